"""The memory of this process as the system counts it (Linux)."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
from pathlib import Path

# Read by glibc when the process starts. One heap; large tensors are mappings of their own, which
# go back to the system as soon as they are freed: the peak is then that of what lives. With
# a threshold of 1 MiB, holes in the heap were up to 30 MiB of it.
ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**16),
    "MALLOC_TRIM_THRESHOLD_": str(2**16),
}


def status(field: str) -> int:
    """Return a field of /proc/self/status in bytes: VmRSS, VmHWM, VmSize, VmData."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def give_back() -> None:
    """Return what was freed to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


class PeakMemory:
    """The growth of the resident set in a `with` block; the kernel keeps the peak (VmHWM)."""

    def __enter__(self) -> PeakMemory:
        give_back()
        Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident now
        self._before = status("VmRSS")
        return self

    def __exit__(self, *exc: object) -> None:
        self.bytes = status("VmHWM") - self._before


def limit_growth(num_bytes: int) -> None:
    """Let the address space grow by so much at most; what asks for more fails to allocate."""
    give_back()
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + num_bytes, resource.RLIM_INFINITY))
