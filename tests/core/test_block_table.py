"""A block table is a list of ids with a front that can fall away."""

from __future__ import annotations

import pytest

from hf_paged.core.block_table import NO_BLOCK, BlockTable

pytestmark = pytest.mark.core_suite


def make_table(*block_ids: int) -> BlockTable:
    table = BlockTable()
    for block_id in block_ids:
        table.append(block_id)
    return table


def test_entries_in_order() -> None:
    """Append, read, replace."""
    table = make_table(7, 2, 9)
    assert len(table) == 3
    assert table[1] == 2
    table[1] = 5
    assert list(table.held()) == [7, 5, 9]


def test_drop_before_gives_up_the_front_once() -> None:
    """Indices stay what they were: entry i still holds token i * block_size."""
    table = make_table(7, 2, 9, 4)
    assert table.drop_before(2) == [7, 2]
    assert table.drop_before(2) == []
    assert table.drop_before(3) == [9]
    assert list(table.ids) == [NO_BLOCK, NO_BLOCK, NO_BLOCK, 4]
    assert list(table.held()) == [4]


def test_drop_before_stops_at_the_end() -> None:
    """A window can lie wholly beyond what is stored."""
    table = make_table(7, 2)
    assert table.drop_before(5) == [7, 2]
    assert len(table) == 2
    table.append(3)
    assert list(table.held()) == [3]


def test_skip_to_leaves_holes() -> None:
    """Tokens behind the window before they were stored have no block."""
    table = make_table(7)
    table.skip_to(3)
    table.append(8)
    assert list(table.ids) == [7, NO_BLOCK, NO_BLOCK, 8]
    assert list(table.held()) == [7, 8]
    table.skip_to(2)
    assert len(table) == 4
    assert table.drop_before(3) == [7]


def test_truncate_returns_what_was_held() -> None:
    """Holes are nobody's; the front can be cut as well."""
    table = make_table(7, 2)
    table.skip_to(4)
    table.append(9)
    assert table.truncate(1) == [2, 9]
    assert list(table.held()) == [7]
    assert table.truncate(5) == []


def test_truncate_into_the_dropped_front() -> None:
    """What is appended after the cut is held again."""
    table = make_table(7, 2, 9)
    table.drop_before(3)
    assert table.truncate(1) == []
    table.append(4)
    assert list(table.ids) == [NO_BLOCK, 4]
    assert list(table.held()) == [4]
    assert table.drop_before(2) == [4]


def test_copy_is_independent() -> None:
    """A fork's table changes alone."""
    table = make_table(7, 2)
    table.drop_before(1)
    twin = table.copy()
    twin.append(9)
    twin[1] = 3
    assert list(table.ids) == [NO_BLOCK, 2]
    assert list(twin.held()) == [3, 9]


def test_entries_are_c_ints() -> None:
    """A step copies a row into an int32 tensor with one memcpy."""
    table = make_table(1, 2)
    assert table.ids.itemsize == 4
    assert memoryview(table.ids).format == "i"
