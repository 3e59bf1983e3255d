"""A served stream in tables and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich import box
from rich.table import Table

from hf_paged.simulation.serving_result import ServingResult

__all__ = ["serving_json", "serving_tables"]

_Column = tuple[str, Callable[[ServingResult], str]]


def _counter(name: str) -> Callable[[ServingResult], str]:
    return lambda result: str(result.counters[name]) if name in result.counters else ""


_THROUGH: tuple[_Column, ...] = (
    ("admitted", lambda r: str(r.num_admitted)),
    ("finished", lambda r: str(r.num_finished)),
    ("refused", lambda r: str(r.num_refused)),
    ("not done", lambda r: str(r.num_waiting)),
    ("mean wait\nsteps", lambda r: f"{r.mean_wait_steps:.0f}"),
    ("steps", lambda r: str(r.num_steps)),
    ("tokens\na step", lambda r: f"{r.tokens_per_step:.1f}"),
)
_MEMORY: tuple[_Column, ...] = (
    ("most at\nonce", lambda r: str(r.peak_running)),
    ("peak used\nslots", lambda r: str(r.peak_reserved_slots)),
    ("waste", lambda r: f"{r.waste:.1%}"),
    ("use of\nbudget", lambda r: f"{r.use_of_budget:.0%}"),
    ("preempted", lambda r: str(r.num_preemptions)),
    ("computed\nagain", lambda r: str(r.num_recomputed_tokens)),
    ("swapped\nout", lambda r: str(r.num_swaps)),
    ("tokens\ncopied out", lambda r: str(r.num_swapped_slots)),
)
_OWN: tuple[_Column, ...] = (
    ("moves", _counter("num_moves")),
    ("tokens\nmoved", _counter("num_moved_slots")),
    ("tokens found\nin the pool", _counter("num_prefix_hit_tokens")),
    ("copies\non write", _counter("num_cow_copies")),
    ("blocks\nevicted", _counter("num_evicted_blocks")),
)


def serving_tables(results: Sequence[ServingResult]) -> list[Table]:
    """Return what got through, what memory it took, and what allocators did for it."""
    own = [result for result in results if result.counters]
    return [
        _table("What got through", _THROUGH, results),
        _table("What it took", _MEMORY, results),
        _table("What else was done", _OWN, own),
    ]


def serving_json(results: Sequence[ServingResult]) -> dict[str, object]:
    """Return every figure, ready for JSON; names carry their units."""
    return {"scenario": "serving", "allocators": [result.figures() for result in results]}


def _table(title: str, columns: Sequence[_Column], results: Sequence[ServingResult]) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
        pad_edge=False,
    )
    table.add_column("allocator", no_wrap=True)
    for header, _ in columns:
        table.add_column(header, justify="right")
    for result in results:
        table.add_row(result.label, *(text(result) for _, text in columns))
    return table
