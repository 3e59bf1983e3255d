"""The largest batch that a variant finishes in a memory budget, found by trying."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jobs import Jobs


def find_largest_batch(
    jobs: Jobs, job: dict[str, Any], first: int, on_probe: Callable[[int], None]
) -> tuple[int, list[dict[str, Any]]]:
    """Double the batch until it fails, then bisect; return (largest batch, all probes).

    Args:
        jobs: runs them.
        job: variant, budget and the rest; `num_rows` is added.
        first: batch to begin with.
        on_probe: told each batch before it is tried.
    """
    probes: list[dict[str, Any]] = []

    def fits(num_rows: int) -> bool:
        on_probe(num_rows)
        probes.append(jobs.run(job | {"workload": "ragged_batch", "num_rows": num_rows}))
        return probes[-1]["status"] == "ok"

    good, bad = 0, first
    while fits(bad) and bad < 1024:
        good, bad = bad, bad * 2
    while bad - good > 1:
        middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good, probes
