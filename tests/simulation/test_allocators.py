"""What holds for every allocator, whatever it is asked for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_paged.simulation.allocator import Allocator
from hf_paged.simulation.memory_strip import Segment, SlotState, complete
from hf_paged.simulation.request import Request
from hf_paged.simulation.serving import allocators_for_serving
from hf_paged.simulation.static_allocator import StaticAllocator

NUM_SLOTS, BLOCK_SIZE = 60, 4
NUM_KINDS = len(allocators_for_serving(NUM_SLOTS, 20, [BLOCK_SIZE], 2))

REQUESTS = st.builds(
    lambda prompt, samples, prefix: (prompt, samples, min(prefix, prompt)),
    st.integers(1, 14),
    st.integers(1, 3),
    st.sampled_from([0, 4, 9]),
)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), REQUESTS, st.integers(0, 5)),
        st.tuples(st.just("grow"), st.integers(0, 9), st.none()),
        st.tuples(st.just("free"), st.integers(0, 9), st.none()),
    ),
    max_size=40,
)


def figures(allocator: Allocator) -> tuple[int, int]:
    return allocator.num_live_slots, allocator.num_reserved_slots


def check(allocator: Allocator) -> None:
    """The strip shows what the figures say, and nothing exceeds the budget."""
    by_state = dict.fromkeys(SlotState, 0)
    end = 0
    for part in allocator.strip():
        assert part.start == end and part.num_slots > 0
        end += part.num_slots
        by_state[part.state] += part.num_slots
    assert end == NUM_SLOTS
    live = by_state[SlotState.USED] + by_state[SlotState.SHARED]
    assert (live, live + by_state[SlotState.RESERVED]) == figures(allocator)
    assert allocator.num_wasted_slots == by_state[SlotState.RESERVED]


@pytest.mark.parametrize("kind", range(NUM_KINDS))
@given(operations=OPERATIONS)
def test_every_allocator_keeps_its_books(
    kind: int, operations: list[tuple[str, object, int | None]]
) -> None:
    """The strip, the figures and the answers agree; what fails changes nothing; all comes back."""
    allocator = allocators_for_serving(NUM_SLOTS, 20, [BLOCK_SIZE], 2)[kind]
    admitted: list[Request] = []
    for number, (operation, argument, num_generated) in enumerate(operations):
        before = figures(allocator)
        if operation == "admit":
            assert isinstance(argument, tuple) and num_generated is not None
            prompt, samples, prefix = argument
            request = Request(number, 0, prompt, 9, samples, 0 if prefix else None, prefix)
            if allocator.admit(request, num_generated):
                admitted.append(request)
            else:
                assert figures(allocator) == before
        elif admitted:
            assert isinstance(argument, int)
            request = admitted[argument % len(admitted)]
            if operation == "free":
                allocator.free(request)
                admitted.remove(request)
            elif allocator.grow(request):
                assert allocator.num_live_slots >= before[0]
            else:
                assert allocator.num_live_slots == before[0]
        check(allocator)
    for request in admitted:
        allocator.free(request)
    assert figures(allocator) == (0, 0)


def test_static_takes_a_reservation_a_sample() -> None:
    """Two samples of ten tokens take forty slots; a third request finds none."""
    allocator = StaticAllocator(50, max_len=20)
    assert allocator.admit(Request(0, 0, 10, num_samples=2))
    assert (allocator.num_live_slots, allocator.num_reserved_slots) == (20, 40)
    assert not allocator.admit(Request(1, 0, 1))


def test_static_ends_at_its_longest_length() -> None:
    allocator = StaticAllocator(20, max_len=10)
    request = Request(0, 0, 9)
    assert allocator.admit(request)
    assert allocator.grow(request)
    assert not allocator.grow(request)
    assert not allocator.admit(Request(1, 0, 11))


def test_a_strip_has_no_gaps_and_no_seams() -> None:
    """Holes are put in, neighbours of one state become one."""
    used = SlotState.USED
    assert complete([Segment(2, 3, used), Segment(5, 1, used), Segment(6, 0, used)], 10) == [
        Segment(0, 2, SlotState.HOLE),
        Segment(2, 4, used),
        Segment(6, 4, SlotState.HOLE),
    ]
