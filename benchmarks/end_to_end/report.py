"""What people paste: a table for each suite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich import box
from rich.table import Table
from step_timer import PARTS

from hf_paged.cache.stats import human_bytes


def tables(data: dict[str, Any]) -> Iterator[Table]:
    """Yield a table for each suite of what `generate.py` writes, and one for each profile."""
    for suite in data["suites"]:
        results = [result for result in data["results"] if result["suite"] == suite["suite"]]
        yield suite_table(suite, results)
        if suite["profile"]:
            yield profile_table(suite)


def suite_table(suite: dict[str, Any], results: list[dict[str, Any]]) -> Table:
    floor = suite["floor_seconds"]
    caption = f"needed: {suite['needed_tokens']:,} tokens"
    if floor is not None:
        caption += f"; linear layers alone, for what patched computed: {floor:.2f} s"
    table = Table(
        title=f"{suite['suite']}: {suite['title']}, {suite['new_tokens']} new tokens each",
        title_justify="left",
        caption=caption,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
    )
    table.add_column()
    for name in (
        "tokens/s",
        "x unpatched",
        "first token",
        "ms a step",
        "computed",
        "KV peak",
        "x floor",
        "rows equal",
    ):
        table.add_column(name, justify="right")
    for result in results:
        if result["status"] != "ok":
            note = result["error"] if result["status"] == "failed" else "n/a"
            table.add_row(result["variant"], note)
            continue
        equal, peak = result["rows_equal"], result["kv_peak_bytes"]
        table.add_row(
            result["variant"],
            f"{result['tokens_per_s']:,.1f}",
            number(result["ratios"].get("tokens_per_s")),
            f"{result['first_token_seconds']:.2f} s",
            f"{1000 * result['step_seconds']:,.1f}",
            f"{result['computed_tokens']:,}",
            "" if peak is None else human_bytes(peak),
            number(None if floor is None else result["seconds"] / floor),
            "" if equal is None else f"{equal} of {result['rows']}",
        )
    return table


def profile_table(suite: dict[str, Any]) -> Table:
    first, step = suite["profile"]["first_token"], suite["profile"]["step"]
    table = Table(
        title=f"{suite['suite']}: where patched spends its time",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    table.add_column()
    for name in ("first token", "", "a decoding step", ""):
        table.add_column(name, justify="right")
    for part in (*PARTS, "all"):
        cells = [part]
        for times, unit in ((first, 1), (step, 1000)):
            whole = sum(times.values())
            seconds = times.get(part, whole)
            time = f"{seconds:.3f} s" if unit == 1 else f"{1000 * seconds:.2f} ms"
            cells += [time, f"{seconds / whole:.0%}"]
        table.add_row(*cells)
    return table


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
