"""The doctor: what it finds, what it says when something is broken, and that it never breaks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_paged
from hf_paged.backends import native
from hf_paged.backends.registry import available_backends, backend_names
from hf_paged.backends.torch_gather import TorchGatherBackend
from hf_paged.cache import memory
from hf_paged.cli.app import main

pytestmark = pytest.mark.core_suite

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def on_a_machine_without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def text_of(capsys: pytest.CaptureFixture[str], *flags: str, exit_code: int = 0) -> str:
    assert main(["doctor", *flags]) == exit_code
    return capsys.readouterr().out


def facts_of(capsys: pytest.CaptureFixture[str], *flags: str, exit_code: int = 0) -> Any:
    return json.loads(text_of(capsys, "--json", *flags, exit_code=exit_code))


def test_a_healthy_machine_passes_on_every_backend_that_works(
    capsys: pytest.CaptureFixture[str],
) -> None:
    facts = facts_of(capsys)
    able = [name for name, reason in available_backends(CPU).items() if reason is None]
    assert facts["self-check"] == {f"{name} on cpu": None for name in able}
    assert facts["backends"] == {"cpu": available_backends(CPU)}
    assert facts["installed"]["torch"] == torch.__version__
    assert facts["installed"]["hf_paged"].startswith(hf_paged.__version__)
    assert facts["machine"]["threads"] == torch.get_num_threads()
    assert facts["native backend"]["built"] == list(native.built_isas())
    assert 0 < facts["memory"]["available"] <= facts["memory"]["total"]
    assert facts["gpus"] == []


def test_the_text_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    text = text_of(capsys, "--no-check")
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= 100
    for section in ("installed", "machine", "native backend", "backends on cpu", "memory", "gpu"):
        assert f"{section}\n  " in text
    for word in ("python", "torch", "transformers", "numpy", "flash-attn", "RLIMIT_AS", "threads"):
        assert word in text
    assert text.endswith("self-check\n  skipped\n")
    assert facts_of(capsys, "--no-check")["self-check"] is None


def test_wrong_tokens_are_found_and_fail(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = TorchGatherBackend.forward

    def wrong(self: TorchGatherBackend, *arguments: Any, **options: Any) -> torch.Tensor:
        return -right(self, *arguments, **options)

    monkeypatch.setattr(TorchGatherBackend, "forward", wrong)
    text = text_of(capsys, exit_code=1)
    (line,) = [line for line in text.splitlines() if "torch on cpu" in line]
    assert "FAILED: greedy search:" in line and "tokens differ" in line
    (line,) = [line for line in text.splitlines() if "torch_reference on cpu" in line]
    assert "same tokens" in line


def test_a_backend_that_raises_is_a_line_and_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("the kernel\nis gone")

    monkeypatch.setattr(TorchGatherBackend, "forward", broken)
    checks = facts_of(capsys, exit_code=1)["self-check"]
    assert checks["torch on cpu"] == "RuntimeError: the kernel is gone"


def test_a_choice_that_this_processor_cannot_follow_is_told_not_raised(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(native.ISA_VARIABLE, "sse9")
    facts = facts_of(capsys, "--no-check")
    assert facts["machine"][native.ISA_VARIABLE] == "sse9"
    assert facts["native backend"]["chosen"] is None
    assert "'sse9' cannot be used" in facts["native backend"]["problem"]
    assert "'sse9' cannot be used" in facts["backends"]["cpu"]["cpu"]
    assert facts["backends"]["cpu"]["torch"] is None
    assert "no: HF_PAGED_CPU_ISA='sse9'" in text_of(capsys, "--no-check")


def test_without_a_library_the_reason_is_there_and_the_others_are_checked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(native.ISA_VARIABLE, raising=False)
    monkeypatch.setattr(native, "_FOLDER", tmp_path)
    monkeypatch.setattr(native, "_BUILD_LOG", tmp_path / "build.txt")
    facts = facts_of(capsys)
    assert facts["native backend"]["built"] == []
    assert "its library is missing" in facts["backends"]["cpu"]["cpu"]
    assert set(facts["self-check"]) == {"torch on cpu", "torch_reference on cpu"}


@pytest.mark.skipif(sys.platform != "linux", reason="cgroups are Linux's")
def test_limits_of_a_container(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "cgroup_limits", lambda: [(2**63 - 4096, 5), (2**31, 2**30)])
    monkeypatch.setattr(memory, "address_space_left", lambda: 2**29)
    found = facts_of(capsys, "--no-check")["memory"]
    assert (found["cgroup limit"], found["cgroup in use"]) == (2**31, 2**30)
    assert found["left of RLIMIT_AS"] == 2**29
    assert found["default limit of a pool"] <= 2**28
    assert "cgroup limit             2.00 GiB" in text_of(capsys, "--no-check")


def test_every_registered_backend_has_a_reason_or_works() -> None:
    assert tuple(available_backends(CPU)) == backend_names()
    assert available_backends(CPU)["torch"] is None
    assert available_backends(torch.device("cuda"))["cpu"] == "it computes on a CPU only"
