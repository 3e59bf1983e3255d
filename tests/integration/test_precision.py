"""Half-precision weights, autocast, a dtype changed after patching, and inference mode."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import hf_paged
from hf_paged.errors import HFPagedError
from reference import CACHE_NAME, patched
from tiny_models import build, ragged_batch

PROMPT = ragged_batch((12, 3, 6))
NEW = 10

_model = functools.cache(build)


def generate(model: PreTrainedModel, **options: Any) -> torch.Tensor:
    options = {"max_new_tokens": NEW, "eos_token_id": None, **options}
    return model.generate(**PROMPT.inputs, **options)


def forced_logits(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits along ``tokens``, [B, T, V], computed over a cache."""
    steps = iter(tokens[:, PROMPT.ids.shape[1] :].unbind(1))

    def force(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, -1e4).scatter(1, next(steps)[:, None], 0.0)

    result = generate(
        model, logits_processor=[force], return_dict_in_generate=True, output_logits=True
    )
    assert torch.equal(result.sequences, tokens)
    setattr(result, CACHE_NAME, None)
    return torch.stack(result.logits, dim=1).float()


def distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative L2 distance."""
    return ((got - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_weights(family: str, dtype: torch.dtype) -> None:
    """Greedy and beams run; along the unpatched model's tokens the logits are near."""
    model = build(family).to(dtype)
    tokens = generate(model)
    expected = forced_logits(model, tokens)
    with patched(model):
        assert distance(forced_logits(model, tokens), expected) <= 2e-2
        for options in ({}, {"num_beams": 3}):
            assert generate(model, **options).shape == tokens.shape
        stats = hf_paged.stats(model)
    with patched(build(family)) as single:
        assert stats.bytes_per_block * 2 == hf_paged.stats(single).bytes_per_block


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
def test_autocast(family: str, attn_implementation: str) -> None:
    """Before it, inside it and after it: the pool follows the dtype of the keys."""
    model = build(family, attn_implementation=attn_implementation)
    tokens = generate(model)

    def cast() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return forced_logits(model, tokens)

    expected = cast()
    with patched(model):
        for _ in range(2):
            assert torch.equal(generate(model), tokens)
            assert distance(cast(), expected) <= 2e-2
        assert torch.equal(generate(model), tokens)


def test_a_smaller_dtype_after_patching_works(family: str) -> None:
    """``model.to(bfloat16)``; blocks of the old dtype are never reused."""
    tokens = generate(_model(family))
    expected = forced_logits(build(family).to(torch.bfloat16), tokens)
    model = build(family)
    with patched(model):
        generate(model)
        model.to(torch.bfloat16)
        assert distance(forced_logits(model, tokens), expected) <= 2e-2
        assert distance(forced_logits(model, tokens), expected) <= 2e-2, "from the prefix cache"


def test_a_larger_dtype_after_patching_says_what_to_do(family: str) -> None:
    """The pool was measured for bf16: an error that names the remedy, and the pool as it was."""
    model = build(family).to(torch.bfloat16)
    with patched(model):
        model.to(torch.float32)
        with pytest.raises(HFPagedError, match="unpatch and patch again"):
            generate(model)
    expected = generate(model)
    with patched(model):
        assert torch.equal(generate(model), expected)


def test_a_dtype_change_while_a_cache_lives_is_an_error() -> None:
    """The cache stays as it was, and goes on when the dtype is the old one again."""
    model = build("llama")
    with patched(model), torch.no_grad(), hf_paged.PagedCache(model) as cache:
        model(PROMPT.ids[:1], past_key_values=cache)
        used, tables = hf_paged.stats(model).used_blocks, cache.block_tables
        model.to(torch.bfloat16)
        with pytest.raises(HFPagedError, match="release them first"):
            generate(model)
        assert hf_paged.stats(model).used_blocks == used and cache.block_tables == tables
        model.to(torch.float32)
        model(PROMPT.ids[:1, :3], past_key_values=cache)
        assert cache.seq_lens == [15]


def test_inference_mode_and_back(model: PreTrainedModel) -> None:
    """Blocks made inside are read and written outside, and the other way round."""
    expected = generate(model)
    with patched(model):
        with torch.inference_mode():
            assert torch.equal(generate(model), expected)
            cache = hf_paged.PagedCache(model)
            model(PROMPT.ids[:1], past_key_values=cache)
        assert torch.equal(generate(model), expected)
        assert hf_paged.stats(model).prefix_hit_tokens > 0
        with torch.no_grad():
            logits = model(PROMPT.ids[:1, :2], past_key_values=cache).logits
        with torch.inference_mode():
            model(PROMPT.ids[:1, :2], past_key_values=cache)
        assert not logits.is_inference() and cache.seq_lens == [16]
        cache.release()


def test_a_model_built_in_inference_mode(family: str) -> None:
    """Its weights have no version counter, and prefixes are still reused rightly."""
    with torch.inference_mode():
        model = build(family)
    expected = generate(model)
    with patched(model):
        for _ in range(2):
            assert torch.equal(generate(model), expected)
        assert hf_paged.stats(model).prefix_hit_tokens > 0
        with torch.inference_mode():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        hits = hf_paged.stats(model).prefix_hit_tokens
        changed = generate(model)
        assert hf_paged.stats(model).prefix_hit_tokens == hits
    assert torch.equal(changed, generate(model))
