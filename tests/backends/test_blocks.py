"""write, gather and copy_blocks: which bytes they touch."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from backends.paged_batch import PagedBatch, by_slot, random_rows
from hf_paged.backends.metadata import AttentionMetadata
from hf_paged.backends.registry import available_backends, create_backend
from hf_paged.cache.layout import KVLayout
from hf_paged.cache.storage import KVStorage

pytestmark = pytest.mark.core_suite

CPU = torch.device("cpu")
BACKENDS = [name for name, reason in available_backends(CPU).items() if reason is None]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Any:
    return create_backend(request.param, CPU)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_write_touches_the_slots_of_its_tokens_only(
    backend: Any, block_size: int, window: int | None, dtype: torch.dtype
) -> None:
    rows = random_rows([(0, 11), (5, 4), (7, 1)], value_dim=6, dtype=dtype)
    batch = PagedBatch(rows, backend, block_size, window=window, poison=7.0)
    expected = [cache.clone() for cache in (batch.view.key_cache, batch.view.value_cache)]
    for cache, new in zip(expected, (batch.key, batch.value), strict=True):
        for token, slot in enumerate(batch.metadata.slot_mapping.tolist()):
            if slot >= 0:
                by_slot(backend, cache)[slot // block_size, slot % block_size] = new[token]
    backend.write(batch.key, batch.value, batch.view, batch.metadata)
    assert torch.equal(batch.view.key_cache, expected[0])
    assert torch.equal(batch.view.value_cache, expected[1])


def test_write_takes_keys_of_any_strides(backend: Any) -> None:
    rows = random_rows([(0, 11), (5, 4)], value_dim=6)
    plain, strided = PagedBatch(rows, backend, 4), PagedBatch(rows, backend, 4)
    strided.key = strided.key.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    strided.value = strided.value.repeat(1, 1, 2)[:, :, :6]
    assert not strided.key.is_contiguous()
    assert not strided.value.is_contiguous()
    assert torch.equal(plain.forward(), strided.forward())
    assert torch.equal(plain.view.key_cache.nan_to_num(9), strided.view.key_cache.nan_to_num(9))
    assert torch.equal(plain.view.value_cache.nan_to_num(9), strided.view.value_cache.nan_to_num(9))


def test_write_of_nothing_but_tokens_without_a_slot(backend: Any) -> None:
    batch = PagedBatch(random_rows([(0, 6)]), backend, 4, poison=7.0)
    batch.metadata.slot_mapping.fill_(-1)
    before = batch.view.key_cache.clone()
    backend.write(batch.key, batch.value, batch.view, batch.metadata)
    assert torch.equal(batch.view.key_cache, before)


def test_one_metadata_serves_layers_with_other_heads_and_windows(backend: Any) -> None:
    """What a backend derives from the metadata belongs to what it was derived for."""
    lens = [(5, 1), (8, 1), (2, 1)]
    shared = PagedBatch(random_rows(lens), backend, 4).metadata
    for num_kv_heads in (2, 3, 1):
        rows = random_rows(lens, num_kv_heads=num_kv_heads)
        for window in (None, 3, 1):
            layer, fresh = PagedBatch(rows, backend, 4), PagedBatch(rows, backend, 4)
            layer.metadata = shared
            assert torch.equal(layer.forward(window=window), fresh.forward(window=window))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_gather_returns_what_was_stored_in_the_order_asked(
    backend: Any, block_size: int, dtype: torch.dtype
) -> None:
    rows = random_rows([(9, 2), (5, 4)], value_dim=6, dtype=dtype)
    batch = PagedBatch(rows, backend, block_size)
    backend.write(batch.key, batch.value, batch.view, batch.metadata)
    for row, slots in zip(rows, batch.token_slots, strict=True):
        tokens = [*reversed(slots), 0, 0]
        key, value = backend.gather(batch.view, torch.tensor([slots[t] for t in tokens]))
        assert torch.equal(key, row.key[tokens])
        assert torch.equal(value, row.value[tokens])


def test_gather_of_no_slots(backend: Any) -> None:
    batch = PagedBatch(random_rows([(9, 2)], value_dim=6), backend, 4)
    key, value = backend.gather(batch.view, torch.zeros(0, dtype=torch.long))
    assert (key.shape, value.shape) == ((0, 2, 8), (0, 2, 6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 6])
def test_copy_blocks_copies_whole_blocks(backend: Any, head_dim: int, dtype: torch.dtype) -> None:
    before = torch.randn(backend.cache_shape(8, 4, 2, head_dim)).to(dtype)
    cache = before.clone()
    # 5 is copied twice, targets are in no order.
    backend.copy_blocks(cache, torch.tensor([4, 1, 5, 5]), torch.tensor([3, 0, 7, 2]))
    assert torch.equal(cache, before[[1, 1, 5, 4, 4, 5, 6, 5]])


@pytest.mark.parametrize("head_dim", [64, 1], ids=["elements", "slots"])
def test_offsets_beyond_2_to_the_31(backend: Any, head_dim: int) -> None:
    """flash-attention#772, vllm#15113. Up to 8 GiB of address space, of which few KiB are used."""
    block_size, num_blocks = 16, 2**31 // (16 * head_dim) + 64
    (row,) = random_rows([(0, 21)], num_kv_heads=1, head_dim=head_dim, dtype=torch.bfloat16)
    value = row.value[..., :8]
    layout = KVLayout((None,), 1, head_dim, torch.bfloat16)
    view = KVStorage(backend, layout, num_blocks, block_size).view(0, row.key, value)
    blocks = torch.tensor([num_blocks - 1, num_blocks - 5])
    slots = ((blocks * block_size)[:, None] + torch.arange(block_size)).flatten()
    prompt = AttentionMetadata(
        block_size=block_size,
        null_block=num_blocks,
        block_tables=blocks[None].int(),
        seq_lens=torch.tensor([21], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, 21], dtype=torch.int32),
        slot_mapping=slots[:21],
        seq_lens_list=[21],
        query_lens_list=[21],
    )
    backend.write(row.key, value, view, prompt)
    stored_key, stored_value = backend.gather(view, prompt.slot_mapping)
    assert torch.equal(stored_key, row.key)
    assert torch.equal(stored_value, value)

    backend.copy_blocks(view.key_cache, blocks[:1], torch.tensor([num_blocks - 9]))
    assert torch.equal(view.key_cache[num_blocks - 9], view.key_cache[num_blocks - 1])

    scores = 0.1 * torch.einsum("hd,kd->hk", row.query[-1].double(), row.key[:, 0].double())
    expected = scores.softmax(1) @ value[:, 0].double()
    for num_new in (1, 2):  # as a step of decoding, and over a past
        step = dataclasses.replace(
            prompt,
            cu_seqlens_q=torch.tensor([0, num_new], dtype=torch.int32),
            slot_mapping=prompt.slot_mapping[-num_new:],
            query_lens_list=[num_new],
            derived={},
        )
        new = slice(21 - num_new, 21)
        out = backend.forward(row.query[new], row.key[new], value[new], view, step, scale=0.1)
        assert (out[-1].double() - expected).norm() < 1e-2 * expected.norm()
