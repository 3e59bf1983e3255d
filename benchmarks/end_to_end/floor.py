"""The time of a model's linear layers alone: what no way to keep K and V can save."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

CHUNK = 2048
"""Most tokens that go through a layer at a time."""

SMALL = 256
"""Up to so many tokens a pass is short, and is taken five times."""


class LinearFloor:
    """Runs every ``nn.Linear`` of a model, one after the other, over random inputs.

    Args:
        model: its output embedding counts only for rows whose logits are needed.
        forwards: tokens of each forward.
        num_rows: rows whose logits each step needs.
        num_steps: new tokens of a row.
    """

    def __init__(self, model: Any, forwards: Sequence[int], num_rows: int, num_steps: int) -> None:
        head = model.get_output_embeddings()
        linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
        self._head = [head]
        self._body = [linear for linear in linears if linear is not head]
        self._sizes: Counter[int] = Counter()
        for size in forwards:
            self._sizes[CHUNK] += size // CHUNK
            self._sizes[size % CHUNK] += 1
        self._num_rows, self._num_steps = num_rows, num_steps

    @torch.no_grad()
    def measure(self) -> float:
        """Return the seconds of all forwards; each number of tokens is timed once."""
        seconds = self._num_steps * _pass_seconds(self._head, self._num_rows)
        for size, count in self._sizes.items():
            if size and count:
                seconds += count * _pass_seconds(self._body, size)
        return seconds


def _pass_seconds(linears: Sequence[Any], size: int) -> float:
    dtype = linears[0].weight.dtype
    widths = {linear.in_features for linear in linears}
    inputs = {width: torch.randn(size, width).to(dtype) for width in widths}
    taken = []
    for _ in range(5 if size <= SMALL else 1):
        start = time.perf_counter()
        for linear in linears:
            linear(inputs[linear.in_features])
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)
