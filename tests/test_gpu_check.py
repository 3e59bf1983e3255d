"""benchmarks/gpu/check.py as far as it goes without a GPU, and that it can fail."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks" / "gpu"

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
    pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux"),
]

PLANTED = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import check
from runner import Check, Skip, expect

def skipped(machine):
    raise Skip("there is no moon")

def wrong(machine):
    expect(1 > 2, "one is not more")

def raises(machine):
    raise RuntimeError("first line\\nlast line")

checks = [
    Check("right", lambda machine: "42"),
    Check("skipped", skipped),
    Check("device", lambda machine: "never", needs_cuda=True),
    Check("wrong", wrong),
    Check("raises", raises),
    Check("right again", lambda machine: "43"),
]
sys.exit(check.main(checks=checks))
"""


def run(*command: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=timeout, env=environment
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_everything_that_needs_no_gpu_passes(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    arguments = ("--cpu", "--json", str(file), "--time-limit", "500")
    done = run(str(FOLDER / "check.py"), *arguments, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads(file.read_text())
    assert written["passed"] >= 20
    assert written["failed"] == 0
    statuses = [check["status"] for check in written["checks"]]
    assert statuses.count("pass") == written["passed"]
    assert statuses.count("skip") == written["skipped"]
    assert len(statuses) == written["passed"] + written["skipped"]
    counts = "passed={passed} failed={failed} skipped={skipped}".format_map(written)
    assert done.stdout.splitlines()[-1] == counts
    names = [check["name"] for check in written["checks"]]
    assert len(set(names)) == len(names)
    assert all(name in done.stdout for name in names)
    assert all(check["figure"] and check["seconds"] >= 0 for check in written["checks"])
    assert written["device"] == "cpu"
    assert written["versions"].keys() >= {"torch", "triton", "transformers", "hf_paged"}
    assert written["hardware"].keys() >= {"processor", "gpus"}
    assert written["backends"]["triton"] == "available"
    assert {timing["what"] for timing in written["timings"]} >= {"copy", "decode", "prefill"}


def test_a_check_that_fails_is_counted_and_the_others_run(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    done = run("-c", PLANTED, str(FOLDER), "--cpu", "--json", str(file))
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "passed=2 failed=2 skipped=2"
    checks = json.loads(file.read_text())["checks"]
    assert [(check["name"], check["status"], check["figure"]) for check in checks] == [
        ("right", "pass", "42"),
        ("skipped", "skip", "there is no moon"),
        ("device", "skip", "needs a CUDA device"),
        ("wrong", "fail", "one is not more"),
        ("raises", "fail", "RuntimeError: last line"),
        ("right again", "pass", "43"),
    ]
    assert "Traceback" in done.stderr


def test_no_check_starts_after_the_time_limit() -> None:
    done = run("-c", PLANTED, str(FOLDER), "--cpu", "--time-limit", "0")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "passed=0 failed=0 skipped=6"
    assert "out of time" in done.stdout


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    done = run(str(FOLDER / "check.py"), "--cpu", "--only", "attention/window", "moon")
    assert done.returncode == 2
    assert "no check is named moon" in done.stderr
    assert "attention/window" in done.stderr
    assert "timing/decode" in done.stderr
    assert not done.stdout
