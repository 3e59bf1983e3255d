"""The Triton backend where nothing is interpreted, and its other tests in a process that does."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_paged.backends import block_ops, triton_ops
from hf_paged.backends.base import LayerView
from hf_paged.backends.triton import LIMITS, TritonBackend
from hf_paged.errors import ConfigurationError

CPU = torch.device("cpu")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


@pytest.mark.slow
@needs_triton
def test_the_kernels_under_the_interpreter_of_triton() -> None:
    """Triton reads the variable once, when it is imported, so these tests have a process."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    options = ["-q", "--noconftest", "-p", "no:cacheprovider", "--tb=short"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, Path(__file__).parent / "triton"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_why_it_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    reason = TritonBackend.unavailable_reason(CPU)
    assert reason is not None
    assert "CUDA" in reason
    assert "TRITON_INTERPRET=1" in reason
    assert TritonBackend.unavailable_reason(torch.device("meta")) == reason
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert TritonBackend.unavailable_reason(torch.device("meta")) == reason


@pytest.mark.parametrize("is_installed", [True, False])
def test_it_runs_where_triton_is_and_interprets(
    is_installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object() if is_installed else None)
    reason = TritonBackend.unavailable_reason(CPU)
    assert reason is None if is_installed else "not installed" in str(reason)


@pytest.mark.parametrize(("capability", "runs"), [((7, 5), False), ((8, 0), True), ((10, 0), True)])
def test_it_needs_a_device_of_sm80(
    capability: tuple[int, int], runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    reason = TritonBackend.unavailable_reason(torch.device("cuda", 0))
    assert reason is None if runs else "sm75" in str(reason)


@pytest.mark.parametrize(
    "refused", [dict(dtype=torch.float64), dict(block_size=8), dict(head_dim=257)], ids=str
)
def test_a_model_beyond_the_limits_is_refused(refused: dict[str, Any]) -> None:
    fits: dict[str, Any] = dict(device=CPU, dtype=torch.bfloat16, head_dim=256, block_size=16)
    backend = TritonBackend()
    backend.check_model(**fits)
    with pytest.raises(ConfigurationError, match="triton"):
        backend.check_model(**fits | refused)
    assert backend.default_block_size % LIMITS.block_size_multiple == 0


@pytest.mark.parametrize(
    ("num_rows", "num_kv_heads", "table_tokens", "expected"),
    [
        (1, 8, 32768, 32),
        (1, 8, 1024, 4),
        (1, 8, 16, 1),
        (4, 8, 32768, 8),
        (64, 8, 32768, 1),
        (1, 1, 2**20, 32),
    ],
)
def test_splits_fill_the_device_and_have_enough_to_do(
    num_rows: int, num_kv_heads: int, table_tokens: int, expected: int
) -> None:
    assert triton_ops.choose_num_splits(num_rows, num_kv_heads, table_tokens, 132) == expected


def blocks_with_gaps() -> tuple[torch.Tensor, LayerView]:
    blocks = torch.full((8, 200), torch.nan)
    key, value = blocks[:, :96].unflatten(1, (4, 3, 8)), blocks[:, 96:168].unflatten(1, (4, 3, 6))
    return blocks, LayerView(key, value)


def test_blocks_in_plain_torch_are_written_read_and_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    blocks, view = blocks_with_gaps()
    key, value = torch.randn(3, 3, 8), torch.randn(3, 3, 6)
    slots = torch.tensor([5, -1, 31])
    block_ops.write(key, value, view.key_cache, view.value_cache, slots)
    assert torch.equal(view.key_cache[1, 1], key[0])
    assert torch.equal(view.value_cache[7, 3], value[2])
    assert (~blocks.isnan()).sum() == 2 * 3 * (8 + 6)
    stored = block_ops.gather(view, slots[::2])
    assert torch.equal(stored[0], key[::2])
    assert torch.equal(stored[1], value[::2])
    block_ops.copy_blocks(blocks, torch.tensor([1]), torch.tensor([3]))
    assert torch.equal(blocks[3].nan_to_num(7.0), blocks[1].nan_to_num(7.0))
    assert blocks[[0, 2, 4, 5, 6]].isnan().all()
    assert "hf_paged.backends.triton_kernels" not in sys.modules


def test_block_operators_are_what_their_schemas_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    _, view = blocks_with_gaps()
    caches = (view.key_cache.nan_to_num_(), view.value_cache.nan_to_num_())
    new = (torch.randn(3, 3, 8), torch.randn(3, 3, 6))
    torch.library.opcheck(block_ops.write.default, (*new, *caches, torch.tensor([5, -1, 31])))
    torch.library.opcheck(
        block_ops.copy_blocks.default,
        (torch.randn(8, 4, 3, 8), torch.tensor([0, 1]), torch.tensor([4, 5])),
    )
