"""The reference scenario drawn: the memory act by act, and the checkerboard after the frees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hf_paged.simulation.memory_strip import Segment, SlotState
from hf_paged.simulation.palette import INK, LATECOMER, LOOKS, REFUSED, Look, bars, legend, sheet
from hf_paged.simulation.reference_scenario import Outcome, ReferenceResult, Stage

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_reference"]

_ACT_HEIGHT, _ACT_GAP = 0.72, 1.0
_NUM_MAP_ROWS = 13


def draw_reference(result: ReferenceResult, path: Path) -> None:
    """Draw every allocator's memory after each act, and as a map after the frees.

    Args:
        result: of the reference scenario.
        path: of the picture; its suffix says the format.

    Raises:
        ConfigurationError: the path cannot be written.
    """
    outcomes, scenario = result.outcomes, result.scenario
    num_map_rows = -(-len(outcomes) // 3)
    heights = [1.35 * len(outcomes) + 0.8, 2.1 * num_map_rows + 0.8]
    with sheet(path, 11, sum(heights)) as figure:
        upper, lower = figure.subfigures(2, 1, squeeze=False, height_ratios=heights)[:, 0]
        upper.set_facecolor("white")
        lower.set_facecolor("white")
        acts = upper.subplots(len(outcomes), 1, sharex=True, squeeze=False)[:, 0]
        for axes, outcome in zip(acts, outcomes, strict=True):
            _draw_acts(axes, outcome, result)
        acts[-1].set_xlabel("slot")
        upper.suptitle(
            f"The same requests in the same {scenario.num_slots} token slots", fontsize=12
        )
        maps = lower.subplots(num_map_rows, 3, squeeze=False).flatten()
        for axes in maps:
            axes.set_axis_off()
        for axes, outcome in zip(maps, outcomes, strict=False):
            _draw_map(axes, outcome)
        lower.suptitle("After every other request is freed, row by row", fontsize=12)
        states = (SlotState.USED, SlotState.RESERVED, SlotState.HOLE)
        legend(figure, [*(LOOKS[state] for state in states), LATECOMER, REFUSED])


def _draw_acts(axes: Axes, outcome: Outcome, result: ReferenceResult) -> None:
    scenario = result.scenario
    num_refused = scenario.num_offered - outcome.num_admitted
    verdict = "placed" if outcome.latecomer_placed else "refused"
    acts = (
        (outcome.full, f"{outcome.num_admitted} in, {num_refused} refused"),
        (outcome.checkerboard, f"{outcome.num_free_slots} free, hole {_hole(outcome)}"),
        (outcome.end, f"{scenario.latecomer_tokens} {verdict}"),
    )
    margin = outcome.num_slots // 80
    for row, (stage, note) in enumerate(acts):
        for look, parts in _looks(stage, outcome):
            bars(axes, parts, -row * _ACT_GAP, _ACT_HEIGHT, look)
        x = outcome.num_slots + margin
        if stage is outcome.end and not outcome.latecomer_placed:
            outside = Segment(x, scenario.latecomer_tokens, SlotState.HOLE)
            bars(axes, [outside], -row * _ACT_GAP, _ACT_HEIGHT, REFUSED)
            x += scenario.latecomer_tokens + margin
        axes.text(x, -row * _ACT_GAP + _ACT_HEIGHT / 2, note, va="center", fontsize=8.5, color=INK)
    middles = [-row * _ACT_GAP + _ACT_HEIGHT / 2 for row in range(len(acts))]
    axes.set_yticks(middles, [stage.title for stage, _ in acts], fontsize=8.5)
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, outcome.num_slots * 1.28)
    axes.set_xticks(range(0, outcome.num_slots + 1, _tick(outcome.num_slots)))
    axes.set_title(outcome.label, loc="left", fontsize=10, fontweight="bold")
    axes.spines[:].set_visible(False)


def _looks(stage: Stage, outcome: Outcome) -> Iterator[tuple[Look, list[Segment]]]:
    for state, look in LOOKS.items():
        parts = [part for part in stage.strip if part.state is state]
        if parts:
            yield look, parts
    if stage is outcome.end:
        yield LATECOMER, outcome.latecomer_segments()


def _draw_map(axes: Axes, outcome: Outcome) -> None:
    width = -(-outcome.num_slots // _NUM_MAP_ROWS)
    for state, look in LOOKS.items():
        parts = [part for part in outcome.checkerboard.strip if part.state is state]
        for row in range(_NUM_MAP_ROWS):
            bars(axes, _row_of(parts, row * width, width), -row - 1, 1, look)
    axes.set_xlim(-2, width + 2)
    axes.set_ylim(-_NUM_MAP_ROWS - 0.1, 0.1)
    axes.set_title(
        f"{outcome.label}: {outcome.num_free_slots} free, largest hole {_hole(outcome)}",
        fontsize=9,
    )


def _row_of(parts: Sequence[Segment], first: int, width: int) -> list[Segment]:
    """Cut out the slots of one row; x counts from its first slot."""
    row = []
    for part in parts:
        start = max(part.start, first)
        end = min(part.start + part.num_slots, first + width)
        if start < end:
            row.append(Segment(start - first, end - start, part.state))
    return row


def _hole(outcome: Outcome) -> int:
    return outcome.checkerboard.largest_hole


def _tick(num_slots: int) -> int:
    """Return a round distance that gives four to nine ticks."""
    step = 1
    while num_slots // step > 9:
        step = step * 10 // 4 if str(step)[0] == "4" else step * 2
    return step
