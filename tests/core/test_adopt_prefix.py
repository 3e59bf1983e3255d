"""Stored prefixes that need not be computed, and how many rows fit: block size 4, exact blocks."""

from __future__ import annotations

import pytest

from forwards import PROMPT, figures, make_manager, new, run, start, table
from hf_paged.core.block_table import NO_BLOCK
from hf_paged.core.cache_manager import KVCacheManager

pytestmark = pytest.mark.core_suite

LONG = list(range(10, 28))


def hits(manager: KVCacheManager) -> tuple[int, int]:
    return manager.num_prefix_query_tokens, manager.num_prefix_hit_tokens


def num_found(manager: KVCacheManager, tokens: list[int], position: int = 0) -> int:
    return len(manager.index.find("v", tokens, position, manager.block_size))


# -- finding ---------------------------------------------------------------------------------------


def test_find_returns_the_path_of_whole_blocks() -> None:
    """The shallowest first; what does not fill a block is no part of it."""
    manager = make_manager(10)
    start(manager, PROMPT)
    path = manager.index.find("v", PROMPT, 0, 4)
    assert [node.blocks for node in path] == [[0], [1]]
    assert [node.depth for node in path] == [1, 2]
    assert num_found(manager, [*PROMPT, 1, 2, 3]) == 2
    assert num_found(manager, PROMPT[:7]) == 1
    assert num_found(manager, PROMPT[:3]) == num_found(manager, []) == 0


def test_find_compares_tokens_positions_and_version() -> None:
    """A path ends with the first block that differs."""
    manager = make_manager(10)
    start(manager, PROMPT)
    assert num_found(manager, [*PROMPT[:7], 0]) == 1
    assert num_found(manager, [0, *PROMPT[1:]]) == 0
    assert num_found(manager, PROMPT, position=1) == 0
    assert manager.index.find("w", PROMPT, 0, 4) == []
    assert manager.index.find(None, PROMPT, 0, 4) == []


# -- adopting --------------------------------------------------------------------------------------


def test_adopted_blocks_are_those_of_the_prefix() -> None:
    """The sequence goes on behind them as if it had computed them."""
    manager = make_manager(10)
    first = start(manager, PROMPT)
    second = manager.new_sequence()
    assert manager.adopt_prefix(second, PROMPT, 0, "v") == 8
    assert (table(second), second.num_tokens, second.next_position) == ([0, 1], 8, 8)
    assert figures(manager) == (7, 0, 3)
    run(manager, new(second, [18, 99, 1, 2]))
    assert table(second) == [0, 1, 3]
    assert table(start(manager, [*PROMPT[:9], 99, 1, 2, 5])) == [0, 1, 3, 4]
    assert table(first) == [0, 1, 2]


def test_last_token_is_always_left_to_compute() -> None:
    """Its logits are what the caller wants, so the block that it fills is not adopted."""
    manager = make_manager(10)
    start(manager, PROMPT[:8])
    for num_tokens, num_adopted in ((9, 8), (8, 4), (5, 4), (4, 0), (1, 0)):
        sequence = manager.new_sequence()
        assert manager.adopt_prefix(sequence, PROMPT[:num_tokens], 0, "v") == num_adopted
        assert table(sequence) == [0, 1][: num_adopted // 4]


def test_nothing_to_adopt_changes_nothing() -> None:
    """Other tokens, other positions, other version: the sequence is as empty as it was."""
    manager = make_manager(10)
    start(manager, PROMPT)
    sequence = manager.new_sequence()
    assert manager.adopt_prefix(sequence, [1, *PROMPT], 0, "v") == 0
    assert manager.adopt_prefix(sequence, PROMPT, 1, "v") == 0
    assert manager.adopt_prefix(sequence, PROMPT, 0, "w") == 0
    assert (table(sequence), sequence.num_tokens, sequence.node) == ([], 0, None)
    assert figures(manager) == (7, 0, 3)


def test_cached_blocks_are_in_use_again() -> None:
    """They are not evicted under the sequence, and are cached again after it."""
    manager = make_manager(3)
    manager.free(start(manager, PROMPT[:8]))
    assert figures(manager) == (1, 2, 0)
    sequence = manager.new_sequence()
    manager.adopt_prefix(sequence, PROMPT, 0, "v")
    assert figures(manager) == (1, 0, 2)
    assert manager.peak_used_blocks == 2
    manager.free(sequence)
    assert figures(manager) == (1, 2, 0)


def test_first_position_is_where_the_row_begins() -> None:
    """A prompt that begins at position 3 is found there."""
    manager = make_manager(10)
    start(manager, PROMPT, position=3)
    sequence = manager.new_sequence()
    assert manager.adopt_prefix(sequence, PROMPT, 3, "v") == 8
    assert sequence.next_position == 11


def test_sequence_with_tokens_adopts_nothing() -> None:
    """That would be a mistake of ours."""
    manager = make_manager(10)
    with pytest.raises(AssertionError):
        manager.adopt_prefix(start(manager, [1]), PROMPT, 0, "v")


def test_evicted_leaf_shortens_the_hit() -> None:
    """The blocks before it are still there."""
    manager = make_manager(3)
    manager.free(start(manager, LONG[:12]))
    start(manager, [1])
    assert figures(manager) == (0, 2, 1)
    assert manager.adopt_prefix(manager.new_sequence(), LONG, 0, "v") == 8


# -- windows ---------------------------------------------------------------------------------------


def test_sliding_group_holds_only_what_the_next_token_sees() -> None:
    """Window 5: token 16 sees tokens 12 to 15."""
    manager = make_manager(20, 4, [None, 5])
    manager.free(start(manager, LONG))
    sequence = manager.new_sequence()
    assert manager.adopt_prefix(sequence, LONG, 0, "v") == 16
    assert [table(sequence, group) for group in (0, 1)] == [
        [0, 1, 2, 3],
        [NO_BLOCK, NO_BLOCK, NO_BLOCK, 5],
    ]
    assert manager.can_crop(sequence, 16) and not manager.can_crop(sequence, 15)


def test_every_group_must_have_its_window() -> None:
    """A prefix that the sliding group did not store is as good as none."""
    manager = make_manager(20, 4, [None, 5])
    start(manager, LONG)
    assert num_found(manager, LONG[:13]) == 3
    sequence = manager.new_sequence()
    assert manager.adopt_prefix(sequence, LONG[:13], 0, "v") == 0
    run(manager, new(sequence, LONG[:13]))
    assert manager.adopt_prefix(manager.new_sequence(), [*LONG[:12], 1, 2, 3, 4, 5], 0, "v") == 12


# -- statistics ------------------------------------------------------------------------------------


def test_adopted_tokens_are_hits_once_the_rest_is_computed() -> None:
    """Then the whole prompt has been looked up, as if one forward had computed all of it."""
    manager = make_manager(10)
    start(manager, PROMPT)
    manager.reset_stats()
    sequence = manager.new_sequence()
    manager.adopt_prefix(sequence, PROMPT, 0, "v")
    assert hits(manager) == (0, 0)
    run(manager, new(sequence, PROMPT[8:]))
    assert hits(manager) == (10, 8)
    run(manager, new(sequence, [1]))
    assert hits(manager) == (10, 8)
    assert manager.num_computed_tokens == 3


def test_last_token_alone_is_a_prompt_too() -> None:
    """One token after adopted ones is the end of a prompt, not a decoded token."""
    manager = make_manager(10)
    start(manager, PROMPT[:8])
    manager.reset_stats()
    sequence = manager.new_sequence()
    manager.adopt_prefix(sequence, PROMPT[:9], 0, "v")
    run(manager, new(sequence, PROMPT[8:9]))
    assert hits(manager) == (9, 8)


def test_adopted_and_given_back_is_no_hit() -> None:
    """Whoever let go before computing will look it up again."""
    manager = make_manager(10)
    start(manager, PROMPT)
    manager.reset_stats()
    sequence = manager.new_sequence()
    manager.adopt_prefix(sequence, PROMPT, 0, "v")
    manager.free(sequence)
    assert hits(manager) == (0, 0)


def test_rolled_back_forward_counts_nothing() -> None:
    """The next one that is committed does."""
    manager = make_manager(10)
    start(manager, PROMPT)
    manager.reset_stats()
    sequence = manager.new_sequence()
    manager.adopt_prefix(sequence, PROMPT, 0, "v")
    manager.rollback(manager.begin([new(sequence, PROMPT[8:])]))
    assert (hits(manager), table(sequence)) == ((0, 0), [0, 1])
    run(manager, new(sequence, PROMPT[8:]))
    assert hits(manager) == (10, 8)


# -- how many fit ----------------------------------------------------------------------------------


def num_that_fit(
    manager: KVCacheManager, *prompts: list[int], num_spare: int = 0, num_kept: int = 0
) -> int:
    """Ask for new rows; check that the question changes nothing."""
    before = figures(manager), manager.pool.states()
    rows = [new(manager.new_sequence(), prompt) for prompt in prompts]
    num = manager.num_that_fit(rows, num_spare_blocks=num_spare, num_kept_blocks=num_kept)
    for row in rows:
        assert (table(row.sequence), row.sequence.num_tokens) == ([], 0)
        manager.free(row.sequence)
    assert (figures(manager), manager.pool.states()) == before
    return num


def test_rows_fit_from_the_first_on() -> None:
    """Blocks 3, 2 and 1: the last one would fit, but not behind one that does not."""
    prompts = [1] * 9, [2] * 5, [3] * 1
    fits = [num_that_fit(make_manager(num_blocks), *prompts) for num_blocks in (2, 3, 4, 5, 6)]
    assert fits == [0, 1, 1, 2, 3]
    assert num_that_fit(make_manager(1)) == 0


def test_spare_blocks_are_for_each_row_kept_blocks_for_all() -> None:
    """Two rows of 2 blocks, 1 spare each: 6 blocks, and 1 more to keep."""
    prompts = [1] * 8, [2] * 8
    assert num_that_fit(make_manager(6), *prompts, num_spare=1) == 2
    assert num_that_fit(make_manager(6), *prompts, num_spare=1, num_kept=1) == 1
    assert num_that_fit(make_manager(7), *prompts, num_spare=1, num_kept=1) == 2


def test_shared_blocks_count_once() -> None:
    """Between the rows, and with what is stored: used blocks cost nothing, cached ones a place."""
    assert num_that_fit(make_manager(4), PROMPT, PROMPT) == 2
    assert num_that_fit(make_manager(4), PROMPT, PROMPT, PROMPT) == 2
    used = make_manager(4)
    start(used, PROMPT[:8])
    assert num_that_fit(used, PROMPT, PROMPT, PROMPT) == 2
    cached = make_manager(4)
    cached.free(start(cached, PROMPT[:8]))
    assert num_that_fit(cached, PROMPT, PROMPT, PROMPT) == 2
    assert num_that_fit(cached, [1] * 8, [2] * 8, PROMPT) == 2


def test_question_leaves_no_trace_in_the_index() -> None:
    """A version that was only asked for is not known afterwards."""
    manager = make_manager(4)
    assert num_that_fit(manager, PROMPT, PROMPT) == 2
    assert manager.index.root("v", keep=False).keep is False


def test_rows_behind_the_first_misfit_are_not_looked_at() -> None:
    """A queue of thousands costs no more than the head that fits."""
    manager = make_manager(3)
    asked = []

    def queue():  # type: ignore[no-untyped-def]
        for index in range(1000):
            asked.append(index)
            yield new(manager.new_sequence(), [index] * 5)

    assert manager.num_that_fit(queue(), num_spare_blocks=0, num_kept_blocks=0) == 1
    assert asked == [0, 1]
