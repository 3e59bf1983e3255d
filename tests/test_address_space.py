"""benchmarks/memory/address_space.py: four times the batch that the unpatched model cannot do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "memory" / "address_space.py"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="/proc and RLIMIT_AS"),
]


def test_four_times_the_rows_in_the_same_address_space(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    command = [sys.executable, str(SCRIPT), "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(file.read_text())
    failing = figures["failing_batch"]
    assert failing > 1 and "alloc" in figures["failed_with"]
    assert figures["finished"] >= 4 * failing
    assert figures["equal_rows"] == figures["finished"]
    assert 0 < figures["kv_peak"] <= figures["budget"] / 2
    assert figures["grown"] <= figures["budget"]
    assert f"fails to allocate at {failing} rows" in done.stdout
    assert f"patched: {figures['finished']} rows" in done.stdout
