"""What the kernels of an accelerator take, and refusals of everything else.

A kernel that is given something else reads out of bounds or computes nonsense, so each limit is
checked in one of three places: when a model is patched (:meth:`KernelLimits.check_model`), at every
layer (:meth:`KernelLimits.check_layer`), and once a step on the host, before tables and lengths are
sent to the device (:func:`check_step`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike

from hf_paged.backends.base import LayerView
from hf_paged.backends.metadata import AttentionMetadata
from hf_paged.errors import ConfigurationError, InputMismatchError

__all__ = ["KernelLimits", "check_step"]


@dataclass(frozen=True)
class KernelLimits:
    """Limits of one backend's kernels.

    Attributes:
        backend: its name, for messages.
        dtypes: of query, K, V and pool, the same for all four.
        block_size_multiple: tokens.
        max_head_dim: of K and V.
        head_dim_multiple: of K and V.
        needs_equal_head_dims: whether V must have the head dim of K.
        min_capability: of a CUDA device; None: not checked.
        capabilities: major numbers that the kernels are built for; None: all from the smallest on.
        softcap, sinks, alibi: whether the kernels know them.
    """

    backend: str
    dtypes: tuple[torch.dtype, ...]
    block_size_multiple: int
    max_head_dim: int
    head_dim_multiple: int = 1
    needs_equal_head_dims: bool = False
    min_capability: tuple[int, int] | None = None
    capabilities: tuple[int, ...] | None = None
    softcap: bool = True
    sinks: bool = True
    alibi: bool = True

    def refuse_capability(self, capability: tuple[int, int]) -> str | None:
        """Return why a CUDA device of this compute capability cannot run the kernels, or None."""
        have = "sm{}{}".format(*capability)
        if self.capabilities is not None and capability[0] not in self.capabilities:
            wanted = " or ".join(f"sm{major}x" for major in self.capabilities)
            return f"the device is {have}, the kernels are built for {wanted}"
        if self.min_capability is not None and capability < self.min_capability:
            return f"the device is {have}, the kernels need sm{{}}{{}} or newer".format(
                *self.min_capability
            )
        return None

    def check_model(
        self,
        *,
        device: torch.device,
        dtype: torch.dtype,
        head_dim: int,
        block_size: int,
        uses_sinks: bool = False,
    ) -> None:
        """Refuse a model; see :meth:`AttentionBackend.check_model`."""
        if dtype not in self.dtypes:
            raise ConfigurationError(
                f"backend={self.backend!r} computes in {self._dtype_names}, the model's K and V "
                f"are {dtype}: load it with dtype={self.dtypes[0]}, or pass backend='torch'."
            )
        if block_size % self.block_size_multiple:
            raise ConfigurationError(
                f"block_size={block_size} does not suit backend {self.backend!r}: expected a "
                f"multiple of {self.block_size_multiple}; pass block_size='auto' or "
                f"{self.block_size_multiple}."
            )
        problem = self._refuse_head_dim(head_dim)
        if uses_sinks and not self.sinks:
            problem = "its layers have attention sinks, which the kernels lack"
        if problem is not None:
            raise ConfigurationError(
                f"backend={self.backend!r} cannot run this model on {device}: {problem}; pass "
                "backend='auto' or 'torch'."
            )

    def check_layer(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        view: LayerView,
        metadata: AttentionMetadata,
        *,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
    ) -> None:
        """Refuse what one layer asks for; arguments as in :meth:`AttentionBackend.forward`.

        Raises:
            InputMismatchError: tensors that do not belong together, or that the kernels lack.
        """
        dtypes = {t.dtype for t in (query, key, value, view.key_cache, view.value_cache)}
        if len(dtypes) > 1 or query.dtype not in self.dtypes:
            raise InputMismatchError(
                f"query is {query.dtype}, key {key.dtype}, value {value.dtype}, their caches "
                f"{view.key_cache.dtype} and {view.value_cache.dtype}: backend {self.backend!r} "
                f"expected the same in all, of {self._dtype_names}; under autocast give the model "
                "one dtype."
            )
        num_tokens, num_heads, head_dim = query.shape
        num_kv_heads = key.shape[1]
        is_multiple = num_heads > 0 and num_kv_heads > 0 and num_heads % num_kv_heads == 0
        if (num_tokens, head_dim) != (key.shape[0], key.shape[2]) or not is_multiple:
            raise InputMismatchError(
                f"query is {tuple(query.shape)} for keys {tuple(key.shape)}: expected as many "
                "tokens, the same head dim, and a multiple of the key heads."
            )
        if key.shape[:2] != value.shape[:2]:
            raise InputMismatchError(
                f"key is {tuple(key.shape)} and value {tuple(value.shape)}: expected as many "
                "tokens and heads in both."
            )
        if self.needs_equal_head_dims and value.shape[2] != head_dim:
            raise InputMismatchError(
                f"values have a head dim of {value.shape[2]}, keys one of {head_dim}: backend "
                f"{self.backend!r} needs equal ones; pass backend='triton' or 'torch'."
            )
        for dim in (head_dim, value.shape[2]):
            problem = self._refuse_head_dim(dim)
            if problem is not None:
                raise InputMismatchError(f"backend {self.backend!r}: {problem}.")
        for name, cache, new in (
            ("key_cache", view.key_cache, key),
            ("value_cache", view.value_cache, value),
        ):
            expected = (metadata.null_block + 1, metadata.block_size, *new.shape[1:])
            if tuple(cache.shape) != expected or cache.stride(-1) != 1:
                raise InputMismatchError(
                    f"{name} is {tuple(cache.shape)} with strides {cache.stride()}: expected "
                    f"{expected}, [num_blocks + 1, block_size, H_kv, D], the last stride 1."
                )
        for name, tensor in (
            ("block_tables", metadata.block_tables),
            ("seq_lens", metadata.seq_lens),
            ("cu_seqlens_q", metadata.cu_seqlens_q),
        ):
            if tensor.dtype != torch.int32 or tensor.device != query.device:
                raise InputMismatchError(
                    f"{name} is {tensor.dtype} on {tensor.device}: expected int32 on "
                    f"{query.device}, where the query is."
                )
        if metadata.block_tables.stride(-1) != 1:
            raise InputMismatchError(
                f"block_tables has strides {metadata.block_tables.stride()}: expected the last "
                "one to be 1."
            )
        if window is not None and window < 1:
            raise InputMismatchError(f"window is {window}: expected at least 1, or None.")
        for name, given, is_known in (
            ("softcap", softcap, self.softcap),
            ("sinks", sinks, self.sinks),
            ("alibi_slopes", alibi_slopes, self.alibi),
        ):
            if given is not None and not is_known:
                raise InputMismatchError(
                    f"the model uses {name}, which backend {self.backend!r} lacks; pass "
                    "backend='triton' or 'torch'."
                )
        for name, per_head in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
            if per_head is not None and per_head.shape != (num_heads,):
                raise InputMismatchError(
                    f"{name} is {tuple(per_head.shape)}: expected one number for each of "
                    f"{num_heads} heads."
                )

    @property
    def _dtype_names(self) -> str:
        return " or ".join(str(dtype) for dtype in self.dtypes)

    def _refuse_head_dim(self, head_dim: int) -> str | None:
        if head_dim > self.max_head_dim:
            return f"its head dim is {head_dim}, the kernels take at most {self.max_head_dim}"
        if head_dim % self.head_dim_multiple:
            return (
                f"its head dim is {head_dim}, the kernels take multiples of "
                f"{self.head_dim_multiple}"
            )
        return None


def check_step(
    block_tables: np.ndarray,
    seq_lens: np.ndarray,
    query_lens: np.ndarray,
    slots: np.ndarray,
    *,
    block_size: int,
    null_block: int,
) -> None:
    """Refuse tables, lengths and slots that would lead a kernel out of the pool.

    Args:
        block_tables: [B, W], on the host like all others.
        seq_lens: [B], tokens of each row with the new ones.
        query_lens: [B], new tokens of each row.
        slots: [N], where the new tokens go; negative: nowhere.
        block_size: tokens a block.
        null_block: the last block, all zeros.

    Raises:
        InputMismatchError: naming the row or the token, what was there, and what would do.
    """
    width = block_tables.shape[1]
    row = _first(seq_lens > width * block_size)
    if row is not None:
        raise InputMismatchError(
            f"seq_lens[{row}] is {seq_lens[row]}: expected at most the {width * block_size} slots "
            f"of its block table ({width} blocks of {block_size})."
        )
    row = _first((query_lens < 0) | (query_lens > seq_lens))
    if row is not None:
        raise InputMismatchError(
            f"row {row} has {query_lens[row]} new tokens and {seq_lens[row]} in all: expected the "
            "new ones to be among them."
        )
    row = _first(((block_tables < 0) | (block_tables > null_block)).any(axis=1))
    if row is not None:
        raise InputMismatchError(
            f"block_tables[{row}] holds {block_tables[row].min()} to {block_tables[row].max()}: "
            f"expected 0 to {null_block}, the blocks of the pool."
        )
    token = _first(slots >= null_block * block_size)
    if token is not None:
        raise InputMismatchError(
            f"slot_mapping[{token}] is {slots[token]}: expected less than "
            f"{null_block * block_size}, the first slot of the null block, or a negative number "
            "for a token that is not stored."
        )
    stored = slots[slots >= 0]
    if np.unique(stored).size != stored.size:
        values, counts = np.unique(stored, return_counts=True)
        raise InputMismatchError(
            f"slot_mapping holds slot {values[counts > 1][0]} twice: expected a slot of its own "
            "for each new token."
        )


def _first(is_bad: ArrayLike) -> int | None:
    """Return the first index that is True, or None.

    >>> _first(np.array([False, True, True]))
    1
    """
    return int(np.argmax(is_bad)) if np.any(is_bad) else None
