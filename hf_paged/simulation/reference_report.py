"""The reference scenario in words, in a table and as JSON."""

from __future__ import annotations

from rich import box
from rich.table import Table

from hf_paged.simulation.reference_scenario import Outcome, ReferenceResult, Stage

__all__ = ["reference_json", "reference_lines", "reference_table"]


def reference_lines(result: ReferenceResult) -> list[str]:
    """Return the story, a line for each allocator; lengths in tokens, memory in slots."""
    scenario, static = result.scenario, result.static
    lines = [
        f"{len(scenario.lengths)} requests, mean {scenario.mean_tokens:.0f}, longest "
        f"{max(scenario.lengths)}, budget {scenario.num_slots}; the first {scenario.num_offered} "
        f"are offered, every other one is freed, then one of {scenario.latecomer_tokens} comes",
        f"{'static':<12}{scenario.num_slots} // {scenario.max_len} reservations of "
        f"{scenario.max_len}: holds {static.num_admitted} at {1 - static.full.waste:.0%} use",
    ]
    lines += [f"{o.label:<12}{_story(o, scenario.latecomer_tokens)}" for o in result.outcomes[1:]]
    if static.num_admitted:
        lines += [
            f"{outcome.num_admitted} / {static.num_admitted} = "
            f"{outcome.num_admitted / static.num_admitted:.1f} x the requests of static, "
            f"{outcome.label}"
            for outcome in result.paged
        ]
    return lines


def _story(outcome: Outcome, latecomer_tokens: int) -> str:
    fate = f"the {latecomer_tokens} {'placed' if outcome.latecomer_placed else 'refused'}"
    start = f"{outcome.num_admitted} admitted, {outcome.num_freed} freed, "
    if outcome.block_size is None:
        return (
            f"{start}{outcome.num_free_slots} slots free, largest hole "
            f"{outcome.checkerboard.largest_hole}: {fate}"
        )
    if outcome.num_latecomer_blocks is not None:
        fate += f" in {outcome.num_latecomer_blocks} blocks"
    before = outcome.checkerboard
    num_wasted = before.num_reserved_slots - before.num_live_slots
    return (
        f"{start}{fate}; {num_wasted} of {before.num_reserved_slots} slots wasted = "
        f"{before.waste:.1%}"
    )


def reference_table(result: ReferenceResult) -> Table:
    """Return the figures of every allocator side by side."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("allocator", no_wrap=True)
    for column in ("admitted", "waste\nwhen full", "free after\nthe frees", "largest\nhole"):
        table.add_column(column, justify="right")
    table.add_column(f"the {result.scenario.latecomer_tokens}")
    for outcome in result.outcomes:
        table.add_row(
            outcome.label,
            str(outcome.num_admitted),
            f"{outcome.full.waste:.1%}",
            str(outcome.num_free_slots),
            str(outcome.checkerboard.largest_hole),
            "placed" if outcome.latecomer_placed else "refused",
        )
    return table


def reference_json(result: ReferenceResult) -> dict[str, object]:
    """Return every figure, ready for JSON; lengths in tokens, memory in slots."""
    scenario = result.scenario
    return {
        "scenario": "reference",
        "num_requests": len(scenario.lengths),
        "mean_tokens": round(scenario.mean_tokens, 3),
        "longest_tokens": max(scenario.lengths),
        "num_slots": scenario.num_slots,
        "max_len": scenario.max_len,
        "num_offered": scenario.num_offered,
        "latecomer_tokens": scenario.latecomer_tokens,
        "allocators": [
            {
                "name": outcome.name,
                "block_size": outcome.block_size,
                "num_admitted": outcome.num_admitted,
                "num_freed": outcome.num_freed,
                "num_free_slots": outcome.num_free_slots,
                "latecomer_placed": outcome.latecomer_placed,
                "num_latecomer_blocks": outcome.num_latecomer_blocks,
                "full": _stage_json(outcome.full),
                "checkerboard": _stage_json(outcome.checkerboard),
                "end": _stage_json(outcome.end),
            }
            for outcome in result.outcomes
        ],
    }


def _stage_json(stage: Stage) -> dict[str, object]:
    return {
        "num_reserved_slots": stage.num_reserved_slots,
        "num_live_slots": stage.num_live_slots,
        "num_wasted_slots": stage.num_reserved_slots - stage.num_live_slots,
        "waste": round(stage.waste, 6),
        "largest_hole": stage.largest_hole,
    }
