"""Paging belongs to the call: without a paged cache a patched model is its unpatched self.

Bit for bit: outputs, gradients, and what the config says.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, StaticCache

import hf_paged
from hf_paged.errors import PagedGradientError
from reference import CACHE_NAME, cache_of, patched, seeded
from tiny_models import build, ragged_batch

_model = functools.cache(build)

FORWARDS: dict[str, Callable[[PreTrainedModel], Any]] = {
    "ids": lambda model: model(ragged_batch((9, 9)).ids),
    "left_padding": lambda model: model(**ragged_batch((9, 3, 6)).inputs),
    "use_cache": lambda model: model(**ragged_batch((9, 3, 6)).inputs, use_cache=True),
    "no_cache": lambda model: model(**ragged_batch((9, 3, 6)).inputs, use_cache=False),
    "labels": lambda model: model(**ragged_batch((9, 3)).inputs, labels=ragged_batch((9, 3)).ids),
    "tuple": lambda model: model(ragged_batch((9, 9)).ids, return_dict=False)[0],
    "hidden_states": lambda model: model(ragged_batch((9, 9)).ids, output_hidden_states=True),
    "mask_4d": lambda model: model(
        ragged_batch((9,)).ids,
        attention_mask=torch.zeros(1, 1, 9, 9).masked_fill(~torch.ones(9, 9).tril().bool(), -1e30),
    ),
}
GENERATIONS: dict[str, Callable[[PreTrainedModel], dict[str, Any]]] = {
    "use_cache_false": lambda model: {"use_cache": False},
    "dynamic": lambda model: {"cache_implementation": "dynamic"},
    "static": lambda model: {"cache_implementation": "static", "disable_compile": True},
    "own_dynamic_cache": lambda model: {CACHE_NAME: DynamicCache(config=model.config)},
    "own_static_cache": lambda model: {
        CACHE_NAME: StaticCache(config=model.config, max_cache_len=40),
        "disable_compile": True,
    },
}


def tensors(result: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of an output, those of a DynamicCache too."""
    if isinstance(result, torch.Tensor):
        return {"": result}
    found = {}
    for name, value in result.items():
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif isinstance(value, tuple):
            found |= {f"{name}.{i}": x for i, x in enumerate(value)}
        elif hasattr(value, "layers"):
            found |= {f"keys.{i}": layer.keys for i, layer in enumerate(value.layers)}
            found |= {f"values.{i}": layer.values for i, layer in enumerate(value.layers)}
    return found


def assert_identical(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize("name", FORWARDS)
def test_a_plain_forward_is_unchanged(model: PreTrainedModel, name: str) -> None:
    """And takes no block of the pool; a cache that the model makes is its own DynamicCache."""
    with torch.no_grad():
        expected = seeded(lambda: FORWARDS[name](model))
        if isinstance(expected, Exception):
            pytest.skip(f"the unpatched model raises {type(expected).__name__}: {expected}")
        with patched(model):
            got = FORWARDS[name](model)
            assert hf_paged.stats(model).peak_used_blocks == 0
    assert_identical(tensors(got), tensors(expected))
    if name == "use_cache":
        assert type(cache_of(got)) is type(cache_of(expected)) is DynamicCache


@pytest.mark.parametrize("name", GENERATIONS)
def test_a_foreign_cache_stays_in_use(model: PreTrainedModel, name: str) -> None:
    """Also the one that generate() returns, and its scores bit for bit."""

    def run() -> Any:
        return model.generate(
            **ragged_batch((9, 3, 6)).inputs,
            max_new_tokens=12,
            return_dict_in_generate=True,
            output_logits=True,
            **GENERATIONS[name](model),
        )

    expected = seeded(run)
    with patched(model):
        got = seeded(run)
        assert hf_paged.stats(model).peak_used_blocks == 0
    assert_identical(tensors(got), tensors(expected))
    assert type(getattr(got, CACHE_NAME, None)) is type(getattr(expected, CACHE_NAME, None))


def test_a_named_cache_of_the_generation_config_stays_in_use(model: PreTrainedModel) -> None:
    """Named in the model's own generation_config, or in one that is passed."""
    config = model.generation_config
    batch = ragged_batch((9, 3))
    with patched(model):
        config.cache_implementation = "dynamic"
        try:
            model.generate(**batch.inputs, max_new_tokens=2)
            model.generate(**batch.inputs, generation_config=config, max_new_tokens=2)
            assert hf_paged.stats(model).peak_used_blocks == 0
        finally:
            config.cache_implementation = None
        model.generate(**batch.inputs, max_new_tokens=2)
        assert hf_paged.stats(model).peak_used_blocks > 0


# -- training ------------------------------------------------------------------------------------


def gradients(model: PreTrainedModel, **options: Any) -> dict[str, torch.Tensor]:
    """One backward pass under a seed; leaves no gradient behind."""
    batch = ragged_batch((9, 3, 6))
    torch.manual_seed(5)
    model(**batch.inputs, labels=batch.ids, **options).loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    assert found
    return found


@pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"use_cache": True}], ids=str)
@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("is_training", [False, True])
def test_gradients_are_equal(
    family: str, is_training: bool, attn_implementation: str, options: dict[str, Any]
) -> None:
    """Dropout too, under a seed; between two calls of generate(), and after unpatching."""
    model = build(
        family,
        attn_implementation=attn_implementation,
        attention_dropout=0.2,
        dropout=0.2,
    ).train(is_training)
    ids = ragged_batch((9,)).ids
    expected = gradients(model, **options)
    with patched(model):
        model.eval().generate(ids, max_new_tokens=2)
        model.train(is_training)
        assert_identical(gradients(model, **options), expected)
        assert model.training is is_training
        model.eval().generate(ids, max_new_tokens=2)
    assert_identical(gradients(model.train(is_training), **options), expected)


def test_gradient_checkpointing_is_unchanged(family: str) -> None:
    """Switched on before patching or after it."""
    model = build(family).train()
    expected = gradients(model)
    options = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}
    with patched(model):
        model.gradient_checkpointing_enable(**options)
        assert_identical(gradients(model), expected)
    with patched(model):
        assert_identical(gradients(model), expected)
        model.gradient_checkpointing_disable()
        assert_identical(gradients(model), expected)


def test_backward_through_a_paged_forward_is_an_error(model: PreTrainedModel) -> None:
    """The forward itself needs no torch.no_grad() and gives the right logits."""
    ids = ragged_batch((9, 9)).ids
    expected = model(ids).logits
    with patched(model), hf_paged.PagedCache(model) as cache:
        got = model(ids, past_key_values=cache).logits
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        with pytest.raises(PagedGradientError, match="use_cache=False"):
            got.sum().backward()
        with torch.no_grad():
            assert not model(ids[:, :1], past_key_values=cache).logits.requires_grad
    model.zero_grad(set_to_none=True)


# -- the config ----------------------------------------------------------------------------------


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
def test_the_config_reads_as_the_user_set_it_while_running(
    family: str, attn_implementation: str
) -> None:
    """Seen by a hook in the middle of a paged forward; and nothing is written to it."""
    model = build(family, attn_implementation=attn_implementation)
    config, before = model.config, model.config.to_dict()
    seen: list[tuple[str, dict[str, Any]]] = []
    layers = [m for m in model.modules() if type(m).__name__.endswith("DecoderLayer")]
    assert layers
    with patched(model):
        for layer in layers:
            layer.register_forward_hook(
                lambda *args: seen.append((config._attn_implementation, config.to_dict()))
            )
        model.generate(**ragged_batch((9, 3)).inputs, max_new_tokens=4)
        assert model.config is config
    assert len(seen) == 4 * len(layers)
    assert all(entry == (attn_implementation, before) for entry in seen)
    assert config.to_dict() == before


def test_a_plain_call_inside_a_paged_one_is_plain(model: PreTrainedModel) -> None:
    """A hook of the head that calls the model again, as contrastive methods do."""
    ids = ragged_batch((9, 9)).ids
    with torch.no_grad():
        expected = model(ids).logits
    inner: list[torch.Tensor] = []
    with patched(model), torch.no_grad(), hf_paged.PagedCache(model) as cache:
        base = model.get_decoder()
        embeddings = model.get_input_embeddings()

        def call_again(*args: Any) -> None:
            hook.remove()
            inner.append(model.get_output_embeddings()(base(ids).last_hidden_state))

        hook = embeddings.register_forward_hook(call_again)
        outer = model(ids, past_key_values=cache).logits
        assert cache.seq_lens == [9, 9]
    torch.testing.assert_close(outer, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(inner[0], expected)


def test_backward_into_tokens_that_are_stored_is_an_error_in_train_mode_too() -> None:
    """train() attends by the model's own code; the past it gathers carries no gradient."""
    model, ids = build("llama"), ragged_batch((9, 9)).ids
    with patched(model), hf_paged.PagedCache(model) as cache:
        model.train()
        model(ids, past_key_values=cache)
        logits = model(ids[:, :1], past_key_values=cache).logits
        with pytest.raises(PagedGradientError, match="use_cache=False"):
            logits.sum().backward()
