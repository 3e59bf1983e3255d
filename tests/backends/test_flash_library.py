"""Where flash-attn is found, and what is said where it is not."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from backends import flash_stand_in
from hf_paged.backends import flash_library
from hf_paged.backends.flash_attn import FlashAttn3Backend, FlashAttnBackend
from hf_paged.backends.flash_library import FlashLibrary, find_library
from hf_paged.backends.registry import available_backends, create_backend
from hf_paged.errors import ConfigurationError

pytestmark = pytest.mark.core_suite

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
PACKAGES = {2: "flash_attn", 3: "flash_attn_interface"}
REPOSITORIES = {2: "kernels-community/flash-attn2", 3: "kernels-community/flash-attn3"}


def module_of(version: int, release: str | None = "2.8.3") -> ModuleType:
    """A module with the functions of flash-attn, as a package or from the hub."""
    module: Any = ModuleType(PACKAGES[version])
    if version == 2:
        module.__version__ = release
        module.flash_attn_with_kvcache = flash_stand_in.fa2_with_kvcache
        module.flash_attn_varlen_func = flash_stand_in.fa2_varlen
    else:
        module.flash_attn_with_kvcache = flash_stand_in.fa3_with_kvcache
        module.flash_attn_varlen_func = flash_stand_in.fa3_varlen
    return module


class Hub(ModuleType):
    """The package ``kernels``; its folder is the cache, a kernel is a file that names it."""

    def __init__(self, cache: Path) -> None:
        super().__init__("kernels")
        self.cache = cache
        self.loaded: list[Any] = []
        self.error: Exception | None = None

    def store(self, repository: str, revision: str, mtime: float = 0.0) -> Path:
        folder = Path(
            self.cache, f"kernels--{repository.replace('/', '--')}", "snapshots", revision
        )
        folder.mkdir(parents=True)
        os.utime(folder, (mtime, mtime))
        return folder

    def get_local_kernel(self, path: Path) -> ModuleType:
        return self._load(path)

    def get_kernel(self, repository: str, *, version: int) -> ModuleType:
        return self._load((repository, version))

    def _load(self, what: Any) -> ModuleType:
        self.loaded.append(what)
        if self.error is not None:
            raise self.error
        return module_of(2 if "flash-attn2" in str(what) else 3, release=None)


@pytest.fixture(autouse=True)
def nothing_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a Hopper device and without flash-attn."""
    monkeypatch.setattr(flash_library, "_loaded", {})
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=7)
    )
    for name in (*PACKAGES.values(), "kernels"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    hub = Hub(tmp_path)
    monkeypatch.setitem(sys.modules, "kernels", hub)
    monkeypatch.setenv("KERNELS_CACHE", str(tmp_path))
    return hub


def put(monkeypatch: pytest.MonkeyPatch, version: int, module: ModuleType) -> None:
    monkeypatch.setitem(sys.modules, PACKAGES[version], module)


def find(version: int, *, may_download: bool = False) -> FlashLibrary:
    library = find_library(version, CUDA, may_download=may_download)
    assert isinstance(library, FlashLibrary), library
    return library


def reason_of(version: int, *, may_download: bool = False, device: torch.device = CUDA) -> str:
    reason = find_library(version, device, may_download=may_download)
    assert isinstance(reason, str)
    backend = {2: FlashAttnBackend, 3: FlashAttn3Backend}[version]
    assert backend.unavailable_reason(device, may_download=may_download) == reason
    return reason


VERSIONS = pytest.mark.parametrize("version", [2, 3])


# -- the device ----------------------------------------------------------------------------------


@VERSIONS
def test_other_devices(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, version, module_of(version))
    for name in ("cpu", "mps", "xpu"):
        assert reason_of(version, device=torch.device(name)) == "it computes on a CUDA device only"
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "ROCm" in reason_of(version)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert reason_of(version) == "PyTorch finds no CUDA device"


@pytest.mark.parametrize(
    ("version", "capability", "reason"),
    [
        (2, (7, 5), "the device is sm75, the kernels need sm80 or newer"),
        (2, (8, 0), None),
        (2, (8, 9), None),
        (2, (10, 0), None),
        (3, (8, 0), "the device is sm80, the kernels are built for sm9x"),
        (3, (9, 0), None),
        (3, (10, 0), "the device is sm100, the kernels are built for sm9x"),
        (3, (12, 0), "the device is sm120, the kernels are built for sm9x"),
    ],
)
def test_compute_capability(
    version: int,
    capability: tuple[int, int],
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put(monkeypatch, version, module_of(version))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    if reason is None:
        find(version)
    else:
        assert reason_of(version) == reason


# -- packages ------------------------------------------------------------------------------------


@VERSIONS
def test_an_installed_package_is_taken(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = module_of(version)
    put(monkeypatch, version, module)
    library = find(version)
    assert (library.version, library.num_multiprocessors) == (version, 7)
    assert library.source == {2: "flash_attn 2.8.3", 3: "flash_attn_interface"}[version]
    assert library.with_kvcache is module.flash_attn_with_kvcache
    assert library.varlen is module.flash_attn_varlen_func
    assert FlashAttnBackend.unavailable_reason(CUDA) == (None if version == 2 else reason_of(2))


@VERSIONS
def test_what_was_found_stays(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, version, module_of(version))
    library = find(version)
    monkeypatch.setitem(sys.modules, PACKAGES[version], None)
    assert find(version) is library
    assert isinstance(find_library(version, torch.device("cuda", 1), may_download=False), str)


@VERSIONS
def test_nothing_is_installed(version: int) -> None:
    assert reason_of(version, may_download=True) == (
        f"package {PACKAGES[version]} is not installed; package kernels is not installed"
    )


@pytest.mark.parametrize(
    ("release", "is_enough"),
    [
        ("2.5.9.post1", False),
        ("2.6.0", True),
        ("2.6.0.post1", True),
        ("2.10.0+cu130torch2.11", True),
        ("1.0.9", False),
    ],
)
def test_versions_of_flash_attn(
    release: str, is_enough: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(monkeypatch, 2, module_of(2, release))
    if is_enough:
        assert find(2).source == f"flash_attn {release}"
    else:
        assert f"package flash_attn is version {release}, 2.6 or newer is needed" in reason_of(2)


def test_flash_attn_4_alone_is_not_flash_attn_2(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, 2, ModuleType("flash_attn"))
    assert "package flash_attn tells no version, so it is not flash-attn 2" in reason_of(2)


@VERSIONS
@pytest.mark.parametrize(
    ("source", "described"),
    [
        ("raise ImportError('undefined symbol: _ZN3c10\\nmore')", "ImportError: undefined symbol"),
        ("raise OSError('libcudart.so.12: cannot open')", "OSError: libcudart.so.12"),
        ("raise RuntimeError()", "RuntimeError: "),
        ("import no_such_module_of_flash", "ModuleNotFoundError: No module named 'no_such_"),
    ],
)
def test_a_package_that_does_not_import_is_a_reason_and_no_crash(
    version: int,
    source: str,
    described: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = PACKAGES[version]
    Path(tmp_path, f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name)
    reason = reason_of(version)
    assert f"package {name} does not import ({described}" in reason
    assert "\n" not in reason
    assert "more" not in reason


@VERSIONS
@pytest.mark.parametrize("function", ["flash_attn_with_kvcache", "flash_attn_varlen_func"])
def test_functions_that_are_missing_or_others(
    version: int, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = module_of(version)
    put(monkeypatch, version, module)
    setattr(module, function, lambda q, k, v, cu_seqlens_k=None, cache_seqlens=None: q)
    assert f"{function} of {PACKAGES[version]}" in reason_of(version)
    assert "softcap" in reason_of(version)
    delattr(module, function)
    assert f"has no {function}" in reason_of(version)


# -- the hub -------------------------------------------------------------------------------------


@VERSIONS
def test_auto_never_downloads(version: int, hub: Hub) -> None:
    name = {2: "flash_attn", 3: "flash_attn_3"}[version]
    assert reason_of(version) == (
        f"package {PACKAGES[version]} is not installed; {REPOSITORIES[version]} is not downloaded "
        f"yet, which backend={name!r} by name would do"
    )
    assert hub.loaded == []


def test_only_a_named_backend_downloads(hub: Hub) -> None:
    assert create_backend("flash_attn", CUDA).name == "flash_attn"
    assert hub.loaded == [("kernels-community/flash-attn2", 4)]
    assert create_backend("auto", CUDA).name == "flash_attn"  # it is there now
    assert create_backend("flash_attn_3", CUDA).name == "flash_attn_3"
    assert hub.loaded[1:] == [("kernels-community/flash-attn3", 1)]
    assert create_backend("auto", CUDA).name == "flash_attn_3"
    assert len(hub.loaded) == 2


@VERSIONS
@pytest.mark.parametrize("may_download", [False, True])
def test_the_newest_snapshot_in_the_cache_is_taken(
    version: int, may_download: bool, hub: Hub
) -> None:
    hub.store(REPOSITORIES[version], "older", mtime=1.0)
    newest = hub.store(REPOSITORIES[version], "a-newer-one", mtime=3.0)
    hub.store(REPOSITORIES[version], "old", mtime=2.0)
    library = find(version, may_download=may_download)
    assert library.source == REPOSITORIES[version]
    assert hub.loaded == [newest]


def test_either_build_of_flash_attn_3_does(hub: Hub) -> None:
    """transformers downloads this one for attn_implementation="flash_attention_3"."""
    snapshot = hub.store("kernels-community/vllm-flash-attn3", "main")
    assert find(3).source == "kernels-community/vllm-flash-attn3"
    assert hub.loaded == [snapshot]


def test_the_cache_is_that_of_the_hub(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub.constants

    monkeypatch.delenv("KERNELS_CACHE")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    snapshot = hub.store(REPOSITORIES[2], "main")
    find(2)
    assert hub.loaded == [snapshot]


@VERSIONS
def test_what_the_hub_says_is_a_reason(version: int, hub: Hub) -> None:
    hub.error = FileNotFoundError("Cannot find a build variant for this system")
    reason = reason_of(version, may_download=True)
    assert f"{REPOSITORIES[version]} does not load from the hub (FileNotFoundError: Cann" in reason
    hub.store(REPOSITORIES[version], "main")
    reason = reason_of(version)
    assert f"{REPOSITORIES[version]} does not load from the cache (FileNotFoundError: C" in reason
    with pytest.raises(ConfigurationError, match="does not load from the hub"):
        create_backend(PACKAGES[version].replace("interface", "3"), CUDA)


def test_a_package_comes_before_the_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.store(REPOSITORIES[2], "main")
    put(monkeypatch, 2, module_of(2))
    assert find(2, may_download=True).source == "flash_attn 2.8.3"
    assert hub.loaded == []


def test_a_broken_package_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(tmp_path, "kernels.py").write_text("raise ImportError('too old')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "kernels")
    assert "package kernels does not import (ImportError: too old)" in reason_of(2)


# -- laziness ------------------------------------------------------------------------------------


def test_nothing_is_imported_for_a_device_that_cannot_run_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(name: str) -> ModuleType:
        raise AssertionError(f"{name} was imported")

    monkeypatch.setattr(flash_library, "importlib", SimpleNamespace(import_module=refuse))
    assert available_backends(CPU)["flash_attn"] is not None
    assert create_backend("auto", CPU).name in ("cpu", "torch")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    assert "sm70" in reason_of(2)
