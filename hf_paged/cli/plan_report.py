"""The figures of ``hf-paged plan``, as data and as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from hf_paged.cli.kv_footprint import BlockPlan
from hf_paged.cli.planned_model import PlannedModel

__all__ = ["make_report", "print_report"]

SWEEP = (8, 16, 32, 64, 128)
"""Block sizes that are compared, in tokens."""


def make_report(
    subject: PlannedModel, num_bytes: int, lengths: Sequence[int], max_length: int, block_size: int
) -> dict[str, Any]:
    """Return every figure of the plan; sizes are bytes, lengths are tokens."""
    footprint = subject.footprint
    plans = {}
    if footprint.is_uniform:
        sizes = sorted({*SWEEP, block_size})
        plans = {size: BlockPlan(footprint, size, num_bytes) for size in sizes}
    blocks = plans.get(block_size)

    def row(group: Sequence[int]) -> dict[str, Any]:
        dynamic = footprint.visible_bytes(max(group))
        static = footprint.visible_bytes(max_length)
        found: dict[str, Any] = {
            "lengths": list(group),
            "dynamic": {"bytes_per_sequence": dynamic, "sequences": num_bytes // dynamic},
            "static": {"bytes_per_sequence": static, "sequences": num_bytes // static},
            "paged": None,
        }
        if blocks is not None:
            paged = round(sum(map(blocks.bytes_of, group)) / len(group))
            found["paged"] = {
                "bytes_per_sequence": paged,
                "sequences": blocks.num_sequences(group),
            }
        return found

    return {
        "model": subject.name,
        "dtype": str(subject.dtype).removeprefix("torch."),
        "layers": footprint.num_layers,
        "storing_layers": len(footprint.layers),
        "sliding_layers": sum(window is not None for window in footprint.windows),
        "windows": sorted({window for window in footprint.windows if window is not None}),
        "bytes_per_token": footprint.bytes_per_token,
        "bytes_per_old_token": footprint.bytes_per_old_token,
        "memory_bytes": num_bytes,
        "tokens_that_fit": num_bytes // footprint.bytes_per_token,
        "max_length": max_length,
        "patchable": subject.is_patchable,
        "rows": [row([length]) for length in lengths],
        "mixed": row(lengths) if len(lengths) > 1 else None,
        "block_size": block_size,
        "block_sizes": [_block_size_row(plan, lengths) for plan in plans.values()],
        "notes": _notes(subject, lengths, blocks),
    }


def _block_size_row(blocks: BlockPlan, lengths: Sequence[int]) -> dict[str, Any]:
    # Round lengths fill their blocks by chance: every length up to a largest block below them.
    ragged = [n for length in lengths for n in range(length, max(0, length - max(SWEEP)), -1)]
    wasted = sum(map(blocks.wasted_bytes_of, lengths))
    return {
        "block_size": blocks.block_size,
        "bytes_per_block": blocks.bytes_per_block,
        "blocks": blocks.num_blocks,
        "sequences": blocks.num_sequences(lengths),
        "wasted_bytes_per_sequence": round(wasted / len(lengths)),
        "wasted_share": wasted / sum(map(blocks.bytes_of, lengths)),
        "ragged_wasted_share": sum(map(blocks.wasted_bytes_of, ragged))
        / sum(map(blocks.bytes_of, ragged)),
    }


def _notes(subject: PlannedModel, lengths: Sequence[int], blocks: BlockPlan | None) -> list[str]:
    notes = list(subject.notes)
    footprint = subject.footprint
    if subject.refusal is not None:
        notes.append(
            f"hf_paged.patch refuses this model, a paged figure is what it would take: "
            f"{subject.refusal}"
        )
    if blocks is None:
        notes.append("no paged figures: the layers store different numbers of bytes for a token")
    elif blocks.num_groups > 1:
        notes.append(
            f"layers of equal windows share blocks: {blocks.num_groups} groups of "
            f"{blocks.bytes_per_block // blocks.block_size} bytes a token each"
        )
    if any(window is not None for window in footprint.windows):
        notes.append(
            "until the step after a prompt, the sliding layers of a DynamicCache still hold all of "
            "it; a paged cache stores the end of it only"
        )
    if subject.max_positions is not None and max(lengths) > subject.max_positions:
        notes.append(f"the config allows {subject.max_positions} tokens in a sequence, not more")
    return notes


def print_report(report: dict[str, Any]) -> None:
    """Print what :func:`make_report` returned; where output is no terminal, 100 columns wide."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=100)
    for line in _head(report):
        console.print(line, markup=False)
    console.print(_sequences(report))
    if report["block_sizes"]:
        console.print(_block_sizes(report))
    for note in report["notes"]:
        console.print(f"Note: {note}.".replace("..", "."), markup=False)


def _head(report: dict[str, Any]) -> list[str]:
    sliding = report["sliding_layers"]
    windows = ", ".join(map(str, report["windows"]))
    kinds = f" ({sliding} of them with a window of {windows} tokens)" if sliding else ""
    per_token, old = report["bytes_per_token"], report["bytes_per_old_token"]
    behind = f", {_size(old)} of one that has left every window" if sliding else ""
    return [
        f"{report['model']}, {report['dtype']}",
        f"K and V in {report['storing_layers']} of {report['layers']} layers{kinds}",
        f"{_size(per_token)} a token ({per_token} bytes){behind}",
        f"{report['tokens_that_fit']:,} tokens fit into {_size(report['memory_bytes'])}",
    ]


def _sequences(report: dict[str, Any]) -> Table:
    table = Table(title="Sequences that fit, and what each of them takes", title_justify="left")
    table.add_column("tokens in each")
    for name in ("DynamicCache", "StaticCache", "paged"):
        table.add_column(name, justify="right")
        table.add_column("each", justify="right")
    mixed = report["mixed"]
    for row in (*report["rows"], *([mixed] if mixed else [])):
        cells = []
        for name in ("dynamic", "static", "paged"):
            cache = row[name]
            cells.append("-" if cache is None else f"{cache['sequences']:,}")
            cells.append("-" if cache is None else _size(cache["bytes_per_sequence"]))
        table.add_row("all of these" if row is mixed else str(row["lengths"][0]), *cells)
    table.caption = f"StaticCache reserves {report['max_length']} tokens for each."
    if mixed:
        table.caption += " Last row: equal shares in one batch, padded by DynamicCache."
    table.caption_justify = "left"
    return table


def _block_sizes(report: dict[str, Any]) -> Table:
    table = Table(title="Block sizes", title_justify="left")
    names = ("block size", "bytes", "blocks", "sequences", "waste in each", "share", "if ragged")
    for name in names:
        table.add_column(name, justify="right")
    for row in report["block_sizes"]:
        table.add_row(
            f"{row['block_size']}",
            _size(row["bytes_per_block"]),
            f"{row['blocks']:,}",
            f"{row['sequences']:,}",
            _size(row["wasted_bytes_per_sequence"]),
            f"{row['wasted_share']:.1%}",
            f"{row['ragged_wasted_share']:.1%}",
            style="bold" if row["block_size"] == report["block_size"] else None,
        )
    table.caption = (
        "Waste: slots without a token that a query needs. Ragged: lengths a bit shorter."
    )
    table.caption_justify = "left"
    return table


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"
