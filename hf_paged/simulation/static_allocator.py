"""The longest length, reserved for everyone: what a batch with padding does."""

from __future__ import annotations

import heapq

from hf_paged.simulation.allocator import Allocator
from hf_paged.simulation.memory_strip import Segment, SlotState, complete
from hf_paged.simulation.request import Request

__all__ = ["StaticAllocator"]


class StaticAllocator(Allocator):
    """Cuts the budget into reservations of ``max_len`` slots; each sample takes one.

    Args:
        num_slots: the budget.
        max_len: slots a reservation.
    """

    name = "static"

    def __init__(self, num_slots: int, max_len: int) -> None:
        super().__init__(num_slots)
        self.max_len = max_len
        self.num_reservations = num_slots // max_len
        self._free = list(range(self.num_reservations))
        self._held: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}

    def admit(self, request: Request, num_generated: int = 0) -> bool:
        """Take a reservation for each sample."""
        length = request.num_prompt_tokens + num_generated
        if length > self.max_len or request.num_samples > len(self._free):
            return False
        self._held[request.number] = [heapq.heappop(self._free) for _ in range(request.num_samples)]
        self._lengths[request.number] = length
        return True

    def grow(self, request: Request) -> bool:
        """Fill one more slot of each reservation."""
        if self._lengths[request.number] == self.max_len:
            return False
        self._lengths[request.number] += 1
        return True

    def free(self, request: Request) -> None:
        """Give the reservations back."""
        del self._lengths[request.number]
        for reservation in self._held.pop(request.number):
            heapq.heappush(self._free, reservation)

    @property
    def num_reserved_slots(self) -> int:
        """Slots of the reservations that are taken."""
        return (self.num_reservations - len(self._free)) * self.max_len

    @property
    def num_live_slots(self) -> int:
        """Tokens of all samples."""
        return sum(len(held) * self._lengths[number] for number, held in self._held.items())

    def strip(self) -> list[Segment]:
        """Return used and reserved slots of each reservation, and what is left."""
        taken = sorted(
            (reservation, self._lengths[number])
            for number, held in self._held.items()
            for reservation in held
        )
        parts = []
        for reservation, length in taken:
            start = reservation * self.max_len
            parts.append(Segment(start, length, SlotState.USED))
            parts.append(Segment(start + length, self.max_len - length, SlotState.RESERVED))
        return complete(parts, self.num_slots)
