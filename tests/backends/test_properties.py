"""Random shapes, lengths and tables: the backends agree, and the place of a block is no input."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from backends.paged_batch import PagedBatch, random_rows
from hf_paged.backends.registry import available_backends, create_backend

pytestmark = pytest.mark.core_suite

CPU = torch.device("cpu")
BACKENDS = [name for name, reason in available_backends(CPU).items() if reason is None]


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
    """Rows, arguments of :class:`PagedBatch` and arguments of the attention."""
    num_new = st.just(1) if draw(st.booleans()) else st.integers(1, 12)
    num_kv_heads, group_size = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    window = draw(st.none() | st.integers(1, 20))
    rows = random_rows(
        draw(st.lists(st.tuples(st.integers(0, 30), num_new), min_size=1, max_size=5)),
        num_kv_heads=num_kv_heads,
        group_size=group_size,
        head_dim=draw(st.sampled_from([1, 4, 6, 16])),
        value_dim=draw(st.none() | st.sampled_from([2, 16])),
        seed=draw(st.integers(0, 2**20)),
    )
    placement = dict(
        block_size=draw(st.sampled_from([1, 2, 4, 8, 16])),
        window=window,
        poison=draw(st.sampled_from([torch.nan, 1e30])),
    )
    sinks = draw(st.none() | st.just(torch.linspace(-3, 3, num_kv_heads * group_size)))
    softcap = draw(st.none() | st.sampled_from([1.0, 20.0]))
    return rows, placement, dict(window=window, sinks=sinks, softcap=softcap)


@settings(max_examples=150, deadline=None)
@given(cases())
def test_torch_equals_the_reference(case: Any) -> None:
    rows, placement, attention = case
    out, expected = (
        PagedBatch(rows, create_backend(name, CPU), **placement).forward(**attention)
        for name in ("torch", "torch_reference")
    )
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=60, deadline=None)
@given(case=cases(), seeds=st.tuples(st.integers(0, 1000), st.integers(0, 1000)))
def test_order_of_physical_blocks_changes_no_bit(
    name: str, case: Any, seeds: tuple[int, int]
) -> None:
    rows, placement, attention = case
    backend = create_backend(name, CPU)
    first, second = (
        PagedBatch(rows, backend, **placement, seed=seed).forward(**attention) for seed in seeds
    )
    assert torch.equal(first, second)
