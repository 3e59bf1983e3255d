"""generate() gives the tokens of the unpatched model: every family, strategy and padding.

The reference is the same object, unpatched. Where it raises itself, the case is skipped and names
what it raised (transformers 5.17 cannot run a draft model whose window is reached).
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import hf_paged
from reference import patched, seeded, sequences
from tiny_models import FAMILIES, Batch, build, ragged_batch

NEW = 14


def _options(**options: Any) -> dict[str, Any]:
    return {"max_new_tokens": NEW, **options}


BATCH_STRATEGIES = {
    "greedy": _options(),
    "sampling": _options(do_sample=True, top_k=20, temperature=0.9),
    "beams": _options(num_beams=4, num_return_sequences=2),
    "beam_sampling": _options(num_beams=3, do_sample=True),
    "three_samples": _options(do_sample=True, num_return_sequences=3),
    "penalties": _options(repetition_penalty=1.3, no_repeat_ngram_size=2),
}
ROW_STRATEGIES = {
    "draft_model": _options(),
    "draft_model_sampling": _options(do_sample=True),
    "prompt_lookup": _options(prompt_lookup_num_tokens=3),
}
BATCHES = {
    "no_padding": lambda: ragged_batch((9, 9, 9)),
    "left_padding": lambda: ragged_batch((9, 3, 6)),
    "pad_is_eos": lambda: ragged_batch((9, 3, 6), pad_id=2),
}


@functools.cache
def _model(family: str, seed: int = 1) -> torch.nn.Module:
    return build(family, seed)


def _run(family: str, strategy: str, padding: str) -> Any:
    model, batch = _model(family), BATCHES[padding]()
    options = BATCH_STRATEGIES.get(strategy) or ROW_STRATEGIES[strategy]
    if strategy in ROW_STRATEGIES:
        row = 1 if padding != "no_padding" else 0
        batch = Batch(batch.ids[row : row + 1], batch.mask[row : row + 1])
        if strategy == "prompt_lookup":  # something to look up
            batch = Batch(batch.ids.repeat(1, 2), batch.mask.repeat(1, 2))
    if strategy.startswith("draft"):
        options = options | {"assistant_model": _model(family, seed=2)}
    pad_id = 2 if padding == "pad_is_eos" else 0
    return seeded(lambda: model.generate(**batch.inputs, **options, pad_token_id=pad_id))


@functools.cache
def _reference(family: str, strategy: str, padding: str) -> Any:
    return _run(family, strategy, padding)


@pytest.mark.core_suite
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("padding", BATCHES)
@pytest.mark.parametrize("strategy", [*BATCH_STRATEGIES, *ROW_STRATEGIES])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal(family: str, strategy: str, padding: str, block_size: int) -> None:
    expected = _reference(family, strategy, padding)
    if isinstance(expected, Exception):
        pytest.skip(f"the unpatched model raises {type(expected).__name__}: {expected}")
    models = (_model(family), _model(family, seed=2))
    with patched(*models, block_size=block_size):
        got = _run(family, strategy, padding)
        assert hf_paged.stats(models[0]).peak_used_blocks > 0
    if isinstance(got, Exception):
        raise got
    assert torch.equal(sequences(got), sequences(expected))
