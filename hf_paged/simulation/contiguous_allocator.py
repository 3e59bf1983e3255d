"""One run of neighbouring slots a sequence, first fit, growing: where holes come from."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

from hf_paged.simulation.allocator import Allocator
from hf_paged.simulation.memory_strip import Segment, SlotState, complete
from hf_paged.simulation.request import Request

__all__ = ["ContiguousAllocator", "Run", "RunSpace"]


@dataclass
class Run:
    """Neighbouring slots of one sequence.

    Attributes:
        start: first slot.
        capacity: slots that it holds.
        length: slots, from the first on, that hold a token.
    """

    start: int
    capacity: int
    length: int


class RunSpace:
    """Free runs of a memory, and first fit in them.

    Args:
        num_slots: slots of the memory.
    """

    def __init__(self, num_slots: int) -> None:
        self._holes: list[tuple[int, int]] = [(0, num_slots)] if num_slots else []

    def holes(self) -> list[tuple[int, int]]:
        """Return (start, end) of every free run, ascending; no two touch."""
        return list(self._holes)

    def take(self, num_slots: int) -> int | None:
        """Take the first run that is long enough; return its first slot, None if there is none."""
        for start, end in self._holes:
            if end - start >= num_slots:
                self.take_at(start, num_slots)
                return start
        return None

    def take_at(self, start: int, num_slots: int) -> bool:
        """Take exactly these slots; False if a hole does not begin there or is too short."""
        index = bisect_left(self._holes, (start, start))
        if index == len(self._holes) or self._holes[index][0] != start:
            return False
        end = self._holes[index][1]
        if end - start < num_slots:
            return False
        if end - start == num_slots:
            del self._holes[index]
        else:
            self._holes[index] = (start + num_slots, end)
        return True

    def give(self, start: int, num_slots: int) -> None:
        """Give slots back; the hole joins its neighbours."""
        if not num_slots:
            return
        end = start + num_slots
        index = bisect_left(self._holes, (start, end))
        if index < len(self._holes) and self._holes[index][0] == end:
            end = self._holes.pop(index)[1]
        if index and self._holes[index - 1][1] == start:
            start = self._holes.pop(index - 1)[0]
        insort(self._holes, (start, end))


class ContiguousAllocator(Allocator):
    """First-fit runs. One that cannot grow where it is moves to a hole that holds it whole.

    While a run moves it holds both places, as ``realloc`` does.

    Args:
        num_slots: the budget.
        num_headroom_slots: slots that a run asks for beyond what it needs now; if there are not
            as many, it does without.
    """

    name = "contiguous"

    def __init__(self, num_slots: int, num_headroom_slots: int = 0) -> None:
        super().__init__(num_slots)
        self.num_headroom_slots = num_headroom_slots
        self._space = RunSpace(num_slots)
        self._runs: dict[int, list[Run]] = {}
        self._num_moves = 0
        self._num_moved_slots = 0

    def admit(self, request: Request, num_generated: int = 0) -> bool:
        """Take the first hole that is long enough, for each sample."""
        length = request.num_prompt_tokens + num_generated
        for headroom in dict.fromkeys((self.num_headroom_slots, 0)):
            runs = self._take_runs(length, length + headroom, request.num_samples)
            if runs is not None:
                self._runs[request.number] = runs
                return True
        return False

    def grow(self, request: Request) -> bool:
        """Lengthen every run by a token, in place or by a move; none if one cannot."""
        grown: list[Run] = []
        for run in self._runs[request.number]:
            if run.length == run.capacity and not self._make_room(run):
                for other in grown:
                    other.length -= 1
                return False
            run.length += 1
            grown.append(run)
        return True

    def free(self, request: Request) -> None:
        """Leave holes behind."""
        for run in self._runs.pop(request.number):
            self._space.give(run.start, run.capacity)

    def runs(self, request: Request) -> list[Run]:
        """Return the run of each sample."""
        return self._runs[request.number]

    @property
    def num_reserved_slots(self) -> int:
        """Slots of all runs."""
        return sum(run.capacity for runs in self._runs.values() for run in runs)

    @property
    def num_live_slots(self) -> int:
        """Tokens of all runs."""
        return sum(run.length for runs in self._runs.values() for run in runs)

    def strip(self) -> list[Segment]:
        """Return runs, their headroom, and the holes between them."""
        parts = []
        for run in sorted((r for runs in self._runs.values() for r in runs), key=lambda r: r.start):
            parts.append(Segment(run.start, run.length, SlotState.USED))
            headroom = run.capacity - run.length
            parts.append(Segment(run.start + run.length, headroom, SlotState.RESERVED))
        return complete(parts, self.num_slots)

    def counters(self) -> dict[str, int]:
        """Return how often a run had to move, and how many tokens were copied for it."""
        return {"num_moves": self._num_moves, "num_moved_slots": self._num_moved_slots}

    def _take_runs(self, length: int, capacity: int, num_runs: int) -> list[Run] | None:
        runs: list[Run] = []
        for _ in range(num_runs):
            start = self._space.take(capacity)
            if start is None:
                for run in runs:
                    self._space.give(run.start, run.capacity)
                return None
            runs.append(Run(start, capacity, length))
        return runs

    def _make_room(self, run: Run) -> bool:
        for extra in dict.fromkeys((1 + self.num_headroom_slots, 1)):
            if self._space.take_at(run.start + run.capacity, extra):
                run.capacity += extra
                return True
            start = self._space.take(run.capacity + extra)
            if start is not None:
                self._space.give(run.start, run.capacity)
                run.start, run.capacity = start, run.capacity + extra
                self._num_moves += 1
                self._num_moved_slots += run.length
                return True
        return False
