"""Stores and copies by the Triton kernels, interpreted."""

from __future__ import annotations

import pytest
import torch

from backends.triton.pools import block_major
from hf_paged.backends import block_ops
from hf_paged.backends.base import LayerView

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return integers, for which NaN equals NaN."""
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_heads", "head_dim", "value_dim"), [(1, 64, 64), (3, 80, 24)])
@pytest.mark.parametrize("block_size", [16, 64])
def test_tokens_land_in_their_slots_and_nowhere_else(
    block_size: int, num_heads: int, head_dim: int, value_dim: int, dtype: torch.dtype
) -> None:
    shape = (5, block_size, num_heads)
    view = block_major(
        LayerView(*(torch.randn(*shape, dim).to(dtype) for dim in (head_dim, value_dim)))
    )
    pool = view.key_cache._base
    assert pool is not None
    key, value = (torch.randn(6, num_heads, dim).to(dtype) for dim in (head_dim, value_dim))
    slots = torch.tensor([0, -1, block_size - 1, 3 * block_size, -7, 5 * block_size - 1])
    expected = pool.clone()
    at = {"key": 16, "value": 16 + block_size * num_heads * head_dim}
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, block_size)
            for name, states in (("key", key), ("value", value)):
                token_size = states[token].numel()
                begin = at[name] + offset * token_size
                expected[block, begin : begin + token_size] = states[token].flatten()
    block_ops.write(key, value, view.key_cache, view.value_cache, slots)
    assert torch.equal(bits(pool), bits(expected))


def test_heads_of_more_than_one_program() -> None:
    view = LayerView(torch.zeros(2, 16, 40, 256), torch.zeros(2, 16, 40, 16))
    key, value = torch.randn(1, 40, 256), torch.randn(1, 40, 16)
    block_ops.write(key, value, view.key_cache, view.value_cache, torch.tensor([17]))
    assert torch.equal(view.key_cache[1, 1], key[0])
    assert torch.equal(view.value_cache[1, 1], value[0])
    assert view.key_cache.count_nonzero() == key.count_nonzero()


def test_no_tokens_and_no_blocks() -> None:
    cache = torch.zeros(2, 16, 1, 16)
    none = torch.zeros(0, dtype=torch.int64)
    block_ops.write(torch.zeros(0, 1, 16), torch.zeros(0, 1, 16), cache, cache, none)
    block_ops.copy_blocks(cache, none, none)
    assert not cache.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_elements", [1, 4096, 9000])
def test_whole_blocks_are_copied_and_nothing_else(num_elements: int, dtype: torch.dtype) -> None:
    pool = torch.randn(8, num_elements + 5).to(dtype)
    cache, before = pool[:, 2 : 2 + num_elements], pool.clone()
    pairs = torch.tensor([[0, 1], [5, 2], [5, 7]])  # as a step hands them over: strided
    block_ops.copy_blocks(cache, pairs[:, 0], pairs[:, 1])
    expected = before.clone()
    expected[[1, 2, 7], 2 : 2 + num_elements] = before[[0, 5, 5], 2 : 2 + num_elements]
    assert torch.equal(pool, expected)


def test_blocks_of_more_dimensions() -> None:
    cache = torch.randn(8, 16, 2, 24)
    before = cache.clone()
    block_ops.copy_blocks(cache, torch.tensor([3]), torch.tensor([6]))
    assert torch.equal(cache, before[[0, 1, 2, 3, 4, 5, 3, 7]])
