"""What one allocator made of a stream of requests."""

from __future__ import annotations

from dataclasses import dataclass, field

from hf_paged.simulation.memory_strip import Segment

__all__ = ["Moment", "ServingResult", "Timeline"]

_MAX_MOMENTS = 320
"""More columns than this no picture shows."""


@dataclass(frozen=True)
class Moment:
    """The memory at the end of one step.

    Attributes:
        step: counted from 0.
        strip: the whole memory.
        num_waiting: requests in the queue, those that had to step back included.
        num_refused: requests refused up to this step.
    """

    step: int
    strip: list[Segment]
    num_waiting: int
    num_refused: int


class Timeline:
    """Moments at equal distances, however long the simulation turns out to be."""

    def __init__(self) -> None:
        self.moments: list[Moment] = []
        self.num_steps_between = 1

    def wants(self, step: int) -> bool:
        """Whether this step is one of the moments."""
        return step % self.num_steps_between == 0

    def record(self, moment: Moment) -> None:
        """Keep a moment; when there are too many, every other one goes."""
        self.moments.append(moment)
        if len(self.moments) > _MAX_MOMENTS:
            del self.moments[1::2]
            self.num_steps_between *= 2


@dataclass
class ServingResult:
    """Figures of one allocator over the whole stream.

    Attributes:
        name: of the allocator.
        block_size: slots a block; None if it has no blocks.
        num_slots: the budget.
        num_requests: in the stream.
        num_admitted: requests that ran at all.
        num_finished: requests that got all their tokens.
        num_refused: requests that an empty memory could not hold.
        num_waiting: requests still waiting or running when the step limit came.
        num_steps: forwards, idle ones included.
        num_output_tokens: tokens generated, by all samples.
        peak_reserved_slots: most slots that were unavailable to others.
        peak_live_slots: most slots that held a token.
        peak_running: most requests that ran at once.
        peak_waiting: most requests that waited at once.
        num_preemptions: times a request stepped back, its tokens dropped and computed again.
        num_recomputed_tokens: tokens that were computed again.
        num_swaps: times a request stepped back, its tokens copied out and in again.
        num_swapped_slots: tokens copied out.
        peak_host_slots: most tokens that were outside at once.
        counters: what only this allocator counts, by name with its unit.
        timeline: empty unless it was asked for.
    """

    name: str
    block_size: int | None
    num_slots: int
    num_requests: int
    num_admitted: int = 0
    num_finished: int = 0
    num_refused: int = 0
    num_waiting: int = 0
    num_steps: int = 0
    num_output_tokens: int = 0
    peak_reserved_slots: int = 0
    peak_live_slots: int = 0
    peak_running: int = 0
    peak_waiting: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_swaps: int = 0
    num_swapped_slots: int = 0
    peak_host_slots: int = 0
    counters: dict[str, int] = field(default_factory=dict)
    timeline: list[Moment] = field(default_factory=list, repr=False)
    _sum_reserved_slots: int = 0
    _sum_live_slots: int = 0
    _sum_waiting_steps: int = 0

    @property
    def label(self) -> str:
        """Name and block size, as a table shows them."""
        return self.name if self.block_size is None else f"{self.name} ({self.block_size})"

    @property
    def waste(self) -> float:
        """Part of the reserved slots that held no token, over all steps."""
        if not self._sum_reserved_slots:
            return 0.0
        return 1 - self._sum_live_slots / self._sum_reserved_slots

    @property
    def use_of_budget(self) -> float:
        """Part of the budget that held a token, over all steps."""
        return self._sum_live_slots / (self.num_steps * self.num_slots) if self.num_steps else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Tokens generated in a step, on average."""
        return self.num_output_tokens / self.num_steps if self.num_steps else 0.0

    @property
    def mean_wait_steps(self) -> float:
        """Steps that a request spent in the queue, on average."""
        return self._sum_waiting_steps / self.num_requests

    def observe(self, reserved: int, live: int, num_running: int, num_waiting: int) -> None:
        """Take in the end of one step; slots, slots, requests, requests."""
        self.num_steps += 1
        self._sum_reserved_slots += reserved
        self._sum_live_slots += live
        self._sum_waiting_steps += num_waiting
        self.peak_reserved_slots = max(self.peak_reserved_slots, reserved)
        self.peak_live_slots = max(self.peak_live_slots, live)
        self.peak_running = max(self.peak_running, num_running)
        self.peak_waiting = max(self.peak_waiting, num_waiting)

    def figures(self) -> dict[str, object]:
        """Return every figure, ready for JSON; the timeline is left out."""
        public = {
            name: value
            for name, value in vars(self).items()
            if not name.startswith("_") and name not in ("counters", "timeline")
        }
        return public | {
            "waste": round(self.waste, 6),
            "use_of_budget": round(self.use_of_budget, 6),
            "tokens_per_step": round(self.tokens_per_step, 4),
            "mean_wait_steps": round(self.mean_wait_steps, 4),
            **self.counters,
        }
