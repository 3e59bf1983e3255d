"""One fixed story: fill the memory, free every other request, then a long one comes.

Nothing here grows or waits; what differs is only where each allocator puts 40 requests, and what
the holes they leave are still good for.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hf_paged.errors import ConfigurationError
from hf_paged.simulation.allocator import Allocator
from hf_paged.simulation.contiguous_allocator import ContiguousAllocator
from hf_paged.simulation.memory_strip import Segment, SlotState
from hf_paged.simulation.paged_allocator import PagedAllocator
from hf_paged.simulation.request import Request
from hf_paged.simulation.static_allocator import StaticAllocator

__all__ = ["Outcome", "ReferenceResult", "ReferenceScenario", "Stage", "run_reference"]

_NUM_REQUESTS = 60
_NUM_OFFERED = 40
_NUM_SPARE_SLOTS = 32
_LATECOMER_TOKENS = 800


@dataclass(frozen=True)
class ReferenceScenario:
    """Lengths in tokens, and the budget in token slots.

    Attributes:
        lengths: of all requests drawn.
        num_offered: how many of them, the first ones, are offered.
        num_slots: the budget.
        max_len: slots of a static reservation.
        latecomer_tokens: length of the request that comes last.
    """

    lengths: tuple[int, ...]
    num_offered: int
    num_slots: int
    max_len: int = 1024
    latecomer_tokens: int = _LATECOMER_TOKENS

    @classmethod
    def draw(
        cls, seed: int = 42, num_slots: int | None = None, max_len: int = 1024
    ) -> ReferenceScenario:
        """Draw 60 lengths; the budget fits the first 40 of them exactly, and 32 slots more.

        Args:
            seed: of the lengths.
            num_slots: another budget.
            max_len: slots of a static reservation, and the longest length.

        Raises:
            ConfigurationError: a length exceeds the budget.
        """
        generator = random.Random(seed)
        lengths = tuple(
            min(max_len, max(32, int(generator.gauss(220, 160)))) for _ in range(_NUM_REQUESTS)
        )
        if num_slots is None:
            num_slots = sum(lengths[:_NUM_OFFERED]) + _NUM_SPARE_SLOTS
        for number, length in enumerate((*lengths[:_NUM_OFFERED], _LATECOMER_TOKENS)):
            if length > num_slots:
                raise ConfigurationError(
                    f"request {number} of the reference scenario has {length} tokens, more than "
                    f"the budget of {num_slots} slots; raise --budget"
                )
        return cls(lengths, _NUM_OFFERED, num_slots, max_len)

    @property
    def mean_tokens(self) -> float:
        """Mean length of all requests drawn."""
        return sum(self.lengths) / len(self.lengths)


@dataclass(frozen=True)
class Stage:
    """The memory after one act of the story; figures in slots.

    Attributes:
        title: the act.
        num_reserved_slots: not available to others.
        num_live_slots: hold a token.
        largest_hole: longest run of free neighbours.
        strip: the whole memory.
    """

    title: str
    num_reserved_slots: int
    num_live_slots: int
    largest_hole: int
    strip: list[Segment] = field(repr=False)

    @property
    def waste(self) -> float:
        """Part of the reserved slots that holds no token; 0.0 if nothing is reserved."""
        if not self.num_reserved_slots:
            return 0.0
        return 1 - self.num_live_slots / self.num_reserved_slots


@dataclass(frozen=True)
class Outcome:
    """What the story was for one allocator.

    Attributes:
        name: of the allocator.
        block_size: slots a block; None if it has no blocks.
        num_slots: the budget.
        num_admitted: requests of those offered that were placed.
        num_freed: every other one of them.
        full: after the offer.
        checkerboard: after the frees.
        end: after the latecomer.
        latecomer_placed: whether it found room.
        num_latecomer_blocks: blocks that it took; None without blocks, or if it was refused.
    """

    name: str
    block_size: int | None
    num_slots: int
    num_admitted: int
    num_freed: int
    full: Stage
    checkerboard: Stage
    end: Stage
    latecomer_placed: bool
    num_latecomer_blocks: int | None

    @property
    def label(self) -> str:
        """Name and block size, as a table shows them."""
        return self.name if self.block_size is None else f"{self.name} ({self.block_size})"

    def latecomer_segments(self) -> list[Segment]:
        """Return what the latecomer took, one segment for each piece of it."""
        before = [part for part in self.checkerboard.strip if part.state is SlotState.HOLE]
        pieces = []
        for part in self.end.strip:
            if part.state is not SlotState.USED:
                continue
            for hole in before:
                start = max(part.start, hole.start)
                end = min(part.start + part.num_slots, hole.start + hole.num_slots)
                if start < end:
                    pieces.append(Segment(start, end - start, SlotState.USED))
        return pieces

    @property
    def num_free_slots(self) -> int:
        """Slots that are free after the frees."""
        return self.num_slots - self.checkerboard.num_reserved_slots


@dataclass(frozen=True)
class ReferenceResult:
    """The story of every allocator; ``outcomes`` are static, contiguous, then paged."""

    scenario: ReferenceScenario
    outcomes: tuple[Outcome, ...]

    @property
    def static(self) -> Outcome:
        """The outcome of static reservations."""
        return self.outcomes[0]

    @property
    def paged(self) -> tuple[Outcome, ...]:
        """The outcome of each block size."""
        return self.outcomes[2:]


def run_reference(
    scenario: ReferenceScenario,
    block_sizes: Sequence[int] = (16,),
    on_outcome: Callable[[str], None] = lambda name: None,
) -> ReferenceResult:
    """Tell the story to each allocator.

    Args:
        scenario: lengths and budget.
        block_sizes: a paged allocator for each; in slots.
        on_outcome: called with the name of each allocator that is done.
    """
    allocators: list[Allocator] = [
        StaticAllocator(scenario.num_slots, scenario.max_len),
        ContiguousAllocator(scenario.num_slots),
        *(PagedAllocator(scenario.num_slots, block_size) for block_size in block_sizes),
    ]
    outcomes = []
    for allocator in allocators:
        outcomes.append(_tell(scenario, allocator))
        on_outcome(allocator.name)
    return ReferenceResult(scenario, tuple(outcomes))


def _tell(scenario: ReferenceScenario, allocator: Allocator) -> Outcome:
    offered = [Request(i, 0, n) for i, n in enumerate(scenario.lengths[: scenario.num_offered])]
    latecomer = Request(len(scenario.lengths), 0, scenario.latecomer_tokens)
    admitted = [request for request in offered if allocator.admit(request)]
    full = _stage(allocator, f"{scenario.num_offered} requests offered")
    for request in admitted[::2]:
        allocator.free(request)
    checkerboard = _stage(allocator, "every other one freed")
    placed = allocator.admit(latecomer)
    paged = allocator if isinstance(allocator, PagedAllocator) else None
    return Outcome(
        name=allocator.name,
        block_size=paged.block_size if paged else None,
        num_slots=scenario.num_slots,
        num_admitted=len(admitted),
        num_freed=len(admitted[::2]),
        full=full,
        checkerboard=checkerboard,
        end=_stage(allocator, f"a request of {scenario.latecomer_tokens} comes"),
        latecomer_placed=placed,
        num_latecomer_blocks=paged.num_blocks(latecomer) if paged and placed else None,
    )


def _stage(allocator: Allocator, title: str) -> Stage:
    return Stage(
        title,
        allocator.num_reserved_slots,
        allocator.num_live_slots,
        allocator.largest_hole,
        allocator.strip(),
    )
