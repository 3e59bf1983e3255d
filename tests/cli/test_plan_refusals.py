"""What ``hf-paged plan`` cannot plan: one line, exit code 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import MambaConfig, PreTrainedConfig, ResNetConfig, T5Config

from hf_paged.cli.app import main

pytestmark = pytest.mark.core_suite

BY_HAND = ["--layers", "4", "--kv-heads", "2", "--head-dim", "8", "--dtype", "float32"]


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the one line on stderr of a plan that is refused."""
    assert main(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    line, end = captured.err[:-1], captured.err[-1]
    assert end == "\n" and "\n" not in line
    assert line.startswith("hf-paged: ")
    return line


def folder_of(config: PreTrainedConfig, folder: Path) -> str:
    config.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ["--layers, --kv-heads, --head-dim, --dtype missing", "MODEL"]),
        (("--layers", "2", "--dtype", "bf16"), ["--kv-heads, --head-dim missing"]),
        ((*BY_HAND[:-1], "int8"), ["--dtype 'int8'", "bfloat16"]),
        ((*BY_HAND, "--memory", "-4GiB"), ["--memory '-4GiB'", "2GiB"]),
        ((*BY_HAND, "--memory", "0"), ["--memory '0'"]),
        ((*BY_HAND, "--memory", "plenty"), ["--memory 'plenty'"]),
        ((*BY_HAND, "--block-size", "12"), ["block_size", "12", "power of two"]),
        ((*BY_HAND, "--lengths", "12,x"), ["--lengths '12,x'", "'x'"]),
        ((*BY_HAND, "--lengths", "12,0"), ["'0'", "at least 1"]),
        ((*BY_HAND, "--prompt", "12"), ["--prompt without --new"]),
        ((*BY_HAND, "--new", "12"), ["--new without --prompt"]),
        ((*BY_HAND, "--max-length", "12"), ["--max-length 12", "2048"]),
        ((*BY_HAND, "--sliding-layers", "2"), ["--sliding-layers 2 without --window"]),
        ((*BY_HAND, "--window", "0"), ["--window 0"]),
        ((*BY_HAND, "--window", "8", "--sliding-layers", "5"), ["--sliding-layers 5", "1 to 4"]),
        (("some/model", "--layers", "2"), ["'some/model'", "--layers", "one of the two"]),
        (("./no/such/folder",), ["'./no/such/folder'", "no folder"]),
        (("--layers", "-1", *BY_HAND[2:]), ["--layers -1", "at least 1"]),
    ],
)
def test_bad_input_is_one_line_that_says_what_and_where(
    arguments: tuple[str, ...], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(capsys, *arguments)
    assert [word for word in words if word not in line] == []


def test_a_model_that_cannot_be_looked_up(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    line = refusal(capsys, "nobody/no-such-model-of-hf-paged")
    assert "MODEL='nobody/no-such-model-of-hf-paged' cannot be read from the Hugging Face" in line
    assert "local folder" in line


def test_folders_that_hold_no_causal_lm_with_attention(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "has no config.json" in refusal(capsys, str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "no_such_type"}')
    assert "no_such_type" in refusal(capsys, str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    assert "cannot be read from the folder" in refusal(capsys, str(tmp_path))
    mamba = refusal(capsys, folder_of(MambaConfig(num_hidden_layers=2), tmp_path / "mamba"))
    assert "something else than K and V in layer 0" in mamba
    assert "LinearAttentionLayer" in mamba
    resnet = refusal(capsys, folder_of(ResNetConfig(), tmp_path / "resnet"))
    assert "is no causal LM" in resnet and "'resnet'" in resnet
    assert "encoder-decoder" in refusal(capsys, folder_of(T5Config(), tmp_path / "t5"))


def test_remote_code_is_never_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "mine", "auto_map": {"AutoConfig": "configuration_mine.Mine"}})
    )
    (tmp_path / "configuration_mine.py").write_text("raise SystemExit('this code ran')")
    assert "cannot be read from the folder" in refusal(capsys, str(tmp_path))
