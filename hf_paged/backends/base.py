"""What an attention backend must do; implementations lie beside this file.

Dimensions: N packed new tokens, H query heads, H_kv key/value heads, D head dim (D_v of values).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from hf_paged.backends.metadata import AttentionMetadata

__all__ = ["AttentionBackend", "LayerView"]


@dataclass(frozen=True)
class LayerView:
    """K and V of one layer in all blocks, in the layout that the backend chose.

    Attributes:
        key_cache: shape ``backend.cache_shape(num_blocks + 1, block_size, H_kv, D)``; the last
            block is the null block: all zeros, never written.
        value_cache: the same with D_v.
    """

    key_cache: torch.Tensor
    value_cache: torch.Tensor


class AttentionBackend(ABC):
    """Stateless but for scratch memory; one object serves all layers and threads of a model.

    Args:
        batch_invariant: a row's output has the same bits whatever other rows are computed with it,
            and however many threads compute.
    """

    name: ClassVar[str]
    block_size_multiple: ClassVar[int] = 1
    default_block_size: ClassVar[int] = 16
    supports_batch_invariance: ClassVar[bool] = False
    is_block_major: ClassVar[bool] = False
    """All layers' K and V of one block lie together, so caches are views with a large stride."""
    supports_graphs: ClassVar[bool] = False
    """A decoding :meth:`forward` may be captured in a CUDA graph and replayed over other contents.

    Its launches depend on shapes alone: ``metadata.block_tables`` has a padded width, lengths are
    read on the device (a step checks them on the host before), the lists of lengths are upper
    bounds, and rows of length 0 give 0.
    """

    def __init__(self, *, batch_invariant: bool = False) -> None:
        self.batch_invariant = batch_invariant

    @classmethod
    @abstractmethod
    def unavailable_reason(cls, device: torch.device) -> str | None:
        """Return why the backend cannot run on ``device``, or None if it can."""

    def check_model(  # noqa: B027
        self,
        *,
        device: torch.device,
        dtype: torch.dtype,
        head_dim: int,
        block_size: int,
        uses_sinks: bool = False,
    ) -> None:
        """Refuse, when a model is patched, what no forward could compute.

        Args:
            device: where the pool will lie.
            dtype: of K and V.
            head_dim: D of K, as the config says.
            block_size: tokens a block.
            uses_sinks: whether its layers have attention sinks.

        Raises:
            ConfigurationError: the kernels lack it; the message says what would do.
        """

    @abstractmethod
    def cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> tuple[int, ...]:
        """Return the shape of K (or V) of one layer; the first dimension is the block."""

    @abstractmethod
    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        view: LayerView,
        metadata: AttentionMetadata,
    ) -> None:
        """Store new tokens in their slots.

        Args:
            key: [N, H_kv, D], any strides.
            value: [N, H_kv, D_v].
            view: mutated where ``metadata.slot_mapping >= 0``, nowhere else.
            metadata: of the layer's group.
        """

    @abstractmethod
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        view: LayerView,
        metadata: AttentionMetadata,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend each new token to itself and to all earlier tokens of its row.

        The mask is causal and bottom-right aligned: of a row with ``q`` new tokens and ``k``
        tokens in all, new token i sees tokens 0 to ``k - q + i``, and of these the last
        ``window``.

        Called after :meth:`write`. In a row with one new token everything visible is stored. In
        a row with more, new tokens may be behind the window already and have no slot: a backend
        takes them from ``key`` and ``value``.

        Args:
            query: [N, H, D].
            key: [N, H_kv, D], the new tokens.
            value: [N, H_kv, D_v], the new tokens.
            view: only slots that hold a token are meaningful; the others may be NaN.
            metadata: of the layer's group.
            scale: factor on the scores before anything else.
            window: tokens that a query sees, itself included; None: all before it.
            softcap: scores become ``softcap * tanh(scores / softcap)``, before masking.
            sinks: [H], a score that takes part in the softmax and has no value.
            alibi_slopes: [H]; a score rises by ``slope * (key position - query position)``, after
                the softcap (ALiBi, arXiv:2108.12409).

        Returns:
            [N, H, D_v] in the dtype of ``query``.
        """

    @abstractmethod
    def gather(self, view: LayerView, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K [n, H_kv, D] and V [n, H_kv, D_v] of the given slots ([n] int64)."""

    def copy_blocks(self, cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy whole blocks inside one tensor.

        Args:
            cache: [num_blocks, ...], each block contiguous: K or V of one layer, or where
                :attr:`is_block_major` all that a device has.
            source: [n] int64, block ids.
            target: likewise; no block is both.
        """
        cache.index_copy_(0, target, cache.index_select(0, source))

    def release_scratch(self) -> None:  # noqa: B027
        """Give back memory that only speeds up the next call."""
