"""The Triton kernels, compiled for devices that are not here: do they fit?

Registers and shared memory are what the compilers that Triton brings with it say.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes that one program may have (CUDA C++ Programming Guide, compute capabilities)."""
MAX_STACK = 128
"""Bytes a thread: prompts of 128 dims on sm80 spill ten registers."""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_every_kernel_fits_the_device(capability: int, tmp_path: Path) -> None:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]),
        "TRITON_CACHE_DIR": str(tmp_path),
        "TRITON_INTERPRET": "0",
    }
    script = TESTS / "backends" / "triton" / "compile_variants.py"
    result = subprocess.run(
        [sys.executable, script, str(capability)], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    usages = json.loads(result.stdout)
    assert {usage["kernel"] for usage in usages} == {
        "_decode_kernel",
        "_combine_kernel",
        "_prefill_kernel",
        "_write_kernel",
        "_copy_kernel",
    }
    for usage in usages:
        assert usage["shared"] <= SHARED_MEMORY[capability], usage
        assert usage["registers"] <= 255, usage
        assert usage["stack"] <= MAX_STACK, usage
    # Two tiles of K and V, 64 tokens of 128 bf16: the next one loads while one is computed.
    assert usages[0]["kernel"] == "_decode_kernel"
    assert usages[0]["shared"] >= 2 * 2 * 64 * 128 * 2
