"""First fit and growth, by story and against a memory that is scanned slot by slot."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hf_paged.simulation.contiguous_allocator import ContiguousAllocator, RunSpace
from hf_paged.simulation.memory_strip import SlotState
from hf_paged.simulation.request import Request


class SlotBySlot:
    """The brute-force model: a list with the owner of every slot, scanned from the left."""

    def __init__(self, num_slots: int, num_headroom_slots: int) -> None:
        self.owners: list[int | None] = [None] * num_slots
        self.headroom = num_headroom_slots
        self.lengths: dict[int, int] = {}

    def first_fit(self, num_slots: int) -> int | None:
        for start in range(len(self.owners) - num_slots + 1):
            if all(owner is None for owner in self.owners[start : start + num_slots]):
                return start
        return None

    def admit(self, number: int, length: int) -> bool:
        for capacity in (length + self.headroom, length):
            start = self.first_fit(capacity)
            if start is not None:
                self.owners[start : start + capacity] = [number] * capacity
                self.lengths[number] = length
                return True
        return False

    def grow(self, number: int) -> bool:
        capacity = self.owners.count(number)
        if self.lengths[number] == capacity and not (
            self._make_room(number, 1 + self.headroom) or self._make_room(number, 1)
        ):
            return False
        self.lengths[number] += 1
        return True

    def free(self, number: int) -> None:
        self.owners = [None if owner == number else owner for owner in self.owners]
        del self.lengths[number]

    def _make_room(self, number: int, extra: int) -> bool:
        start, capacity = self.owners.index(number), self.owners.count(number)
        behind = self.owners[start + capacity : start + capacity + extra]
        if behind == [None] * extra:
            self.owners[start + capacity : start + capacity + extra] = [number] * extra
            return True
        target = self.first_fit(capacity + extra)
        if target is None:
            return False
        self.owners = [None if owner == number else owner for owner in self.owners]
        self.owners[target : target + capacity + extra] = [number] * (capacity + extra)
        return True

    def largest_hole(self) -> int:
        longest = run = 0
        for owner in self.owners:
            run = run + 1 if owner is None else 0
            longest = max(longest, run)
        return longest


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), st.integers(1, 12)),
        st.tuples(st.just("grow"), st.integers(0, 20)),
        st.tuples(st.just("free"), st.integers(0, 20)),
    ),
    max_size=60,
)


@given(OPERATIONS, st.integers(1, 40), st.integers(0, 4))
def test_like_a_memory_scanned_slot_by_slot(
    operations: list[tuple[str, int]], num_slots: int, headroom: int
) -> None:
    """The same answers, the same places, the same holes after every operation."""
    allocator = ContiguousAllocator(num_slots, headroom)
    model = SlotBySlot(num_slots, headroom)
    admitted: list[Request] = []
    for number, (operation, argument) in enumerate(operations):
        if operation == "admit":
            request = Request(number, 0, argument)
            fits = allocator.admit(request)
            assert fits == model.admit(number, argument)
            if fits:
                admitted.append(request)
        elif admitted and operation == "grow":
            request = admitted[argument % len(admitted)]
            assert allocator.grow(request) == model.grow(request.number)
        elif admitted:
            request = admitted.pop(argument % len(admitted))
            allocator.free(request)
            model.free(request.number)
        for request in admitted:
            (run,) = allocator.runs(request)
            assert run.start == model.owners.index(request.number)
            assert run.capacity == model.owners.count(request.number)
            assert run.length == model.lengths[request.number]
        assert allocator.largest_hole == model.largest_hole()
        assert allocator.num_reserved_slots == num_slots - model.owners.count(None)
        assert allocator.num_live_slots == sum(model.lengths.values())


def test_holes_join_their_neighbours() -> None:
    """Three runs given back out of order become one hole again."""
    space = RunSpace(30)
    assert [space.take(10), space.take(10), space.take(10)] == [0, 10, 20]
    space.give(0, 10)
    space.give(20, 10)
    assert space.holes() == [(0, 10), (20, 30)]
    space.give(10, 10)
    assert space.holes() == [(0, 30)]


def test_room_enough_but_in_pieces() -> None:
    """20 slots are free, none of 11 in one piece."""
    allocator = ContiguousAllocator(40)
    requests = [Request(number, 0, 10) for number in range(4)]
    assert all(allocator.admit(request) for request in requests)
    allocator.free(requests[0])
    allocator.free(requests[2])
    assert not allocator.admit(Request(4, 0, 11))
    assert allocator.admit(Request(5, 0, 10))


def test_a_run_moves_when_its_neighbour_is_in_the_way() -> None:
    """The first run fills its headroom and cannot grow in place; it moves and leaves a hole."""
    allocator = ContiguousAllocator(42, num_headroom_slots=3)
    first, second = Request(0, 0, 10), Request(1, 0, 10)
    allocator.admit(first)
    allocator.admit(second)
    assert all(allocator.grow(first) for _ in range(4))
    (run,) = allocator.runs(first)
    assert (run.start, run.capacity, run.length) == (26, 14, 14)
    assert allocator.strip()[0].state is SlotState.HOLE
    assert allocator.counters() == {"num_moves": 1, "num_moved_slots": 13}


def test_headroom_is_given_up_before_a_request_is_refused() -> None:
    """Ten slots left, ten needed: the second run does without."""
    allocator = ContiguousAllocator(22, num_headroom_slots=2)
    first, second = Request(0, 0, 10), Request(1, 0, 10)
    assert allocator.admit(first) and allocator.admit(second)
    assert [allocator.runs(r)[0].capacity for r in (first, second)] == [12, 10]


def test_samples_grow_together_or_not_at_all() -> None:
    """The second sample has no room, so the first one gives its slot back."""
    allocator = ContiguousAllocator(9)
    request = Request(0, 0, 4, num_samples=2)
    assert allocator.admit(request)
    assert not allocator.grow(request)
    assert [run.length for run in allocator.runs(request)] == [4, 4]
