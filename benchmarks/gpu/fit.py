"""Do the kernels fit devices that are not here? Compiled ahead of time, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from runner import Check, Machine, Skip, expect

SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes that one program may have (CUDA C++ Programming Guide, compute capabilities)."""


def shared_memory(machine: Machine, capability: int) -> str:
    if machine.is_cuda:
        raise Skip("the kernels are compiled for the device itself")
    script = Path(__file__).with_name("ahead_of_time.py")
    done = subprocess.run(
        [sys.executable, str(script), str(capability)],
        env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    expect(done.returncode == 0, (done.stderr.strip().splitlines() or ["no message"])[-1])
    taken = json.loads(done.stdout.splitlines()[-1])
    expect(len(taken) >= 5, f"only {len(taken)} kernels were compiled")
    kernel, most = max(taken, key=lambda each: each[1])
    limit = SHARED_MEMORY[capability]
    expect(most <= limit, f"{kernel} takes {most} bytes of shared memory, there are {limit}")
    return f"{len(taken)} kernels, at most {most / 1024:.0f} of {limit // 1024} KiB ({kernel})"


CHECKS = tuple(
    Check(
        f"fit/sm{capability}",
        lambda machine, capability=capability: shared_memory(machine, capability),
    )
    for capability in SHARED_MEMORY
)
