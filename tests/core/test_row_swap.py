"""Blocks of a row that gives way come back from a store, unless something is missing."""

from __future__ import annotations

import pytest

from forwards import figures, make_manager, new, run, table
from hf_paged.core.allocation import NewTokens
from hf_paged.core.cache_manager import KVCacheManager
from hf_paged.core.row import Row
from hf_paged.core.row_swap import RowSwap


class Shelf:
    """A store that only takes notes."""

    def __init__(self, num_slots: int = 100) -> None:
        self.free_slots = list(range(1000, 1000 + num_slots))
        self.loaded: list[tuple[list[int], list[int]]] = []

    def store(self, block_ids: list[int]) -> list[int] | None:
        if len(block_ids) > len(self.free_slots):
            return None
        return [self.free_slots.pop(0) for _ in block_ids]

    def load(self, slots: list[int], block_ids: list[int]) -> None:
        self.loaded.append((slots, block_ids))

    def free(self, slots: list[int]) -> None:
        self.free_slots += slots


def active_row(manager: KVCacheManager, num_tokens: int, first: int = 10) -> Row:
    row = Row([*range(first, first + num_tokens), 99])
    row.sequence = manager.new_sequence()
    run(manager, new(row.sequence, row.token_ids[:-1]))
    return row


def come_back(manager: KVCacheManager, swap: RowSwap, row: Row) -> int:
    """Give the row a new sequence; return how many tokens it holds then."""
    assert row.stored is not None
    sequence = row.sequence = manager.new_sequence()
    start = manager.adopt_prefix(sequence, row.token_ids, 0, "v")
    rest = row.token_ids[start : row.stored.num_tokens]
    swap.move_in(row.stored, NewTokens(sequence, len(rest), rest, start, "v"))
    swap.forget(row)
    manager.check_integrity()
    return sequence.num_tokens


def test_what_the_pool_does_not_keep_is_copied_back() -> None:
    """10 tokens: blocks 0, 1 stay cached, the half-full block 2 does not."""
    manager, shelf = make_manager(8), Shelf()
    swap = RowSwap(manager, manager.begin, shelf)
    row = active_row(manager, 10)
    swap.move_out(row)
    assert row.sequence is not None
    manager.free(row.sequence)
    computed = manager.num_computed_tokens
    assert come_back(manager, swap, row) == 10
    assert shelf.loaded == [([1002], [2])]
    assert table(row.sequence) == [0, 1, 2]
    assert manager.num_computed_tokens == computed
    assert len(shelf.free_slots) == 100


def test_evicted_blocks_are_copied_back_too() -> None:
    manager, shelf = make_manager(4), Shelf()
    swap = RowSwap(manager, manager.begin, shelf)
    row = active_row(manager, 10)
    swap.move_out(row)
    assert row.sequence is not None
    manager.free(row.sequence)
    other = active_row(manager, 16, first=50)
    assert other.sequence is not None
    manager.free(other.sequence)
    assert come_back(manager, swap, row) == 10
    assert [slots for slots, _ in shelf.loaded] == [[1000, 1001, 1002]]


def test_blocks_that_others_keep_are_not_stored() -> None:
    manager, shelf = make_manager(8), Shelf()
    swap = RowSwap(manager, manager.begin, shelf)
    row = active_row(manager, 10)
    assert row.sequence is not None
    twin = manager.fork(row.sequence)
    swap.move_out(row)
    assert len(shelf.free_slots) == 100
    # The twin goes, and with it what was not stored: nothing is made up, it is computed again.
    manager.free(row.sequence)
    manager.free(twin)
    manager.clear_cached()
    assert come_back(manager, swap, row) == 0
    assert shelf.loaded == []


def test_no_room_in_the_store_or_in_the_pool() -> None:
    manager, shelf = make_manager(4), Shelf(num_slots=2)
    swap = RowSwap(manager, manager.begin, shelf)
    row = active_row(manager, 10)
    swap.move_out(row)
    assert row.stored is None
    shelf.free_slots += [7]
    swap.move_out(row)
    assert row.stored is not None
    assert row.sequence is not None
    manager.free(row.sequence)
    active_row(manager, 8, first=50)
    assert come_back(manager, swap, row) == 8  # two are cached, for a third there is no room
    assert figures(manager) == (0, 0, 4)


def test_behind_a_window_nothing_needs_to_come_back() -> None:
    manager, shelf = make_manager(20, windows=(6,)), Shelf()
    swap = RowSwap(manager, manager.begin, shelf)
    row = active_row(manager, 18)
    swap.move_out(row)
    assert row.sequence is not None
    assert table(row.sequence)[:3] == [-1, -1, -1]
    manager.free(row.sequence)
    manager.clear_cached()
    assert come_back(manager, swap, row) == 18
    assert len(shelf.loaded[0][0]) == 2


@pytest.mark.parametrize("num_tokens", range(9, 24))
def test_no_block_is_named_that_was_not_copied(num_tokens: int) -> None:
    """A block that had just left the window came back unwritten, under the name of its prefix."""
    manager, shelf = make_manager(20, windows=(8,)), Shelf()
    swap = RowSwap(manager, manager.begin, shelf)
    row = active_row(manager, num_tokens)
    swap.move_out(row)
    assert row.sequence is not None
    manager.free(row.sequence)
    manager.clear_cached()
    assert come_back(manager, swap, row) == num_tokens
    named = [block for block, content in enumerate(manager.pool.states().contents) if content]
    assert set(named) <= set(shelf.loaded[0][1])
