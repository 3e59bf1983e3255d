"""Run the same call on the same object unpatched and patched, and compare."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from transformers import LlamaModel

import hf_paged

CACHE_NAME = (
    "cache" if "cache" in inspect.signature(LlamaModel.forward).parameters else "past_key_values"
)
"""The argument and output field that holds the cache, by transformers version."""


def sequences(result: Any) -> torch.Tensor:
    """Return the token ids of what generate() returned."""
    return result if isinstance(result, torch.Tensor) else result.sequences


def cache_of(result: Any) -> Any:
    """Return the cache in what forward() or generate() returned."""
    return getattr(result, CACHE_NAME)


def seeded(run: Callable[[], Any], seed: int = 3) -> Any:
    """Run under a seed; return the exception instead of raising it."""
    torch.manual_seed(seed)
    try:
        return run()
    except Exception as error:
        return error


@contextmanager
def patched(*models: torch.nn.Module, **options: Any):
    """Patch, and unpatch on the way out; blocks must have come back and invariants hold."""
    options = {"num_blocks": 400, "block_size": 4, "debug": True} | options
    for model in models:
        hf_paged.patch(model, **options)
    try:
        yield models[0]
        for model in models:
            stats = hf_paged.stats(model)
            assert stats.used_blocks == 0, stats
            assert stats.free_blocks + stats.cached_blocks == stats.num_blocks, stats
    finally:
        for model in models:
            hf_paged.unpatch(model)
