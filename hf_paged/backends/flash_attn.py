"""Attention through flash-attn 2 and 3 over blocks, K and V as [num_blocks, block_size, H_kv, D].

Which call a step makes, by its rows:

    each has one new token              uniform   over blocks, rows may be split
    none has a past                     dense     over the new K and V alone
    a window hides part of a row        dense     over what was gathered of the past
    all have equally many new tokens    uniform
    others                              paged     over blocks, packed queries

A prompt without a past is about twice as fast over its new K and V as over blocks. Behind a window
new tokens have no slot, so the pool does not hold them.

Under ``batch_invariant`` a row must not change its kernel with its neighbours: rows of different
kinds are computed apart, and no row is split.

Lines of flash_api.cpp are those of v2.8.3, and for generation 3 those of hopper/ at 0251105a.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from hf_paged.backends import block_ops, flash_library, flash_ops
from hf_paged.backends.base import LayerView
from hf_paged.backends.flash_library import LIMITS
from hf_paged.backends.flash_plan import (
    Part,
    Plan,
    end_to_end,
    gather_visible,
    split_by_kind,
    without_idle_rows,
)
from hf_paged.backends.kernel_backend import KernelBackend
from hf_paged.backends.metadata import AttentionMetadata
from hf_paged.errors import ConfigurationError

__all__ = ["FlashAttn3Backend", "FlashAttnBackend"]

_QUERY_TILE = 128
"""Query rows that one thread block takes, all query heads of a key head counted."""
_MIN_SPLIT = 512
"""Tokens below which a part of a row is not worth its share of the sum."""
_MAX_SPLITS = 32


class FlashAttnBackend(KernelBackend):
    """flash-attn 2.6 or newer, on Ampere and later.

    From 2.8.4 on (flash-attention#2711) each call over a block table reads the longest length back
    to the host: no graph can capture it, and decoding is slower.
    """

    name = "flash_attn"
    block_size_multiple = 256
    default_block_size = 256
    LIMITS = LIMITS[2]
    _version: ClassVar[int] = 2

    @classmethod
    def unavailable_reason(cls, device: torch.device, *, may_download: bool = False) -> str | None:
        """Needs flash-attn and a device that it is built for.

        Args:
            device: where to compute.
            may_download: get the kernels from the Hugging Face hub if that is where they are.
        """
        library = flash_library.find_library(cls._version, device, may_download=may_download)
        return library if isinstance(library, str) else None

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
        """Attend all rows in one call; under ``batch_invariant`` in one for each kind of row."""
        self.LIMITS.check_layer(
            query,
            key,
            value,
            view,
            metadata,
            window=window,
            softcap=softcap,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
        )
        slopes = None if alibi_slopes is None else alibi_slopes.float().contiguous()
        metadata = without_idle_rows(metadata)
        parts = self._parts(metadata, window) if self.batch_invariant else None
        if parts is None:
            return self._attend(
                query, key, value, view, metadata, scale, window, softcap or 0.0, slopes
            )
        out = query.new_empty(query.shape)
        for part in parts:
            attended = self._attend(
                query.index_select(0, part.tokens),
                key.index_select(0, part.tokens),
                value.index_select(0, part.tokens),
                view,
                part.metadata,
                scale,
                window,
                softcap or 0.0,
                slopes,
            )
            out.index_copy_(0, part.tokens, attended)
        return out

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        view: LayerView,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
        softcap: float,
        alibi_slopes: torch.Tensor | None,
    ) -> torch.Tensor:
        plan = self._plan(metadata, window)
        out: torch.Tensor
        if plan.call == "dense":
            cu_seqlens_k = metadata.cu_seqlens_q
            if plan.gathered is not None:
                past_key, past_value = block_ops.gather(view, plan.gathered.slots)
                key = end_to_end(past_key, key, plan.gathered)
                value = end_to_end(past_value, value, plan.gathered)
                cu_seqlens_k = plan.gathered.cu_seqlens
            out = flash_ops.dense(
                query,
                key,
                value,
                metadata.cu_seqlens_q,
                cu_seqlens_k,
                plan.max_query_len,
                plan.max_seq_len,
                self._version,
                scale,
                plan.window,
                softcap,
                alibi_slopes,
            )
            return out
        num_splits = self._num_splits(query, key.shape[1], metadata)
        blocks = (view.key_cache, view.value_cache, metadata.block_tables, metadata.seq_lens)
        if plan.call == "uniform":
            out = flash_ops.uniform(
                query,
                *blocks,
                self._version,
                scale,
                plan.window,
                softcap,
                alibi_slopes,
                num_splits,
            )
        else:
            out = flash_ops.paged(
                query,
                *blocks,
                metadata.cu_seqlens_q,
                plan.max_query_len,
                plan.max_seq_len,
                self._version,
                scale,
                softcap,
                alibi_slopes,
                num_splits,
            )
        return out

    def _plan(self, metadata: AttentionMetadata, window: int | None) -> Plan:
        """Return what to call, looking at host lists alone."""
        key = ("flash_plan", self.batch_invariant, window)
        plan: Plan | None = metadata.derived.get(key)
        if plan is None:
            plan = metadata.derived[key] = self._make_plan(metadata, window)
        return plan

    def _make_plan(self, metadata: AttentionMetadata, window: int | None) -> Plan:
        seq_lens, query_lens = metadata.seq_lens_list, metadata.query_lens_list
        longest, most_new = max(seq_lens), max(query_lens)
        hides = window is not None and window < longest
        left = window - 1 if window is not None and hides else -1
        if most_new == 1:
            if self.batch_invariant and window is not None:
                left = window - 1  # whatever the longest neighbour is, or may be in a graph
            return Plan("uniform", 1, longest, left)
        if seq_lens == query_lens:
            return Plan("dense", most_new, longest, left)
        if window is not None and hides:
            gathered, longest = gather_visible(metadata, window)
            return Plan("dense", most_new, longest, left, gathered)
        # How the tiles of a packed call and of a uniform one lie is the library's secret: under
        # batch_invariant a row with several new tokens goes through one of them always.
        if min(query_lens) == most_new and not self.batch_invariant:
            return Plan("uniform", most_new, longest, left)
        return Plan("paged", most_new, longest, left)

    def _num_splits(
        self, query: torch.Tensor, num_kv_heads: int, metadata: AttentionMetadata
    ) -> int:
        """Return into how many parts a row is cut.

        0 leaves it to flash-attn 2, which looks at the shapes and at the width of the table
        (flash_api.cpp, lines 304 to 318), at no lengths: a graph captures what any of its replays
        would choose. Where the width is padded, parts of short rows are empty.
        """
        return 1 if self.batch_invariant else 0

    def _parts(self, metadata: AttentionMetadata, window: int | None) -> list[Part] | None:
        """Return what :func:`split_by_kind` does, derived once a step and window."""
        key = ("flash_parts", window)
        if key not in metadata.derived:
            metadata.derived[key] = split_by_kind(metadata, window)
        parts: list[Part] | None = metadata.derived[key]
        return parts


class FlashAttn3Backend(FlashAttnBackend):
    """flash-attn 3, on Hopper."""

    name = "flash_attn_3"
    block_size_multiple = 16
    default_block_size = 64
    LIMITS = LIMITS[3]
    _version: ClassVar[int] = 3

    def check_model(
        self,
        *,
        device: torch.device,
        dtype: torch.dtype,
        head_dim: int,
        block_size: int,
        uses_sinks: bool = False,
    ) -> None:
        """Refuse dtypes, head dims and block sizes that the kernels lack."""
        super().check_model(
            device=device,
            dtype=dtype,
            head_dim=head_dim,
            block_size=block_size,
            uses_sinks=uses_sinks,
        )
        # Blocks that its key tiles (80 tokens or more, tile_size.h) divide are loaded another way,
        # with other tiles, if the longest query of the batch is long enough (flash_api.cpp, 423).
        if self.batch_invariant and block_size > 64:
            raise ConfigurationError(
                f"block_size={block_size} does not suit backend {self.name!r} with "
                "batch_invariant=True: expected at most 64; pass block_size='auto' or 64."
            )

    def _num_splits(
        self, query: torch.Tensor, num_kv_heads: int, metadata: AttentionMetadata
    ) -> int:
        """Return into how many parts a row is cut at most: enough to give each multiprocessor work.

        From shapes alone, so that a graph may capture it. The library's own choice assumes one row
        and would allocate fp32 sums for up to 128 parts of all rows (flash_api.cpp, 465 and 1097).
        How many of the parts a row really gets is decided on the device by its length.
        """
        if self.batch_invariant:
            return 1
        library = flash_ops.find(self._version, query.device)
        num_rows, width = metadata.block_tables.shape
        group_size = query.shape[1] // num_kv_heads
        num_tiles = num_kv_heads * max(num_rows, query.shape[0] * group_size // _QUERY_TILE)
        num_parts = width * metadata.block_size // _MIN_SPLIT
        return max(1, min(library.num_multiprocessors // num_tiles, num_parts, _MAX_SPLITS))
