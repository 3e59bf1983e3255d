"""What rows have in common is computed once: block size 4, exact blocks and tokens."""

from __future__ import annotations

import pytest

from forwards import figures
from hf_paged.core.block_table import NO_BLOCK
from row_driver import RowDriver, lines, table_of, tokens

pytestmark = pytest.mark.core_suite

COMMON = tokens(10, 10)


def hits(driver: RowDriver) -> tuple[int, int]:
    """Return prompt tokens that were looked up, and those of them that were found."""
    return driver.manager.num_prefix_query_tokens, driver.manager.num_prefix_hit_tokens


# -- equal prompts ---------------------------------------------------------------------------------


def test_equal_prompts_are_computed_once() -> None:
    """The others wait, fork when the first is complete, and part where they write."""
    driver = RowDriver(10)
    rows = [driver.add(name, COMMON, 3) for name in "abc"]
    assert driver.step() == [("a", COMMON)]
    assert [table_of(row) for row in rows] == [[0, 1, 2]] * 3
    assert [row.num_cached_tokens for row in rows] == [0, 10, 10]
    assert driver.step() == [("a", [20]), ("b", [20]), ("c", [20])]
    assert [table_of(row) for row in rows] == [[0, 1, 3], [0, 1, 4], [0, 1, 2]]
    assert driver.manager.num_cow_copies == 2
    driver.run()
    assert driver.finished == dict.fromkeys("abc", tokens(10, 13))
    assert driver.manager.num_computed_tokens == 10 + 3 * 2


def test_equal_prompts_in_chunks() -> None:
    """The others let the first one go on to its end, even where the budget has room for them."""
    driver = RowDriver(10, max_batch_tokens=8)
    for name in "ab":
        driver.add(name, COMMON, 2)
    assert driver.run() == [[("a", COMMON[:8])], [("a", COMMON[8:])], [("a", [20]), ("b", [20])]]


def test_twin_that_waits_needs_no_block_to_enter() -> None:
    """It could not compute for itself beside the first, but all of its blocks are there."""
    driver = RowDriver(5)
    for name in "abcd":
        driver.add(name, COMMON[:8], 9)
    driver.step()
    assert (lines(driver), figures(driver.manager)) == ((3, 1), (3, 0, 2))
    # Each of the three takes a block next, so there is none for "d".
    assert driver.step() == [("a", [18]), ("b", [18]), ("c", [18])]
    assert figures(driver.manager) == (0, 0, 5)


def test_twin_that_came_too_late_computes_its_last_block() -> None:
    """The first has gone on; what is stored in whole blocks before the last token is adopted."""
    driver = RowDriver(4)
    for name in "abc":
        driver.add(name, COMMON[:8], 2)
    driver.step()
    assert lines(driver) == (2, 1)
    assert driver.run() == [[("a", [18]), ("b", [18])], [("c", COMMON[4:8])], [("c", [18])]]
    assert driver.finished == dict.fromkeys("abc", tokens(10, 10))


def test_row_that_went_on_has_no_twins() -> None:
    """What it holds is more than the prompt by now; its whole blocks are adopted instead."""
    driver = RowDriver(10)
    row = driver.add("a", COMMON, 3)
    driver.step()
    driver.add("b", COMMON, 3)
    assert driver.scheduler.fork_twins(row) == []
    assert driver.step() == [("a", [20]), ("b", [18, 19])]


@pytest.mark.parametrize("position", [0, 1])
def test_positions_are_part_of_a_prompt(position: int) -> None:
    """Equal tokens at other positions have other K and V."""
    driver = RowDriver(10, max_batch_tokens=10)
    driver.add("a", COMMON)
    driver.add("b", COMMON, position=position)
    assert driver.run() == [[("a", COMMON)], [("b", COMMON)]][: 1 + position]


def test_nothing_is_shared_without_a_version() -> None:
    """Tokens do not determine K and V: equal prompts are computed side by side, and again."""
    driver = RowDriver(10, version=None)
    rows = [driver.add(name, COMMON, 2) for name in "ab"]
    assert driver.step() == [("a", COMMON), ("b", COMMON)]
    assert [table_of(row) for row in rows] == [[0, 1, 2], [3, 4, 5]]
    driver.run()
    driver.add("c", COMMON)
    assert driver.run() == [[("c", COMMON)]]
    assert (figures(driver.manager), hits(driver)) == ((10, 0, 0), (0, 0))


# -- common prefixes -------------------------------------------------------------------------------


def test_common_prefix_is_computed_by_one() -> None:
    """The other one lets it go first, adopts the whole blocks and computes the rest."""
    driver = RowDriver(20)
    driver.add("a", [*COMMON, 50], 2)
    second = driver.add("b", [*COMMON, 60], 2)
    assert driver.step() == [("a", [*COMMON, 50])]
    assert (second.sequence, second.num_cached_tokens) == (None, 0)
    assert driver.step() == [("a", [51]), ("b", [18, 19, 60])]
    assert (table_of(second), second.num_cached_tokens) == ([0, 1, 3], 8)
    driver.run()
    assert hits(driver) == (11 + 11, 8)


def test_row_without_the_prefix_does_not_wait() -> None:
    """Only those wait that have something to gain; a later row uses the room."""
    driver = RowDriver(20)
    driver.add("a", [*COMMON, 50])
    driver.add("b", [*COMMON, 60])
    driver.add("c", [1, 2, 3, 4, 5])
    assert driver.run() == [
        [("a", [*COMMON, 50]), ("c", [1, 2, 3, 4, 5])],
        [("b", [18, 19, 60])],
    ]


def test_prefix_in_chunks_is_adopted_in_the_end() -> None:
    """Two forwards compute it; "b" waits through both, as it would only compute the same."""
    driver = RowDriver(20, max_batch_tokens=5)
    driver.add("a", [*COMMON, 50])
    driver.add("b", [*COMMON, 60])
    assert driver.run() == [
        [("a", COMMON[:5])],
        [("a", COMMON[5:])],
        [("a", [50]), ("b", [18, 19, 60])],
    ]


def test_row_that_has_begun_a_block_is_waited_for() -> None:
    """One token of the first block is enough to be ahead: it was computed twice once."""
    driver = RowDriver(20, max_batch_tokens=12)
    driver.add("a", tokens(90, 11))
    driver.add("b", [*COMMON, 50])
    assert driver.step() == [("a", tokens(90, 11)), ("b", [10])]
    driver.add("c", [*COMMON[:8], 60])
    assert driver.run() == [[("b", [*COMMON[1:], 50])], [("c", [60])]]


def test_stored_prefix_costs_its_last_token_only() -> None:
    """Of a prompt that a former row left behind, only the logits are wanted."""
    driver = RowDriver(20)
    driver.add("a", COMMON[:9])
    driver.run()
    assert figures(driver.manager) == (18, 2, 0)
    again = driver.add("b", COMMON[:9], 2)
    assert driver.step() == [("b", [18])]
    assert (table_of(again), again.num_cached_tokens) == ([0, 1, 2], 8)
    assert (driver.manager.num_computed_tokens, hits(driver)) == (10, (18, 8))


def test_generated_tokens_are_found_by_a_prompt() -> None:
    """The second turn of a chat begins with prompt and answer of the first."""
    driver = RowDriver(20)
    driver.add("a", COMMON[:5], 8)
    driver.run()
    driver.add("b", [*tokens(10, 13), 99])
    assert driver.run() == [[("b", [22, 99])]]


def test_unkept_blocks_are_shared_while_their_row_lives() -> None:
    """Rows of the call share, the next call finds nothing."""
    driver = RowDriver(20, keep=False)
    driver.add("a", [*COMMON, 50], 9)
    driver.step()
    driver.add("b", [*COMMON, 60])
    assert driver.step() == [("a", [51]), ("b", [18, 19, 60])]
    driver.run()
    driver.add("c", [*COMMON, 70])
    assert driver.run() == [[("c", [*COMMON, 70])]]


def test_hits_of_a_row_that_lets_another_go_first_count_once() -> None:
    """It looks at what is stored, waits, and looks again; it was counted both times once."""
    driver = RowDriver(20)
    driver.add("a", [*COMMON[:8], 50])
    driver.run()
    driver.manager.reset_stats()
    driver.add("b", [*COMMON, 20, 21, 60])
    driver.add("c", [*COMMON, 20, 21, 70])
    assert driver.run() == [[("b", [18, 19, 20, 21, 60])], [("c", [70])]]
    assert hits(driver) == (13 + 13, 8 + 12)


# -- windows ---------------------------------------------------------------------------------------


def test_only_blocks_inside_the_window_are_adopted() -> None:
    """The sliding group starts where the next token looks; nothing before it is held."""
    driver = RowDriver(20, windows=(None, 5))
    driver.add("a", tokens(10, 17))
    driver.run()
    row = driver.add("b", [*tokens(10, 16), 99], 2)
    assert driver.step() == [("b", [99])]
    assert table_of(row, group=0) == [0, 1, 2, 3, 4]
    assert table_of(row, group=1) == [NO_BLOCK, NO_BLOCK, NO_BLOCK, 5, 6]


def test_group_that_lacks_a_block_shortens_the_hit() -> None:
    """A long prompt stored only its end in the sliding group: a shorter one has no use for it."""
    driver = RowDriver(20, windows=(None, 5))
    driver.add("a", tokens(10, 17))
    driver.run()
    driver.add("b", [*tokens(10, 12), 99])
    assert driver.run() == [[("b", [*tokens(10, 12), 99])]]
    # Meanwhile block 2 of the sliding group is there, so a third row finds 12 tokens.
    driver.add("c", [*tokens(10, 12), 98])
    assert driver.run() == [[("c", [98])]]


def test_chunks_shrink_where_a_window_needs_the_room() -> None:
    """What a chunk sees and what it adds want 5 blocks; block by block the row fits its 3."""
    driver = RowDriver(3, windows=(8,), max_batch_tokens=10)
    row = driver.add("a", tokens(10, 24), 2)
    driver.scheduler.check_can_ever_fit(row, 25)
    assert [len(batch[0][1]) for batch in driver.run()] == [10, 2, 4, 4, 4, 1]
    assert driver.finished == {"a": tokens(10, 26)}


def test_chunks_shrink_before_a_row_gives_way() -> None:
    """The room is wanted for a moment only, so nobody loses what it has computed."""
    driver = RowDriver(5, windows=(8,), max_batch_tokens=12)
    driver.add("a", tokens(10, 2), 9, max_new=1)
    driver.add("b", tokens(40, 30), 1)
    prompts = [dict(batch).get("b", []) for batch in driver.run()]
    assert [len(chunk) for chunk in prompts] == [10, 2, 4, 4, 4, 4, 2, 0, 0]
    assert driver.scheduler.num_preemptions == 0
