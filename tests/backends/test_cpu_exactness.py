"""The native backend against float64, for each instruction set that this processor runs.

The tolerance in half precision is little more than the rounding of the result itself. Where the
processor multiplies matrices (AMX), a prompt's weights are rounded to bfloat16 as well, as torch's
own attention does: two roundings, of up to 1.65e-3 each.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from backends.dense_oracle import dense_attention, relative_error
from backends.paged_batch import PagedBatch, random_rows
from hf_paged.backends import native
from hf_paged.backends.registry import create_backend

pytestmark = [pytest.mark.core_suite, pytest.mark.usefixtures("isa")]

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2.2e-3, torch.float16: 6e-4}
AMX_TOLERANCE = 2.4e-3

MIXED = [(70, 1), (33, 5), (0, 40), (9, 0), (20, 30), (0, 1)]
"""Decoding, a draft, a prompt, nothing new, a prompt behind a prefix, a first token."""

DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype)[6:])
MODES = pytest.mark.parametrize("batch_invariant", [False, True], ids=["free", "invariant"])


def check(
    lens: Sequence[tuple[int, int]],
    *,
    block_size: int = 16,
    batch_invariant: bool = False,
    attention: dict[str, Any] | None = None,
    **shape: Any,
) -> None:
    """Compare with float64, and with the same rows in other physical blocks bit for bit."""
    rows = random_rows(lens, **shape)
    attention = {"scale": rows[0].query.shape[2] ** -0.5} | (attention or {})
    backend = create_backend("cpu", CPU, batch_invariant=batch_invariant)
    out, elsewhere = (
        PagedBatch(
            rows, backend, block_size, window=attention.get("window"), poison=poison, seed=seed
        ).forward(**attention)
        for seed, poison in ((0, torch.nan), (1, 1e30))
    )
    assert torch.equal(out, elsewhere)
    expected = dense_attention(rows, **attention)
    assert (out.shape, out.dtype) == (expected.shape, rows[0].query.dtype)
    error = relative_error(out, expected)
    # With a handful of numbers, rounding alone can be worse than it is on average.
    rounding = relative_error(expected.to(out.dtype), expected)
    tolerance = TOLERANCE[out.dtype]
    if out.dtype == torch.bfloat16 and native.chosen_isa() == "amx":
        tolerance = AMX_TOLERANCE
    assert error < max(tolerance, 1.02 * rounding), f"{error} (rounding: {rounding})"


@MODES
@DTYPES
@pytest.mark.parametrize("block_size", [1, 2, 16, 64, 256])
def test_decode_of_lengths_around_blocks_tiles_and_chunks(
    block_size: int, dtype: torch.dtype, batch_invariant: bool
) -> None:
    edges = {block_size, 64, 128, 256, 512}
    seq_lens = sorted({1, *(edge + more for edge in edges for more in (-1, 0, 1))} - {0})
    check(
        [(seq_len - 1, 1) for seq_len in seq_lens],
        block_size=block_size,
        batch_invariant=batch_invariant,
        dtype=dtype,
        head_dim=64,
    )


@MODES
@DTYPES
@pytest.mark.parametrize(
    ("lens", "group_size"),
    [
        ([(3000, 1), (1024, 1), (2047, 1)], 3),
        ([(2100, 4), (1023, 2)], 4),
        ([(2047, 9), (2048, 6)], 4),
        ([(700, 600)], 1),
    ],
    ids=["decode", "draft", "long-draft", "prefix"],
)
def test_thousands_of_tokens(
    lens: Any, group_size: int, dtype: torch.dtype, batch_invariant: bool
) -> None:
    shape: dict[str, Any] = dict(num_kv_heads=1, group_size=group_size, head_dim=64, dtype=dtype)
    for window in (None, 1111) if dtype == torch.bfloat16 else (None,):
        check(lens, batch_invariant=batch_invariant, **shape, attention=dict(window=window))


@DTYPES
@pytest.mark.parametrize("num_new", range(2, 9))
def test_drafts_over_pasts_of_all_lengths(num_new: int, dtype: torch.dtype) -> None:
    pasts = [0, 1, 15, 16, 17, 63, 64, 65, 300, 511, 513]
    check([(past, num_new) for past in pasts], num_kv_heads=1, group_size=3, dtype=dtype)


@MODES
@DTYPES
@pytest.mark.parametrize("num_past", [0, 1, 40, 257], ids=lambda num_past: f"after-{num_past}")
def test_prompts_of_lengths_around_tiles_panels_and_tasks(
    num_past: int, dtype: torch.dtype, batch_invariant: bool
) -> None:
    for num_new in (2, 17, 47, 48, 49, 63, 64, 65, 95, 97, 193):
        check([(num_past, num_new)], num_kv_heads=1, dtype=dtype, batch_invariant=batch_invariant)


@DTYPES
@pytest.mark.parametrize("block_size", [1, 2, 16, 64, 256])
def test_rows_of_every_kind_in_one_batch(block_size: int, dtype: torch.dtype) -> None:
    check(MIXED, block_size=block_size, dtype=dtype)
    check([(0, 0), *reversed(MIXED), (300, 0)], block_size=block_size, dtype=dtype)


@pytest.mark.parametrize("lens", [[(7, 0)], [(7, 0), (0, 0), (20, 0)]])
def test_a_batch_with_nothing_new_gives_nothing(lens: Any) -> None:
    batch = PagedBatch(random_rows(lens, value_dim=6), create_backend("cpu", CPU), 4)
    batch.metadata.slot_mapping = batch.metadata.slot_mapping.long()
    assert batch.forward().shape == (0, 4, 6)


@DTYPES
@pytest.mark.parametrize("group_size", [*range(1, 17), 71])
def test_query_heads_of_one_key_head(group_size: int, dtype: torch.dtype) -> None:
    num_kv_heads = 2 if group_size <= 8 else 1
    check(MIXED, group_size=group_size, num_kv_heads=num_kv_heads, head_dim=32, dtype=dtype)


@DTYPES
@pytest.mark.parametrize(
    ("head_dim", "value_dim"),
    [(dim, dim) for dim in (1, 5, 8, 16, 20, 32, 40, 64, 72, 80, 96, 112, 128, 160, 192, 256)]
    + [(192, 128), (8, 256), (72, 5), (33, 64), (576, 512)],
)
def test_head_dims_of_keys_and_values(head_dim: int, value_dim: int, dtype: torch.dtype) -> None:
    check(MIXED, head_dim=head_dim, value_dim=value_dim, dtype=dtype)
    check(MIXED, head_dim=head_dim, value_dim=value_dim, dtype=dtype, attention=dict(window=9))


@DTYPES
@pytest.mark.parametrize("window", [None, 1, 20], ids=lambda window: f"window-{window}")
@pytest.mark.parametrize("softcap", [None, 2.0, 50.0], ids=lambda softcap: f"softcap-{softcap}")
def test_windows_softcaps_sinks_and_slopes_together(
    softcap: float | None, window: int | None, dtype: torch.dtype
) -> None:
    per_head: list[Any] = [None, torch.tensor([0.0, 4.0, -4.0, 0.5])]
    for sinks, slopes in itertools.product(per_head, per_head):
        attention = dict(
            window=window,
            softcap=softcap,
            sinks=sinks,
            alibi_slopes=None if slopes is None else slopes.abs() / 8,
        )
        check(MIXED, dtype=dtype, head_dim=40, attention=attention)


@DTYPES
@pytest.mark.parametrize("num_new", [1, 4, 40])
def test_scores_in_the_billions_pick_one_token(dtype: torch.dtype, num_new: int) -> None:
    """The score of the largest less the largest is 0, however the scale rounds them."""
    (row,) = random_rows([(70, num_new)], head_dim=128, value_dim=32, dtype=dtype)
    factor = 3e4 if dtype != torch.float16 else 1e3
    row.query.mul_(factor)
    row.key.mul_(factor)
    out = PagedBatch([row], create_backend("cpu", CPU), 16).forward(scale=128**-0.5)
    expected = dense_attention([row], scale=128**-0.5)
    assert relative_error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_per_head_numbers_may_have_another_dtype(dtype: torch.dtype) -> None:
    sinks, slopes = torch.tensor([0.0, 4.0, -4.0, 0.5]), torch.tensor([0.5, 0.25, 0.0, 0.125])
    for attention in (dict(sinks=sinks.to(dtype)), dict(alibi_slopes=slopes.double())):
        check(MIXED, attention=attention)


@pytest.mark.parametrize("num_new", [1, 4, 40])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 2e-5), (torch.bfloat16, 3e-3)],
    ids=["float32", "bfloat16"],
)
def test_scores_far_apart_neither_overflow_nor_vanish(
    dtype: torch.dtype, tolerance: float, num_new: int
) -> None:
    """A running maximum that jumps by hundreds from tile to tile; errors grow with the scores."""
    (row,) = random_rows([(300, num_new)], head_dim=8, dtype=dtype)
    row.key[::37] *= 30
    attention: dict[str, Any] = dict(scale=1.0)
    out = PagedBatch([row], create_backend("cpu", CPU), 16).forward(**attention)
    assert relative_error(out, dense_attention([row], **attention)) < tolerance


@pytest.mark.parametrize("num_new", [1, 4, 40])
@pytest.mark.parametrize(
    ("dtype", "factor"),
    [(torch.float16, factor) for factor in (2.0**-24, 2.0**-17, 2.0**-14, 1.0, 60000.0)]
    + [(torch.bfloat16, factor) for factor in (2.0**-100, 1.0, 2.0**120)],
    ids=str,
)
def test_every_number_survives_the_way_through_fp32(
    dtype: torch.dtype, factor: float, num_new: int
) -> None:
    """Subnormal and large: the same V in each slot comes out as it went in."""
    (row,) = random_rows([(70, num_new)], value_dim=48, dtype=dtype)
    are_subnormal = dtype == torch.float16 and factor < 1
    scale = torch.arange(-24, 24) if are_subnormal else torch.linspace(-1, 1, 48)
    row.value[:] = (factor * scale).to(dtype)
    expected = row.value[:num_new].repeat_interleave(2, dim=1)
    assert torch.equal(PagedBatch([row], create_backend("cpu", CPU), 16).forward(), expected)


@DTYPES
@pytest.mark.parametrize("num_new", [1, 4, 40])
@pytest.mark.parametrize("bad", ["query", "key", "value"])
def test_a_nan_in_what_is_seen_is_not_hidden(bad: str, num_new: int, dtype: torch.dtype) -> None:
    (row,) = random_rows([(70, num_new)], dtype=dtype)
    getattr(row, bad)[0] = torch.nan
    assert PagedBatch([row], create_backend("cpu", CPU), 16).forward()[0].isnan().all()
