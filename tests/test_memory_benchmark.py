"""benchmarks/memory/ on a tiny random model: rows are complete, and what is promised holds."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
PROMISED = {"one": 1.05, "ten": 1.10, "beams": 1.20, "long": 1.10}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="/proc and RLIMIT_AS"),
]


def run(file: Path, *arguments: str) -> dict[str, Any]:
    """Run the benchmark as a user would, and return what it wrote."""
    command = [sys.executable, str(BENCHMARKS / "memory" / "run.py"), "--model", "tiny"]
    command += ["--threads", "1", "--json", str(file), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    arguments = ["--workloads", *PROMISED, "--variants", "dynamic", "continuous", "patched"]
    return run(tmp_path_factory.mktemp("memory") / "out.json", "--quick", *arguments)


def test_promised_multiples_of_the_ideal(data: dict[str, Any]) -> None:
    patched = [result for result in data["results"] if result["variant"] == "patched"]
    multiples = {result["workload"]: result["multiple"] for result in patched}
    assert multiples.keys() == PROMISED.keys()
    for workload, most in PROMISED.items():
        assert 1 <= multiples[workload] <= most, (workload, multiples)


def test_rows_are_complete(data: dict[str, Any]) -> None:
    results = {(result["workload"], result["variant"]): result for result in data["results"]}
    assert len(results) == 12
    refused = results.pop(("beams", "continuous"))
    assert refused["status"] == "unsupported"
    assert "beam search" in refused["error"]
    for result in results.values():
        assert result["status"] == "ok", result
        assert result["kv_allocated"] >= result["ideal"] > 0
        assert 0 <= result["waste"] < 1
        assert result["peak_process"] > 0
        assert result["seconds"] > 0
    # One answer, whoever computes it; 10 x 299 columns and 4 x 599 in a rectangle.
    token_bytes = data["model"]["token_bytes"]
    assert len({result["ideal"] for (name, _), result in results.items() if name == "ten"}) == 1
    assert results["ten", "dynamic"]["kv_allocated"] == 10 * 299 * token_bytes
    assert results["beams", "dynamic"]["kv_allocated"] == 4 * 599 * token_bytes
    assert data["machine"].keys() >= {"processor", "memory", "torch", "transformers", "hf-paged"}


def test_largest_batch_is_found_by_trying(tmp_path: Path) -> None:
    arguments = ("--workloads", "--variants", "dynamic", "--budget", "24MiB", "--first-batch", "32")
    data = run(tmp_path / "out.json", *arguments)
    largest = data["largest_batch"]["dynamic"]
    tried = {probe["num_rows"]: probe["status"] for probe in data["probes"]}
    assert tried[largest] == "ok"
    assert tried[largest + 1] == "failed"


def test_a_child_that_dies_is_reported(tmp_path: Path) -> None:
    arguments = ("--workloads", "long", "--variants", "dynamic", "--budget", "0")
    data = run(tmp_path / "out.json", *arguments, "--timeout", "0.01")
    (result,) = data["results"]
    assert (result["status"], result["error"]) == ("died", "no result after 0.01 s")


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([[1, 2, 3], [1, 2, 4], [2]], 5),
        ([[1, 2], [1, 2], [1, 2, 3]], 3),
        ([[7, 300], [300, 7]], 4),
        ([], 0),
    ],
)
def test_equal_prefixes_are_counted_once(rows: list[list[int]], expected: int) -> None:
    module = runpy.run_path(str(BENCHMARKS / "memory" / "distinct_tokens.py"))
    assert module["num_distinct_tokens"](rows) == expected
    assert expected == len({tuple(row[: end + 1]) for row in rows for end in range(len(row))})
