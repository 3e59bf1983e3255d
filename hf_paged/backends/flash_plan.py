"""Which rows a call of flash-attn takes, and where their tokens are: derived once a step.

Lengths come from the host and block ids stay on the device: neither waits for the other.

Dimensions: B rows, N new tokens of all rows end to end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from hf_paged.backends.metadata import AttentionMetadata
from hf_paged.backends.upload import send

__all__ = [
    "Gathered",
    "Part",
    "Plan",
    "end_to_end",
    "gather_visible",
    "split_by_kind",
    "without_idle_rows",
]


@dataclass(frozen=True)
class Gathered:
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
class Plan:
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
    gathered: Gathered | None = None


@dataclass(frozen=True)
class Part:
    """Rows that one kernel computes: their metadata, and their tokens' places in N ([n] int64)."""

    metadata: AttentionMetadata
    tokens: torch.Tensor


def gather_visible(metadata: AttentionMetadata, window: int) -> tuple[Gathered, int]:
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
    entry, offset, past, new, cu_seqlens = send(
        [
            row * width + token // size,
            token % size,
            np.repeat(starts, kept) + place,
            np.repeat(starts + kept, num_new) + _ranges(num_new),
            np.concatenate([[0], ends]),
        ],
        metadata.block_tables.device,
    )
    slots = metadata.block_tables.reshape(-1)[entry].long() * size + offset
    return Gathered(slots, past, new, cu_seqlens.int()), int(lengths.max())


def split_by_kind(metadata: AttentionMetadata, window: int | None) -> list[Part] | None:
    """Return rows by their kind, which depends on nothing but the row; None: all are alike."""
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


def without_idle_rows(metadata: AttentionMetadata) -> AttentionMetadata:
    """Return the rows that have new tokens; a chunk of a padded batch may have none of some row."""
    if "flash_busy" not in metadata.derived:
        query_lens = metadata.query_lens_list
        busy = [row for row, query_len in enumerate(query_lens) if query_len]
        is_all = len(busy) == len(query_lens)
        metadata.derived["flash_busy"] = None if is_all else _rows(metadata, busy).metadata
    rest: AttentionMetadata | None = metadata.derived["flash_busy"]
    return metadata if rest is None else rest


def _rows(metadata: AttentionMetadata, rows: list[int]) -> Part:
    seq_lens, query_lens = metadata.seq_lens_list, metadata.query_lens_list
    num_new = np.array([query_lens[row] for row in rows])
    index, tokens, cu_seqlens_q = send(
        [
            np.array(rows),
            np.repeat(np.cumsum([0, *query_lens])[rows], num_new) + _ranges(num_new),
            np.cumsum([0, *num_new]),
        ],
        metadata.block_tables.device,
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
    return Part(part, tokens)


def _ranges(lengths: np.ndarray) -> np.ndarray:
    """Return 0, 1, ... for each length, end to end.

    >>> _ranges(np.array([2, 0, 3])).tolist()
    [0, 1, 0, 1, 2]
    """
    ranges: np.ndarray = np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)
    return ranges


def end_to_end(past: torch.Tensor, new: torch.Tensor, gathered: Gathered) -> torch.Tensor:
    """Return the visible tokens of all rows, [K, H_kv, D], from [P, H_kv, D] and [N, H_kv, D]."""
    out = new.new_empty(past.shape[0] + new.shape[0], *new.shape[1:])
    return out.index_copy_(0, gathered.past, past).index_copy_(0, gathered.new, new)
