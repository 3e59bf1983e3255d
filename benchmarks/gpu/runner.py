"""Runs checks one after the other, each by itself, inside a time limit; says what came of them."""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

GRACE = 60.0
"""Seconds beyond the limit after which a check that still runs counts as hung."""

STYLES = {"pass": "green", "fail": "bold red", "skip": "yellow"}


class Skip(Exception):
    """The check does not apply here; its message says why."""


class CheckFailed(Exception):
    """What was measured is not what was expected."""


def expect(condition: object, message: str) -> None:
    """Fail the check unless ``condition`` holds."""
    if not condition:
        raise CheckFailed(message)


@dataclass
class Machine:
    """Where checks run, and what they leave for the report.

    Attributes:
        device: a CUDA device; a CPU, where Triton interprets.
        timings: figures of the timing checks.
    """

    device: torch.device
    timings: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    @contextmanager
    def no_host_sync(self) -> Iterator[None]:
        """Let torch raise wherever the host would wait for the device; a CPU has no such thing."""
        if not self.is_cuda:
            yield
            return
        self.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def sleep(self, milliseconds: float) -> None:
        """Keep the current stream busy for about that long, at some 2 GHz."""
        torch.cuda._sleep(int(milliseconds * 2e6))


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: as on the command line.
        run: returns a figure; raises :class:`Skip`, or anything else as a failure.
        needs_cuda: whether it is skipped on a CPU.
    """

    name: str
    run: Callable[[Machine], str]
    needs_cuda: bool = False


@dataclass
class Result:
    """What came of a check: "pass", "fail" or "skip", and a figure or a reason."""

    name: str
    status: str
    figure: str
    seconds: float = 0.0


class Runner:
    """Runs checks and reports them.

    Args:
        checks: in the order in which they run.
        machine: where.
        time_limit: seconds; a check does not start after them.
        json_file: what to write; None: nothing.
        facts: of the machine, for the JSON file.
    """

    def __init__(
        self,
        checks: Sequence[Check],
        machine: Machine,
        *,
        time_limit: float,
        json_file: Path | None = None,
        facts: dict[str, Any] | None = None,
    ) -> None:
        self.results: list[Result] = []
        self._checks = checks
        self._machine = machine
        self._time_limit = time_limit
        self._json_file = json_file
        self._facts = facts or {}
        self._start = time.perf_counter()
        self._progress = Console(stderr=True)
        self._lost: str | None = None

    def run(self) -> int:
        """Return the exit code."""
        watchdog = threading.Timer(self._time_limit + GRACE, self._give_up)
        watchdog.daemon = True
        watchdog.start()
        for number, check in enumerate(self._checks, start=1):
            label = f"[{number}/{len(self._checks)}] {check.name}"
            with self._progress.status(Text(label)):
                result = self._run_one(check)
            self.results.append(result)
            if not self._progress.is_terminal:
                print(f"{label}: {result.status}, {result.seconds:.1f} s", file=sys.stderr)
        watchdog.cancel()
        return self._report()

    def _run_one(self, check: Check) -> Result:
        start = time.perf_counter()
        if self._lost is not None:
            return Result(check.name, "fail", f"not run: {self._lost}")
        if check.needs_cuda and not self._machine.is_cuda:
            return Result(check.name, "skip", "needs a CUDA device")
        if start - self._start > self._time_limit:
            return Result(check.name, "skip", "out of time")
        torch.manual_seed(0)
        try:
            figure = check.run(self._machine)
            self._machine.synchronize()  # an error of a kernel shows here at the latest
            status = "pass"
        except Skip as reason:
            status, figure = "skip", str(reason)
        except Exception as error:
            traceback.print_exc()
            lines = str(error).strip().splitlines() or ["no message"]
            line = lines[0] if "CUDA" in lines[0] else lines[-1]  # CUDA goes on with advice
            status, figure = "fail", f"{type(error).__name__}: {line}"
            if isinstance(error, CheckFailed):
                figure = str(error)
        self._clean_up()
        return Result(check.name, status, figure, time.perf_counter() - start)

    def _clean_up(self) -> None:
        gc.collect()
        if not self._machine.is_cuda:
            return
        try:
            torch.cuda.set_sync_debug_mode("default")
            self._machine.synchronize()
            torch.cuda.empty_cache()
            torch.ones(1, device=self._machine.device).add_(1).item()
        except Exception as error:
            self._lost = f"the device is lost ({str(error).strip().splitlines()[0]})"

    def _give_up(self) -> None:
        """End a process whose main thread waits for the device and will wait for ever."""
        done = len(self.results)
        for check in self._checks[done:]:
            what = "still running, given up" if check is self._checks[done] else "not run"
            self.results.append(Result(check.name, "fail", what))
        sys.stdout.flush()
        code = self._report()
        sys.stdout.flush()
        os._exit(code)

    def _report(self) -> int:
        counts = {status: 0 for status in STYLES}
        table = Table(title=f"hf_paged on {self._machine.device}", title_justify="left")
        for header, options in (
            ("check", dict(no_wrap=True)),
            ("", {}),
            ("figure or reason", dict(overflow="fold")),
            ("s", dict(justify="right")),
        ):
            table.add_column(header, **options)  # type: ignore[arg-type]
        for result in self.results:
            counts[result.status] += 1
            table.add_row(
                result.name,
                Text(result.status, style=STYLES[result.status]),
                Text(result.figure),
                f"{result.seconds:.1f}",
            )
        console = Console()
        if not console.is_terminal:
            console = Console(width=140)
        console.print(table)
        if self._json_file is not None:
            written = {
                **self._facts,
                "device": str(self._machine.device),
                "seconds": time.perf_counter() - self._start,
                "passed": counts["pass"],
                "failed": counts["fail"],
                "skipped": counts["skip"],
                "checks": [asdict(result) for result in self.results],
                "timings": self._machine.timings,
            }
            self._json_file.write_text(json.dumps(written, indent=1, default=str) + "\n")
        print(f"passed={counts['pass']} failed={counts['fail']} skipped={counts['skip']}")
        return int(counts["fail"] > 0)
