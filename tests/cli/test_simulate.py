"""``hf-paged simulate`` as a user meets it."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import pytest

from hf_paged.cli.app import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["simulate", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_without_options_it_tells_the_reference_story(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys)
    assert (code, err) == (0, "")
    for figure in (
        "mean 228, longest 593, budget 8528",
        "8528 // 1024 reservations of 1024: holds 8 at 20% use",
        "40 admitted, 20 freed, 4810 slots free, largest hole 359: the 800 refused",
        "39 admitted, 20 freed, the 800 placed in 50 blocks; 101 of 3760 slots wasted = 2.7%",
        "39 / 8 = 4.9 x",
    ):
        assert figure in out
    assert run(capsys, "--scenario", "reference") == (code, out, err)


def test_the_reference_story_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--json", "--block-sizes", "16,64")
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert result["num_slots"] == 8528
    static, contiguous, paged, coarse = result["allocators"]
    assert static["num_admitted"] == 8
    assert contiguous["checkerboard"]["largest_hole"] == 359
    assert paged["num_latecomer_blocks"] == 50
    assert paged["checkerboard"]["num_wasted_slots"] == 101
    assert coarse["block_size"] == 64


def test_a_stream_is_served(capsys: pytest.CaptureFixture[str]) -> None:
    """Tables without a word cut off, and every allocator in them."""
    options = ("--requests", "20", "--prompts", "uniform:20:80", "--outputs", "fixed:20")
    more = ("--budget", "1500", "--max-len", "150", "--samples", "2", "--shared-prefix", "32")
    code, out, err = run(capsys, *options, *more)
    assert (code, err) == (0, "")
    assert "…" not in out
    for name in ("static", "contiguous", "paged (16)", "+ sharing (16)", "+ eviction, swap (16)"):
        assert name in out

    code, out, _ = run(capsys, *options, *more, "--json")
    allocators = json.loads(out)["allocators"]
    assert code == 0
    assert [a["num_finished"] for a in allocators] == [20] * 6
    assert all(a["num_output_tokens"] == 20 * 20 * 2 for a in allocators)


def test_a_file_is_served(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival,prompt,output\n0,100,3\n2,50,4\n")
    code, out, _ = run(capsys, "--workload", str(path), "--json", "--budget", "1024")
    assert code == 0
    assert [a["num_output_tokens"] for a in json.loads(out)["allocators"]] == [7] * 6


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--budget", "-5"], "--budget: expected 1 or more slots, got -5"),
        (["--budget", "100"], "more than the budget of 100 slots"),
        (["--requests", "0"], "--requests: expected 1 or more requests, got 0"),
        (["--rate", "-1"], "--rate: expected 0 or more requests a step, got -1"),
        (["--rate", "nan"], "--rate: expected 0 or more requests a step, got nan"),
        (["--block-sizes", "16,x"], "--block-sizes: expected whole numbers from 1"),
        (["--block-sizes", "0"], "--block-sizes: expected whole numbers from 1"),
        (["--block-sizes", "9999"], "to the budget of 8528 slots"),
        (["--prompts", "zipf:2"], "--prompts: 'zipf:2' is no distribution"),
        (["--prompts", "fixed:9000"], "can never fit into the budget of 8192 slots"),
        (["--prompts", "fixed:900", "--max-len", "800"], "but --max-len is 800"),
        (["--scenario", "reference", "--rate", "1"], "--rate belongs to --scenario serving"),
        (["--workload", "w.csv", "--samples", "2"], "--samples draws requests, but --workload"),
        (["--workload", "none.csv"], "none.csv: cannot be read: No such file or directory"),
        (["--plot", "/nowhere/out.png"], "/nowhere/out.png cannot be written: No such file"),
        (["--plot", "out.xyz"], "out.xyz cannot be written: Format 'xyz' is not supported"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert complaint in err
    assert err.startswith("hf-paged: ") and err.count("\n") == 1


def test_a_malformed_line_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival,prompt,output\n" + "0,10,5\n" * 5 + "0,many,5\n")
    code, _, err = run(capsys, "--workload", str(path))
    assert code == 2
    assert f"line 7 of {path}: prompt must be a number, got 'many'" in err


def test_a_length_above_the_budget_is_named_with_its_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival": 0, "prompt": 500, "output": 100}\n')
    code, _, err = run(capsys, "--workload", str(path), "--budget", "512")
    assert code == 2
    assert f"line 1 of {path}: prompt 500 + output 100 = 600 tokens can never fit" in err


def test_pictures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Both scenarios draw; the background is painted, so that it shows on a dark page."""
    pytest.importorskip("matplotlib")
    story, stream = tmp_path / "story.png", tmp_path / "stream.png"
    assert run(capsys, "--plot", str(story))[0] == 0
    serving = ("--requests", "12", "--budget", "2000", "--prompts", "fixed:100", "--samples", "3")
    assert run(capsys, *serving, "--plot", str(stream))[0] == 0
    from matplotlib.image import imread

    for path in (story, stream):
        width, height = struct.unpack(">II", path.read_bytes()[16:24])
        assert width > 1000 and height > 1000
        assert imread(path)[0, 0].tolist() == [1.0, 1.0, 1.0, 1.0]


def test_without_matplotlib_the_remedy_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line, before anything was computed; without --plot nobody misses it."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(capsys)[0] == 0
    code, out, err = run(capsys, "--plot", "out.png")
    assert (code, out) == (2, "")
    assert err == (
        "hf-paged: --plot needs matplotlib, which is not installed: pip install hf-paged[plots]\n"
    )


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for option in ("--workload", "--block-sizes", "--budget", "--seed", "--json", "--plot"):
        assert option in out
