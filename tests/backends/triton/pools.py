"""Batches as the Triton kernels meet them: blocks far apart, and garbage wherever no token is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from backends.dense_oracle import dense_attention, relative_error
from backends.paged_batch import PagedBatch, Row, random_rows
from hf_paged.backends import triton_ops
from hf_paged.backends.base import LayerView
from hf_paged.backends.triton import TritonBackend

GARBAGE = 2**30
TOLERANCE = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}


def block_major(view: LayerView, poison: float = torch.nan) -> LayerView:
    """Return the same caches as parts of one tensor of blocks, with poison before and after."""
    caches = (view.key_cache, view.value_cache)
    sizes = [cache[0].numel() for cache in caches]
    blocks = torch.full((caches[0].shape[0], sum(sizes) + 48), poison).to(caches[0].dtype)
    key, value = (
        part.unflatten(1, cache.shape[1:])
        for part, cache in zip(blocks[:, 16 : 16 + sum(sizes)].split(sizes, 1), caches, strict=True)
    )
    key.copy_(caches[0])
    value.copy_(caches[1])
    return LayerView(key, value)


def make_batch(
    rows: Sequence[Row], block_size: int, *, window: int | None = None, poison: float = torch.nan
) -> PagedBatch:
    """Return a block-major batch, garbage in what no query sees of its tables and past tokens."""
    batch = PagedBatch(rows, TritonBackend(), block_size, window=window, poison=poison)
    for row, slots in zip(rows, batch.token_slots, strict=True):
        first_seen = 0 if window is None else row.num_past - window + 1
        for token, slot in slots.items():
            if token < first_seen:
                for cache in (batch.view.key_cache, batch.view.value_cache):
                    cache[slot // block_size, slot % block_size] = poison
    batch.view = block_major(batch.view, poison)
    tables = torch.full_like(batch.metadata.block_tables, GARBAGE)
    for row, slots in enumerate(batch.token_slots):
        for token, slot in slots.items():
            tables[row, token // block_size] = slot // block_size
    batch.metadata.block_tables = tables
    return batch


def attend(batch: PagedBatch, num_splits: int = 1, **attention: Any) -> torch.Tensor:
    """Write and attend through the operators, with a number of splits of the caller's."""
    batch.backend.write(batch.key, batch.value, batch.view, batch.metadata)
    view, metadata = batch.view, batch.metadata
    return triton_ops.attention(
        batch.query,
        batch.key,
        batch.value,
        view.key_cache,
        view.value_cache,
        metadata.block_tables,
        metadata.seq_lens,
        metadata.cu_seqlens_q,
        max(metadata.query_lens_list),
        1 in metadata.query_lens_list,
        num_splits,
        **{"scale": 0.3} | attention,
    )


def check(
    lens: Sequence[tuple[int, int]],
    *,
    block_size: int = 16,
    num_splits: int = 1,
    attention: dict[str, Any] | None = None,
    **shape: Any,
) -> None:
    """Compare rows of (past, new) tokens with attention in float64."""
    attention = {"scale": 0.3} | (attention or {})
    rows = random_rows(lens, **{"num_kv_heads": 1} | shape)
    batch = make_batch(rows, block_size, window=attention.get("window"))
    out = attend(batch, num_splits, **attention)
    expected = dense_attention(rows, **attention)
    assert out.shape == expected.shape
    assert out.dtype == rows[0].query.dtype
    error = relative_error(out, expected)
    assert error < TOLERANCE[out.dtype], f"relative L2 error {error}"
