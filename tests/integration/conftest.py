"""The models of tests that run over more than one family."""

from __future__ import annotations

import functools

import pytest
from transformers import PreTrainedModel

from tiny_models import build

_build = functools.cache(build)


@pytest.fixture(params=[pytest.param("llama", marks=pytest.mark.core_suite), "gemma3", "opt"])
def family(request: pytest.FixtureRequest) -> str:
    """A plain, a sliding-window and a learned-position family."""
    return str(request.param)


@pytest.fixture
def model(family: str) -> PreTrainedModel:
    """A model of each family, unpatched; built once."""
    return _build(family)
