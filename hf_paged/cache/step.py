"""One forward over a paged cache: from reserved blocks to the attention of each layer.

    reserve ─▶ PagedStep() ─▶ (update ─▶ attend) for each layer ─▶ check_complete ─▶ commit
                                     any exception ─▶ rollback

Dimensions: B x T the shape in which the model computes, N new tokens that are real, H query heads,
H_kv key/value heads, D head dim. A rectangle has a row a sequence and may hold padding; packed
tokens have none, and their sequences lie end to end in [1, N] or one below the other in [N, 1].
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch

from hf_paged.backends.metadata import AttentionMetadata
from hf_paged.cache.step_metadata import StepMetadata
from hf_paged.core.allocation import Allocation, NewTokens
from hf_paged.errors import CacheStateError, PagedGradientError, UnsupportedModelError

if TYPE_CHECKING:
    from hf_paged.cache.runtime import PagedRuntime
    from hf_paged.cache.step_cache import StepCache

__all__ = ["CURRENT_STEP", "PagedStep", "reserve"]

CURRENT_STEP: ContextVar[PagedStep | None] = ContextVar("current_step", default=None)
"""The forward that this thread is in, if it carries a paged cache."""


def reserve(
    runtime: PagedRuntime, rows: list[NewTokens], *, hold_window: bool, occasion: str
) -> Allocation:
    """Take the blocks of a forward and copy those that it writes although others read them.

    Mutates block tables; ``manager.commit`` or ``manager.rollback`` must follow. The lock must be
    held.

    Raises:
        KVCacheFullError: too few blocks; nothing has changed.
    """
    allocation = runtime.manager.begin(rows, hold_window=hold_window, occasion=occasion)
    if runtime.block_file is not None:
        runtime.block_file.await_blocks(allocation.new_blocks)
    if runtime.config.debug:
        runtime.storage.poison(allocation.new_blocks)
    runtime.storage.copy_blocks(allocation.copies)
    return allocation


class PagedStep:
    """A forward in progress, over blocks that were reserved for it.

    The cache commits them or rolls them back afterwards.

    Args:
        cache: the cache that the call carries.
        metadata: of the rows; ``token_index`` says where they are in B x T.
        num_rows: B.
        num_columns: T.
        num_layers: layers that the forward runs.
        is_paged: see below.

    Attributes:
        cache: as given.
        is_paged: True: layers attend through the backend. False ("gathered"): the model's own
            attention runs, with its own mask, over K and V gathered into the padded shape; for
            masks and outputs that no backend knows, slower and exact.
        masks_issued: whether a layer may already hold one of our markers instead of a mask.
    """

    def __init__(
        self,
        cache: StepCache,
        metadata: StepMetadata,
        *,
        num_rows: int,
        num_columns: int,
        num_layers: int,
        is_paged: bool,
    ) -> None:
        self.cache = cache
        self.is_paged = is_paged
        self.masks_issued = False
        self._runtime = cache.runtime
        self._metadata = metadata
        self._num_rows = num_rows
        self._num_columns = num_columns
        self._num_layers = num_layers
        self._updated: set[int] = set()
        self._awaiting: int | None = None
        self._new_kv: tuple[torch.Tensor, torch.Tensor] | None = None
        self._returned: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store what ``layer`` computed.

        Args:
            key: [B, H_kv, T, D].
            value: [B, H_kv, T, D_v].
            layer: index in the model.

        Returns:
            Paged: the same tensors, for :meth:`attend`. Gathered: K and V of all columns that
            :meth:`PagedCache.get_mask_sizes` counts, zeros where a column is padding.
        """
        self._expect_attention_called()
        if layer in self._updated or not 0 <= layer < self._num_layers:
            raise UnsupportedModelError(
                f"layer {layer} stored K and V twice in one forward or is beyond the "
                f"{self._num_layers} layers of the config: expected one cache.update() a layer."
            )
        new_key, new_value = self._pack(key.detach()), self._pack(value.detach())
        self._check_storage(layer, new_key, new_value)
        view = self._runtime.storage.view(layer, new_key, new_value)
        with torch.no_grad():
            if new_key.shape[0]:
                self._runtime.backend.write(
                    new_key, new_value, view, self._metadata_of(layer, key.device)
                )
        self._updated.add(layer)
        if self.is_paged:
            self._returned = (key, value)
            self._awaiting = layer
            self._new_kv = (new_key, new_value)
            return key, value
        past_key, past_value = self.cache.gather_past(layer, key, value)
        if torch.is_grad_enabled() and key.requires_grad and past_key.shape[2]:
            past_key, past_value = (
                _StopGradient.apply(past, key)  # type: ignore[no-untyped-call]
                for past in (past_key, past_value)
            )
        return torch.cat([past_key, key], dim=2), torch.cat([past_value, value], dim=2)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend through the backend.

        Args:
            query: [B, H, T, D].
            key: what :meth:`update` returned, the object itself.
            value: likewise.
            layer: the layer whose :meth:`update` came last.
            scale: see :meth:`AttentionBackend.forward`.
            window: see :meth:`AttentionBackend.forward`.
            softcap: see :meth:`AttentionBackend.forward`.
            sinks: see :meth:`AttentionBackend.forward`.

        Returns:
            [B, T, H, D_v]; 0 where a column is padding.
        """
        if layer != self._awaiting or self._new_kv is None:
            raise UnsupportedModelError(
                f"attention of layer {layer} ran, but the last K and V stored were those of layer "
                f"{self._awaiting}: layers that attend to another layer's K and V lack the seam."
            )
        assert self._returned is not None
        if key is not self._returned[0] or value is not self._returned[1]:
            raise UnsupportedModelError(
                f"layer {layer} attends to K {tuple(key.shape)} and V {tuple(value.shape)} made of "
                f"what it stored, {tuple(self._returned[0].shape)} and "
                f"{tuple(self._returned[1].shape)} (a latent, or another shape of it): it "
                "lacks the seam of attention over the cached K and V themselves."
            )
        group_window = self._group(layer).window
        if group_window is not None and (window is None or window > group_window):
            raise UnsupportedModelError(
                f"layer {layer} attends {'to all tokens' if window is None else window}, but its "
                f"config announces a sliding window of {group_window}; it needs a ModelSpec."
            )
        self._awaiting = None
        key, value = self._new_kv
        self._returned = None
        with torch.no_grad():
            packed = self._pack(query.detach())
            metadata = self._metadata_of(layer, query.device)
            out = packed.new_zeros(0, packed.shape[1], value.shape[-1])
            if packed.shape[0]:
                out = self._runtime.backend.forward(
                    packed,
                    key,
                    value,
                    self._runtime.storage.view(layer, key, value),
                    metadata,
                    scale=scale,
                    window=window,
                    softcap=softcap,
                    sinks=sinks,
                )
            out = self._unpack(out)
        if torch.is_grad_enabled() and query.requires_grad:
            out = _StopGradient.apply(out, query)  # type: ignore[no-untyped-call]
        return out

    def check_complete(self) -> None:
        """Raise unless every layer has stored and attended once.

        Raises:
            UnsupportedModelError: naming the layers.
        """
        self._expect_attention_called()
        if len(self._updated) != self._num_layers:
            missing = sorted(set(range(self._num_layers)) - self._updated)
            raise UnsupportedModelError(
                f"layers {missing} did not store K and V in this forward: expected one "
                f"cache.update() from each of {self._num_layers} layers."
            )

    def _group(self, layer: int) -> Any:
        return self._runtime.manager.groups[self._runtime.group_of_layer[layer]]

    def _check_storage(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        runtime = self._runtime
        if runtime.storage.fits(layer, key, value):
            return
        if self._updated:
            raise UnsupportedModelError(
                f"layer {layer} stores {key.dtype} with heads {tuple(key.shape[-2:])}, another one "
                "in this forward something else: expected the same number and size of heads in "
                "every layer."
            )
        with runtime.lock:
            if runtime.manager.num_stored_sequences:
                raise CacheStateError(
                    f"keys of layer {layer} are {key.dtype} with heads {tuple(key.shape[-2:])}, "
                    "but caches made with another dtype or shape are in use; release them first."
                )
            runtime.manager.clear_cached()
            runtime.storage.clear()

    def _expect_attention_called(self) -> None:
        if self._awaiting is not None:
            raise UnsupportedModelError(
                f"layer {self._awaiting} stored K and V but did not attend through the "
                "registered attention function: the architecture lacks that seam "
                "(ALL_ATTENTION_FUNCTIONS)."
            )

    # -- rectangle <-> packed ----------------------------------------------------------------

    def _pack(self, states: torch.Tensor) -> torch.Tensor:
        """Turn [B, H, T, D] into the real tokens end to end, [N, H, D]."""
        packed = states[:, :, 0] if states.shape[2] == 1 else states.transpose(1, 2).flatten(0, 1)
        index = self._metadata.index_on(states.device)
        return packed if index is None else packed.index_select(0, index)

    def _unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """Turn [N, H, D] into [B, T, H, D], zeros where a column is padding."""
        index = self._metadata.index_on(packed.device)
        if index is not None:
            padded = packed.new_zeros(self._num_rows * self._num_columns, *packed.shape[1:])
            packed = padded.index_copy_(0, index, packed)
        return packed.view(self._num_rows, self._num_columns, *packed.shape[1:])

    def _metadata_of(self, layer: int, device: torch.device) -> AttentionMetadata:
        return self._metadata.of_group(self._runtime.group_of_layer[layer], device)


class _StopGradient(torch.autograd.Function):
    """Passes its input on; backward() explains instead of giving a partial gradient."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise PagedGradientError(
            "backward() reached a forward with a paged cache: K and V in the pool carry no "
            "gradient. Train without a cache (use_cache=False) or with a DynamicCache."
        )
