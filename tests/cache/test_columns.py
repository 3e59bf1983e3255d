"""Columns against a list of lists."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from hf_paged.cache.columns import Columns
from hf_paged.errors import InputMismatchError

pytestmark = pytest.mark.core_suite


def columns_of(*rows: str) -> Columns:
    """Return columns from drawings: ``"..xx"`` is two of padding, then two real ones."""
    columns = Columns(len(rows))
    columns.append(mask_of(*rows).bool())
    return columns


def mask_of(*rows: str) -> torch.Tensor:
    return torch.tensor([[int(column == "x") for column in row] for row in rows])


def drawing(real: torch.Tensor) -> list[str]:
    return ["".join("x" if column else "." for column in row) for row in real.tolist()]


# -- one thing at a time -----------------------------------------------------------------------


def test_new_columns_begin_empty() -> None:
    columns = Columns(2)
    assert (columns.num_columns, columns.real.shape) == (0, (2, 0))
    assert not columns.has_padding
    assert not columns.has_gaps


@pytest.mark.parametrize(
    ("rows", "has_padding", "has_gaps"),
    [
        (["xxx", "xxx"], False, False),
        (["..x", "xxx"], True, False),
        (["xx.", "xxx"], True, True),
        (["x.x", "xxx"], True, True),
        (["...", "xxx"], True, False),
        ([".x.", "..x"], True, True),
    ],
)
def test_padding_and_gaps(rows: list[str], has_padding: bool, has_gaps: bool) -> None:
    columns = columns_of(*rows)
    assert columns.has_padding is has_padding
    assert columns.has_gaps is has_gaps


@pytest.mark.parametrize(
    ("past", "new", "is_late"),
    [
        (["", ""], ["..x", "xxx"], False),
        (["", ""], ["x.x", "xxx"], True),
        (["", ""], ["xx.", "xxx"], True),
        (["", ""], ["...", "xxx"], False),
        (["..", "xx"], ["..", "xx"], False),
        (["..", "xx"], [".x", "xx"], False),
        ([".x", "xx"], [".x", "xx"], True),
        (["..", "xx"], [".x", "x."], True),
        (["x", "x"], [".", "x"], True),
    ],
)
def test_padding_after_a_row_has_begun(past: list[str], new: list[str], is_late: bool) -> None:
    assert columns_of(*past).is_padded_late(mask_of(*new).bool()) is is_late


def test_select_copies_rows_in_the_order_asked() -> None:
    columns = columns_of("..x", "xxx", ".xx")
    selected = columns.select([2, 0, 2])
    assert drawing(selected.real) == [".xx", "..x", ".xx"]
    assert selected.has_padding
    assert not columns.select([1]).has_padding
    selected.append(mask_of("x", "x", ".").bool())
    assert drawing(columns.real) == ["..x", "xxx", ".xx"], "the original is not touched"
    assert columns.select([]).real.shape == (0, 3)


def test_crop_tells_what_each_row_loses() -> None:
    columns = columns_of("...x", "xxxx", ".x.x")
    assert columns.num_real_after(1) == [1, 3, 2]
    assert columns.crop(3) == [1, 1, 1]
    assert drawing(columns.real) == ["...", "xxx", ".x."]
    assert columns.crop(3) == [0, 0, 0]
    assert columns.crop(0) == [0, 3, 1]
    assert not columns.has_padding, "nothing is left"
    columns.append(mask_of("x", ".", "x").bool())
    assert drawing(columns.real) == ["x", ".", "x"], "no cropped column comes back"


# -- the mask of a forward ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.long, torch.bool, torch.float32])
def test_a_mask_gives_the_new_columns(dtype: torch.dtype) -> None:
    columns = columns_of("..x", "xxx")
    real, hides_past = columns.new_columns(mask_of("..xx.", "xxxxx").to(dtype), 2)
    assert drawing(real) == ["x.", "xx"]
    assert real.dtype == torch.bool
    assert not hides_past
    assert columns.num_columns == 3, "reading changes nothing"


def test_no_mask_means_that_everything_is_real() -> None:
    real, hides_past = columns_of("xxx", "xxx").new_columns(None, 2)
    assert drawing(real) == ["xx", "xx"]
    assert not hides_past


def test_a_mask_may_hide_stored_columns() -> None:
    real, hides_past = columns_of("..x", "xxx").new_columns(mask_of("...x", ".xxx"), 1)
    assert drawing(real) == ["x", "x"]
    assert hides_past


@pytest.mark.parametrize(
    ("mask", "num_new"),
    [("x" * 12, 1), ("x" * 10, 1), ("x", 1), ("x" * 11, 2), ("", 1)],
)
def test_a_mask_of_another_length_is_refused_with_both_lengths(mask: str, num_new: int) -> None:
    """transformers#47597: a cache of 10 tokens, a mask of 12, one new id."""
    columns = columns_of("x" * 10)
    with pytest.raises(InputMismatchError) as raised:
        columns.new_columns(mask_of(mask), num_new)
    message = str(raised.value)
    assert "attention_mask" in message
    assert f"(1, {len(mask)})" in message
    assert f"(1, {10 + num_new})" in message
    assert f"10 cached columns and {num_new} new" in message
    assert "pass the mask of all tokens so far" in message
    assert columns.num_columns == 10


@pytest.mark.parametrize("shape", [(1, 4), (3, 4), (4,), (2, 1, 1, 4)])
def test_a_mask_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputMismatchError, match=r"expected \(2, 4\)"):
        columns_of("xxx", "xxx").new_columns(torch.ones(shape), 1)


def test_a_mask_that_shows_padding_is_refused() -> None:
    with pytest.raises(InputMismatchError, match="were padding when they were computed"):
        columns_of("..x", "xxx").new_columns(mask_of("xxxx", "xxxx"), 1)


def test_a_missing_mask_is_refused_when_there_is_padding() -> None:
    with pytest.raises(InputMismatchError, match=r"a mask of 5 columns \(3 cached, 2 new\)"):
        columns_of("..x", "xxx").new_columns(None, 2)


# -- any sequence of operations ----------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 4), st.data())
def test_columns_are_a_list_of_lists(num_rows: int, data: Any) -> None:
    columns = Columns(num_rows)
    model: list[list[bool]] = [[] for _ in range(num_rows)]
    for _ in range(data.draw(st.integers(1, 8))):
        operation = data.draw(st.sampled_from(["append", "append", "crop", "select"]))
        if operation == "append":
            num_new = data.draw(st.sampled_from([0, 1, 2, 70]))
            is_padded = data.draw(st.booleans())
            column = st.booleans() if is_padded and num_new < 70 else st.just(True)
            new = [[data.draw(column) for _ in range(num_new)] for _ in model]
            real = torch.tensor(new, dtype=torch.bool).view(len(model), num_new)
            has_begun = [any(row) for row in model]
            assert columns.is_padded_late(real) == any(
                not row[i] and (begun or any(row[:i]))
                for row, begun in zip(new, has_begun, strict=True)
                for i in range(num_new)
            )
            columns.append(real)
            model = [row + more for row, more in zip(model, new, strict=True)]
        elif operation == "crop":
            keep = data.draw(st.integers(0, len(model[0])))
            lost = [sum(row[keep:]) for row in model]
            assert columns.num_real_after(keep) == lost
            assert columns.crop(keep) == lost
            model = [row[:keep] for row in model]
        else:
            rows = data.draw(st.lists(st.integers(0, len(model) - 1), min_size=1, max_size=5))
            columns = columns.select(rows)
            model = [list(model[row]) for row in rows]
        assert columns.num_columns == len(model[0])
        assert columns.real.tolist() == model
        assert columns.has_padding == (not all(map(all, model)))
        assert columns.has_gaps == any(
            row[i] and not row[i + 1] for row in model for i in range(len(row) - 1)
        )
        mask = torch.tensor(model, dtype=torch.long).view(len(model), -1)
        mask = torch.cat([mask, torch.ones(len(model), 3, dtype=torch.long)], dim=1)
        real, hides_past = columns.new_columns(mask, 3)
        assert real.all()
        assert not hides_past
