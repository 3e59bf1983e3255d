"""What people wrap models in: PEFT, accelerate's hooks and offloading, pipelines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import (
    AlignDevicesHook,
    ModelHook,
    add_hook_to_module,
    remove_hook_from_module,
)
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel, pipeline

import hf_paged
from reference import patched, seeded
from tiny_models import build, ragged_batch
from tiny_tokenizer import build_tokenizer

DECODING = {"greedy": {}, "beams": {"num_beams": 3}}


def generate(model: Any, **options: Any) -> torch.Tensor:
    """Generate for a left-padded batch under a seed."""
    inputs = ragged_batch((12, 3, 6)).inputs
    result = seeded(lambda: model.generate(**inputs, **{"max_new_tokens": 8, **options}))
    if isinstance(result, Exception):
        raise result
    return result


# -- PEFT ----------------------------------------------------------------------------------------


def add_adapter(model: Any, name: str, seed: int) -> PeftModel:
    """Add a LoRA adapter that matters: neither of its matrices is zero."""
    torch.manual_seed(seed)
    config = LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False)
    if isinstance(model, PeftModel):
        model.add_adapter(name, config)
        return model.eval()
    return get_peft_model(model, config, adapter_name=name).eval()


@pytest.fixture
def lora(family: str) -> PeftModel:
    return add_adapter(add_adapter(build(family), "one", seed=1), "two", seed=2)


@pytest.mark.parametrize("decoding", DECODING)
def test_patching_through_a_peft_wrapper(lora: PeftModel, decoding: str) -> None:
    expected = generate(lora, **DECODING[decoding])
    with patched(lora) as model:
        assert model is lora and hf_paged.stats(lora) == hf_paged.stats(lora.get_base_model())
        assert hf_paged.patch(lora.get_base_model(), num_blocks=400, block_size=4, debug=True)
        assert torch.equal(generate(lora, **DECODING[decoding]), expected)
        assert hf_paged.stats(lora).peak_used_blocks > 0
    assert torch.equal(generate(lora, **DECODING[decoding]), expected)


def test_a_patched_model_gets_an_adapter_later(family: str) -> None:
    base = build(family)
    plain = generate(base)
    with patched(base):
        assert torch.equal(generate(base), plain)
        lora = add_adapter(base, "one", seed=1)
        got = generate(lora)
        assert torch.equal(lora.generate(**ragged_batch((12, 3, 6)).inputs, max_new_tokens=8), got)
        with lora.disable_adapter():
            assert torch.equal(generate(lora), plain)
    assert torch.equal(generate(lora), got) and not torch.equal(got, plain)


def test_adapters_never_share_prefixes(lora: PeftModel) -> None:
    """A, B, none, A again on the same prompt: only the last call finds blocks of its own kind."""

    def runs() -> list[torch.Tensor]:
        results = []
        for name in ("one", "two"):
            lora.set_adapter(name)
            results.append(generate(lora))
        with lora.disable_adapter():
            results.append(generate(lora))
        return results

    expected = runs()
    with patched(lora):
        hits = []
        for got, wanted in zip(runs(), expected, strict=True):
            assert torch.equal(got, wanted)
        hits.append(hf_paged.stats(lora).prefix_hit_tokens)
        lora.set_adapter("one")
        assert torch.equal(generate(lora), expected[0])
        hits.append(hf_paged.stats(lora).prefix_hit_tokens)
        assert hits[0] == 0 and hits[1] > 0


def test_a_merge_is_seen(lora: PeftModel) -> None:
    """Merged, unmerged and merged for good: no stale K and V."""
    lora.set_adapter("one")
    with patched(lora):
        before = generate(lora)
        lora.merge_adapter(["two"])
        got = generate(lora)
        lora.unmerge_adapter()
        assert torch.equal(generate(lora), before)
        base = lora.merge_and_unload(adapter_names=["two"])
        assert torch.equal(generate(base), got)
    assert torch.equal(generate(base), got) and not torch.equal(got, before)


@pytest.mark.parametrize("decoding", DECODING)
def test_a_batch_of_mixed_adapters(lora: PeftModel, decoding: str) -> None:
    """Equal prompts under different adapters: no row takes another's blocks."""
    ids = ragged_batch((10,)).ids.repeat(3, 1)

    def run() -> Any:
        return lora.generate(
            input_ids=ids,
            adapter_names=["one", "__base__", "two"],
            max_new_tokens=8,
            **DECODING[decoding],
        )

    expected = run()
    with patched(lora):
        for _ in range(2):
            assert torch.equal(run(), expected)
        assert hf_paged.stats(lora).prefix_hit_tokens == 0


def test_an_adapter_is_trainable_as_before(lora: PeftModel) -> None:
    """Gradients of a plain call, patched and afterwards; a step changes what is generated."""
    batch = ragged_batch((9, 3, 6))
    lora.set_adapter("one")

    def gradients() -> list[torch.Tensor]:
        lora.zero_grad()
        lora(**batch.inputs, labels=batch.ids).loss.backward()
        found = [p.grad.clone() for p in lora.parameters() if p.grad is not None]
        assert len(found) == 2 * 3 * lora.config.num_hidden_layers
        return found

    expected = gradients()
    with patched(lora):
        before = generate(lora)
        assert all(map(torch.equal, gradients(), expected))
        torch.optim.SGD([p for p in lora.parameters() if p.requires_grad], lr=0.5).step()
        got = generate(lora)
    assert torch.equal(generate(lora), got) and not torch.equal(got, before)
    lora.set_adapter("one")
    gradients()


# -- accelerate ----------------------------------------------------------------------------------


def hook_every_module(model: PreTrainedModel, folder: Path) -> None:
    for module in model.modules():
        add_hook_to_module(module, AlignDevicesHook("cpu", io_same_device=True))


def hook_every_module_twice(model: PreTrainedModel, folder: Path) -> None:
    for module in model.modules():
        add_hook_to_module(module, ModelHook())
        add_hook_to_module(module, ModelHook(), append=True)


def dispatch(model: PreTrainedModel, folder: Path) -> None:
    dispatch_model(model, {"": "cpu"}, force_hooks=True)


HOOKS: dict[str, Callable[[PreTrainedModel, Path], None]] = {
    "every_module": hook_every_module,
    "every_module_twice": hook_every_module_twice,
    "dispatch_model": dispatch,
    "cpu_offload": lambda model, folder: cpu_offload(model, torch.device("cpu")),
    "disk_offload": lambda model, folder: disk_offload(model, folder, torch.device("cpu")),
}

OFFLOADED = pytest.mark.filterwarnings("ignore:You are calling .generate.. with the `input_ids`")
"""5.17 says of offloaded models, patched or not, that they are on meta and the ids are not."""


def assert_forwards_are_plain(model: PreTrainedModel) -> None:
    """Each module's forward is that of its class, whatever accelerate leaves behind."""
    for module in model.modules():
        assert module.forward.__func__ is type(module).forward
        assert not hasattr(module, "_old_forward") and not hasattr(type(module), "_hf_paged")


@OFFLOADED
@pytest.mark.parametrize("unhook_first", [False, True], ids=["unpatch_unhook", "unhook_unpatch"])
@pytest.mark.parametrize("hook_first", [False, True], ids=["patch_hook", "hook_patch"])
@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize(
    "family", [pytest.param("llama", marks=pytest.mark.core_suite), "opt"], ids=str
)
def test_accelerate_hooks_in_any_order(
    family: str, name: str, hook_first: bool, unhook_first: bool, tmp_path: Path
) -> None:
    model = build(family)
    expected = {key: generate(model, **options) for key, options in DECODING.items()}
    if hook_first:
        HOOKS[name](model, tmp_path)
    hf_paged.patch(model, num_blocks=200, block_size=4, debug=True)
    if not hook_first:
        HOOKS[name](model, tmp_path)
    for key, options in DECODING.items():
        assert torch.equal(generate(model, **options), expected[key])
    stats = hf_paged.stats(model)
    assert stats.peak_used_blocks > 0 and stats.used_blocks == 0
    if "offload" in name:
        assert stats.cached_blocks == 0, "nothing is kept for later calls"
    if unhook_first:
        remove_hook_from_module(model, recurse=True)
        assert torch.equal(generate(model), expected["greedy"])
        hf_paged.unpatch(model)
    else:
        hf_paged.unpatch(model)
        assert torch.equal(generate(model), expected["greedy"])
        remove_hook_from_module(model, recurse=True)
    assert_forwards_are_plain(model)
    assert torch.equal(generate(model), expected["greedy"])


@OFFLOADED
def test_offloaded_weights_share_prefixes_within_a_call_alone(family: str, tmp_path: Path) -> None:
    """A change of weights on disk could go unnoticed, so nothing is kept for later calls."""
    model = build(family)
    ids = ragged_batch((12,)).ids.repeat(3, 1)
    expected = model.generate(ids, max_new_tokens=4)
    disk_offload(model, tmp_path, torch.device("cpu"))
    with patched(model):
        for _ in range(2):
            hf_paged.reset_stats(model)
            assert torch.equal(model.generate(ids, max_new_tokens=4), expected)
            stats = hf_paged.stats(model)
            assert stats.cached_blocks == 0
            groups = 2 if family == "gemma3" else 1
            assert stats.peak_used_blocks <= groups * (3 + 3), "one prompt, three tails"


def test_a_model_loaded_with_a_device_map(family: str, tmp_path: Path) -> None:
    """Whole on the CPU, and with half of its layers on disk."""
    expected = generate(build(family))
    build(family).save_pretrained(tmp_path / "model")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "model", device_map={"": "cpu"})
    with patched(whole):
        assert torch.equal(generate(whole), expected)
        whole.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(generate(again), expected)

    prefix = "model.decoder" if family == "opt" else "model"
    names = [name for name, _ in whole.get_submodule(prefix).named_children() if name != "layers"]
    device_map: dict[str, Any] = {f"{prefix}.{name}": "cpu" for name in names} | {"lm_head": "cpu"}
    for layer in range(whole.config.num_hidden_layers):
        device_map[f"{prefix}.layers.{layer}"] = "disk" if layer % 2 else "cpu"
    split = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offload"
    )
    assert torch.equal(generate(split), expected)
    with patched(split):
        assert torch.equal(generate(split), expected)


# -- pipelines -----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"batch_size": 3}], ids=str)
def test_a_text_generation_pipeline(model: PreTrainedModel, options: dict[str, Any]) -> None:
    prompts = ["w9 w8 w7 w6 w5", "w100", "w20 w30 w40"]

    def run() -> Any:
        pipe = pipeline("text-generation", model=model, tokenizer=build_tokenizer())
        return pipe(prompts, max_new_tokens=8, do_sample=False, **options)

    expected = run()
    with patched(model):
        assert run() == expected
        assert hf_paged.stats(model).peak_used_blocks > 0
