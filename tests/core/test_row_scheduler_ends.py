"""Rows that must stay together, and rows that leave: block size 4, exact blocks."""

from __future__ import annotations

import pytest

from forwards import figures, start
from hf_paged.errors import KVCacheFullError
from row_driver import RowDriver, lines, table_of, tokens

pytestmark = pytest.mark.core_suite


# -- rigid -----------------------------------------------------------------------------------------


def test_rigid_rows_fit_all_at_once_or_not_at_all() -> None:
    """None waits and none gives way; when there is room, the same call goes through."""
    driver = RowDriver(6)
    driver.scheduler.is_rigid = True
    other = start(driver.manager, [1] * 8)
    for name, first in (("a", 10), ("b", 30), ("c", 50)):
        driver.add(name, tokens(first, 8), 1)
    for _ in range(2):
        with pytest.raises(KVCacheFullError, match="6 more blocks needed, 4 available") as caught:
            driver.step()
        assert (caught.value.num_rows, caught.value.num_rows_that_fit) == (3, 2)
        assert (lines(driver), driver.scheduler.num_preemptions) == ((3, 0), 0)
        assert figures(driver.manager) == (4, 0, 2)
    driver.manager.free(other)
    assert [name for name, _ in driver.step()] == ["a", "b", "c"]
    assert sorted(driver.finished) == ["a", "b", "c"]


def test_rigid_rows_that_outgrow_the_pool_lose_nothing() -> None:
    """The error comes before the forward: every row still holds what it had computed."""
    driver = RowDriver(5)
    driver.scheduler.is_rigid = True
    other = start(driver.manager, [1])
    rows = [driver.add(name, tokens(first, 8), 2) for name, first in (("a", 10), ("b", 30))]
    driver.step()
    with pytest.raises(KVCacheFullError):
        driver.step()
    assert [table_of(row) for row in rows] == [[1, 2], [3, 4]]
    driver.manager.free(other)
    driver.scheduler.is_rigid = False
    assert driver.run() == [[("a", [18])], [("b", [38])]]


# -- leaving ---------------------------------------------------------------------------------------


def test_finish_lets_active_and_waiting_rows_go() -> None:
    """Whoever called knows why: the answer is not wanted any more."""
    driver = RowDriver(4)
    running = driver.add("a", tokens(10, 8), 9)
    waiting = driver.add("b", tokens(30, 8), 9)
    driver.step()
    assert running in driver.scheduler and waiting in driver.scheduler
    driver.scheduler.finish(waiting)
    assert (lines(driver), waiting in driver.scheduler) == ((1, 0), False)
    driver.scheduler.finish(running)
    assert (lines(driver), running.sequence, driver.sequences) == ((0, 0), None, [])
    assert figures(driver.manager) == (2, 2, 0)


def test_finish_makes_room_for_the_next() -> None:
    """A waiting row enters in the forward after the one that leaves."""
    driver = RowDriver(4)
    running = driver.add("a", tokens(10, 8), 9)
    driver.add("b", tokens(30, 8), 1)
    driver.step()
    assert driver.step() == [("a", [18])]
    driver.scheduler.finish(running)
    assert driver.step() == [("b", tokens(30, 8))]


def test_row_behind_one_that_leaves_the_queue_enters() -> None:
    """Nothing has changed in the pool, but the head of the queue is another one."""
    driver = RowDriver(4)
    driver.add("a", tokens(10, 8), 9, max_new=1)
    big = driver.add("b", tokens(30, 12), 1)
    driver.add("c", [1], 1)
    assert [len(driver.step()) for _ in range(4)] == [1, 1, 1, 1]
    driver.scheduler.finish(big)
    assert driver.step() == [("a", [21]), ("c", [1])]


def test_close_lets_all_rows_go() -> None:
    """Every block is free or cached again, and nobody is left."""
    driver = RowDriver(4, keep=False)
    driver.add("a", tokens(10, 8), 9)
    driver.add("b", tokens(30, 8), 9)
    driver.step()
    driver.scheduler.close()
    assert (lines(driver), driver.sequences) == ((0, 0), [])
    assert figures(driver.manager) == (4, 0, 0)


def test_hand_over_leaves_the_sequences_to_the_caller() -> None:
    """The rows are gone, their blocks are not."""
    driver = RowDriver(4)
    row = driver.add("a", tokens(10, 6), 9)
    driver.step()
    sequence = row.sequence
    driver.scheduler.hand_over()
    assert (lines(driver), driver.sequences, row.sequence) == ((0, 0), [], None)
    assert driver.manager.sequences == [sequence]
    assert figures(driver.manager) == (2, 0, 2)
