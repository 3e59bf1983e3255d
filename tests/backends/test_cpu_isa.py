"""Which instruction set is computed with, and what happens where none was built.

That each of them is exact is in the neighbours, which run once for each.
"""

from __future__ import annotations

import logging
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from backends.paged_batch import PagedBatch, random_rows
from hf_paged.backends import native, registry
from hf_paged.backends.cpu import CpuBackend
from hf_paged.backends.registry import create_backend
from hf_paged.errors import ConfigurationError

pytestmark = pytest.mark.core_suite

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]
SUPPORTED = {  # by torch's capability, and whether the system lets a process use AMX
    ("AVX512", True): ("amx", "avx512", "avx2", "portable"),
    ("AVX512", False): ("avx512", "avx2", "portable"),
    ("AVX2", True): ("avx2", "portable"),  # as under ATEN_CPU_CAPABILITY=avx2
    ("AVX2", False): ("avx2", "portable"),
    ("DEFAULT", False): ("portable",),
    ("SVE256", False): ("portable",),
}
KERNELS = ("attend", "check_rows", "check_slots", "copy_blocks", "write_tokens")

needs_libraries = pytest.mark.skipif(
    not native.built_isas() and not os.environ.get("CI"), reason="nothing was built here"
)


@pytest.fixture(autouse=True)
def no_choice_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(native.ISA_VARIABLE, raising=False)


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installation without libraries, which has not said so yet."""
    monkeypatch.setattr(native, "_FOLDER", tmp_path)
    monkeypatch.setattr(native, "_BUILD_LOG", tmp_path / native._BUILD_LOG.name)
    registry._say_once.cache_clear()
    yield tmp_path
    registry._say_once.cache_clear()


@pytest.mark.skipif(not os.environ.get("CI"), reason="elsewhere a compiler is no duty")
def test_ci_has_a_library_for_every_instruction_set_of_its_platform() -> None:
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    assert native.built_isas() == (SUPPORTED["AVX512", True] if is_x86 else ("portable",))
    assert native.unavailable_reason() is None


@pytest.mark.parametrize(("capability", "has_amx"), SUPPORTED)
def test_the_best_that_is_both_built_and_supported_is_chosen(
    capability: str, has_amx: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(native, "request_amx", lambda: has_amx)
    supported = SUPPORTED[capability, has_amx]
    assert native.supported_isas() == supported
    everything = SUPPORTED["AVX512", True]
    for built in (everything, everything[1:], ("avx2", "portable"), ("portable",), ("avx512",)):
        monkeypatch.setattr(native, "built_isas", lambda built=built: built)
        both = [isa for isa in supported if isa in built]
        assert native.chosen_isa() == (both[0] if both else None)
        for isa in both:
            monkeypatch.setenv(native.ISA_VARIABLE, isa)
            assert native.chosen_isa() == isa
        monkeypatch.delenv(native.ISA_VARIABLE, raising=False)


@needs_libraries
@pytest.mark.parametrize("isa", native.supported_isas())
def test_the_kernels_are_those_of_the_forced_instruction_set(
    isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []

    def spy(library: native.NativeLibrary, name: str) -> Any:
        kernel = getattr(library, name)

        def call(*arguments: Any) -> Any:
            called.append((library.isa, name))
            return kernel(*arguments)

        return call

    for other in native.supported_isas():
        monkeypatch.setenv(native.ISA_VARIABLE, other)
        library = native.load_library()
        assert library.isa == other
        assert library.path.name.endswith(f"_{other}.so")
        for name in KERNELS:
            monkeypatch.setattr(library, name, spy(library, name))
    monkeypatch.setenv(native.ISA_VARIABLE, isa)
    batch = PagedBatch(random_rows([(5, 1), (0, 3)]), create_backend("cpu", CPU), 4)
    batch.forward()
    batch.backend.copy_blocks(batch.view.key_cache, torch.tensor([0]), torch.tensor([1]))
    assert set(called) == {(isa, name) for name in KERNELS}


@needs_libraries
@pytest.mark.parametrize("name", ["cpu", "auto"])
@pytest.mark.parametrize("forced", ["sse9", "AVX2", "portable ", "avx512", "avx2"])
def test_forcing_what_is_not_there_is_refused(
    name: str, forced: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "supported_isas", lambda: ("portable",))
    monkeypatch.setattr(native, "built_isas", lambda: ("avx512", "portable"))
    monkeypatch.setenv(native.ISA_VARIABLE, forced)
    with pytest.raises(ConfigurationError) as raised:
        create_backend(name, CPU)
    message = str(raised.value)
    assert f"HF_PAGED_CPU_ISA={forced!r}" in message
    assert "this processor runs portable," in message
    assert "libraries are built for avx512, portable" in message


def test_without_a_library_auto_takes_torch_and_says_so_once(
    empty_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="hf_paged"):
        assert [create_backend("auto", CPU).name for _ in range(3)] == ["torch"] * 3
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "'cpu' is not available on cpu" in record.getMessage()
    assert "its library is missing" in record.getMessage()
    with pytest.raises(ConfigurationError, match=r"pip install -e \."):
        create_backend("cpu", CPU)


def test_what_the_build_left_in_its_log_is_quoted(
    empty_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    native._BUILD_LOG.write_text("no C++ compiler was found; CompileError: nothing to do it with\n")
    with caplog.at_level(logging.WARNING, logger="hf_paged"):
        assert create_backend("auto", CPU).name == "torch"
    (record,) = caplog.records
    reason = "no C++ compiler was found; CompileError: nothing to do it with)"
    assert reason in record.getMessage()
    with pytest.raises(ConfigurationError) as raised:
        create_backend("cpu", CPU)
    assert reason in str(raised.value)


def test_a_file_that_is_no_library_is_a_reason_and_no_crash(empty_folder: Path) -> None:
    native._path("portable").write_text("not a library")
    reason = native.unavailable_reason()
    assert reason is not None and "does not load" in reason
    assert create_backend("auto", CPU).name == "torch"


@needs_libraries
def test_a_library_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Rows(native.Rows):
        _fields_ = (("more", native.Tokens),)

    isa = native.chosen_isa()
    assert isa is not None
    monkeypatch.setattr(native, "Rows", Rows)
    with pytest.raises(RuntimeError, match=r"another version of hf_paged \(Rows has \d+ bytes"):
        native.NativeLibrary(native._path(isa))


@needs_libraries
def test_on_another_device_it_is_no_choice() -> None:
    assert CpuBackend.unavailable_reason(CPU) is None
    assert CpuBackend.unavailable_reason(torch.device("cuda")) == "it computes on a CPU only"
    assert create_backend("auto", torch.device("cuda")).name == "torch"


def build_with(compiler: Path | str, folder: Path) -> tuple[Path, str]:
    """Return (where the libraries went, what the build said)."""
    pytest.importorskip("setuptools")
    tree, target = folder / "tree", folder / "target"
    # Without pyproject.toml, which asks for a newer setuptools than an environment may have.
    sources = Path("hf_paged", "backends", "csrc")
    shutil.copytree(ROOT / sources, tree / sources)
    shutil.copy(ROOT / "setup.py", tree)
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--build-lib", str(target)],
        cwd=tree,
        env=os.environ | {"CC": str(compiler), "CXX": str(compiler)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return target / "hf_paged" / "backends" / "lib", done.stdout + done.stderr


def test_without_a_compiler_an_install_succeeds_and_leaves_the_reason(
    tmp_path: Path, empty_folder: Path
) -> None:
    compiler = "no-such-compiler"
    target, said = build_with(compiler, tmp_path)
    assert "hf_paged is installed without its native CPU backend" in said
    assert [path.name for path in target.iterdir()] == ["build.txt"]
    log = target / "build.txt"
    assert "no C++ compiler was found" in log.read_text()
    assert compiler in log.read_text()
    shutil.copy(log, native._BUILD_LOG)
    reason = native.unavailable_reason()
    assert reason is not None and log.read_text().strip() in reason


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AMX is x86-64's")
def test_what_only_newer_compilers_know_is_left_out(tmp_path: Path) -> None:
    compiler = tmp_path / "gcc-10"
    compiler.write_text(
        """#!/bin/sh
case "$*" in *-mamx-tile*) echo "unrecognized option '-mamx-tile'" >&2; exit 1;; esac
while [ "$1" != -o ]; do shift; done
: > "$2"
"""
    )
    compiler.chmod(0o755)
    stale = tmp_path / "target/hf_paged/backends/lib/libhf_paged_cpu_amx.so"
    stale.parent.mkdir(parents=True)
    stale.write_text("of another compiler")
    target, said = build_with(compiler, tmp_path)
    assert sorted(path.name for path in target.iterdir()) == [
        f"libhf_paged_cpu_{isa}.so" for isa in ("avx2", "avx512", "portable")
    ]
    assert "libhf_paged_cpu_amx" in said
