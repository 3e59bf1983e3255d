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

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from hf_paged.backends import block_ops, flash_library
from hf_paged.backends.base import AttentionBackend, LayerView
from hf_paged.backends.flash_library import LIMITS, FlashLibrary
from hf_paged.backends.limits import KernelLimits
from hf_paged.backends.metadata import AttentionMetadata
from hf_paged.errors import ConfigurationError, InputMismatchError

__all__ = ["FlashAttn3Backend", "FlashAttnBackend"]

_QUERY_TILE = 128
"""Query rows that one thread block takes, all query heads of a key head counted."""
_MIN_SPLIT = 512
"""Tokens below which a part of a row is not worth its share of the sum."""
_MAX_SPLITS = 32

_library = torch.library.Library("hf_paged", "FRAGMENT")
_library.define(
    "flash_uniform(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_tables, "
    "Tensor seq_lens, int version, float scale, int window, float softcap, "
    "Tensor? alibi_slopes, int num_splits) -> Tensor"
)
_library.define(
    "flash_paged(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_tables, "
    "Tensor seq_lens, Tensor cu_seqlens_q, SymInt max_query_len, SymInt max_seq_len, int version, "
    "float scale, float softcap, Tensor? alibi_slopes, int num_splits) -> Tensor"
)
_library.define(
    "flash_dense(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, "
    "Tensor cu_seqlens_k, SymInt max_query_len, SymInt max_seq_len, int version, float scale, "
    "int window, float softcap, Tensor? alibi_slopes) -> Tensor"
)


@dataclass(frozen=True)
class _Gathered:
    """What a window leaves of each row, end to end: K visible tokens, P of them stored before.

    Attributes:
        slots: [P] int64, of the tokens of the past.
        past: [P] int64, where they come to lie in K.
        new: [N] int64, where the new tokens come to lie in K.
        cu_seqlens: [B + 1] int32, where each row begins in K.
    """

    slots: torch.Tensor
    past: torch.Tensor
    new: torch.Tensor
    cu_seqlens: torch.Tensor


@dataclass(frozen=True)
class _Plan:
    """Which call serves the rows of a step under one window.

    Attributes:
        call: "uniform", "paged" or "dense".
        max_query_len: the most new tokens of a row.
        max_seq_len: the most tokens of a row that the call sees.
        window: tokens that a query sees before itself; -1: all. flash-attn lets the query heads of
            a key head share its loads only if it is told of no window (flash_api.cpp, line 1278),
            so a window that hides nothing is not mentioned.
        gathered: of a dense call; None: there is no past.
    """

    call: str
    max_query_len: int
    max_seq_len: int
    window: int
    gathered: _Gathered | None = None


@dataclass(frozen=True)
class _Part:
    """Rows that one kernel computes: their metadata, and their tokens' places in N ([n] int64)."""

    metadata: AttentionMetadata
    tokens: torch.Tensor


class FlashAttnBackend(AttentionBackend):
    """flash-attn 2.6 or newer, on Ampere and later.

    From 2.8.4 on (flash-attention#2711) each call over a block table reads the longest length back
    to the host: no graph can capture it, and decoding is slower.
    """

    name = "flash_attn"
    block_size_multiple = 256
    default_block_size = 256
    supports_batch_invariance = True
    is_block_major = True
    supports_graphs = True
    LIMITS: ClassVar[KernelLimits] = LIMITS[2]
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
        self.LIMITS.check_model(
            device=device,
            dtype=dtype,
            head_dim=head_dim,
            block_size=block_size,
            uses_sinks=uses_sinks,
        )

    def cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> tuple[int, ...]:
        """Return NHD, the only layout that flash-attn reads."""
        return (num_blocks, block_size, num_kv_heads, head_dim)

    def write(
        self, key: torch.Tensor, value: torch.Tensor, view: LayerView, metadata: AttentionMetadata
    ) -> None:
        """Store new tokens in one kernel."""
        block_ops.write(key, value, view.key_cache, view.value_cache, metadata.slot_mapping)

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
        metadata = _without_idle_rows(metadata)
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

    def gather(self, view: LayerView, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Index the caches by block and offset."""
        return block_ops.gather(view, slots)

    def copy_blocks(self, cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy whole blocks, all layers at once, in one kernel."""
        block_ops.copy_blocks(cache, source, target)

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
                key = _end_to_end(past_key, key, plan.gathered)
                value = _end_to_end(past_value, value, plan.gathered)
                cu_seqlens_k = plan.gathered.cu_seqlens
            out = torch.ops.hf_paged.flash_dense(
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
            out = torch.ops.hf_paged.flash_uniform(
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
            out = torch.ops.hf_paged.flash_paged(
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

    def _plan(self, metadata: AttentionMetadata, window: int | None) -> _Plan:
        """Return what to call, looking at host lists alone."""
        key = ("flash_plan", self.batch_invariant, window)
        plan: _Plan | None = metadata.derived.get(key)
        if plan is None:
            plan = metadata.derived[key] = self._make_plan(metadata, window)
        return plan

    def _make_plan(self, metadata: AttentionMetadata, window: int | None) -> _Plan:
        seq_lens, query_lens = metadata.seq_lens_list, metadata.query_lens_list
        longest, most_new = max(seq_lens), max(query_lens)
        hides = window is not None and window < longest
        left = window - 1 if window is not None and hides else -1
        if most_new == 1:
            if self.batch_invariant and window is not None:
                left = window - 1  # whatever the longest neighbour is, or may be in a graph
            return _Plan("uniform", 1, longest, left)
        if seq_lens == query_lens:
            return _Plan("dense", most_new, longest, left)
        if window is not None and hides:
            gathered, longest = _gather_visible(metadata, window)
            return _Plan("dense", most_new, longest, left, gathered)
        # How the tiles of a packed call and of a uniform one lie is the library's secret: under
        # batch_invariant a row with several new tokens goes through one of them always.
        if min(query_lens) == most_new and not self.batch_invariant:
            return _Plan("uniform", most_new, longest, left)
        return _Plan("paged", most_new, longest, left)

    def _num_splits(
        self, query: torch.Tensor, num_kv_heads: int, metadata: AttentionMetadata
    ) -> int:
        """Return into how many parts a row is cut.

        0 leaves it to flash-attn 2, which looks at the shapes and at the width of the table
        (flash_api.cpp, lines 304 to 318), at no lengths: a graph captures what any of its replays
        would choose. Where the width is padded, parts of short rows are empty.
        """
        return 1 if self.batch_invariant else 0

    def _parts(self, metadata: AttentionMetadata, window: int | None) -> list[_Part] | None:
        """Return rows by their kind, which depends on nothing but the row; None: all are alike."""
        key = ("flash_parts", window)
        if key not in metadata.derived:
            metadata.derived[key] = _split_by_kind(metadata, window)
        parts: list[_Part] | None = metadata.derived[key]
        return parts


class FlashAttn3Backend(FlashAttnBackend):
    """flash-attn 3, on Hopper."""

    name = "flash_attn_3"
    block_size_multiple = 16
    default_block_size = 64
    LIMITS: ClassVar[KernelLimits] = LIMITS[3]
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
        library = _find(self._version, query.device)
        num_rows, width = metadata.block_tables.shape
        group_size = query.shape[1] // num_kv_heads
        num_tiles = num_kv_heads * max(num_rows, query.shape[0] * group_size // _QUERY_TILE)
        num_parts = width * metadata.block_size // _MIN_SPLIT
        return max(1, min(library.num_multiprocessors // num_tiles, num_parts, _MAX_SPLITS))


# -- what a step derives once ------------------------------------------------------------------


def _gather_visible(metadata: AttentionMetadata, window: int) -> tuple[_Gathered, int]:
    """Return which stored tokens some new token of their row sees, and the most tokens of a row.

    Lengths come from the host and block ids stay on the device: neither waits for the other.
    """
    num_new = np.array(metadata.query_lens_list)
    num_past = np.array(metadata.seq_lens_list) - num_new
    kept = np.minimum(num_past, window - 1)  # what the first new token sees before itself
    lengths = kept + num_new
    ends = lengths.cumsum()
    starts = ends - lengths
    place, token = _ranges(kept), np.repeat(num_past - kept, kept)
    token += place
    row = np.repeat(np.arange(len(kept)), kept)
    size, width = metadata.block_size, metadata.block_tables.shape[1]
    entry, offset, past, new, cu_seqlens = _upload(
        metadata.block_tables.device,
        row * width + token // size,
        token % size,
        np.repeat(starts, kept) + place,
        np.repeat(starts + kept, num_new) + _ranges(num_new),
        np.concatenate([[0], ends]),
    )
    slots = metadata.block_tables.reshape(-1)[entry].long() * size + offset
    return _Gathered(slots, past, new, cu_seqlens.int()), int(lengths.max())


def _split_by_kind(metadata: AttentionMetadata, window: int | None) -> list[_Part] | None:
    seq_lens, query_lens = metadata.seq_lens_list, metadata.query_lens_list
    rows_of: dict[tuple[bool, bool, bool], list[int]] = {}
    for row, (seq_len, query_len) in enumerate(zip(seq_lens, query_lens, strict=True)):
        is_single = query_len == 1
        is_fresh = seq_len == query_len and not is_single
        is_hidden = window is not None and seq_len > window and not is_single
        rows_of.setdefault((is_single, is_fresh, is_hidden), []).append(row)
    if len(rows_of) == 1:
        return None
    return [_rows(metadata, rows) for rows in rows_of.values()]


def _without_idle_rows(metadata: AttentionMetadata) -> AttentionMetadata:
    """Return the rows that have new tokens; a chunk of a padded batch may have none of some row."""
    if "flash_busy" not in metadata.derived:
        query_lens = metadata.query_lens_list
        busy = [row for row, query_len in enumerate(query_lens) if query_len]
        is_all = len(busy) == len(query_lens)
        metadata.derived["flash_busy"] = None if is_all else _rows(metadata, busy).metadata
    rest: AttentionMetadata | None = metadata.derived["flash_busy"]
    return metadata if rest is None else rest


def _rows(metadata: AttentionMetadata, rows: list[int]) -> _Part:
    seq_lens, query_lens = metadata.seq_lens_list, metadata.query_lens_list
    num_new = np.array([query_lens[row] for row in rows])
    index, tokens, cu_seqlens_q = _upload(
        metadata.block_tables.device,
        np.array(rows),
        np.repeat(np.cumsum([0, *query_lens])[rows], num_new) + _ranges(num_new),
        np.cumsum([0, *num_new]),
    )
    part = AttentionMetadata(
        metadata.block_size,
        metadata.null_block,
        metadata.block_tables.index_select(0, index),
        metadata.seq_lens.index_select(0, index),
        cu_seqlens_q.int(),
        metadata.slot_mapping.index_select(0, tokens),
        [seq_lens[row] for row in rows],
        num_new.tolist(),
    )
    return _Part(part, tokens)


def _ranges(lengths: np.ndarray) -> np.ndarray:
    """Return 0, 1, ... for each length, end to end.

    >>> _ranges(np.array([2, 0, 3])).tolist()
    [0, 1, 0, 1, 2]
    """
    ranges: np.ndarray = np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)
    return ranges


def _upload(device: torch.device, *arrays: np.ndarray) -> list[torch.Tensor]:
    """Return int64 arrays as tensors on ``device``, in one copy that nobody waits for."""
    tensor = torch.from_numpy(np.concatenate(arrays))
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # torch keeps it until the copy is done
    tensor = tensor.to(device, non_blocking=True)
    ends = np.cumsum([len(array) for array in arrays])
    return [tensor[end - len(array) : end] for array, end in zip(arrays, ends, strict=True)]


def _end_to_end(past: torch.Tensor, new: torch.Tensor, gathered: _Gathered) -> torch.Tensor:
    """Return the visible tokens of all rows, [K, H_kv, D], from [P, H_kv, D] and [N, H_kv, D]."""
    out = new.new_empty(past.shape[0] + new.shape[0], *new.shape[1:])
    return out.index_copy_(0, gathered.past, past).index_copy_(0, gathered.new, new)


# -- operators ---------------------------------------------------------------------------------


def _find(version: int, device: torch.device) -> FlashLibrary:
    library = flash_library.find_library(version, device, may_download=False)
    if isinstance(library, str):
        raise InputMismatchError(
            f"a layer on {device} attends through backend {LIMITS[version].backend!r}, which "
            f"cannot run there: {library}. Move the model, or pass backend='torch'."
        )
    return library


def _loadable(states: torch.Tensor) -> torch.Tensor:
    """Return the same values where the kernels can load 16 bytes at a time."""
    *outer, inner = states.stride()
    if inner == 1 and states.storage_offset() % 8 == 0 and not any(s % 8 for s in outer):
        return states
    return states.clone(memory_format=torch.contiguous_format)


def _uniform(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    version: int,
    scale: float,
    window: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    num_splits: int,
) -> torch.Tensor:
    num_rows = seq_lens.shape[0]
    out = _find(version, query.device).uniform(
        _loadable(query).view(num_rows, query.shape[0] // num_rows, *query.shape[1:]),
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        scale=scale,
        window=window,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        num_splits=num_splits,
    )
    return out.contiguous().view(query.shape)


def _paged(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
    version: int,
    scale: float,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    num_splits: int,
) -> torch.Tensor:
    out = _find(version, query.device).paged(
        _loadable(query),
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        cu_seqlens_q,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        scale=scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        num_splits=num_splits,
    )
    return out.contiguous()


def _dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
    version: int,
    scale: float,
    window: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
) -> torch.Tensor:
    out = _find(version, query.device).dense(
        _loadable(query),
        _loadable(key),
        _loadable(value),
        cu_seqlens_q,
        cu_seqlens_k,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        scale=scale,
        window=window,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
    )
    return out.contiguous()


def _fake(query: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return query.new_empty(query.shape)


for _name, _function in (
    ("flash_uniform", _uniform),
    ("flash_paged", _paged),
    ("flash_dense", _dense),
):
    # On a CPU there is no flash-attn; the error says so.
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _function, _key)
    torch.library.register_fake(f"hf_paged::{_name}", _fake, lib=_library)
