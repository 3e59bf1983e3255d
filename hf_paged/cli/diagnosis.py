"""What a bug report should say about a machine: versions, processor, backends, memory."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import hf_paged
from hf_paged.backends import native
from hf_paged.backends.registry import available_backends
from hf_paged.cache import memory
from hf_paged.errors import HFPagedError

__all__ = ["diagnose", "usable_devices"]

_PACKAGES = (
    "torch",
    "transformers",
    "numpy",
    "accelerate",
    "peft",
    "triton",
    "flash-attn",
    "bitsandbytes",
    "safetensors",
    "tokenizers",
)
_VARIABLES = (native.ISA_VARIABLE, "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES")


def diagnose() -> dict[str, Any]:
    """Return every fact by section; sizes are bytes, None is what this machine does not tell."""
    return {
        "installed": _installed(),
        "machine": _machine(),
        "native backend": _native(),
        "backends": {str(device): dict(available_backends(device)) for device in usable_devices()},
        "memory": _memory(),
        "gpus": _gpus(),
    }


def usable_devices() -> list[torch.device]:
    """Return the devices on which a model can be here: the CPU, and the first GPU if any."""
    names = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    return [torch.device(name) for name in names]


def _installed() -> dict[str, str | None]:
    found: dict[str, str | None] = {
        "hf_paged": f"{hf_paged.__version__} in {Path(hf_paged.__file__).parent}",
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
    }
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def _machine() -> dict[str, Any]:
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "torch's capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "cores for this process": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else None,
        "threads": torch.get_num_threads(),
        **{name: os.environ.get(name) for name in _VARIABLES},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}
    return ", ".join(sorted(models)) or platform.processor() or platform.machine()


def _native() -> dict[str, Any]:
    chosen: str | None = None
    try:
        chosen, problem = native.chosen_isa(), native.unavailable_reason()
    except HFPagedError as error:
        problem = str(error)
    return {
        "supported": list(native.supported_isas()),
        "built": list(native.built_isas()),
        "chosen": chosen,
        "problem": problem,
    }


def _memory() -> dict[str, Any]:
    cpu = torch.device("cpu")
    # Version 1 of cgroups says "no limit" by a number beyond every address.
    limits = [pair for pair in memory.cgroup_limits() if pair[0] < 2**60]
    limit, used = min(limits, key=lambda pair: pair[0] - pair[1]) if limits else (None, None)
    return {
        "total": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "available": memory.meminfo_bytes("MemAvailable"),
        "cgroup limit": limit,
        "cgroup in use": used,
        "left of RLIMIT_AS": memory.address_space_left(),
        "default limit of a pool": memory.num_free_bytes(cpu) // 2,
    }


def _gpus() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        gpus.append(
            {
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "total": total,
                "free": free,
                "cuda": torch.version.cuda,
            }
        )
    return gpus
