"""Copies of whole blocks by the native backend: what they touch, and which they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_paged.backends import cpu_kernels
from hf_paged.errors import InputMismatchError

pytestmark = pytest.mark.core_suite


def check_refusal(
    facts: list[str], cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor
) -> None:
    before = cache.clone()
    with pytest.raises(InputMismatchError) as raised:
        cpu_kernels.copy_blocks(cache, source, target)
    for fact in facts:
        assert fact in str(raised.value)
    assert torch.equal(cache, before)


@pytest.mark.parametrize("num_threads_worth", [1, 4000], ids=["few-bytes", "many-bytes"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.int8])
def test_blocks_of_any_dtype_are_copied(dtype: torch.dtype, num_threads_worth: int) -> None:
    cache = torch.randint(-9, 9, (8, 2, 4, num_threads_worth)).to(dtype)
    expected = cache[[0, 7, 1, 3, 4, 5, 6, 7]]
    cpu_kernels.copy_blocks(cache, torch.tensor([7, 1]), torch.tensor([1, 2]))
    assert torch.equal(cache, expected), "every source is read before a target is written"
    cpu_kernels.copy_blocks(cache, torch.tensor([3, 4, 3]), torch.tensor([0, 5, 6]))
    assert torch.equal(cache, expected[[3, 1, 2, 3, 4, 4, 3, 7]])


def test_no_copy_changes_nothing() -> None:
    cache = torch.randn(8, 2, 4, 8)
    before = cache.clone()
    nothing = torch.zeros(0, dtype=torch.int64)
    cpu_kernels.copy_blocks(cache, nothing, nothing)
    assert torch.equal(cache, before)


@pytest.mark.parametrize("name", ["source", "target"])
@pytest.mark.parametrize("bad", [-1, 8, 2**40])
def test_copy_blocks_refuses_blocks_beyond_the_cache(name: str, bad: int) -> None:
    cache = torch.randn(8, 2, 4, 8)
    ids = {"source": torch.tensor([0, 1]), "target": torch.tensor([2, 3])}
    ids[name][1] = bad
    facts = [f"{name} holds block ids", str(bad), "ids of the 8 blocks of the cache"]
    check_refusal(facts, cache, **ids)


def test_copy_blocks_refuses_a_cache_whose_blocks_have_gaps() -> None:
    cache = torch.randn(8, 4, 2, 8).transpose(1, 2)
    facts = ["cache has strides (64, 8, 16, 1) for shape (8, 2, 4, 8)", "each of them contiguous"]
    ids = torch.tensor([0]), torch.tensor([1])
    check_refusal(facts, cache, *ids)


@pytest.mark.parametrize(
    "ids",
    [
        (torch.tensor([1, 3, 5]), torch.tensor([0, 2, 4])[:1]),
        (torch.tensor([1, 3, 5])[:1], torch.tensor([0, 2, 4])),
        (torch.zeros(4, dtype=torch.int32)[:2], torch.tensor([1, 2])),
        (torch.tensor([1, 2]), torch.zeros(4, dtype=torch.int32)[:2]),
        (torch.tensor([[1, 3]]), torch.tensor([[0, 2]])),
    ],
    ids=["fewer-targets", "more-targets", "sources-of-int32", "targets-of-int32", "a-matrix"],
)
def test_copy_blocks_refuses_ids_that_are_not_as_many_int64(ids: Any) -> None:
    """They were read beyond their end, or as other numbers."""
    check_refusal(["source", "target", "int64"], torch.randn(8, 2, 4, 8), *ids)


def test_copy_blocks_copies_no_byte_between_the_blocks() -> None:
    """K and V in turns: a copy of K's blocks once took V's along."""
    storage = torch.randn(9, 2, 2, 4, 8)
    expected = storage.clone()
    expected[[0, 7], 1] = storage[[5, 6], 1]
    cpu_kernels.copy_blocks(storage[:8, 1], torch.tensor([5, 6]), torch.tensor([0, 7]))
    assert torch.equal(storage, expected)
