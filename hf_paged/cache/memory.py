"""How much memory there is: for the pool's default limit, and to refuse more than exists."""

from __future__ import annotations

import os
from pathlib import Path

import torch

__all__ = ["num_free_bytes", "num_total_bytes"]

_CGROUP = Path("/sys/fs/cgroup")


def num_total_bytes(device: torch.device) -> int:
    """Return the memory of ``device``; on a CPU the smaller of RAM and the cgroup's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _cgroup_value("memory.max")
    return total if limit is None else min(total, limit)


def num_free_bytes(device: torch.device) -> int:
    """Return what may still be allocated on ``device``.

    On a CPU the smallest of available memory, what the cgroup has left and what RLIMIT_AS has
    left.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = [_meminfo("MemAvailable")]
    limit, usage = _cgroup_value("memory.max"), _cgroup_value("memory.current")
    if limit is not None and usage is not None:
        free.append(max(0, limit - usage))
    free.append(_address_space_left())
    known = [num_bytes for num_bytes in free if num_bytes is not None]
    return min(known) if known else num_total_bytes(device)


def _meminfo(field: str) -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _cgroup_value(name: str) -> int | None:
    try:
        text = (_CGROUP / name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _address_space_left() -> int | None:
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit == resource.RLIM_INFINITY:
            return None
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (ImportError, OSError):
        return None
    return max(0, limit - num_pages * os.sysconf("SC_PAGE_SIZE"))
