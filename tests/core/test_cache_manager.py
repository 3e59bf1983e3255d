"""Which rows share which blocks, and who makes a copy: block size 4, exact block ids."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from forwards import PROMPT, figures, make_manager, new, run, start, table
from hf_paged.core.allocation import NewTokens
from hf_paged.core.prefix_index import BlockKey
from hf_paged.core.sequence import Sequence

pytestmark = pytest.mark.core_suite


def test_eight_equal_prompts_in_one_forward() -> None:
    """Full blocks are shared from the first forward on, tails are not (nano-vllm#219)."""
    manager = make_manager(20)
    sequences = [manager.new_sequence() for _ in range(8)]
    allocation = run(manager, *[new(sequence, PROMPT) for sequence in sequences])
    assert [table(sequence) for sequence in sequences] == [[0, 1, 2 + i] for i in range(8)]
    assert figures(manager) == (10, 0, 10)
    assert allocation.rows[0].slots(0, 4) == list(range(10))
    assert allocation.rows[3].slots(0, 4) == [-1] * 8 + [20, 21]
    assert [row.num_hit_tokens for row in allocation.rows] == [0] + [8] * 7


def test_nothing_is_shareable_before_commit() -> None:
    """A forward beside this one computes the same prompt for itself."""
    manager = make_manager(10)
    first, second = manager.new_sequence(), manager.new_sequence()
    one = manager.begin([new(first, PROMPT)])
    two = manager.begin([new(second, PROMPT)])
    assert (table(first), table(second)) == ([0, 1, 2], [3, 4, 5])
    manager.check_integrity()
    manager.rollback(one)
    manager.commit(two)
    assert table(start(manager, PROMPT)) == [3, 4, 0]


def test_equal_blocks_of_two_forwards_become_one() -> None:
    """The second to commit drops its own copy of each full block."""
    manager = make_manager(10)
    first, second = manager.new_sequence(), manager.new_sequence()
    one = manager.begin([new(first, PROMPT)])
    two = manager.begin([new(second, PROMPT)])
    manager.commit(one)
    manager.commit(two)
    assert (table(first), table(second)) == ([0, 1, 2], [0, 1, 5])
    assert figures(manager) == (6, 0, 4)


def test_decoded_block_is_found_by_a_prompt() -> None:
    """A block that became full token by token is as good as one of a prompt."""
    manager = make_manager(10)
    sequence = start(manager, [1, 2, 3])
    run(manager, new(sequence, [4]))
    run(manager, new(sequence, [5]))
    assert table(start(manager, [1, 2, 3, 4, 9])) == [0, 2]


@pytest.mark.parametrize("hit_first", [True, False])
def test_hit_and_miss_in_one_batch(hit_first: bool) -> None:
    """Block tables are right for both, in either order (vllm#7018)."""
    manager = make_manager(10)
    manager.free(start(manager, PROMPT))  # 0 and 1 stay cached
    hit, miss = manager.new_sequence(), manager.new_sequence()
    rows = [new(hit, PROMPT), new(miss, [7] * 6)]
    run(manager, *(rows if hit_first else reversed(rows)))
    assert table(hit) == ([0, 1, 2] if hit_first else [0, 1, 4])
    assert table(miss) == ([3, 4] if hit_first else [2, 3])


def test_alternating_prompts_in_a_pool_too_small_for_both() -> None:
    """A, B, A: the old content of A is gone and is computed again (nano-vllm#163)."""
    manager = make_manager(3)
    a, b = [1] * 12, [2] * 12
    for prompt in (a, b, a):
        sequence = manager.new_sequence()
        allocation = run(manager, new(sequence, prompt))
        assert len(allocation.new_blocks) == 3
        assert all(slot >= 0 for slot in allocation.rows[0].slots(0, 4))
        manager.free(sequence)
    assert manager.pool.num_evictions == 6
    assert manager.num_prefix_hit_tokens == 0


def test_prompt_that_evicts_the_last_of_its_version_is_found() -> None:
    """The eviction leaves the version's root alone while a forward extends it."""
    manager = make_manager(3)
    manager.free(start(manager, [1] * 12))
    manager.free(start(manager, [2] * 12))
    start(manager, [2] * 12)
    assert manager.num_prefix_hit_tokens == 12


def test_equal_hashes_are_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are compared; the hash alone proves nothing (openvino.genai#3722)."""
    monkeypatch.setattr(BlockKey, "__hash__", lambda self: 0)
    manager = make_manager(10)
    start(manager, [1, 1, 1, 1, 2, 2, 2, 2])
    other = start(manager, [3, 3, 3, 3, 2, 2, 2, 2])
    equal = start(manager, [1, 1, 1, 1, 3, 3, 3, 3])
    assert table(other) == [2, 3]
    assert table(equal) == [0, 4]


@pytest.mark.parametrize(
    "change",
    [
        lambda sequence: new(sequence, PROMPT, position=1),
        lambda sequence: new(sequence, PROMPT, version="adapter b"),
        lambda sequence: NewTokens(sequence, 10, None, 0, "v"),
        lambda sequence: NewTokens(sequence, 10, PROMPT, None, "v"),
        lambda sequence: NewTokens(sequence, 10, PROMPT, 0, None),
    ],
    ids=["positions", "version", "embeddings", "gaps", "no version"],
)
def test_never_shared(change: Callable[[Sequence], NewTokens]) -> None:
    """Equal tokens under anything else that differs, within a forward and after it."""
    manager = make_manager(12)
    first, second = manager.new_sequence(), manager.new_sequence()
    run(manager, new(first, PROMPT), change(second))
    third = manager.new_sequence()
    run(manager, change(third))
    assert not set(table(first)) & {*table(second), *table(third)}


def test_version_may_not_change_on_the_way() -> None:
    """From the first token under another version on, nothing of the sequence is shared."""
    manager = make_manager(12)
    sequence = start(manager, [1] * 4)
    run(manager, new(sequence, [2] * 4, version="other"))
    run(manager, new(sequence, [3] * 4))
    assert table(sequence) == [0, 1, 2]
    assert table(start(manager, [1] * 4 + [2] * 4 + [3] * 4)) == [0, 3, 4]


def test_position_gap_ends_sharing() -> None:
    """Tokens that do not follow on are not the continuation of the prefix."""
    manager = make_manager(12)
    sequence = start(manager, [1] * 4)
    run(manager, new(sequence, [2] * 4, position=9))
    assert table(start(manager, [1] * 4 + [2] * 4)) == [0, 2]


def test_two_forks_of_a_half_full_block_make_one_copy() -> None:
    """The first of the two to write copies, the second writes in place."""
    manager = make_manager(10)
    parent = start(manager, PROMPT[:6])
    child = manager.fork(parent)
    assert table(child) == [0, 1]
    allocation = run(manager, new(parent, [1]), new(child, [2]))
    assert allocation.copies == [(1, 2)]
    assert (table(parent), table(child)) == ([0, 2], [0, 1])
    assert (allocation.rows[0].slots(0, 4), allocation.rows[1].slots(0, 4)) == ([10], [6])
    assert manager.num_cow_copies == 1
    assert figures(manager) == (7, 0, 3)


def test_fork_that_outlives_its_parent_writes_in_place() -> None:
    """Nobody else reads the block any more: no copy."""
    manager = make_manager(10)
    parent = start(manager, PROMPT[:6])
    child = manager.fork(parent)
    manager.free(parent)
    assert run(manager, new(child, [1])).copies == []
    assert table(child) == [0, 1]


def test_fork_at_a_block_boundary_copies_nothing() -> None:
    """Each takes a block of its own."""
    manager = make_manager(10)
    parent = start(manager, PROMPT[:8])
    child = manager.fork(parent)
    assert run(manager, new(parent, [1]), new(child, [2])).copies == []
    assert (table(parent), table(child)) == ([0, 1, 2], [0, 1, 3])


def test_shorter_fork_may_not_write_where_a_rollback_reads() -> None:
    """The longer row copies, but a rollback gives it back the slots that the shorter would take."""
    manager = make_manager(10)
    longer = start(manager, [1, 2, 3])
    shorter = manager.fork(longer)
    manager.crop(shorter, 1)
    allocation = manager.begin([new(longer, [4]), new(shorter, [9])])
    assert allocation.copies == [(0, 1), (0, 2)]
    manager.rollback(allocation)
    assert (table(longer), table(shorter)) == ([0], [0])
    # The other way round the shorter row leaves first, and what the longer holds is its own.
    assert run(manager, new(shorter, [9]), new(longer, [4])).copies == [(0, 1)]


def test_crop_to_a_block_boundary() -> None:
    """The blocks behind the cut stay cached; the same continuation finds them."""
    manager = make_manager(10)
    sequence = start(manager, PROMPT[:8])
    manager.crop(sequence, 4)
    assert table(sequence) == [0]
    assert figures(manager) == (8, 1, 1)
    run(manager, new(sequence, PROMPT[4:8]))
    assert table(sequence) == [0, 1]


def test_crop_frees_a_block_only_when_it_is_empty() -> None:
    """One token left is enough to hold the block."""
    manager = make_manager(10)
    sequence = start(manager, PROMPT[:7])
    manager.crop(sequence, 5)
    assert table(sequence) == [0, 1]
    assert manager.pool.num_live_slots == 5
    manager.crop(sequence, 4)
    assert table(sequence) == [0]
    manager.crop(sequence, 0)
    assert table(sequence) == []
    assert figures(manager) == (9, 1, 0)


def test_crop_into_a_known_block_then_append() -> None:
    """The writer copies; the known block stays what it is, for others to find."""
    manager = make_manager(10)
    sequence = start(manager, PROMPT[:8])
    manager.crop(sequence, 6)
    allocation = run(manager, new(sequence, [1, 2]))
    assert allocation.copies == [(1, 2)]
    assert allocation.rows[0].slots(0, 4) == [10, 11]
    assert table(sequence) == [0, 2]
    assert table(start(manager, PROMPT[:8])) == [0, 1]
    assert table(start(manager, [*PROMPT[:6], 1, 2])) == [0, 2]


def test_crop_into_a_shared_block_then_append() -> None:
    """A rejected draft of one beam does not touch the other."""
    manager = make_manager(10)
    parent = start(manager, PROMPT[:7])
    child = manager.fork(parent)
    manager.crop(child, 5)
    assert run(manager, new(child, [1])).copies == [(1, 2)]
    assert (table(parent), table(child)) == ([0, 1], [0, 2])
    assert run(manager, new(parent, [1])).copies == []


def test_crop_and_the_same_tokens_again() -> None:
    """The copy turns out to equal the known block and is dropped at commit."""
    manager = make_manager(10)
    sequence = start(manager, PROMPT[:8])
    manager.crop(sequence, 6)
    run(manager, new(sequence, PROMPT[6:8]))
    assert table(sequence) == [0, 1]
    assert figures(manager) == (8, 0, 2)


def test_unkept_content_is_emptied_at_once() -> None:
    """keep=False: rows of the call share, nothing stays after it."""
    manager = make_manager(10)
    sequences = [manager.new_sequence(), manager.new_sequence()]
    run(manager, *[NewTokens(s, 10, PROMPT, 0, "once", keep=False) for s in sequences])
    assert [table(sequence) for sequence in sequences] == [[0, 1, 2], [0, 1, 3]]
    manager.free(sequences[0])
    assert figures(manager) == (7, 0, 3)
    manager.free(sequences[1])
    assert figures(manager) == (10, 0, 0)


def test_freed_sequence_is_not_freed_again() -> None:
    """The second free() is a mistake of ours and says so."""
    manager = make_manager(10)
    sequence = start(manager, PROMPT)
    manager.free(sequence)
    with pytest.raises(AssertionError, match="freed twice"):
        manager.free(sequence)


def test_sequence_is_freed_deepest_block_first() -> None:
    """So eviction takes the leaf and leaves the prefix."""
    manager = make_manager(4)
    manager.free(start(manager, PROMPT[:8]))
    start(manager, [1] * 12)
    assert manager.pool.is_cached(0)
    assert manager.pool.num_evictions == 1
