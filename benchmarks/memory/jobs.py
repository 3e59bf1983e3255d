"""Sends jobs to a `child.py` and survives what becomes of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from process_memory import ENVIRONMENT


class Jobs:
    """Runs each job in a process of its own, forked from one that holds the model."""

    def __init__(self, model: str, num_threads: int, log: Path | None = None) -> None:
        self._command = [sys.executable, str(Path(__file__).parent / "child.py")]
        self._command += [model, str(num_threads)]
        self._log = log
        self.about: dict[str, Any] = {}
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if self._log is None else self._log.open("a"),
            text=True,
            env=os.environ | ENVIRONMENT,
        )
        line = self._read()
        if not line:
            raise SystemExit("the child could not load the model: run child.py by itself")
        self.about = json.loads(line)

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Return the job and its result; `status` is ok, unsupported, failed or died."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
            line = self._read()
        except BrokenPipeError:
            line = ""
        if line:
            return job | json.loads(line)
        code = self._process.wait()
        self._start()
        return job | {"status": "died", "error": f"with its parent, exit code {code}"}

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
