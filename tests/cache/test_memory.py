"""How much memory there is, and the limit of a pool that follows from it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_paged.backends.torch_gather import TorchGatherBackend
from hf_paged.cache import memory, sizing
from hf_paged.cache.layout import KVLayout
from hf_paged.cache.memory import num_free_bytes, num_total_bytes
from hf_paged.cache.runtime import PagedRuntime
from hf_paged.config import PagedConfig
from hf_paged.errors import ConfigurationError

pytestmark = pytest.mark.core_suite

CPU = torch.device("cpu")
GIB = 2**30
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


# -- the machine -------------------------------------------------------------------------------


def test_free_is_part_of_total() -> None:
    total = num_total_bytes(CPU)
    assert 0 <= num_free_bytes(CPU) <= total
    assert total <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@needs_linux
def test_the_limit_of_the_address_space_counts() -> None:
    script = """
import resource, torch
from pathlib import Path
from hf_paged.cache.layout import KVLayout
from hf_paged.cache.memory import num_free_bytes
from hf_paged.cache.runtime import PagedRuntime
from hf_paged.config import PagedConfig

used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
hard = resource.getrlimit(resource.RLIMIT_AS)[1]
resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, hard))
free = num_free_bytes(torch.device("cpu"))
layout = KVLayout((None,), 2, 8, torch.float32)
runtime = PagedRuntime(PagedConfig(), layout, torch.device("cpu"), None)
key = torch.ones(1, 2, 8)
runtime.storage.view(0, key, key).key_cache[0] = 1
print(free, runtime.num_blocks * runtime.bytes_per_block)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    free, pool = map(int, done.stdout.split())
    assert 0 < free <= 2**28
    assert free // 3 < pool <= free // 2 + 2**20, "half of what is left by default"


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that describes the process's cgroups: its membership, and files."""
    own = tmp_path / "proc-self-cgroup"
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "_OWN_CGROUPS", own)
    monkeypatch.setattr(memory, "meminfo_bytes", lambda field: 16 * GIB)
    monkeypatch.setattr(memory, "address_space_left", lambda: None)

    def describe(membership: str, files: dict[str, str]) -> None:
        own.write_text(membership)
        for name, text in files.items():
            path = tmp_path / "cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return describe


def test_without_cgroups_there_is_no_limit(cgroups: Any) -> None:
    assert num_free_bytes(CPU) == 16 * GIB


@pytest.mark.parametrize("limit", ["max", "9223372036854771712"])
def test_a_cgroup_without_a_limit_limits_nothing(cgroups: Any, limit: str) -> None:
    cgroups("0::/\n", {"memory.max": limit, "memory.current": str(5 * GIB), "memory.stat": ""})
    assert num_free_bytes(CPU) == 16 * GIB


@pytest.mark.parametrize(
    ("membership", "folder"),
    [
        ("0::/\n", ""),
        ("0::/user.slice/session.scope\n", "user.slice/session.scope/"),
        ("0::/user.slice/session.scope\n", "user.slice/"),
        ("0::/user.slice/session.scope\n", ""),
    ],
)
def test_limit_of_the_own_cgroup_or_one_above(cgroups: Any, membership: str, folder: str) -> None:
    files = {"memory.max": f"{GIB}\n", "memory.current": f"{GIB // 4}\n"}
    cgroups(membership, {folder + name: text for name, text in files.items()})
    assert num_total_bytes(CPU) == GIB
    assert num_free_bytes(CPU) == GIB - GIB // 4


@pytest.mark.parametrize("folder", ["memory/docker/ab12/", "memory/"], ids=["host", "container"])
def test_limit_of_cgroups_version_1(cgroups: Any, folder: str) -> None:
    membership = "9:name=systemd:/docker/ab12\n4:cpu,memory:/docker/ab12\n0::/\n"
    files = {
        "memory.limit_in_bytes": f"{GIB}\n",
        "memory.usage_in_bytes": f"{GIB // 2}\n",
        "memory.stat": f"cache 5\ninactive_file 1\ntotal_inactive_file {GIB // 4}\n",
    }
    cgroups(membership, {folder + name: text for name, text in files.items()})
    assert num_total_bytes(CPU) == GIB
    assert num_free_bytes(CPU) == GIB - GIB // 4


def test_page_cache_of_a_checkpoint_is_free_memory(cgroups: Any) -> None:
    files = {
        "memory.max": str(8 * GIB),
        "memory.current": str(8 * GIB - 4096),
        "memory.stat": f"anon {GIB}\nfile {7 * GIB}\ninactive_file {6 * GIB}\n",
    }
    cgroups("0::/\n", files)
    assert num_free_bytes(CPU) == 6 * GIB + 4096


def test_a_cgroup_beyond_its_limit_leaves_nothing(cgroups: Any) -> None:
    cgroups("0::/\n", {"memory.max": str(GIB), "memory.current": str(2 * GIB)})
    assert num_free_bytes(CPU) == 0


# -- the pool ----------------------------------------------------------------------------------


class StubComputation:
    """Nothing is computed here."""

    def is_determined(self) -> bool:
        return False

    def fingerprint(self) -> Hashable | None:
        return None


LAYOUT = KVLayout((None, None, 8, 8), num_kv_heads=2, head_dim=8, dtype=torch.float32)
BYTES_PER_BLOCK = 16 * 2 * (2 * 2 * 8 * 4)
"""16 tokens, K and V, in the two layers of a group."""


def make_runtime(**arguments: Any) -> PagedRuntime:
    return PagedRuntime(PagedConfig(**arguments), LAYOUT, CPU, StubComputation())


@pytest.mark.parametrize(
    ("arguments", "num_blocks"),
    [
        (dict(num_blocks=7), 7),
        (dict(kv_memory=10 * BYTES_PER_BLOCK), 9),
        (dict(kv_memory=11 * BYTES_PER_BLOCK - 1), 9),
        (dict(kv_memory=2 * BYTES_PER_BLOCK), 1),
        (dict(kv_memory="1MiB"), 2**20 // BYTES_PER_BLOCK - 1),
        (dict(kv_memory=0.25), 2 * GIB // BYTES_PER_BLOCK - 1),
        (dict(), 4 * GIB // BYTES_PER_BLOCK - 1),
    ],
    ids=str,
)
def test_blocks_of_a_limit(
    arguments: dict[str, Any], num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizing, "num_free_bytes", lambda device: 8 * GIB)
    monkeypatch.setattr(sizing, "num_total_bytes", lambda device: 16 * GIB)
    runtime = make_runtime(**arguments)
    stats = runtime.stats()
    assert runtime.num_blocks == stats.num_blocks == stats.free_blocks == num_blocks
    assert stats.bytes_per_block == BYTES_PER_BLOCK
    assert stats.capacity_bytes == (num_blocks + 1) * BYTES_PER_BLOCK, "the null block included"
    assert (stats.used_blocks, stats.used_bytes, stats.live_tokens) == (0, 0, 0)
    assert (stats.utilization, stats.utilization_at_peak) == (1.0, 1.0)
    assert (stats.block_size, stats.backend) == (16, runtime.backend.name)


@pytest.mark.parametrize(
    "arguments",
    [dict(kv_memory=2 * BYTES_PER_BLOCK - 1), dict(kv_memory="1"), dict(kv_memory=1e-12)],
    ids=str,
)
def test_a_limit_that_holds_no_block_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError) as raised:
        make_runtime(**arguments)
    message = str(raised.value)
    assert f"kv_memory={arguments['kv_memory']!r} holds no block" in message
    assert f"at least {2 * BYTES_PER_BLOCK} bytes" in message
    assert re.search(r"\d+ bytes are free; raise kv_memory or lower block_size", message)


@pytest.mark.parametrize(
    "arguments",
    [
        dict(num_blocks=10**12),
        dict(kv_memory="1000TiB"),
        dict(kv_memory=1e300),
        dict(kv_memory=2**60),
    ],
    ids=str,
)
def test_more_than_the_machine_has_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError) as raised:
        make_runtime(**arguments)
    message = str(raised.value)
    ((name, value),) = arguments.items()
    assert f"{name}={value!r} is more than cpu has" in message
    assert f"{num_total_bytes(CPU)} there; pass less" in message


def test_the_block_size_suits_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attention#1579, #824: refused with the reason, or chosen to fit."""
    assert make_runtime(num_blocks=4).block_size == 16
    assert make_runtime(num_blocks=4, block_size=2).block_size == 2
    monkeypatch.setattr(TorchGatherBackend, "block_size_multiple", 64)
    monkeypatch.setattr(TorchGatherBackend, "default_block_size", 64)
    assert make_runtime(num_blocks=4, backend="torch").block_size == 64
    assert make_runtime(num_blocks=4, backend="torch", block_size=128).block_size == 128
    with pytest.raises(ConfigurationError) as raised:
        make_runtime(num_blocks=4, backend="torch", block_size=16)
    message = str(raised.value)
    for part in ("block_size=16", "'torch'", "a multiple of 64", "block_size='auto' or 64"):
        assert part in message
