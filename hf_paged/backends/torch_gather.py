"""A usable backend in plain torch: gather the visible blocks, then scaled_dot_product_attention.

K and V lie apart as [num_blocks, H_kv, block_size, D] (HND): the tokens of one block and head are
one contiguous row, so a gather is one index_select of long rows into a buffer that is kept. All G
query heads of a key head are packed into one product ([H_kv, G, D]); ``enable_gqa`` would be 4 to
10 times slower on a CPU.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from hf_paged.backends.base import AttentionBackend, LayerView
from hf_paged.backends.metadata import AttentionMetadata

__all__ = ["TorchGatherBackend"]

QUERY_CHUNK = 256
"""Queries whose mask is made at once when a prompt extends a cached prefix or has a window."""


@dataclass
class _DecodePlan:
    """Which rows of the cache a decoding step gathers, for one window.

    Attributes:
        cache_rows: [B * H_kv * W] int64, rows of the cache seen as [num_blocks * H_kv, -1].
        num_entries: W, blocks gathered for each row.
        mask: [B, 1, 1, W * block_size] bool, True where a token is visible; None: everywhere.
        distance: [B, 1, 1, W * block_size] int64, the position of a key less that of the query.
        last_rows: [B * H_kv] int64, the gathered rows of each sequence's last block.
        unfilled: [B * H_kv, block_size, 1] bool, their slots that hold no token; None: all do.
    """

    cache_rows: torch.Tensor
    num_entries: int
    mask: torch.Tensor | None
    distance: torch.Tensor
    last_rows: torch.Tensor
    unfilled: torch.Tensor | None


class TorchGatherBackend(AttentionBackend):
    """Runs on every device that torch knows; the copy costs what a kernel would save."""

    name = "torch"

    def __init__(self, *, batch_invariant: bool = False) -> None:
        super().__init__(batch_invariant=batch_invariant)
        self._scratch = threading.local()

    @classmethod
    def unavailable_reason(cls, device: torch.device) -> str | None:
        """Runs wherever torch runs."""
        return None

    def cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> tuple[int, ...]:
        """Return HND: one contiguous row a block and head."""
        return (num_blocks, num_kv_heads, block_size, head_dim)

    def write(
        self, key: torch.Tensor, value: torch.Tensor, view: LayerView, metadata: AttentionMetadata
    ) -> None:
        """Store new tokens: one index_copy of [n * H_kv] rows into the cache seen as such rows."""
        num_heads, block_size = view.key_cache.shape[1:3]
        plan = metadata.derived.get(("write", num_heads))
        if plan is None:
            slots = metadata.slot_mapping
            stored = torch.nonzero(slots >= 0)[:, 0]
            slots = slots[stored]
            heads = torch.arange(num_heads, device=slots.device)
            block, offset = slots // block_size, slots % block_size
            rows = ((block[:, None] * num_heads + heads) * block_size + offset[:, None]).flatten()
            everything = stored.shape[0] == metadata.slot_mapping.shape[0]
            plan = metadata.derived["write", num_heads] = (None if everything else stored, rows)
        stored_or_none, rows = plan
        for cache, new in ((view.key_cache, key), (view.value_cache, value)):
            tokens = new if stored_or_none is None else new.index_select(0, stored_or_none)
            cache.view(-1, cache.shape[-1]).index_copy_(0, rows, tokens.flatten(0, 1))

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
        """Attend all rows at once when decoding, row by row otherwise."""
        if metadata.is_decode:
            return self._decode(query, view, metadata, scale, window, softcap, sinks, alibi_slopes)
        out = query.new_empty(*query.shape[:2], value.shape[-1])
        begin = 0
        rows = zip(metadata.seq_lens_list, metadata.query_lens_list, strict=True)
        for row, (seq_len, query_len) in enumerate(rows):
            new = slice(begin, begin + query_len)
            first, past_key, past_value = self._past(
                view, metadata, row, seq_len, query_len, window
            )
            out[new] = _attend_row(
                query[new].transpose(0, 1),
                torch.cat([past_key, key[new].transpose(0, 1)], dim=1),
                torch.cat([past_value, value[new].transpose(0, 1)], dim=1),
                first,
                scale,
                window,
                softcap,
                sinks,
                alibi_slopes,
            ).transpose(0, 1)
            begin += query_len
        return out

    def gather(self, view: LayerView, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Index the caches by block and offset."""
        block_size = view.key_cache.shape[2]
        block, offset = slots // block_size, slots % block_size
        return view.key_cache[block, :, offset], view.value_cache[block, :, offset]

    def release_scratch(self) -> None:
        """Drop the gather buffers of all threads."""
        self._scratch = threading.local()

    def _decode(
        self,
        query: torch.Tensor,
        view: LayerView,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
        alibi_slopes: torch.Tensor | None,
    ) -> torch.Tensor:
        num_heads = view.key_cache.shape[1]
        plan = metadata.derived.get(("decode", window, num_heads))
        if plan is None:
            plan = _plan_decode(metadata, window, num_heads)
            metadata.derived["decode", window, num_heads] = plan
        key = self._gather_blocks("key", view.key_cache, plan)
        value = self._gather_blocks("value", view.value_cache, plan)
        packed = query.reshape(query.shape[0], num_heads, -1, query.shape[2])  # [B, H_kv, G, D]
        if softcap is None and sinks is None and alibi_slopes is None:
            out = scaled_dot_product_attention(packed, key, value, attn_mask=plan.mask, scale=scale)
        else:
            sink = None if sinks is None else sinks.view(num_heads, -1, 1)
            bias = None
            if alibi_slopes is not None:
                bias = alibi_slopes.view(num_heads, -1, 1) * plan.distance
            out = _softmax_attention(packed, key, value, plan.mask, scale, softcap, sink, bias)
        return out.flatten(1, 2)

    def _gather_blocks(self, name: str, cache: torch.Tensor, plan: _DecodePlan) -> torch.Tensor:
        """Return [B, H_kv, W * block_size, D] in a kept buffer, zeros where no token is."""
        num_heads, block_size, head_dim = cache.shape[1:]
        num_rows = plan.cache_rows.shape[0]
        buffer = self._buffer(name, cache, num_rows * block_size * head_dim)
        rows = buffer.view(num_rows, block_size * head_dim)
        torch.index_select(cache.view(-1, block_size * head_dim), 0, plan.cache_rows, out=rows)
        if plan.unfilled is not None:
            last = rows.index_select(0, plan.last_rows).view(-1, block_size, head_dim)
            rows.index_copy_(0, plan.last_rows, last.masked_fill_(plan.unfilled, 0).flatten(1))
        return rows.view(-1, num_heads, plan.num_entries * block_size, head_dim)

    def _buffer(self, name: str, like: torch.Tensor, num_elements: int) -> torch.Tensor:
        key = f"{name} {like.device} {like.dtype}"
        buffer: torch.Tensor | None = getattr(self._scratch, key, None)
        if buffer is None or buffer.shape[0] < num_elements:
            # A fresh large allocation each step costs 2 to 3 times as much: grow with room.
            with torch.inference_mode(False):
                buffer = torch.empty(
                    num_elements + num_elements // 4, dtype=like.dtype, device=like.device
                )
            setattr(self._scratch, key, buffer)
        return buffer[:num_elements]

    def _past(
        self,
        view: LayerView,
        metadata: AttentionMetadata,
        row: int,
        seq_len: int,
        query_len: int,
        window: int | None,
    ) -> tuple[int, torch.Tensor, torch.Tensor]:
        """Return the first visible stored token of a row, and K and V from there, [H_kv, n, D]."""
        past_len, size = seq_len - query_len, metadata.block_size
        first = 0 if window is None else max(0, past_len - window + 1)
        first = min(first, past_len) // size * size
        blocks = metadata.block_tables[row, first // size : -(-past_len // size)].long()
        key, value = (
            cache[blocks].transpose(0, 1).flatten(1, 2)[:, : past_len - first]
            for cache in (view.key_cache, view.value_cache)
        )
        return first, key, value


def _plan_decode(metadata: AttentionMetadata, window: int | None, num_heads: int) -> _DecodePlan:
    size, lens = metadata.block_size, metadata.seq_lens.long()
    tables, device = metadata.block_tables.long(), metadata.block_tables.device
    first_entry = torch.zeros_like(lens)
    if window is not None:
        first_entry = (lens - window).clamp_(min=0) // size
    last_entry = (lens - 1) // size - first_entry
    num_entries = int(last_entry.max()) + 1
    entries = torch.arange(num_entries, device=device)
    # Past the end of the table any entry will do that is behind the mask and holds zeros: the
    # null block, which is what the table itself has past a row's end.
    wanted = first_entry[:, None] + entries
    width = tables.shape[1]
    blocks = tables.gather(1, wanted.clamp(max=width - 1))
    is_used = entries <= last_entry[:, None]
    blocks = torch.where(is_used, blocks, metadata.null_block)
    heads = torch.arange(num_heads, device=device)
    cache_rows = (blocks[:, None, :] * num_heads + heads[:, None]).flatten()
    at = first_entry[:, None] * size + torch.arange(num_entries * size, device=device)
    visible = at < lens[:, None]
    if window is not None:
        visible &= at >= (lens - window)[:, None]
    is_full = bool((lens % size == 0).all())
    offsets = torch.arange(size, device=device)
    unfilled = (offsets > ((lens - 1) % size)[:, None]).repeat_interleave(num_heads, 0)
    first_rows = torch.arange(lens.shape[0] * num_heads, device=device) * num_entries
    return _DecodePlan(
        cache_rows,
        num_entries,
        None if bool(visible.all()) else visible[:, None, None, :],
        (at - lens[:, None] + 1)[:, None, None, :],
        first_rows + last_entry.repeat_interleave(num_heads),
        None if is_full else unfilled[:, :, None],
    )


def _attend_row(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    first: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
) -> torch.Tensor:
    """Attend the new tokens of one row.

    Args:
        query: [H, n, D]; its last token is the last one of ``key``.
        key: [H_kv, m, D], tokens ``first`` to ``first + m - 1`` of the row.
        value: [H_kv, m, D_v].
        first: index of the first key.
        scale: see :meth:`AttentionBackend.forward`.
        window: see :meth:`AttentionBackend.forward`.
        softcap: see :meth:`AttentionBackend.forward`.
        sinks: see :meth:`AttentionBackend.forward`.
        alibi_slopes: see :meth:`AttentionBackend.forward`.

    Returns:
        [H, n, D_v].
    """
    num_heads, num_new, num_keys = key.shape[0], query.shape[1], key.shape[1]
    packed = query.reshape(num_heads, -1, num_new, query.shape[2])  # [H_kv, G, n, D]
    key, value = key[:, None], value[:, None]
    plain = softcap is None and sinks is None and alibi_slopes is None
    if plain and num_new == num_keys and (window is None or window >= num_keys):
        shape = (-1, packed.shape[1], -1, -1)
        return scaled_dot_product_attention(
            packed, key.expand(shape), value.expand(shape), is_causal=True, scale=scale
        ).flatten(0, 1)
    out = packed.new_empty(*packed.shape[:-1], value.shape[-1])
    at = torch.arange(num_keys - num_new, num_keys, device=query.device)
    sink = None if sinks is None else sinks.view(num_heads, -1, 1, 1)
    for start in range(0, num_new, QUERY_CHUNK):
        rows = slice(start, min(start + QUERY_CHUNK, num_new))
        low = 0 if window is None else max(0, int(at[rows][0]) - window + 1)
        high = int(at[rows][-1]) + 1
        seen = torch.arange(low, high, device=query.device)
        mask = seen <= at[rows, None]
        if window is not None:
            mask &= seen > at[rows, None] - window
        chunk_key, chunk_value = key[:, :, low:high], value[:, :, low:high]
        if plain:
            shape = (-1, packed.shape[1], -1, -1)
            out[:, :, rows] = scaled_dot_product_attention(
                packed[:, :, rows],
                chunk_key.expand(shape),
                chunk_value.expand(shape),
                attn_mask=mask,
                scale=scale,
            )
        else:
            bias = None
            if alibi_slopes is not None:
                bias = alibi_slopes.view(num_heads, -1, 1, 1) * (seen - at[rows, None])
            out[:, :, rows] = _softmax_attention(
                packed[:, :, rows], chunk_key, chunk_value, mask, scale, softcap, sink, bias
            )
    return out.flatten(0, 1)


def _softmax_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Attend with what scaled_dot_product_attention lacks; softmax in float32 at least.

    Args:
        query: [..., n, D].
        key: [..., m, D], broadcast to the leading dimensions of ``query``.
        value: [..., m, D_v], likewise.
        mask: broadcasts to [..., n, m], True where visible.
        scale: see :meth:`AttentionBackend.forward`.
        softcap: likewise.
        sinks: broadcasts to [..., n, 1].
        bias: broadcasts to [..., n, m], added after the softcap.
    """
    scores = query @ key.transpose(-1, -2) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1).to(scores.dtype)], dim=-1)
    weights = scores.softmax(dim=-1)
    if sinks is not None:
        weights = weights[..., :-1]
    return weights.to(value.dtype) @ value
