"""benchmarks/end_to_end/ on a tiny random model: figures are complete, and the tokens equal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "end_to_end" / "generate.py"
SUITES = ["ragged", "shared", "nsample", "single", "beam"]
VARIANTS = ["unpatched", "patched", "generate_batch"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="/proc"),
]


def run(file: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """Run the benchmark as a user would; return what it wrote and what it printed."""
    command = [sys.executable, str(BENCHMARK), "--model", "tiny", "--dtype", "float32"]
    command += ["--threads", "1", "--repeats", "1", "--scale", "0.05", "--json", str(file)]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(file.read_text()), done.stdout


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    file = tmp_path_factory.mktemp("end_to_end") / "out.json"
    return run(file, "--suite", ",".join(SUITES), "--kv-memory", "64MiB")


@pytest.fixture(scope="module")
def data(output: tuple[dict[str, Any], str]) -> dict[str, Any]:
    return output[0]


def test_patched_gives_the_tokens_of_unpatched(data: dict[str, Any]) -> None:
    patched = [result for result in data["results"] if result["variant"] == "patched"]
    assert [result["suite"] for result in patched] == SUITES
    for result in patched:
        assert result["rows_equal"] == result["rows"] > 0, result


def test_figures_are_complete(data: dict[str, Any]) -> None:
    results = {(result["suite"], result["variant"]): result for result in data["results"]}
    assert list(results) == [(suite, variant) for suite in SUITES for variant in VARIANTS]
    refused = results.pop(("beam", "generate_batch"))
    assert (refused["status"], refused["error"]) == ("unsupported", "no beam search")
    for (_, variant), result in results.items():
        assert result["status"] == "ok", result
        assert result["tokens_per_s"] > 0
        assert result["seconds"] > 0
        assert result["first_token_seconds"] > 0
        assert result["ratios"]["tokens_per_s"] > 0
        assert (result["kv_peak_bytes"] is None) == (variant == "generate_batch")
    assert data["machine"].keys() >= {"processor", "memory", "torch", "transformers", "hf-paged"}
    assert data["model"]["dtype"] == data["arguments"]["dtype"] == "float32"


def test_computed_tokens_are_counted(data: dict[str, Any]) -> None:
    results = {(result["suite"], result["variant"]): result for result in data["results"]}
    for suite in data["suites"]:
        name, needed = suite["suite"], suite["needed_tokens"]
        assert suite["floor_seconds"] > 0
        computed = {
            variant: results[name, variant].get("computed_tokens", needed) for variant in VARIANTS
        }
        assert computed["unpatched"] >= computed["patched"] >= needed
        assert computed["generate_batch"] >= needed
    # One row: no padding, nothing to share. 6 prompt tokens, 3 new ones; the last is not computed.
    (single,) = (suite for suite in data["suites"] if suite["suite"] == "single")
    assert (single["prompt_tokens"], single["new_tokens"]) == (6, 3)
    assert single["needed_tokens"] == results["single", "unpatched"]["computed_tokens"] == 8
    assert results["single", "unpatched"]["kv_peak_bytes"] == 8 * data["model"]["token_bytes"]


def test_the_table_has_a_row_for_each_figure(output: tuple[dict[str, Any], str]) -> None:
    _, printed = output
    for variant in VARIANTS:
        rows = [line for line in printed.splitlines() if line.startswith(f" {variant} ")]
        assert len(rows) == len(SUITES)
    assert printed.count("n/a") == 1


def test_profile_splits_the_time_of_a_step(tmp_path: Path) -> None:
    arguments = ("--suite", "single", "--variants", "patched", "--profile")
    data, printed = run(tmp_path / "out.json", *arguments, "--scale", "0.2")
    (suite,) = data["suites"]
    for times in suite["profile"].values():
        assert list(times) == [
            "linear layers",
            "attention",
            "rest of the forward",
            "outside of the forward",
        ]
    assert all(seconds > 0 for seconds in suite["profile"]["first_token"].values())
    assert "where patched spends its time" in printed
    assert data["results"][0]["rows_equal"] is None  # nothing to compare with
