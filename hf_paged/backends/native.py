"""The compiled kernels of :mod:`hf_paged.backends.cpu`: found, checked, called through ctypes.

One shared library is built for each instruction set (see ``csrc/`` and ``setup.py``); the best one
that this processor runs is loaded. The interface is plain C, ``csrc/abi.h``, mirrored below. The
libraries bring no threads of their own: they run in torch's, so ``torch.set_num_threads`` counts.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hf_paged.errors import ConfigurationError

__all__ = [
    "DTYPES",
    "NativeLibrary",
    "Workspace",
    "built_isas",
    "chosen_isa",
    "load_library",
    "supported_isas",
    "threads",
    "unavailable_reason",
]

ISA_VARIABLE = "HF_PAGED_CPU_ISA"
_ISAS = ("amx", "avx512", "avx2", "portable")
_FOLDER = Path(__file__).parent / "lib"
_BUILD_LOG = _FOLDER / "build.txt"

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""What the kernels compute with, and its number in ``abi.h``."""


class Threads(ctypes.Structure):
    """``hfp_threads``."""

    _fields_ = (("parallel_for", ctypes.c_void_p), ("num_threads", ctypes.c_int64))


class Cache(ctypes.Structure):
    """``hfp_cache``."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("block_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("token_stride", ctypes.c_int64),
    )


class Tokens(ctypes.Structure):
    """``hfp_tokens``."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("token_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
    )


class Rows(ctypes.Structure):
    """``hfp_rows``."""

    _fields_ = (
        ("block_tables", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("cu_seqlens_q", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("table_stride", ctypes.c_int64),
        ("table_width", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("num_blocks", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
    )


class Attention(ctypes.Structure):
    """``hfp_attention``."""

    _fields_ = (
        ("rows", Rows),
        ("query", Tokens),
        ("key", Tokens),
        ("value", Tokens),
        ("key_cache", Cache),
        ("value_cache", Cache),
        ("out", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("alibi_slopes", ctypes.c_void_p),
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("value_dim", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("dtype", ctypes.c_int32),
        ("batch_invariant", ctypes.c_int32),
    )


class Write(ctypes.Structure):
    """``hfp_write``."""

    _fields_ = (
        ("key", Tokens),
        ("value", Tokens),
        ("key_cache", Cache),
        ("value_cache", Cache),
        ("slot_mapping", ctypes.c_void_p),
        ("num_tokens", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("key_bytes", ctypes.c_int64),
        ("value_bytes", ctypes.c_int64),
        ("element_size", ctypes.c_int32),
    )


class NativeLibrary:
    """One loaded library: the functions of ``abi.h`` as callables.

    Args:
        path: of the shared library.

    Raises:
        OSError: the system cannot load it.
        RuntimeError: it was built from another version of the sources.
    """

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        pointer, integer = ctypes.c_void_p, ctypes.c_int64

        def function(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
            found: Any = getattr(library, name)
            found.restype, found.argtypes = result, arguments
            return found  # type: ignore[no-any-return]

        size = function("hfp_struct_size", integer, ctypes.c_int32)
        for index, struct in enumerate((Rows, Attention, Write, Threads)):
            if size(index) != ctypes.sizeof(struct):
                raise RuntimeError(
                    f"{path.name} is of another version of hf_paged ({struct.__name__} has "
                    f"{size(index)} bytes, expected {ctypes.sizeof(struct)}): install again, e.g. "
                    "`pip install --force-reinstall --no-deps hf-paged` or `pip install -e .`"
                )
        self.path = path
        self.isa: str = function("hfp_isa", ctypes.c_char_p)().decode()
        self.new_workspace = function("hfp_workspace_new", pointer)
        self.free_workspace = function("hfp_workspace_free", None, pointer)
        self.workspace_bytes = function("hfp_workspace_bytes", integer, pointer)
        self.check_rows = function("hfp_check_rows", ctypes.c_int32, pointer, integer, pointer)
        self.check_slots = function(
            "hfp_check_slots", ctypes.c_int32, pointer, integer, integer, pointer
        )
        self.attend = function("hfp_attend", ctypes.c_int32, pointer, pointer, pointer)
        self.write_tokens = function("hfp_write_tokens", None, pointer, pointer)
        self.copy_blocks = function(
            "hfp_copy_blocks", None, pointer, integer, integer, pointer, pointer, integer, pointer
        )
        self.read = function("hfp_read", ctypes.c_float, pointer, integer, pointer)


class Workspace:
    """Memory of a :class:`NativeLibrary` for one call at a time; freed with this object."""

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library
        self.handle = library.new_workspace()
        if not self.handle:
            raise MemoryError("no memory for a workspace")

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._library.free_workspace(self.handle)

    @property
    def num_bytes(self) -> int:
        """Bytes that it holds now."""
        return int(self._library.workspace_bytes(self.handle))


def threads() -> Any:
    """Return torch's threads, as many as ``torch.get_num_threads()``, for a kernel's argument."""
    return _threads(torch.get_num_threads())


@functools.cache
def _threads(num_threads: int) -> Any:
    library = "libtorch_cpu.dylib" if platform.system() == "Darwin" else "libtorch_cpu.so"
    # torch has loaded it; this only finds it. torch_parallel_for is there from torch 2.10 on.
    torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / library))
    address = ctypes.cast(torch_cpu.torch_parallel_for, ctypes.c_void_p)
    return ctypes.byref(Threads(address, num_threads))


def supported_isas() -> tuple[str, ...]:
    """Return the instruction sets that this processor runs, the best one first."""
    best = {"AVX512": "avx512", "AVX2": "avx2"}.get(
        torch.backends.cpu.get_cpu_capability(), "portable"
    )
    if best == "avx512" and request_amx():
        best = "amx"
    return _ISAS[_ISAS.index(best) :]


@functools.cache
def request_amx() -> bool:
    """Ask the system to let this process use AMX, and return whether it does.

    Linux grants it to a process that asks, for good, where the processor has it (all that do have
    AVX512_BF16 too, and multiply bfloat16). torch asks as well, when it first multiplies bfloat16.
    See Documentation/arch/x86/xstate.rst of the kernel.
    """
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0)


def built_isas() -> tuple[str, ...]:
    """Return the instruction sets for which a library was built, the best one first."""
    return tuple(isa for isa in _ISAS if _path(isa).exists())


def chosen_isa() -> str | None:
    """Return what :func:`load_library` loads, None if nothing fits.

    Raises:
        ConfigurationError: ``HF_PAGED_CPU_ISA`` names what this processor or this build lacks.
    """
    usable = [isa for isa in supported_isas() if isa in built_isas()]
    forced = os.environ.get(ISA_VARIABLE)
    if not forced:
        return usable[0] if usable else None
    if forced not in usable:
        raise ConfigurationError(
            f"{ISA_VARIABLE}={forced!r} cannot be used: this processor runs "
            f"{', '.join(supported_isas())}, libraries are built for "
            f"{', '.join(built_isas()) or 'none'}; set it to one of both lists or unset it."
        )
    return forced


def unavailable_reason() -> str | None:
    """Return why there is no library to load, or None if there is one."""
    isa = chosen_isa()
    if isa is not None:
        try:
            _load(_path(isa))
        except (OSError, RuntimeError, AttributeError) as error:
            return f"its library does not load ({error})"
        return None
    if _BUILD_LOG.exists():
        return f"it was not compiled when hf_paged was installed ({_BUILD_LOG.read_text().strip()})"
    return "its library is missing: hf_paged was never built from here (`pip install -e .` builds)"


def load_library() -> NativeLibrary:
    """Return the library of :func:`chosen_isa`, loaded once a process."""
    return _load_chosen(os.environ.get(ISA_VARIABLE))


@functools.cache
def _load_chosen(forced: str | None) -> NativeLibrary:
    isa = chosen_isa()
    assert isa is not None, "callers ask unavailable_reason() first"
    return _load(_path(isa))


@functools.cache
def _load(path: Path) -> NativeLibrary:
    return NativeLibrary(path)


def _path(isa: str) -> Path:
    return _FOLDER / f"libhf_paged_cpu_{isa}.so"
