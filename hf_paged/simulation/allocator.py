"""What every allocator of the simulation can do."""

from __future__ import annotations

from abc import ABC, abstractmethod

from hf_paged.simulation.memory_strip import Segment, SlotState
from hf_paged.simulation.request import Request

__all__ = ["Allocator"]


class Allocator(ABC):
    """Gives slots to requests. A call that returns False has changed nothing.

    Attributes:
        name: as tables and pictures show it.
        num_slots: the budget, in token slots.
        block_size: slots a block; None if it has no blocks.
        swaps: whether a request that must step back is copied out, not computed again.
        forks: whether the samples of a request branch off one computed prompt.
    """

    name: str
    block_size: int | None = None
    swaps: bool = False
    forks: bool = False

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots

    @abstractmethod
    def admit(self, request: Request, num_generated: int = 0) -> bool:
        """Store the prompt and ``num_generated`` tokens after it, for each sample.

        Args:
            request: not admitted at present.
            num_generated: tokens a sample that it generated before it had to step back.
        """

    @abstractmethod
    def grow(self, request: Request) -> bool:
        """Store one more token of each sample."""

    @abstractmethod
    def free(self, request: Request) -> None:
        """Give up everything that the request holds."""

    @property
    @abstractmethod
    def num_reserved_slots(self) -> int:
        """Slots that no other request can have, with a token in them or not."""

    @property
    @abstractmethod
    def num_live_slots(self) -> int:
        """Slots that hold a token; one that several sequences read counts once."""

    @abstractmethod
    def strip(self) -> list[Segment]:
        """Return the whole memory, ascending, without gaps."""

    def counters(self) -> dict[str, int]:
        """Return what this allocator alone can count, by name with its unit."""
        return {}

    @property
    def label(self) -> str:
        """Name and block size, as tables and pictures show them."""
        return self.name if self.block_size is None else f"{self.name} ({self.block_size})"

    @property
    def num_wasted_slots(self) -> int:
        """Slots that are reserved and hold no token."""
        return self.num_reserved_slots - self.num_live_slots

    @property
    def largest_hole(self) -> int:
        """Slots of the longest free run of neighbours."""
        return max(
            (part.num_slots for part in self.strip() if part.state is SlotState.HOLE), default=0
        )
