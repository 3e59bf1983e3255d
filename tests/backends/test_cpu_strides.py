"""Random shapes, strides and tables: the native backend agrees with the readable one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given, settings

from backends.paged_batch import PagedBatch, Row, random_rows
from hf_paged.backends.base import LayerView
from hf_paged.backends.cpu import CpuBackend
from hf_paged.backends.registry import create_backend

pytestmark = [pytest.mark.core_suite, pytest.mark.usefixtures("isa")]

CPU = torch.device("cpu")


def interleaved(view: LayerView) -> LayerView:
    """K beside V in one allocation, as some layouts have it."""
    key, value = view.key_cache, view.value_cache
    both = torch.cat([key, value], dim=3)
    return LayerView(both[..., : key.shape[3]], both[..., key.shape[3] :])


def token_major(view: LayerView) -> LayerView:
    """The tokens of a block one after the other (NHD)."""
    caches = (view.key_cache, view.value_cache)
    return LayerView(*(cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in caches))


def with_gaps(view: LayerView) -> LayerView:
    """Something else behind each block."""
    caches = (view.key_cache, view.value_cache)
    return LayerView(
        *(torch.stack([torch.full_like(c, torch.nan), c], dim=1)[:, 1] for c in caches)
    )


LAYOUTS: list[Callable[[LayerView], LayerView]] = [
    lambda view: view,
    interleaved,
    token_major,
    with_gaps,
]
STRIDES: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda tokens: tokens,
    lambda tokens: tokens.transpose(0, 1).contiguous().transpose(0, 1),
    lambda tokens: tokens.permute(2, 1, 0).contiguous().permute(2, 1, 0),
    lambda tokens: torch.cat([tokens, tokens], dim=2)[..., tokens.shape[2] :],
    lambda tokens: torch.cat([tokens, tokens], dim=1)[:, : tokens.shape[1]],
]


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Row], dict[str, Any], dict[str, Any]]:
    """Rows, arguments of :class:`PagedBatch` and arguments of the attention."""
    num_kv_heads, group_size = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4, 6, 17]))
    head_dim = draw(st.integers(1, 80))
    kind = st.tuples(st.integers(0, 150), st.sampled_from([0, 1, 1, 2, 5, 33, 70]))
    rows = random_rows(
        draw(st.lists(kind, min_size=1, max_size=5)),
        num_kv_heads=num_kv_heads,
        group_size=group_size,
        head_dim=head_dim,
        value_dim=draw(st.integers(1, 80)),
        seed=draw(st.integers(0, 2**20)),
    )
    window = draw(st.none() | st.integers(1, 100))
    per_head = st.none() | st.just(torch.linspace(0, 1, num_kv_heads * group_size))
    attention = dict(
        scale=head_dim**-0.5,
        window=window,
        softcap=draw(st.none() | st.sampled_from([1.0, 20.0])),
        sinks=draw(per_head),
        alibi_slopes=draw(per_head),
    )
    return rows, dict(block_size=draw(st.integers(1, 40)), window=window), attention


@settings(max_examples=60, deadline=None)
@given(cases(), st.booleans(), st.sampled_from(LAYOUTS), st.tuples(*[st.sampled_from(STRIDES)] * 3))
def test_any_shapes_strides_and_tables_agree_with_the_reference(
    case: Any, batch_invariant: bool, layout: Any, strides: Any
) -> None:
    rows, placement, attention = case
    assume(any(row.query.shape[0] for row in rows))
    expected = PagedBatch(rows, create_backend("torch_reference", CPU), **placement)
    batch = PagedBatch(rows, CpuBackend(batch_invariant=batch_invariant), **placement)
    batch.view = layout(batch.view)
    batch.query, batch.key, batch.value = (
        stride(tokens)
        for stride, tokens in zip(strides, (batch.query, batch.key, batch.value), strict=True)
    )
    out = batch.forward(**attention)
    torch.testing.assert_close(out, expected.forward(**attention), rtol=1e-5, atol=1e-5)
