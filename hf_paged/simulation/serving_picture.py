"""A served stream drawn: each allocator's memory over time, its queue below."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from hf_paged.simulation.memory_strip import Segment, SlotState
from hf_paged.simulation.palette import INK, LOOKS, REFUSED, WAITING, legend, sheet
from hf_paged.simulation.serving_result import ServingResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_serving"]

_NUM_COLUMNS, _NUM_ADDRESSES = 600, 160


def draw_serving(results: Sequence[ServingResult], path: Path) -> None:
    """Draw the memory of each allocator over time.

    Args:
        results: with timelines, at least one.
        path: of the picture; its suffix says the format.

    Raises:
        ConfigurationError: the path cannot be written.
    """
    num_steps = _num_steps_shown(results)
    most_waiting = max(1, *(result.peak_waiting for result in results))
    states = {part.state for r in results for moment in r.timeline for part in moment.strip}
    with sheet(path, 11, 1.75 * len(results) + 1) as figure:
        grid = figure.add_gridspec(2 * len(results), 1, height_ratios=[4, 1] * len(results))
        for row, result in enumerate(results):
            memory = figure.add_subplot(grid[2 * row])
            queue = figure.add_subplot(grid[2 * row + 1])
            _draw_memory(memory, result, num_steps)
            _draw_queue(queue, result, num_steps, most_waiting)
        queue.tick_params(labelbottom=True)
        queue.set_xlabel("step")
        figure.suptitle(
            f"{results[0].num_requests} requests in {results[0].num_slots} token slots: "
            "the memory over time, and who waits",
            fontsize=12,
        )
        looks = [look for state, look in LOOKS.items() if state in states]
        refused = [REFUSED] if any(result.num_refused for result in results) else []
        legend(figure, [*looks, WAITING, *refused], hatched=False)


def _draw_memory(axes: Axes, result: ServingResult, num_steps: int) -> None:
    from matplotlib.colors import ListedColormap

    order = list(LOOKS)
    steps = [moment.step for moment in result.timeline]
    num_columns = max(1, _NUM_COLUMNS * result.num_steps // num_steps)
    pixels = [_pixels(moment.strip, result.num_slots, order) for moment in result.timeline]
    columns = [
        pixels[max(0, bisect_right(steps, column * result.num_steps / num_columns) - 1)]
        for column in range(num_columns)
    ]
    if result.timeline:
        axes.imshow(
            list(zip(*columns, strict=True)),
            cmap=ListedColormap([look.colour for look in LOOKS.values()]),
            vmin=0,
            vmax=len(order) - 1,
            aspect="auto",
            origin="lower",
            interpolation="nearest",
            extent=(0, result.num_steps, 0, result.num_slots),
        )
    if result.num_steps < num_steps:
        axes.axvspan(result.num_steps, num_steps, facecolor="#F2F2F2", lw=0)
        axes.axvline(result.num_steps, color=INK, lw=0.8)
    axes.set_xlim(0, num_steps)
    axes.set_ylim(0, result.num_slots)
    axes.set_yticks([0, result.num_slots])
    axes.tick_params(labelbottom=False, labelsize=8)
    axes.set_ylabel("slot", fontsize=8, labelpad=-12)
    axes.set_title(_headline(result), loc="left", fontsize=9)
    goes_on = "goes on to" if result.num_steps > num_steps else "ends at"
    axes.set_title(f"{goes_on} step {result.num_steps}", loc="right", fontsize=9)


def _num_steps_shown(results: Sequence[ServingResult]) -> int:
    """Return how many steps fit on the sheet: the slowest must not squeeze all others."""
    steps = sorted((result.num_steps for result in results), reverse=True)
    return max(1, min(steps[0], int(1.15 * steps[1])) if len(steps) > 1 else steps[0])


def _draw_queue(axes: Axes, result: ServingResult, num_steps: int, most_waiting: int) -> None:
    steps = [moment.step for moment in result.timeline]
    waiting = [moment.num_waiting for moment in result.timeline]
    axes.fill_between(steps, waiting, step="post", color=WAITING.colour, lw=0)
    refusals = [
        after.step
        for before, after in pairwise(result.timeline)
        if after.num_refused > before.num_refused
    ]
    if result.timeline and result.timeline[0].num_refused:
        refusals.insert(0, result.timeline[0].step)
    heights = [most_waiting / 2] * len(refusals)
    axes.scatter(refusals, heights, marker="x", s=28, color=REFUSED.colour, clip_on=False)
    axes.set_xlim(0, num_steps)
    axes.set_ylim(0, most_waiting)
    axes.set_yticks([most_waiting])
    axes.tick_params(labelbottom=False, labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _headline(result: ServingResult) -> str:
    parts = [
        f"{result.tokens_per_step:.1f} tokens a step",
        f"{result.waste:.1%} of what is reserved is empty",
    ]
    for count, what in (
        (result.num_refused, "refused"),
        (result.num_preemptions, "stepped back"),
        (result.num_swaps, "swapped out"),
    ):
        if count:
            parts.append(f"{count} {what}")
    return f"{result.label}:  " + ",  ".join(parts)


def _pixels(strip: Sequence[Segment], num_slots: int, order: list[SlotState]) -> list[int]:
    """Return, for each pixel from the first slot up, the state that most of its slots are in."""
    shares = [dict[int, float]() for _ in range(_NUM_ADDRESSES)]
    height = num_slots / _NUM_ADDRESSES
    for part in strip:
        state, end = order.index(part.state), part.start + part.num_slots
        first, last = int(part.start / height), min(int(end / height), _NUM_ADDRESSES - 1)
        for pixel in range(first, last + 1):
            share = min(end, (pixel + 1) * height) - max(part.start, pixel * height)
            shares[pixel][state] = shares[pixel].get(state, 0.0) + share
    return [max(share, key=lambda state: share[state]) for share in shares]
