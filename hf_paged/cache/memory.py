"""How much memory there is: for the pool's default limit, and to refuse more than exists."""

from __future__ import annotations

import os
from pathlib import Path

import torch

__all__ = [
    "address_space_left",
    "cgroup_limits",
    "meminfo_bytes",
    "num_free_bytes",
    "num_total_bytes",
]

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def num_total_bytes(device: torch.device) -> int:
    """Return the memory of ``device``; on a CPU the smaller of RAM and the cgroup's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *(limit for limit, _ in cgroup_limits())])


def num_free_bytes(device: torch.device) -> int:
    """Return what may still be allocated on ``device``.

    On a CPU the smallest of available memory, what the cgroup has left and what RLIMIT_AS has
    left.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = [meminfo_bytes("MemAvailable")]
    free.extend(max(0, limit - used) for limit, used in cgroup_limits())
    free.append(address_space_left())
    known = [num_bytes for num_bytes in free if num_bytes is not None]
    return min(known) if known else num_total_bytes(device)


def meminfo_bytes(field: str) -> int | None:
    """Return a line of /proc/meminfo, "MemAvailable" say, or None where there is none."""
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return None


def cgroup_limits() -> list[tuple[int, int]]:
    """Return (limit, bytes in use) of the process's cgroup and of those above it, if limited.

    Both versions of cgroups. Page cache that the kernel drops first is not in use: reading a
    checkpoint may fill a container's limit with it.
    """
    limits = []
    for line in _read(_OWN_CGROUPS).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = _CGROUPS, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = _CGROUPS / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            if not folder.is_relative_to(root):
                break
            limit, usage = (_read(folder / name).strip() for name in names[:2])
            if limit.isdigit() and usage.isdigit():
                stat = dict(pair.split() for pair in _read(folder / "memory.stat").splitlines())
                limits.append((int(limit), max(0, int(usage) - int(stat.get(names[2], 0)))))
    return limits


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def address_space_left() -> int | None:
    """Return what RLIMIT_AS leaves to this process in bytes, or None if nothing limits it."""
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit == resource.RLIM_INFINITY:
            return None
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (ImportError, OSError):
        return None
    return max(0, limit - num_pages * os.sysconf("SC_PAGE_SIZE"))
