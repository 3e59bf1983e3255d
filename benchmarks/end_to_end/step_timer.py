"""Where the time of a patched model goes, by timers around four seams."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from contenders import Patched
from workloads import Workload

from hf_paged.cache.step import PagedStep

PARTS = ("linear layers", "attention", "rest of the forward", "outside of the forward")


class StepTimer:
    """Adds up the time of linear layers, paged attention and the layers' forward, in a `with`.

    Classes are wrapped, not objects: a forward replaced on a module would change what paging does.

    Args:
        model: a patched one.
    """

    def __init__(self, model: Any) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        base_class = type(model.base_model)
        base_class = getattr(base_class, "_hf_paged_original_class", base_class)
        self._seams: list[tuple[Any, str, str]] = [
            (torch.nn.Linear, "forward", "linear"),
            (PagedStep, "update", "attention"),
            (PagedStep, "attend", "attention"),
            (base_class, "forward", "base"),
        ]
        self._head = model.get_output_embeddings()
        self._originals: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> StepTimer:
        for owner, name, key in self._seams:
            original = vars(owner)[name]
            self._originals.append((owner, name, original))
            setattr(owner, name, self._timed(original, key))
        return self

    def __exit__(self, *exc: object) -> None:
        for owner, name, original in self._originals:
            setattr(owner, name, original)
        self._originals.clear()

    def _timed(self, function: Callable[..., Any], key: str) -> Callable[..., Any]:
        def timed(target: Any, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(target, *args, **kwargs)
            finally:
                self.seconds["head" if target is self._head else key] += time.perf_counter() - start

        return timed

    def parts(self, total: float) -> dict[str, float]:
        """Split the ``total`` seconds of a run into PARTS."""
        taken = self.seconds
        if not taken["base"] or not taken["attention"]:
            raise RuntimeError("the patched model went past the timed seams")
        return dict(
            zip(
                PARTS,
                (
                    taken["linear"] + taken["head"],
                    taken["attention"],
                    taken["base"] - taken["linear"] - taken["attention"],
                    total - taken["base"] - taken["head"],
                ),
                strict=True,
            )
        )


def profile(patched: Patched, work: Workload) -> dict[str, dict[str, float]]:
    """Return the seconds of each part: "first_token", and "step", one decoding step after it.

    A run that ends with the first token is taken off a whole one; what is left are the steps.
    """
    runs = []
    for num_new in (1, work.max_new_tokens):
        patched.forget()
        with StepTimer(patched.model) as timer:
            start = time.perf_counter()
            patched.generate(work, num_new)
            runs.append(timer.parts(time.perf_counter() - start))
    first, whole = runs
    num_steps = work.max_new_tokens - 1
    return {
        "first_token": first,
        "step": {part: (whole[part] - first[part]) / num_steps for part in PARTS},
    }
