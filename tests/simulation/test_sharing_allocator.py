"""Prefixes, forks and eviction in the simulation are those of the real manager."""

from __future__ import annotations

from hf_paged.simulation.memory_strip import SlotState
from hf_paged.simulation.request import Request
from hf_paged.simulation.sharing_allocator import SharingAllocator, token_ids


def test_texts_are_equal_where_they_should_be() -> None:
    """The named beginning is everyone's, the prompt its samples', the output each one's own."""
    one = Request(1, 0, 6, 4, 2, 0, 3)
    two = Request(2, 0, 6, 4, 2, 0, 3)
    assert token_ids(one, 0, 0, 3) == token_ids(two, 1, 0, 3)
    assert set(token_ids(one, 0, 3, 6)).isdisjoint(token_ids(two, 0, 3, 6))
    assert token_ids(one, 0, 0, 6) == token_ids(one, 1, 0, 6)
    assert set(token_ids(one, 0, 6, 9)).isdisjoint(token_ids(one, 1, 6, 9))
    assert token_ids(one, 0, 2, 8) == token_ids(one, 0, 0, 9)[2:8]


def test_a_prefix_is_stored_once() -> None:
    """Two prompts of 12 tokens, 8 of them the same: 16 slots, not 24."""
    allocator = SharingAllocator(64, 4)
    for number in range(2):
        assert allocator.admit(Request(number, 0, 12, prefix=0, num_prefix_tokens=8))
    assert allocator.num_reserved_slots == allocator.num_live_slots == 16
    assert allocator.counters()["num_prefix_hit_tokens"] == 8
    assert allocator.strip()[0].state is SlotState.SHARED


def test_other_prefixes_are_not_shared() -> None:
    allocator = SharingAllocator(64, 4)
    for number in range(2):
        assert allocator.admit(Request(number, 0, 12, prefix=number, num_prefix_tokens=8))
    assert allocator.num_live_slots == 24


def test_a_fork_shares_the_last_block_until_someone_writes() -> None:
    """Rows share the whole block of a prompt of 6; forks share its half-filled one as well."""
    request = Request(0, 0, 6, num_samples=3)
    rows, forks = SharingAllocator(64, 4), SharingAllocator(64, 4, forks=True)
    assert rows.admit(request) and forks.admit(request)
    assert (rows.num_live_slots, forks.num_live_slots) == (4 + 3 * 2, 6)

    assert rows.grow(request) and forks.grow(request)
    assert rows.num_live_slots == forks.num_live_slots == 4 + 3 * 3
    assert forks.counters()["num_cow_copies"] == 2, "the last of three writes in place"
    assert rows.counters()["num_cow_copies"] == 0


def test_forks_come_back_with_what_they_had_generated() -> None:
    """A request that stepped back after 5 tokens is stored as it would have been without."""
    request = Request(0, 0, 6, 9, num_samples=2)
    stayed, returned = SharingAllocator(64, 4, forks=True), SharingAllocator(64, 4, forks=True)
    assert stayed.admit(request)
    for _ in range(5):
        assert stayed.grow(request)
    assert returned.admit(request, num_generated=5)
    assert returned.num_live_slots == stayed.num_live_slots
    assert returned.num_reserved_slots == stayed.num_reserved_slots


def test_what_ended_requests_leave_is_found_and_evicted() -> None:
    """The prefix stays cached for the next request, until another one needs the whole pool."""
    allocator = SharingAllocator(16, 4, keeps_prefixes=True)
    first = Request(0, 0, 8, prefix=0, num_prefix_tokens=8)
    assert allocator.admit(first)
    allocator.free(first)
    assert allocator.num_reserved_slots == 0
    assert allocator.strip()[0].state is SlotState.CACHED

    second = Request(1, 0, 9, prefix=0, num_prefix_tokens=8)
    assert allocator.admit(second)
    assert allocator.counters()["num_prefix_hit_tokens"] == 8
    allocator.free(second)

    assert allocator.admit(Request(2, 0, 16))
    assert allocator.counters()["num_evicted_blocks"] == 2


def test_without_keeping_nothing_stays() -> None:
    allocator = SharingAllocator(16, 4)
    request = Request(0, 0, 8)
    assert allocator.admit(request)
    allocator.free(request)
    assert [part.state for part in allocator.strip()] == [SlotState.HOLE]
    allocator.manager.check_integrity()


def test_a_refused_request_leaves_no_references() -> None:
    """The prompt fits, what three forks had generated does not: nothing is held afterwards."""
    allocator = SharingAllocator(16, 4, forks=True)
    assert not allocator.admit(Request(0, 0, 4, 20, num_samples=3), num_generated=8)
    assert allocator.num_reserved_slots == 0
    allocator.manager.check_integrity()
