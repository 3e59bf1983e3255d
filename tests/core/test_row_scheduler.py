"""Which rows compute, wait and give way: block size 4, exact tokens of each forward.

The model counts: after token 12 comes 13. A row holds ``len(prompt) + num_new - 1`` tokens in the
end, since its last one is never computed.
"""

from __future__ import annotations

import pytest

from forwards import figures, start
from hf_paged.core.row import Row
from hf_paged.errors import KVCacheFullError
from row_driver import RowDriver, lines, table_of, tokens

pytestmark = pytest.mark.core_suite


# -- entering --------------------------------------------------------------------------------------


def test_rows_that_fit_run_together_and_leave_when_they_end() -> None:
    """Two prompts in one forward; the shorter answer gives its blocks back at once."""
    driver = RowDriver(10)
    first = driver.add("a", tokens(10, 5), 3)
    second = driver.add("b", tokens(30, 4), 1)
    assert (lines(driver), figures(driver.manager)) == ((0, 2), (10, 0, 0))
    assert driver.step() == [("a", [10, 11, 12, 13, 14]), ("b", [30, 31, 32, 33])]
    assert (table_of(first), second.sequence) == ([0, 1], None)
    assert (lines(driver), figures(driver.manager)) == ((1, 0), (7, 1, 2))
    assert driver.run() == [[("a", [15])], [("a", [16])]]
    assert driver.finished == {"a": tokens(10, 8), "b": tokens(30, 5)}
    assert driver.scheduler.next_batch() is None


def test_first_come_first_served() -> None:
    """The row at the head does not fit, so the small one behind it waits as well."""
    driver = RowDriver(5)
    driver.add("a", tokens(10, 10), 2)
    driver.add("b", tokens(30, 12), 1)
    driver.add("c", tokens(50, 2), 1)
    assert driver.step() == [("a", tokens(10, 10))]
    assert lines(driver) == (1, 2)
    assert driver.run() == [[("a", [20])], [("b", tokens(30, 12)), ("c", [50, 51])]]


def test_row_enters_only_if_all_could_grow() -> None:
    """Prompts of 2 blocks fit beside each other, the block that each may grow by does not."""
    driver = RowDriver(5)
    driver.add("a", tokens(10, 8), 2)
    driver.add("b", tokens(30, 8), 2)
    assert driver.step() == [("a", tokens(10, 8))]
    assert driver.run() == [[("a", [18])], [("b", tokens(30, 8))], [("b", [38])]]
    assert driver.scheduler.num_preemptions == 0

    driver = RowDriver(6)
    driver.add("a", tokens(10, 8), 2)
    driver.add("b", tokens(30, 8), 2)
    assert driver.step() == [("a", tokens(10, 8)), ("b", tokens(30, 8))]


def test_prompt_in_chunks_has_its_room_reserved() -> None:
    """7 of 8 blocks are available, and 4 of them are for the rest of the first prompt."""
    driver = RowDriver(8, max_batch_tokens=4)
    driver.add("a", tokens(10, 20))
    driver.step()
    driver.add("b", tokens(50, 16))
    driver.step()
    assert (lines(driver), driver.manager.pool.num_available) == ((1, 1), 6)
    driver.run()
    assert driver.scheduler.num_preemptions == 0


def test_growth_is_what_is_left_of_max_tokens() -> None:
    """A row whose end is not known may grow by 64 tokens, 16 blocks, as far as one knows."""
    driver = RowDriver(33)
    driver.scheduler.add(Row([1, 2, 3]))
    driver.scheduler.add(Row([4, 5, 6]))
    assert driver.scheduler.next_batch() is not None
    assert lines(driver) == (1, 1)  # 2 x (1 + 16) blocks would have to be available

    driver = RowDriver(6)
    driver.scheduler.add(Row([1, 2, 3], max_tokens=10))
    driver.scheduler.add(Row([4, 5, 6], max_tokens=10))
    assert driver.scheduler.next_batch() is not None
    assert lines(driver) == (2, 0)  # 2 x (1 + 2): 7 tokens more


def test_rows_that_come_later_join_decoding_rows() -> None:
    """The prompt of one and the next token of the other share a forward."""
    driver = RowDriver(10)
    driver.add("a", tokens(10, 3), 3)
    driver.step()
    driver.add("b", tokens(30, 3), 2)
    assert driver.run() == [[("a", [13]), ("b", [30, 31, 32])], [("a", [14]), ("b", [33])]]


# -- the token budget ------------------------------------------------------------------------------


def test_prompts_go_in_chunks_beside_decoding_rows() -> None:
    """Eight tokens a forward: those that decode first, what is left for the next prompt."""
    driver = RowDriver(20, max_batch_tokens=8)
    driver.add("a", tokens(10, 3), 4)
    driver.add("b", tokens(30, 14), 2)
    driver.add("c", tokens(60, 4), 1)
    assert driver.run() == [
        [("a", [10, 11, 12]), ("b", tokens(30, 5))],
        [("a", [13]), ("b", tokens(35, 7))],
        [("a", [14]), ("b", [42, 43]), ("c", tokens(60, 4))],
        [("a", [15]), ("b", [44])],
    ]


def test_decoding_rows_are_never_held_back() -> None:
    """Six rows decode although the budget is four, and a prompt still goes on by a block."""
    driver = RowDriver(40, max_batch_tokens=4, is_patient=True)
    for index in range(6):
        driver.add(str(index), [10 * index], 9)
    assert [len(driver.step()) for _ in range(2)] == [4, 2]
    driver.add("prompt", tokens(100, 6), 1)
    decoded = [(str(index), [10 * index + 1]) for index in range(6)]
    assert driver.step() == [*decoded, ("prompt", tokens(100, 4))]
    assert driver.step()[-1] == ("prompt", [104, 105])


def test_is_filling_until_all_prompts_are_computed() -> None:
    """Rows that entered together can wait for each other and then decode together."""
    driver = RowDriver(20, max_batch_tokens=4, is_patient=True)
    driver.add("a", tokens(10, 3), 2)
    driver.add("b", tokens(30, 6), 2)
    assert driver.step() == [("a", [10, 11, 12]), ("b", [30])]
    assert driver.scheduler.is_filling
    assert driver.step() == [("b", tokens(31, 4))]
    assert driver.step() == [("b", [35])]
    assert not driver.scheduler.is_filling
    assert driver.step() == [("a", [13]), ("b", [36])]


# -- giving way ------------------------------------------------------------------------------------


def make_crowded_driver(num_blocks: int, version: str | None = "v") -> RowDriver:
    """Two rows that promise to end at once and go on; "late" never ran when they collide."""
    driver = RowDriver(num_blocks, version=version)
    driver.add("a", tokens(10, 4), 9, max_new=1)
    driver.add("b", tokens(30, 4), 9, max_new=1)
    for _ in range(5):
        driver.step()
    driver.add("late", tokens(50, 8), 1)
    return driver


def test_youngest_gives_way_and_finds_its_blocks_again() -> None:
    """A third block for both is one too many; two of the one that left are still there later."""
    driver = make_crowded_driver(5)
    assert (lines(driver), figures(driver.manager)) == ((2, 1), (1, 0, 4))
    assert driver.step() == [("a", [18])]
    assert (lines(driver), figures(driver.manager)) == ((1, 2), (0, 2, 3))
    assert driver.scheduler.num_preemptions == 1
    # It returns in front of the row that never ran, computes one token and goes on.
    assert driver.run() == [
        [("a", [19])],
        [("a", [20])],
        [("a", [21])],
        [("b", [38]), ("late", tokens(50, 8))],
        [("b", [39])],
        [("b", [40])],
        [("b", [41])],
    ]
    assert driver.finished["b"] == tokens(30, 13)
    assert driver.manager.num_computed_tokens == 12 + 12 + 8


def test_what_is_not_stored_any_more_is_computed_again() -> None:
    """Without sharing the row returns with all its tokens, those that it generated as well."""
    driver = make_crowded_driver(5, version=None)
    driver.step()
    assert figures(driver.manager) == (2, 0, 3)
    assert driver.run()[3] == [("b", tokens(30, 9)), ("late", tokens(50, 8))]
    assert driver.finished["b"] == tokens(30, 13)


def test_rows_that_give_way_together_keep_their_order() -> None:
    """Four rows want a second block each: two get one, two return, before the one that waits."""
    driver = RowDriver(4, version=None)
    for name, first in (("a", 10), ("b", 30), ("c", 50), ("d", 70)):
        driver.add(name, tokens(first, 4), 2, max_new=1)
    driver.add("late", [90], 1)
    assert len(driver.step()) == 4
    assert driver.run() == [
        [("a", [14]), ("b", [34])],
        [("c", tokens(50, 5)), ("d", tokens(70, 5))],
        [("late", [90])],
    ]
    assert driver.scheduler.num_preemptions == 2


def test_oldest_row_never_gives_way() -> None:
    """Alone and too long it fails, keeps what it has, and goes on when there is room."""
    driver = RowDriver(3)
    other = start(driver.manager, [1] * 3)
    row = driver.add("a", tokens(10, 8), 2, max_new=1)
    driver.step()
    with pytest.raises(KVCacheFullError, match="1 more blocks needed, 0 available of 3"):
        driver.step()
    assert (lines(driver), table_of(row)) == ((1, 0), [1, 2])
    driver.manager.free(other)
    assert driver.run() == [[("a", [18])]]


def test_row_that_does_not_fit_alone_raises() -> None:
    """The head of the queue enters an idle pool whatever it needs, and says what it needs."""
    driver = RowDriver(3)
    driver.add("a", tokens(10, 13))
    driver.add("b", [1])
    with pytest.raises(KVCacheFullError, match="4 more blocks needed, 3 available of 3"):
        driver.step()
    assert (lines(driver), figures(driver.manager)) == ((1, 1), (3, 0, 0))


@pytest.mark.parametrize(("windows", "needed"), [((None,), 5), ((8,), 3), ((None, 8), 8)])
def test_check_can_ever_fit(windows: tuple[int | None, ...], needed: int) -> None:
    """20 tokens are 5 blocks, or the 3 that a window of 8 can span."""
    row = Row(tokens(10, 16))
    RowDriver(needed, windows=windows).scheduler.check_can_ever_fit(row, 20)
    with pytest.raises(
        KVCacheFullError, match=rf"16 prompt tokens, 20 in all, needs {needed}"
    ) as e:
        RowDriver(needed - 1, windows=windows).scheduler.check_can_ever_fit(row, 20)
    assert (e.value.num_needed_blocks, e.value.num_available_blocks) == (needed, needed - 1)
    assert (e.value.num_rows, e.value.num_rows_that_fit) == (1, 0)


def test_make_room_comes_before_giving_way() -> None:
    """The caller lets go of something of its own, so that nobody has to leave."""
    driver = RowDriver(6)
    other = [start(driver.manager, [1] * 8)]

    def make_room() -> bool:
        if other:
            driver.manager.free(other.pop())
            return True
        return False

    driver.make_room = make_room
    driver.add("a", tokens(10, 8), 2, max_new=1)
    driver.add("b", tokens(30, 8), 2, max_new=1)
    assert driver.run() == [
        [("a", tokens(10, 8)), ("b", tokens(30, 8))],
        [("a", [18]), ("b", [38])],
    ]
    assert (other, driver.scheduler.num_preemptions) == ([], 0)
