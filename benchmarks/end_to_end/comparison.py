"""One suite, run by every contender in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from computed_tokens import watched_forwards
from contenders import Contender, Patched, Unsupported
from floor import LinearFloor
from step_timer import profile
from suites import num_needed_tokens, num_new_tokens, num_rows
from workloads import Workload


class Comparison:
    """Runs a suite and keeps the figures.

    Args:
        work: what to generate.
        contenders: by name.
        token_bytes: K and V of one token in all layers.
    """

    def __init__(self, work: Workload, contenders: dict[str, Contender], token_bytes: int) -> None:
        self._work, self._contenders, self._token_bytes = work, contenders, token_bytes
        self._floor: LinearFloor | None = None
        self._floor_seconds: list[float] = []
        self._profile: dict[str, Any] | None = None
        self._tokens: dict[str, torch.Tensor] = {}
        self._seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
        self._results: dict[str, dict[str, Any]] = {
            name: {"suite": work.name, "variant": name, "status": "ok"} for name in contenders
        }

    def num_runs(self, repeats: int) -> int:
        """Return how often :meth:`run` advances its progress bar."""
        return len(self._contenders) * (repeats + 1)

    def run(self, repeats: int, progress: Any, *, is_profiled: bool) -> None:
        """Warm all contenders up, then let them take turns.

        Args:
            repeats: turns of each contender, and of the floor.
            progress: a tqdm bar.
            is_profiled: also split the time of the patched model.
        """
        for action in (self._warm_up, *[self._measure] * repeats):
            for name in self._contenders:
                progress.set_description(f"{self._work.name}: {name}")
                self._attempt(name, action)
                progress.update()
            if action == self._measure and self._floor is not None:
                self._floor_seconds.append(self._floor.measure())
        patched = self._contenders.get("patched")
        if is_profiled and isinstance(patched, Patched):
            self._profile = profile(patched, self._work)

    def about(self) -> dict[str, Any]:
        """Return what is the same for all contenders."""
        work, floor = self._work, self._floor_seconds
        return {
            "suite": work.name,
            "title": work.title,
            "prompts": len(work.prompts),
            "prompt_tokens": sum(map(len, work.prompts)),
            "decoded_rows": num_rows(work),
            "new_tokens": work.max_new_tokens,
            "needed_tokens": num_needed_tokens(work),
            "floor_seconds": statistics.median(floor) if floor else None,
            "profile": self._profile,
        }

    def results(self) -> list[dict[str, Any]]:
        """Return the figures of each contender, and their ratios to the unpatched model's."""
        for name, result in self._results.items():
            if result["status"] == "ok":
                result |= self._figures(name)
        base = self._results.get("unpatched", {})
        compared = ("tokens_per_s", "first_token_seconds", "step_seconds")
        compared += ("computed_tokens", "kv_peak_bytes")
        for result in self._results.values():
            result["ratios"] = {
                key: result[key] / base[key]
                for key in compared
                if base.get(key) and result.get(key) is not None
            }
        return list(self._results.values())

    def _attempt(self, name: str, action: Callable[[str, Contender], None]) -> None:
        result = self._results[name]
        if result["status"] != "ok":
            return
        try:
            action(name, self._contenders[name])
        except Unsupported as error:
            result |= {"status": "unsupported", "error": str(error)}
        except Exception as error:
            message = " ".join(f"{type(error).__name__}: {error}".split())
            result |= {"status": "failed", "error": message[:400]}

    def _warm_up(self, name: str, contender: Contender) -> None:
        """Run once, count what is computed."""
        work = self._work
        contender.forget()
        with watched_forwards(contender.model) as forwards:
            tokens = contender.generate(work, work.max_new_tokens)
        expected = len(work.prompts) * work.num_samples, work.max_new_tokens
        if tokens.shape != expected:
            raise RuntimeError(f"expected {expected} new tokens, got {tuple(tokens.shape)}")
        self._results[name] |= {
            "rows": expected[0],
            "forwards": len(forwards),
            "computed_tokens": sum(forwards),
            "kv_peak_bytes": contender.kv_peak_bytes(work, self._token_bytes),
        }
        if name == "patched":
            self._floor = LinearFloor(
                contender.model, forwards, num_rows(work), work.max_new_tokens
            )

    def _measure(self, name: str, contender: Contender) -> None:
        taken = []
        for num_new in (1, self._work.max_new_tokens):
            contender.forget()
            start = time.perf_counter()
            self._tokens[name] = contender.generate(self._work, num_new)
            taken.append(time.perf_counter() - start)
        self._seconds[name].append((taken[0], taken[1]))

    def _figures(self, name: str) -> dict[str, Any]:
        work = self._work
        first = [one for one, _ in self._seconds[name]]
        whole = [every for _, every in self._seconds[name]]
        seconds = statistics.median(whole)
        expected = self._tokens.get("unpatched")
        if name == "unpatched" or (name == "generate_batch" and work.num_samples > 1):
            expected = None  # itself; or another use of the random numbers
        equal = None if expected is None else (self._tokens[name] == expected).all(1).sum().item()
        return {
            "seconds": seconds,
            "all_seconds": whole,
            "tokens_per_s": num_new_tokens(work) / seconds,
            "first_token_seconds": statistics.median(first),
            "all_first_token_seconds": first,
            "step_seconds": (seconds - statistics.median(first)) / (work.max_new_tokens - 1),
            "rows_equal": equal,
        }
