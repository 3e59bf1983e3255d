# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Paged attention, stores and copies in Triton: kernels over NHD blocks, and their launches.

Rows with one new token run in the decoding kernel, all others in the prefill kernel, so a row is
computed in the same way whatever its companions are. Both hold a tile of query rows: some queries
of one sequence, each with several query heads of one key head. Both then run over tiles of BLOCK_N
keys with an online softmax (arXiv:2205.14135) in base 2, whose state is

    acc [BLOCK_M, D_v]    the values, weighted by 2 ** (score - row_max)
    row_max [BLOCK_M]     the largest score so far
    row_sum [BLOCK_M]     the sum of the weights

Key positions that are visible to no query of a tile are never read: neither their slots, which may
hold NaN, nor their entries of the block table, which may hold anything. Tiles of keys begin at
multiples of BLOCK_N, so a tile lies in one block wherever BLOCK_N divides the block size.

Arguments that are None at the launch are constants: their branches are compiled away.

Dimensions: B rows, N new tokens of all rows end to end, H query heads, H_kv key/value heads,
G = H / H_kv, D head dim of keys, D_v of values, W entries of a block table, S splits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

__all__ = ["attend", "copy_blocks", "write"]

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1.0e38)  # finite: differences of two are 0, not NaN as those of -inf
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
COPY_CHUNK = 4096  # elements that one program copies
OPTIONS = {"enable_fp_fusion": True}  # Triton 3.9 warns where nothing is said, 3.10 fuses nothing


# One tile -----------------------------------------------------------------------------------------


@triton.jit
def _load_rows(base, row_offsets, is_row, DIM: tl.constexpr, PADDED_DIM: tl.constexpr):
    """Load [rows, PADDED_DIM]: DIM elements from each offset, 0 elsewhere."""
    dims = tl.arange(0, PADDED_DIM)
    return tl.load(
        base + row_offsets[:, None] + dims[None, :],
        mask=is_row[:, None] & (dims < DIM)[None, :],
        other=0.0,
    )


@triton.jit
def _load_entries(table, start, first, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Load the block of each position of a tile: one number, or BLOCK_N where blocks are smaller.

    A loop loads those of the next tile with each tile: K and V then depend on no load of their own
    iteration, which would take a stage of the software pipeline from them.
    """
    if BLOCK_SIZE % BLOCK_N == 0:
        entries = tl.load(table + start // BLOCK_SIZE, mask=start < end, other=0)
    else:
        at = start + tl.arange(0, BLOCK_N)
        is_stored = (at >= first) & (at < end)
        entries = tl.load(table + at // BLOCK_SIZE, mask=is_stored, other=0)
    return entries


@triton.jit
def _load_stored(
    cache,
    entries,
    at,
    is_stored,
    block_stride,
    token_stride,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Load [BLOCK_N, PADDED_DIM] of one head; 64 bits, as pools exceed 2 ** 31 elements."""
    offsets = entries.to(tl.int64) * block_stride + at % BLOCK_SIZE * token_stride
    return _load_rows(cache, offsets, is_stored, DIM, PADDED_DIM)


@triton.jit
def _dot(a, b, acc):
    if INTERPRETED:  # Triton's interpreter multiplies the bits of bf16 as integers
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _tanh(x):
    """Return tanh to a few units of the last place, for small arguments too."""
    decay = tl.exp2(tl.abs(x) * (-2 * LOG2_E))
    large = (1 - decay) / (1 + decay)
    square = x * x
    small = x * (
        1 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315 - square * 62 / 2835)))
    )
    return tl.where(tl.abs(x) < 0.3, small, tl.where(x < 0, -large, large))


@triton.jit
def _start_softmax(sinks, heads, has_sink, BLOCK_M: tl.constexpr, PADDED_VALUE_DIM: tl.constexpr):
    """Return an empty state. A sink is a score without a value, so it is what comes first."""
    acc = tl.zeros([BLOCK_M, PADDED_VALUE_DIM], tl.float32)
    row_max = tl.full([BLOCK_M], LOWEST, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=has_sink, other=float("-inf")).to(tl.float32)
        row_max = tl.maximum(sink * LOG2_E, LOWEST)
        row_sum = tl.where(row_max > LOWEST, 1.0, 0.0)
    return acc, row_max, row_sum


@triton.jit
def _attend_tile(
    acc, row_max, row_sum, query, key, value, visible, distance, slopes, scale, softcap
):
    """Add key [BLOCK_N, D] and value [BLOCK_N, D_v] to the state of query [BLOCK_M, D].

    ``visible`` and ``distance``, the position of a key less that of the query, broadcast to
    [BLOCK_M, BLOCK_N]; ``slopes`` [BLOCK_M] or None are those of ALiBi in base 2.
    """
    scores = _dot(query, tl.trans(key), None)
    if softcap is None:
        scores *= scale * LOG2_E
    else:
        scores = softcap * LOG2_E * _tanh(scores * (scale / softcap))
    if slopes is not None:
        scores += slopes[:, None] * distance
    scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    weights = tl.exp2(scores - new_max[:, None])
    decay = tl.exp2(row_max - new_max)
    acc = _dot(weights.to(value.dtype), value, acc * decay[:, None])
    return acc, new_max, row_sum * decay + tl.sum(weights, 1)


# Rows with one new token --------------------------------------------------------------------------


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["block_tables", "seq_lens", "cu_seqlens_q"],
)
def _decode_kernel(
    query,
    key_cache,
    value_cache,
    block_tables,
    seq_lens,
    cu_seqlens_q,
    sinks,
    alibi_slopes,
    out,
    split_out,
    split_lse,
    scale,
    softcap,
    window,
    num_heads,
    query_token_stride,
    query_head_stride,
    key_block_stride,
    key_token_stride,
    key_head_stride,
    value_block_stride,
    value_token_stride,
    value_head_stride,
    table_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid (key heads x tiles of their query heads, S, B): a part of the keys of one row.

    Everything visible is in the pool. With one split the result goes to ``out`` [N, H, D_v]. With
    more, the logarithm of the weights' sum goes to ``split_lse`` [B, H, S], and where it is not
    LOWEST, the result of the split to ``split_out`` [B, H, S, D_v].
    """
    TILES: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    kv_head = (tl.program_id(0) // TILES).to(tl.int64)
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    token = tl.load(cu_seqlens_q + row).to(tl.int64)
    if tl.load(cu_seqlens_q + row + 1) - token != 1:
        return
    seq_len = tl.load(seq_lens + row)

    in_group = tl.program_id(0) % TILES * BLOCK_M + tl.arange(0, BLOCK_M)
    is_head = in_group < GROUP
    heads = kv_head * GROUP + in_group
    q = _load_rows(
        query + token * query_token_stride,
        heads * query_head_stride,
        is_head,
        HEAD_DIM,
        PADDED_HEAD_DIM,
    )
    slopes = None
    if alibi_slopes is not None:
        slopes = tl.load(alibi_slopes + heads, mask=is_head, other=0.0).to(tl.float32) * LOG2_E

    first = 0
    if window is not None:
        first = tl.maximum(seq_len - window, 0)
    aligned = first // BLOCK_N * BLOCK_N
    span = tl.cdiv(tl.cdiv(seq_len - aligned, tl.num_programs(1)), BLOCK_N) * BLOCK_N
    begin = aligned + split * span
    end = tl.minimum(begin + span, seq_len)

    key_cache += kv_head * key_head_stride
    value_cache += kv_head * value_head_stride
    table = block_tables + row * table_stride
    has_sink = in_group < tl.where(split == 0, GROUP, 0)  # it counts once
    acc, row_max, row_sum = _start_softmax(sinks, heads, has_sink, BLOCK_M, PADDED_VALUE_DIM)
    entries = _load_entries(table, begin, first, end, BLOCK_SIZE, BLOCK_N)
    for start in range(begin, end, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        visible = (at >= first) & (at < end)
        next_entries = _load_entries(table, start + BLOCK_N, first, end, BLOCK_SIZE, BLOCK_N)
        k = _load_stored(
            key_cache,
            entries,
            at,
            visible,
            key_block_stride,
            key_token_stride,
            HEAD_DIM,
            PADDED_HEAD_DIM,
            BLOCK_SIZE,
        )
        v = _load_stored(
            value_cache,
            entries,
            at,
            visible,
            value_block_stride,
            value_token_stride,
            VALUE_DIM,
            PADDED_VALUE_DIM,
            BLOCK_SIZE,
        )
        distance = at - (seq_len - 1)
        acc, row_max, row_sum = _attend_tile(
            acc,
            row_max,
            row_sum,
            q,
            k,
            v,
            visible[None, :],
            distance[None, :],
            slopes,
            scale,
            softcap,
        )
        entries = next_entries

    saw_any = row_sum > 0
    row_sum = tl.where(saw_any, row_sum, 1.0)
    result = acc / row_sum[:, None]
    dims = tl.arange(0, PADDED_VALUE_DIM)
    is_stored = is_head[:, None] & (dims < VALUE_DIM)[None, :]
    if split_out is None:
        rows = (token * num_heads + heads) * VALUE_DIM
        tl.store(out + rows[:, None] + dims[None, :], result, mask=is_stored)
    else:
        rows = (row * num_heads + heads) * tl.num_programs(1) + split
        lse = tl.where(saw_any, row_max + tl.log2(row_sum), LOWEST)
        tl.store(split_lse + rows, lse, mask=is_head)
        is_stored &= saw_any[:, None]
        tl.store(split_out + rows[:, None] * VALUE_DIM + dims[None, :], result, mask=is_stored)


@triton.jit(do_not_specialize_on_alignment=["cu_seqlens_q"])
def _combine_kernel(
    split_out,
    split_lse,
    cu_seqlens_q,
    out,
    VALUE_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    """Grid (H, B): the mean of a row's splits, weighted by what each of them saw."""
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    token = tl.load(cu_seqlens_q + row).to(tl.int64)
    if tl.load(cu_seqlens_q + row + 1) - token != 1:
        return
    splits = (row * tl.num_programs(0) + head) * NUM_SPLITS + tl.arange(0, NUM_SPLITS)
    lse = tl.load(split_lse + splits)
    results = _load_rows(split_out, splits * VALUE_DIM, lse > LOWEST, VALUE_DIM, PADDED_VALUE_DIM)
    weights = tl.exp2(lse - tl.max(lse, 0))
    result = tl.sum(results * weights[:, None], 0) / tl.sum(weights, 0)
    dims = tl.arange(0, PADDED_VALUE_DIM)
    rows = (token * tl.num_programs(0) + head) * VALUE_DIM
    tl.store(out + rows + dims, result, mask=dims < VALUE_DIM)


# Rows with more new tokens ------------------------------------------------------------------------


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["block_tables", "seq_lens", "cu_seqlens_q"],
)
def _prefill_kernel(
    query,
    key,
    value,
    key_cache,
    value_cache,
    block_tables,
    seq_lens,
    cu_seqlens_q,
    sinks,
    alibi_slopes,
    out,
    scale,
    softcap,
    window,
    num_heads,
    query_token_stride,
    query_head_stride,
    new_key_token_stride,
    new_key_head_stride,
    new_value_token_stride,
    new_value_head_stride,
    key_block_stride,
    key_token_stride,
    key_head_stride,
    value_block_stride,
    value_token_stride,
    value_head_stride,
    table_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid (tiles of queries, key heads x tiles of their query heads, B): some queries of one row.

    Past tokens come from the pool, then new ones from ``key`` and ``value``: with a window, those
    that the last query does not see have no slot. Tile row ``i`` is query ``i // HEADS``, head
    ``i % HEADS``.
    """
    HEADS: tl.constexpr = GROUP if GROUP < BLOCK_M else BLOCK_M
    QUERIES: tl.constexpr = BLOCK_M // HEADS
    TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head = (tl.program_id(1) // TILES).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    first_token = tl.load(cu_seqlens_q + row).to(tl.int64)
    query_len = (tl.load(cu_seqlens_q + row + 1) - first_token).to(tl.int32)
    first_query = tl.program_id(0) * QUERIES
    if (query_len == 1) | (first_query >= query_len):
        return
    seq_len = tl.load(seq_lens + row)
    past_len = seq_len - query_len

    tile_rows = tl.arange(0, BLOCK_M)
    queries = first_query + tile_rows // HEADS
    in_group = tl.program_id(1) % TILES * HEADS + tile_rows % HEADS
    heads = kv_head * GROUP + in_group
    is_row = (tile_rows < QUERIES * HEADS) & (queries < query_len) & (in_group < GROUP)
    tokens = first_token + queries
    q = _load_rows(
        query,
        tokens * query_token_stride + heads * query_head_stride,
        is_row,
        HEAD_DIM,
        PADDED_HEAD_DIM,
    )
    slopes = None
    if alibi_slopes is not None:
        slopes = tl.load(alibi_slopes + heads, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
    acc, row_max, row_sum = _start_softmax(sinks, heads, is_row, BLOCK_M, PADDED_VALUE_DIM)

    first = 0  # the first position that a query of this tile sees
    if window is not None:
        first = tl.maximum(past_len + first_query - window + 1, 0)

    key_cache += kv_head * key_head_stride
    value_cache += kv_head * value_head_stride
    table = block_tables + row * table_stride
    begin = first // BLOCK_N * BLOCK_N
    entries = _load_entries(table, begin, first, past_len, BLOCK_SIZE, BLOCK_N)
    for start in range(begin, past_len, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        is_stored = (at >= first) & (at < past_len)
        next_entries = _load_entries(table, start + BLOCK_N, first, past_len, BLOCK_SIZE, BLOCK_N)
        k = _load_stored(
            key_cache,
            entries,
            at,
            is_stored,
            key_block_stride,
            key_token_stride,
            HEAD_DIM,
            PADDED_HEAD_DIM,
            BLOCK_SIZE,
        )
        v = _load_stored(
            value_cache,
            entries,
            at,
            is_stored,
            value_block_stride,
            value_token_stride,
            VALUE_DIM,
            PADDED_VALUE_DIM,
            BLOCK_SIZE,
        )
        distance = at[None, :] - (past_len + queries)[:, None]
        visible = is_stored[None, :]
        if window is not None:
            visible &= distance > -window
        acc, row_max, row_sum = _attend_tile(
            acc, row_max, row_sum, q, k, v, visible, distance, slopes, scale, softcap
        )
        entries = next_entries

    key += first_token * new_key_token_stride + kv_head * new_key_head_stride
    value += first_token * new_value_token_stride + kv_head * new_value_head_stride
    begin = tl.maximum(first - past_len, 0) // BLOCK_N * BLOCK_N
    # seq_len only ends a row that pads the batch: it has no token at all.
    end = tl.minimum(tl.minimum(first_query + QUERIES, query_len), seq_len)
    for start in range(begin, end, BLOCK_N):
        new = start + tl.arange(0, BLOCK_N)
        is_new = new < end
        k = _load_rows(
            key, new.to(tl.int64) * new_key_token_stride, is_new, HEAD_DIM, PADDED_HEAD_DIM
        )
        v = _load_rows(
            value, new.to(tl.int64) * new_value_token_stride, is_new, VALUE_DIM, PADDED_VALUE_DIM
        )
        distance = new[None, :] - queries[:, None]
        visible = (distance <= 0) & is_new[None, :]
        if window is not None:
            visible &= distance > -window
        acc, row_max, row_sum = _attend_tile(
            acc, row_max, row_sum, q, k, v, visible, distance, slopes, scale, softcap
        )

    result = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
    dims = tl.arange(0, PADDED_VALUE_DIM)
    rows = (tokens * num_heads + heads) * VALUE_DIM
    tl.store(
        out + rows[:, None] + dims[None, :],
        result,
        mask=is_row[:, None] & (dims < VALUE_DIM)[None, :],
    )


class _Tiles(NamedTuple):
    """Sizes of one attention kernel, for shared memory and registers of sm80 and newer.

    Attributes:
        rows: BLOCK_M; 16 at least, as tensor cores multiply 16 rows at once.
        keys: BLOCK_N.
        num_warps: of a program.
        num_stages: one more than the tiles of K and V that are in shared memory at once.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def _decode_tiles(dtype: torch.dtype, padded_dim: int, group: int) -> _Tiles:
    if dtype == torch.float32:  # without tensor cores
        return _Tiles(16, 32 if padded_dim <= 128 else 16, 4, 3)
    rows = min(max(16, triton.next_power_of_2(group)), 32)
    return _Tiles(rows, 64 if padded_dim <= 128 else 32, 4, 3)


def _prefill_tiles(dtype: torch.dtype, padded_dim: int) -> _Tiles:
    if dtype == torch.float32:
        return _Tiles(32, 16, 8, 2)
    return _Tiles(128, 64, 8, 3) if padded_dim <= 128 else _Tiles(64, 32, 8, 3)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    max_query_len: int,
    has_single_token_rows: bool,
    num_splits: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend as :meth:`AttentionBackend.forward` says; nothing is checked here.

    Args:
        query: [N, H, D].
        key: [N, H_kv, D], the new tokens.
        value: [N, H_kv, D_v], the new tokens.
        key_cache: [num_blocks, block_size, H_kv, D], the last stride 1.
        value_cache: the same with D_v.
        block_tables: [B, W] int32.
        seq_lens: [B] int32.
        cu_seqlens_q: [B + 1] int32.
        max_query_len: no row has more new tokens.
        has_single_token_rows: False: no row has exactly one.
        num_splits: S, a power of two.
        scale: factor on the scores before anything else.
        window: tokens that a query sees, itself included.
        softcap: see :meth:`AttentionBackend.forward`.
        sinks: [H].
        alibi_slopes: [H].

    Returns:
        [N, H, D_v] in the dtype of ``query``, contiguous.
    """
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, value_dim = value.shape[1:]
    num_rows, group = seq_lens.shape[0], num_heads // num_kv_heads
    out = query.new_empty(query.shape[0], num_heads, value_dim)
    padded_head_dim, padded_value_dim = (
        max(16, triton.next_power_of_2(dim)) for dim in (head_dim, value_dim)
    )
    padded_dim = max(padded_head_dim, padded_value_dim)
    tables = (block_tables, seq_lens, cu_seqlens_q)
    if window is not None:
        window = min(window, 2**31 - 1)  # positions are 32-bit numbers
    numbers = (scale, softcap, window, num_heads)
    cache_strides = (*key_cache.stride()[:3], *value_cache.stride()[:3], block_tables.stride(0))
    constants = dict(
        GROUP=group,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        PADDED_HEAD_DIM=padded_head_dim,
        PADDED_VALUE_DIM=padded_value_dim,
        BLOCK_SIZE=key_cache.shape[1],
    )
    with torch.cuda.device_of(query):  # Triton launches on the current device
        if has_single_token_rows:
            split_out = split_lse = None
            if num_splits > 1:
                shape = (num_rows, num_heads, num_splits)
                split_out = query.new_empty(*shape, value_dim, dtype=torch.float32)
                split_lse = query.new_empty(shape, dtype=torch.float32)
            tiles = _decode_tiles(query.dtype, padded_dim, group)
            grid = (num_kv_heads * triton.cdiv(group, tiles.rows), num_splits, num_rows)
            _decode_kernel[grid](
                query,
                key_cache,
                value_cache,
                *tables,
                sinks,
                alibi_slopes,
                out,
                split_out,
                split_lse,
                *numbers,
                *query.stride()[:2],
                *cache_strides,
                **constants,
                BLOCK_M=tiles.rows,
                BLOCK_N=tiles.keys,
                num_warps=tiles.num_warps,
                num_stages=tiles.num_stages,
                **OPTIONS,
            )
            if num_splits > 1:
                _combine_kernel[(num_heads, num_rows)](
                    split_out,
                    split_lse,
                    cu_seqlens_q,
                    out,
                    VALUE_DIM=value_dim,
                    PADDED_VALUE_DIM=padded_value_dim,
                    NUM_SPLITS=num_splits,
                    **OPTIONS,
                )
        if max_query_len > 1:
            tiles = _prefill_tiles(query.dtype, padded_dim)
            heads = min(group, tiles.rows)
            queries = tiles.rows // heads
            _prefill_kernel[
                (
                    triton.cdiv(max_query_len, queries),
                    num_kv_heads * triton.cdiv(group, heads),
                    num_rows,
                )
            ](
                query,
                key,
                value,
                key_cache,
                value_cache,
                *tables,
                sinks,
                alibi_slopes,
                out,
                *numbers,
                *query.stride()[:2],
                *key.stride()[:2],
                *value.stride()[:2],
                *cache_strides,
                **constants,
                BLOCK_M=tiles.rows,
                BLOCK_N=tiles.keys,
                num_warps=tiles.num_warps,
                num_stages=tiles.num_stages,
                **OPTIONS,
            )
    return out


# Stores and copies --------------------------------------------------------------------------------


@triton.jit
def _store_token(
    new,
    cache,
    token,
    slot,
    heads,
    is_head,
    new_token_stride,
    new_head_stride,
    block_stride,
    token_stride,
    head_stride,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    states = _load_rows(
        new + token * new_token_stride, heads * new_head_stride, is_head, DIM, PADDED_DIM
    )
    dims = tl.arange(0, PADDED_DIM)
    cache += slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * token_stride
    tl.store(
        cache + (heads * head_stride)[:, None] + dims[None, :],
        states,
        mask=is_head[:, None] & (dims < DIM)[None, :],
    )


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def _write_kernel(
    key,
    value,
    key_cache,
    value_cache,
    slot_mapping,
    num_kv_heads,
    new_key_token_stride,
    new_key_head_stride,
    new_value_token_stride,
    new_value_head_stride,
    key_block_stride,
    key_token_stride,
    key_head_stride,
    value_block_stride,
    value_token_stride,
    value_head_stride,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Grid (N, tiles of key heads): K and V of one token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    heads = tl.program_id(1).to(tl.int64) * HEADS + tl.arange(0, HEADS)
    is_head = heads < num_kv_heads
    _store_token(
        key,
        key_cache,
        token,
        slot,
        heads,
        is_head,
        new_key_token_stride,
        new_key_head_stride,
        key_block_stride,
        key_token_stride,
        key_head_stride,
        HEAD_DIM,
        PADDED_HEAD_DIM,
        BLOCK_SIZE,
    )
    _store_token(
        value,
        value_cache,
        token,
        slot,
        heads,
        is_head,
        new_value_token_stride,
        new_value_head_stride,
        value_block_stride,
        value_token_stride,
        value_head_stride,
        VALUE_DIM,
        PADDED_VALUE_DIM,
        BLOCK_SIZE,
    )


def write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Store tokens in their slots, those with a negative slot nowhere.

    Args:
        key: [N, H_kv, D].
        value: [N, H_kv, D_v].
        key_cache: [num_blocks, block_size, H_kv, D], the last stride 1.
        value_cache: the same with D_v.
        slot_mapping: [N] int64, contiguous.
    """
    key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (key, value))
    num_tokens, num_kv_heads, head_dim = key.shape
    value_dim = value.shape[2]
    if num_tokens == 0:
        return
    padded_head_dim, padded_value_dim = map(triton.next_power_of_2, (head_dim, value_dim))
    # 4,096 elements a program are 32 for each thread.
    heads = max(1, 4096 // max(padded_head_dim, padded_value_dim))
    heads = min(heads, triton.next_power_of_2(num_kv_heads))
    with torch.cuda.device_of(key):
        _write_kernel[(num_tokens, triton.cdiv(num_kv_heads, heads))](
            key,
            value,
            key_cache,
            value_cache,
            slot_mapping,
            num_kv_heads,
            *key.stride()[:2],
            *value.stride()[:2],
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            HEAD_DIM=head_dim,
            VALUE_DIM=value_dim,
            PADDED_HEAD_DIM=padded_head_dim,
            PADDED_VALUE_DIM=padded_value_dim,
            BLOCK_SIZE=key_cache.shape[1],
            HEADS=heads,
            **OPTIONS,
        )


@triton.jit(do_not_specialize_on_alignment=["source", "target"])
def _copy_kernel(
    cache,
    source,
    target,
    source_stride,
    target_stride,
    block_stride,
    num_elements,
    CHUNK: tl.constexpr,
):
    """Grid (chunks of a block, pairs)."""
    pair = tl.program_id(1).to(tl.int64)
    elements = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    is_element = elements < num_elements
    source_block = tl.load(source + pair * source_stride)
    target_block = tl.load(target + pair * target_stride)
    states = tl.load(cache + source_block * block_stride + elements, mask=is_element)
    tl.store(cache + target_block * block_stride + elements, states, mask=is_element)


def copy_blocks(cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy whole blocks inside one tensor.

    Args:
        cache: [num_blocks, ...], each block contiguous, at any distance from the next.
        source: [n] int64, block ids.
        target: [n] int64, none of them a source, none twice.
    """
    if source.shape[0] == 0:
        return
    blocks = cache.view(cache.shape[0], -1)  # raises where a block is not contiguous
    num_elements = blocks.shape[1]
    with torch.cuda.device_of(cache):
        _copy_kernel[(triton.cdiv(num_elements, COPY_CHUNK), source.shape[0])](
            blocks,
            source,
            target,
            source.stride(0),
            target.stride(0),
            blocks.stride(0),
            num_elements,
            CHUNK=COPY_CHUNK,
            **OPTIONS,
        )
