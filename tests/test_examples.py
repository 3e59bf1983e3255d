"""Each example exits with 0, on the real model: it checks its own claim.

They run in this process as `python examples/NAME.py` would run them, so that the model is loaded
once; one runs in a process of its own. quickstart.py is run by `.ci/run`.
"""

from __future__ import annotations

import gc
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_paged
import real_model
from hf_paged.errors import ConfigurationError

EXAMPLES = Path(__file__).parent.parent / "examples"

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

ARGUMENTS = {
    "batch_larger_than_pool": ["--max-new-tokens", "6"],
    "beam_search": ["--max-new-tokens", "6"],
    "best_of_n": ["--max-new-tokens", "6", "-n", "4"],
    "chat": ["--max-new-tokens", "6"],
    "decoding_loop": ["--max-new-tokens", "20"],
    "few_shot": ["--questions", "2"],
    "stream": ["--max-new-tokens", "8"],
    "tree_search": ["--max-new-tokens", "6"],
}
ON_BOTH_VERSIONS = {"chat", "decoding_loop"}  # they name the cache, to generate() and to a forward
NOT_EXAMPLES = {"prompts", "real_model"}


@pytest.fixture(scope="module")
def loaded() -> Any:
    return real_model.load_smollm2()


@pytest.fixture
def smollm2(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The model, given to whatever loads it, and unpatched again at the end."""
    monkeypatch.setattr(real_model, "load_smollm2", lambda dtype=torch.float32: loaded)
    model, _ = loaded
    yield model
    with suppress(ConfigurationError):  # the example has unpatched it
        hf_paged.unpatch(model)


def test_every_example_is_listed() -> None:
    names = {file.stem for file in EXAMPLES.glob("*.py")} - NOT_EXAMPLES
    assert names == {*ARGUMENTS, "quickstart"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.core_suite] if name in ON_BOTH_VERSIONS else [])
        for name in ARGUMENTS
    ],
)
def test_example(name: str, smollm2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = smollm2.generation_config.to_dict()
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *ARGUMENTS[name]])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert end.value.code == 0
    assert smollm2.generation_config.to_dict() == settings
    gc.collect()
    with suppress(ConfigurationError):
        assert hf_paged.stats(smollm2).used_blocks == 0


def test_an_example_as_a_program() -> None:
    command = [sys.executable, "-W", "error", EXAMPLES / "stream.py", "--max-new-tokens", "4"]
    subprocess.run(command, check=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})
