"""A picture of the memory at one moment: every slot of the budget, from the first to the last."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

__all__ = ["Segment", "SlotState", "complete"]


class SlotState(Enum):
    """What a slot is good for at the moment."""

    USED = "used"
    SHARED = "shared"
    RESERVED = "reserved"
    CACHED = "cached"
    HOLE = "hole"


@dataclass(frozen=True)
class Segment:
    """Neighbouring slots in the same state.

    Attributes:
        start: first slot.
        num_slots: how many.
        state: ``USED`` holds a token, ``SHARED`` one that several sequences read, ``RESERVED``
            holds nothing and nobody else may have it, ``CACHED`` holds a prefix and gives way,
            ``HOLE`` is free.
    """

    start: int
    num_slots: int
    state: SlotState


def complete(segments: Iterable[Segment], num_slots: int) -> list[Segment]:
    """Put holes between the segments and after the last; merge neighbours of one state.

    Args:
        segments: ascending, none overlapping; empty ones are left out.
        num_slots: slots of the whole strip.
    """
    merged: list[Segment] = []
    for segment in _with_holes(segments, num_slots):
        if merged and merged[-1].state is segment.state:
            last = merged.pop()
            segment = Segment(last.start, last.num_slots + segment.num_slots, last.state)
        merged.append(segment)
    return merged


def _with_holes(segments: Iterable[Segment], num_slots: int) -> Iterator[Segment]:
    end = 0
    for segment in segments:
        if segment.start > end:
            yield Segment(end, segment.start - end, SlotState.HOLE)
        if segment.num_slots:
            yield segment
        end = segment.start + segment.num_slots
    if num_slots > end:
        yield Segment(end, num_slots - end, SlotState.HOLE)
