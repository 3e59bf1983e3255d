"""How many tokens an ideal cache would hold: equal prefixes once, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def num_distinct_tokens(rows: Sequence[Sequence[int]]) -> int:
    """Return the number of different prefixes of `rows`, that is of nodes in their trie.

    >>> num_distinct_tokens([[1, 2, 3], [1, 2, 4], [2]])
    5
    """
    # In sorted order each row shares most with its neighbour. Arrays: lists of ints would be seen
    # in the process's peak.
    arrays = sorted(
        (np.asarray(row, dtype=np.int32) for row in rows), key=lambda row: row.tobytes()
    )
    total = 0
    previous = np.empty(0, dtype=np.int32)
    for row in arrays:
        length = min(len(row), len(previous))
        differs = np.flatnonzero(row[:length] != previous[:length])
        total += len(row) - (int(differs[0]) if len(differs) else length)
        previous = row
    return total
