"""patch() leaves a model usable in every other way, and unpatch() leaves no trace."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from typing import Any

import psutil
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BloomConfig,
    DeepseekV3Config,
    DiffLlamaConfig,
    LlamaConfig,
    LlamaModel,
    MambaConfig,
    T5Config,
    T5ForConditionalGeneration,
)

import hf_paged
from hf_paged.errors import ConfigurationError, UnsupportedModelError
from reference import patched
from tiny_models import CONFIGS, FAMILIES, build, from_config, ragged_batch

pytestmark = pytest.mark.core_suite


def _snapshot(model: torch.nn.Module) -> dict[str, Any]:
    """Everything that unpatch must give back: classes, attributes, hooks, config objects."""
    seen: dict[str, Any] = {"config": copy.deepcopy(model.config.to_dict())}
    for name, module in model.named_modules():
        seen[name, "class"] = type(module)
        for attribute, value in module.__dict__.items():
            plain = isinstance(value, (int, float, str, bool, type(None)))
            seen[name, attribute] = value if plain else id(value)
        seen[name, "forward"] = getattr(module.forward, "__func__", module.forward)
    return seen


@pytest.mark.parametrize("family", FAMILIES)
def test_unpatch_restores_every_attribute_of_every_module(family: str) -> None:
    model = build(family)
    before = _snapshot(model)
    batch = ragged_batch((9, 3))
    with patched(model):
        model.generate(**batch.inputs, max_new_tokens=3)
    assert _snapshot(model) == before


def test_patch_returns_the_same_object_and_is_idempotent() -> None:
    model = build("llama")
    assert hf_paged.patch(model, num_blocks=8) is model
    assert hf_paged.patch(model, num_blocks=8) is model
    with pytest.raises(ConfigurationError, match="unpatch"):
        hf_paged.patch(model, num_blocks=9)
    assert hf_paged.unpatch(model) is model
    with pytest.raises(ConfigurationError, match="not patched"):
        hf_paged.unpatch(model)


def test_the_config_reads_as_the_user_set_it() -> None:
    model = build("llama")
    before, config = model.config.to_dict(), model.config
    with patched(model):
        assert model.config is config
        assert model.config.to_dict() == before
        assert model.config._attn_implementation == "sdpa"
        assert model.model.config._attn_implementation == "sdpa"
        assert type(model).__name__ == "LlamaForCausalLM"
        assert AutoModelForCausalLM.from_config(model.config) is not None


def test_copies_of_a_patched_model_are_unpatched() -> None:
    model = build("gemma3")
    batch = ragged_batch((9, 3))
    expected = model.generate(**batch.inputs, max_new_tokens=6)
    with patched(model):
        twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model)]
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        twins.append(torch.load(buffer, weights_only=False))
        for twin in twins[:2] + twins[3:]:
            assert type(twin) is not type(model)
            assert twin.model.config is twin.config
            assert twin.model.layers[0].self_attn.config is twin.config
            with pytest.raises(ConfigurationError):
                hf_paged.stats(twin)
            assert torch.equal(twin.generate(**batch.inputs, max_new_tokens=6), expected)
    assert _snapshot(twins[0]).keys() == _snapshot(model).keys()


def test_state_dict_and_save_pretrained_give_what_the_unpatched_model_gives(tmp_path: Any) -> None:
    model = build("opt")
    keys = list(model.state_dict())
    model.save_pretrained(tmp_path / "before")
    with patched(model):
        assert list(model.state_dict()) == keys
        model.save_pretrained(tmp_path / "patched")
    files = sorted(path.name for path in (tmp_path / "before").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "patched").iterdir())
    for name in files:
        before, after = (tmp_path / folder / name for folder in ("before", "patched"))
        assert before.read_bytes() == after.read_bytes(), name


def test_models_that_share_a_config_object_do_not_affect_one_another() -> None:
    config = copy.deepcopy(CONFIGS["llama"])
    first, second = from_config(config, seed=1), from_config(config, seed=2)
    first.config = second.config = first.model.config = second.model.config = config
    for model in (first, second):
        for layer in model.model.layers:
            layer.self_attn.config = config
    batch = ragged_batch((9, 3, 6))
    expected = [m.generate(**batch.inputs, max_new_tokens=8) for m in (first, second)]
    hf_paged.patch(first, num_blocks=64)
    hf_paged.patch(second, num_blocks=64)
    hf_paged.unpatch(first)
    assert config._attn_implementation == "sdpa"
    for model, tokens in zip((first, second), expected, strict=True):
        assert torch.equal(model.generate(**batch.inputs, max_new_tokens=8), tokens)
    assert hf_paged.stats(second).peak_used_blocks > 0
    hf_paged.unpatch(second)
    assert first.model.config is second.model.config is config


def test_a_patched_target_works_with_an_unpatched_draft_of_the_same_config() -> None:
    config = copy.deepcopy(CONFIGS["llama"])
    target, draft = from_config(config, seed=1), from_config(config, seed=2)
    batch = ragged_batch((9,))
    expected = target.generate(**batch.inputs, assistant_model=draft, max_new_tokens=12)
    with patched(target):
        got = target.generate(**batch.inputs, assistant_model=draft, max_new_tokens=12)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_set_attn_implementation_is_followed(implementation: str) -> None:
    model = build("llama")
    batch = ragged_batch((9, 3))
    expected = build("llama", attn_implementation=implementation).generate(
        **batch.inputs, max_new_tokens=8
    )
    with patched(model):
        model.set_attn_implementation(implementation)
        assert model.config._attn_implementation == implementation
        assert torch.equal(model.generate(**batch.inputs, max_new_tokens=8), expected)
    assert model.config._attn_implementation == implementation


def test_resized_embeddings_work_while_patched() -> None:
    model = build("llama")
    with patched(model):
        torch.manual_seed(0)
        model.resize_token_embeddings(140, mean_resizing=False)
        got = model.generate(**ragged_batch((9, 3)).inputs, max_new_tokens=8)
    assert torch.equal(got, model.generate(**ragged_batch((9, 3)).inputs, max_new_tokens=8))


def test_a_patched_model_that_is_dropped_is_collected() -> None:
    model = hf_paged.patch(build("llama"), num_blocks=16)
    model.generate(**ragged_batch((9, 3)).inputs, max_new_tokens=2)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_memory_is_given_back() -> None:
    """transformers#47731: generate, then measure memory."""
    model = build("llama", head_dim=128, num_key_value_heads=4)
    hf_paged.patch(model, num_blocks=4096, prefix_caching=False)
    model.generate(**ragged_batch((230,) * 8).inputs, max_new_tokens=2)
    pool_bytes = hf_paged.stats(model).peak_used_bytes
    assert pool_bytes > 20 << 20
    before = psutil.Process().memory_info().rss
    hf_paged.trim(model)
    assert before - psutil.Process().memory_info().rss > 0.8 * pool_bytes
    hf_paged.unpatch(model)


@pytest.mark.parametrize(
    ("make", "seam"),
    [
        (lambda: BertForMaskedLM(BertConfig(**_BERT)), r"generate\(\)"),
        (lambda: LlamaModel(CONFIGS["llama"]), r"generate\(\)"),
        (lambda: T5ForConditionalGeneration(T5Config(**_T5)), r"generate\(\)"),
        (lambda: AutoModelForCausalLM.from_config(BertConfig(**_BERT)), "causal attention"),
        (lambda: AutoModelForCausalLM.from_config(BloomConfig(**_BLOOM)), "ALL_ATTENTION"),
        (lambda: AutoModelForCausalLM.from_config(MambaConfig(**_MAMBA)), "ALL_ATTENTION"),
        (lambda: torch.nn.Linear(2, 2), "causal LM"),
        (lambda: AutoModelForCausalLM.from_config(DiffLlamaConfig(**_TINY)), "reshapes K and V"),
        (lambda: AutoModelForCausalLM.from_config(DeepseekV3Config(**_TINY)), "latent"),
    ],
    ids=[
        "encoder",
        "no_head",
        "encoder_decoder",
        "bert_lm",
        "bloom",
        "mamba",
        "no_model",
        "reshaped",
        "mla",
    ],
)
def test_a_model_without_the_seams_is_refused_and_untouched(make: Any, seam: str) -> None:
    model = make()
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(UnsupportedModelError, match=seam):
        hf_paged.patch(model, num_blocks=8)
    assert {name: type(module) for name, module in model.named_modules()} == before


_TINY = dict(
    vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
)
_BERT = dict(
    vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
)
_T5 = dict(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2)
_BLOOM = dict(vocab_size=64, hidden_size=16, n_layer=2, n_head=2)
_MAMBA = dict(vocab_size=64, hidden_size=16, num_hidden_layers=2, state_size=4)


def test_a_layer_that_bypasses_the_attention_function_is_never_silently_wrong() -> None:
    """An architecture may look right and then attend on its own."""
    model = build("llama")
    attention = model.model.layers[1].self_attn
    original = attention.forward

    def bypass(hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        shape = (*hidden_states.shape[:-1], -1, attention.head_dim)
        key = attention.k_proj(hidden_states).view(shape).transpose(1, 2)
        cache.update(key, key, attention.layer_idx)
        return hidden_states, None

    with patched(model):
        attention.forward = bypass
        with pytest.raises(UnsupportedModelError, match="layer 1 stored K and V but did not"):
            model.generate(**ragged_batch((9, 3)).inputs, max_new_tokens=2)
        del attention.forward
        assert attention.forward.__func__ is original.__func__
        model.generate(**ragged_batch((9, 3)).inputs, max_new_tokens=2)


def test_an_llama_with_heads_of_another_size_than_hidden_over_heads() -> None:
    model = from_config(
        LlamaConfig(**{**CONFIGS["llama"].to_dict(), "head_dim": 24, "num_key_value_heads": 1})
    )
    batch = ragged_batch((9, 3))
    expected = model.generate(**batch.inputs, max_new_tokens=8)
    with patched(model):
        assert torch.equal(model.generate(**batch.inputs, max_new_tokens=8), expected)
