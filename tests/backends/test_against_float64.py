"""Every backend against attention over plain tensors in float64: no blocks, no tables.

pytorch#160861, llama.cpp#29034 (lengths around a block, softcap, poisoned slots);
sgl-kernel-xpu#196 (a few new tokens over a short past).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from backends.dense_oracle import dense_attention, relative_error
from backends.paged_batch import PagedBatch, random_rows
from hf_paged.backends.registry import available_backends, create_backend
from hf_paged.backends.torch_gather import QUERY_CHUNK

pytestmark = pytest.mark.core_suite

CPU = torch.device("cpu")
BACKENDS = [name for name, reason in available_backends(CPU).items() if reason is None]
POISONS = [torch.nan, 1e30]
WINDOWS = [None, 1, 3, 8, 1000]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}

DECODE = [(0, 1), (3, 1), (4, 1), (12, 1), (18, 1)]
PREFILL = [(0, 11), (5, 4), (16, 3), (0, 1), (13, 1), (2, 9)]
SHAPES = pytest.mark.parametrize("lens", [DECODE, PREFILL], ids=["decode", "prefill"])


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Any:
    return create_backend(request.param, CPU)


def check(
    backend: Any,
    lens: Sequence[tuple[int, int]],
    *,
    block_size: int = 4,
    poison: float = torch.nan,
    held_window: int | None = None,
    attention: dict[str, Any] | None = None,
    **shape: Any,
) -> None:
    """Compare; ``held_window`` (default: the attention's window) is what the group keeps."""
    attention = {"scale": 0.3} | (attention or {})
    rows = random_rows(lens, **shape)
    batch = PagedBatch(
        rows, backend, block_size, window=held_window or attention.get("window"), poison=poison
    )
    out = batch.forward(**attention)
    expected = dense_attention(rows, **attention)
    assert out.shape == expected.shape
    assert out.dtype == rows[0].query.dtype
    error = relative_error(out, expected)
    assert error < TOLERANCE[out.dtype], f"relative L2 error {error}"


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_decode_around_the_end_of_a_block(
    backend: Any, block_size: int, window: int | None, poison: float
) -> None:
    seq_lens = [1, block_size - 1, block_size, block_size + 1, 2 * block_size + 1]
    lens = [(seq_len - 1, 1) for seq_len in seq_lens if seq_len]
    arguments: dict[str, Any] = dict(block_size=block_size, poison=poison)
    for one in lens:
        check(backend, [one], attention=dict(window=window), **arguments)
    check(backend, [*lens, *reversed(lens)], attention=dict(window=window), **arguments)


@pytest.mark.parametrize("num_new", [1, 2, 3, 4, 5])
def test_few_new_tokens_over_a_short_past(backend: Any, num_new: int) -> None:
    for num_past in range(10):
        for window in (None, 1, 3):
            check(backend, [(num_past, num_new)], attention=dict(window=window))


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_ragged_rows_of_prompts_continued_prompts_and_single_tokens(
    backend: Any, block_size: int, window: int | None, poison: float
) -> None:
    check(backend, PREFILL, block_size=block_size, poison=poison, attention=dict(window=window))


@pytest.mark.parametrize("num_new", [1, 3, 4, 5, 9])
def test_fresh_prompt(backend: Any, num_new: int) -> None:
    check(backend, [(0, num_new)])
    check(backend, [(0, num_new), (0, 2)])


@pytest.mark.parametrize("window", [None, 8, 100, 290, 1000])
@pytest.mark.parametrize("num_past", [0, 37])
def test_prompt_of_more_than_one_query_chunk(
    backend: Any, num_past: int, window: int | None
) -> None:
    assert QUERY_CHUNK < 300 < 2 * QUERY_CHUNK
    check(backend, [(num_past, 300)], block_size=16, attention=dict(window=window))


def test_prompt_of_more_than_one_query_chunk_with_softcap_and_sinks(backend: Any) -> None:
    attention = dict(softcap=2.0, sinks=torch.tensor([0.0, 3.0, -2.0, 1.0]), window=50)
    for num_past in (0, 37):
        check(backend, [(num_past, 300)], block_size=16, attention=attention)


@SHAPES
@pytest.mark.parametrize("num_kv_heads", [1, 3])
@pytest.mark.parametrize("group_size", [1, 2, 3, 4, 8])
def test_query_heads_of_one_key_head(
    backend: Any, lens: Any, group_size: int, num_kv_heads: int
) -> None:
    check(backend, lens, group_size=group_size, num_kv_heads=num_kv_heads)


@SHAPES
@pytest.mark.parametrize(("head_dim", "value_dim"), [(8, 8), (64, 64), (80, 80), (24, 8), (8, 24)])
def test_head_dims_of_keys_and_values(
    backend: Any, lens: Any, head_dim: int, value_dim: int
) -> None:
    shape: dict[str, Any] = dict(head_dim=head_dim, value_dim=value_dim)
    check(backend, lens, **shape, attention=dict(scale=head_dim**-0.5))
    check(backend, lens, **shape, attention=dict(scale=head_dim**-0.5, window=3, softcap=5.0))


@SHAPES
@pytest.mark.parametrize(
    "attention",
    [
        dict(softcap=0.5),
        dict(softcap=30.0, window=3),
        dict(sinks=torch.tensor([0.0, 4.0, -4.0, 1.0])),
        dict(sinks=torch.tensor([0.0, 4.0, -4.0, 1.0]), window=3),
        dict(sinks=torch.tensor([0.0, 4.0, -4.0, 1.0]), window=1, softcap=2.0),
        dict(scale=1.0),
        dict(scale=0.01, window=8),
        dict(alibi_slopes=torch.tensor([0.0, 0.5, -0.1, 1.0])),
        dict(alibi_slopes=torch.tensor([0.0, 0.5, -0.1, 1.0]), window=3, softcap=2.0),
    ],
    ids=lambda attention: "-".join(attention),
)
@pytest.mark.parametrize("poison", POISONS)
def test_softcap_sinks_alibi_and_scale(
    backend: Any, lens: Any, attention: dict[str, Any], poison: float
) -> None:
    check(backend, lens, poison=poison, attention=attention)


@SHAPES
@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize(
    "attention",
    [dict(), dict(window=3), dict(softcap=5.0), dict(sinks=torch.tensor([0.0, 4.0, -4.0, 1.0]))],
    ids=lambda attention: "-".join(attention) or "plain",
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(
    backend: Any, lens: Any, dtype: torch.dtype, attention: dict[str, Any], poison: float
) -> None:
    shape: dict[str, Any] = dict(head_dim=64, dtype=dtype, poison=poison)
    check(backend, lens, **shape, attention={"scale": 64**-0.5} | attention)


@SHAPES
def test_layer_with_a_smaller_window_than_its_group(backend: Any, lens: Any) -> None:
    check(backend, lens, held_window=8, attention=dict(window=3))


@pytest.mark.parametrize("poison", POISONS)
def test_new_tokens_behind_the_window_have_no_slot(backend: Any, poison: float) -> None:
    lens = [(0, 21), (6, 13)]
    rows = random_rows(lens)
    batch = PagedBatch(rows, backend, 4, window=3, poison=poison)
    assert batch.metadata.slot_mapping[:16].tolist() == [-1] * 16
    assert (batch.metadata.slot_mapping[16:21] >= 0).all()
    check(backend, lens, poison=poison, attention=dict(window=3))
