"""Windows, the end of the pool, rollback and figures of the manager."""

from __future__ import annotations

import pytest

from forwards import PROMPT, figures, make_manager, new, run, start, table
from hf_paged.core.allocation import NewTokens
from hf_paged.core.block_table import NO_BLOCK
from hf_paged.core.cache_manager import KVCacheManager
from hf_paged.errors import KVCacheFullError

pytestmark = pytest.mark.core_suite


# -- windows ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("window", [1, 3, 8, 16])
@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_sliding_group_is_bounded(block_size: int, window: int, chunk: int) -> None:
    """However long a sequence grows, token by token, in chunks or as one long prefill."""
    manager = make_manager(400, block_size, [window])
    sequence = manager.new_sequence()
    bound = -(-window // block_size) + 1
    for _ in range(0, 100, chunk):
        run(manager, new(sequence, [1] * chunk))
        assert manager.pool.num_used <= bound
    first_visible = (sequence.num_tokens - window + 1) // block_size
    assert NO_BLOCK not in table(sequence)[first_visible:]
    assert manager.num_blocks_at_most(100) <= bound


def test_long_prefill_stores_only_what_stays_visible() -> None:
    """Blocks that no later query sees are not even taken; their tokens have no slot."""
    manager = make_manager(10, 4, [None, 5])
    sequence = manager.new_sequence()
    allocation = run(manager, new(sequence, list(range(18))))
    assert table(sequence, 0) == [0, 1, 2, 3, 4]
    assert table(sequence, 1) == [NO_BLOCK] * 3 + [5, 6]
    assert allocation.rows[0].slots(1, 4) == [-1] * 12 + [20, 21, 22, 23, 24, 25]


def test_prefix_hit_needs_both_groups() -> None:
    """The full group's blocks alone do not save the computation."""
    manager = make_manager(20, 4, [None, 5])
    manager.free(start(manager, list(range(18))))
    again = manager.new_sequence()
    allocation = run(manager, new(again, list(range(18))))
    assert allocation.rows[0].num_hit_tokens == 16
    shorter = manager.new_sequence()
    allocation = run(manager, new(shorter, list(range(8))))
    assert allocation.rows[0].num_hit_tokens == 0
    assert table(shorter, 0) == [0, 1]


def test_block_that_falls_behind_half_full_is_not_published() -> None:
    """A long chunk jumps over the rest of the block: nobody may take it for full."""
    manager = make_manager(20, 4, [3])
    sequence = start(manager, [0, 1])
    run(manager, new(sequence, list(range(2, 12))))
    prompt = manager.new_sequence()
    allocation = run(manager, new(prompt, list(range(5))))
    assert all(slot >= 0 for slot in allocation.rows[0].slots(0, 4))


def test_known_block_that_falls_behind_after_a_crop_keeps_its_name() -> None:
    """Cropped into, then jumped over: the block still holds the old tokens, for others."""
    manager = make_manager(20, 4, [3])
    sequence = start(manager, [0, 1, 2, 3])
    manager.crop(sequence, 2)
    run(manager, new(sequence, [9] * 10))
    assert table(start(manager, [0, 1, 2, 3])) == [0]


def test_hold_window_allows_a_crop() -> None:
    """A draft may be rejected: what falls behind the window meanwhile is kept."""
    manager = make_manager(20, 4, [5])
    sequence = start(manager, list(range(8)))
    run(manager, new(sequence, list(range(8, 18))), hold_window=True)
    assert table(sequence) == [NO_BLOCK, 1, 2, 3, 4]
    assert manager.can_crop(sequence, 9)
    manager.crop(sequence, 9)
    manager.drop_hidden(sequence)
    assert table(sequence) == [NO_BLOCK, 1, 2]
    assert run(manager, new(sequence, [1])).copies == [(2, 4)]  # 2 is full, so it is known
    assert table(sequence) == [NO_BLOCK, 1, 4]


def test_crop_behind_a_dropped_window_is_refused() -> None:
    """can_crop() says which lengths still have their whole window."""
    manager = make_manager(20, 4, [5])
    sequence = start(manager, list(range(18)))
    # 14 to 17 are visible next; block 3 (12 to 15) holds the two before them as well
    assert [manager.can_crop(sequence, n) for n in (18, 16, 15, 12, 0)] == [
        True,
        True,
        False,
        False,
        True,
    ]


# -- the end of the pool ---------------------------------------------------------------------------


def test_error_names_the_numbers() -> None:
    """Blocks needed, blocks available, rows that fit; the message says the same."""
    manager = make_manager(7)
    start(manager, [1] * 3)
    sequences = [manager.new_sequence() for _ in range(3)]
    with pytest.raises(KVCacheFullError) as caught:
        manager.begin([new(s, [i] * 9) for i, s in enumerate(sequences)], occasion="step 3")
    error = caught.value
    assert (error.num_needed_blocks, error.num_available_blocks) == (9, 6)
    assert (error.num_rows, error.num_rows_that_fit) == (3, 2)
    for words in (
        "at step 3",
        "9 more blocks needed",
        "6 available of 7",
        "2 of 3 rows",
        "kv_memory=",
    ):
        assert words in str(error)


def test_begin_is_all_or_nothing() -> None:
    """A forward that does not fit leaves every figure and table as it was."""
    manager = make_manager(6)
    manager.free(start(manager, PROMPT[:8]))
    parent = start(manager, [1] * 6)
    child = manager.fork(parent)
    before = figures(manager), table(parent), table(child)
    hit = manager.new_sequence()
    rows = [new(hit, PROMPT), new(parent, [2]), new(child, [3] * 9)]
    with pytest.raises(KVCacheFullError):
        manager.begin(rows)
    assert (figures(manager), table(parent), table(child), table(hit)) == (*before, [])
    assert (hit.num_tokens, parent.num_tokens, child.num_tokens) == (0, 6, 6)
    assert manager.pool.num_evictions == manager.num_cow_copies == 0
    assert table(start(manager, PROMPT[:8])) == [0, 1]


def test_cached_blocks_that_are_shared_are_not_evicted_for_it() -> None:
    """A revived block is no longer available to the rest of the same forward."""
    manager = make_manager(3)
    manager.free(start(manager, PROMPT[:8]))
    sequence = manager.new_sequence()
    with pytest.raises(KVCacheFullError) as caught:
        manager.begin([new(sequence, [*PROMPT[:8], *[1] * 5])])
    assert (caught.value.num_needed_blocks, caught.value.num_available_blocks) == (4, 3)
    run(manager, new(sequence, [*PROMPT[:8], 1]))
    assert table(sequence) == [0, 1, 2]


def test_check_fits_changes_nothing() -> None:
    """It raises what begin() would raise, or nothing."""
    manager = make_manager(3)
    manager.free(start(manager, PROMPT[:8]))
    sequence = manager.new_sequence()
    manager.check_fits([new(sequence, [1] * 12)], occasion="the prompt")
    with pytest.raises(KVCacheFullError, match="at the prompt: 4 more blocks needed"):
        manager.check_fits([new(sequence, [1] * 13)], occasion="the prompt")
    assert figures(manager) == (1, 2, 0)
    assert (table(sequence), sequence.num_tokens) == ([], 0)
    assert manager.pool.num_evictions == 0


# -- rollback --------------------------------------------------------------------------------------


def snapshot(manager: KVCacheManager) -> list[int]:
    return [manager.pool.ref_count(block) for block in range(manager.pool.num_blocks)]


def test_rollback_restores_shared_copied_and_new() -> None:
    """A hit, a copy, an append in place and a new block, all undone."""
    manager = make_manager(12)
    manager.free(start(manager, PROMPT[:8]))
    parent = start(manager, [1] * 6)
    child = manager.fork(parent)
    hit = manager.new_sequence()
    before = figures(manager), snapshot(manager), table(parent), table(child)
    allocation = manager.begin(
        [new(hit, PROMPT), new(parent, [2] * 9), new(child, [3]), new(manager.new_sequence(), [4])]
    )
    assert allocation.copies
    manager.check_integrity()
    manager.rollback(allocation)
    assert (figures(manager), snapshot(manager), table(parent), table(child)) == before
    assert (table(hit), hit.num_tokens, parent.num_tokens) == ([], 0, 6)
    run(manager, new(hit, PROMPT), new(child, [3]))
    assert table(hit)[:2] == [0, 1]


def test_rollback_after_an_eviction() -> None:
    """What was evicted is gone, and free; everything else is as it was."""
    manager = make_manager(4)
    manager.free(start(manager, PROMPT[:8]))
    sequence = manager.new_sequence()
    manager.rollback(manager.begin([new(sequence, [1] * 12)]))
    assert figures(manager) == (3, 1, 0)
    assert manager.pool.is_cached(0)
    assert table(start(manager, PROMPT[:8])) == [0, 1]


def test_rollback_publishes_nothing() -> None:
    """What a failed forward was about to compute is no hit."""
    manager = make_manager(4)
    sequence = manager.new_sequence()
    manager.rollback(manager.begin([new(sequence, PROMPT)]))
    run(manager, new(sequence, PROMPT))
    assert manager.num_prefix_hit_tokens == 0


# -- figures ---------------------------------------------------------------------------------------


def test_utilization_counts_a_shared_slot_once() -> None:
    """Ten tokens, two rows, full blocks shared: 8 + 2 + 2 slots of 4 blocks."""
    manager = make_manager(10)
    assert manager.utilization == 1.0
    sequences = [manager.new_sequence() for _ in range(2)]
    run(manager, *[new(sequence, PROMPT) for sequence in sequences])
    assert manager.pool.num_live_slots == 12
    assert manager.utilization == 12 / 16
    manager.free(sequences[0])
    assert manager.utilization == 10 / 12


def test_peak_and_its_utilization_belong_to_one_moment() -> None:
    """A smaller, better filled moment later does not change them; reset_stats() does."""
    manager = make_manager(10)
    first, second = start(manager, [1] * 5), start(manager, [2] * 5)
    assert (manager.peak_used_blocks, manager.utilization_at_peak) == (4, 10 / 16)
    manager.free(first)
    run(manager, new(second, [2] * 3))
    assert (manager.peak_used_blocks, manager.utilization_at_peak) == (4, 10 / 16)
    manager.reset_stats()
    assert (manager.peak_used_blocks, manager.utilization_at_peak) == (2, 1.0)


def test_prefix_tokens_asked_and_hit() -> None:
    """Prompts are asked for whole; full blocks that were there are hits."""
    manager = make_manager(10)
    start(manager, PROMPT)
    start(manager, PROMPT)
    assert (manager.num_prefix_query_tokens, manager.num_prefix_hit_tokens) == (20, 8)
    unshareable = manager.new_sequence()
    run(manager, NewTokens(unshareable, 3))
    assert manager.num_prefix_query_tokens == 20
    manager.reset_stats()
    assert (manager.num_prefix_query_tokens, manager.num_prefix_hit_tokens) == (0, 0)


def test_clear_cached_tells_what_is_empty() -> None:
    """Debug mode poisons exactly the blocks that hold nothing any more."""
    emptied: list[int] = []
    manager = KVCacheManager(10, 4, make_manager(1).groups, on_emptied=emptied.extend)
    manager.free(start(manager, PROMPT))
    assert emptied == [2]
    manager.clear_cached()
    assert emptied == [2, 1, 0]
    assert figures(manager) == (10, 0, 0)
    assert manager.num_stored_sequences == 0
