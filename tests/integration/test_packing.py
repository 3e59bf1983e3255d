"""Which models are packed, how that is found out, and what hooks see."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from transformers import GraniteConfig, LlamaConfig

import hf_paged
from hf_paged.errors import ConfigurationError
from reference import patched
from tiny_models import Batch, build, from_config, ragged_batch

pytestmark = pytest.mark.core_suite

NEW = 5
SMALL: dict[str, Any] = dict(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)


class Neighbours(torch.nn.Module):
    """An MLP in which each token also sees the one before it, whoever's it is."""

    def __init__(self, mlp: torch.nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.mlp(hidden_states + hidden_states.roll(1, dims=1))
        return out


def unlisted() -> Any:
    """A model that no spec names."""
    return from_config(GraniteConfig(**SMALL))


def is_packed(model: Any, batch: Batch) -> bool:
    """Whether a generate() avoids padding; its tokens must be right in any case."""
    hf_paged.reset_stats(model)
    hf_paged.clear_prefix_cache(model)
    model.generate(**batch.inputs, max_new_tokens=NEW)
    return hf_paged.stats(model).padded_tokens_avoided > 0


def test_an_architecture_in_no_list_is_compared_once(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = unlisted(), ragged_batch((9, 3))
    expected = model.generate(**batch.inputs, max_new_tokens=NEW)
    caplog.set_level(logging.INFO, "hf_paged")
    with patched(model):
        assert torch.equal(model.generate(**batch.inputs, max_new_tokens=NEW), expected)
        assert is_packed(model, batch)
    said = [record.message for record in caplog.records if "compared" in record.message]
    assert len(said) == 1 and "granite was compared packed and alone: equal" in said[0]


def test_tokens_that_meet_outside_attention_stay_in_rectangles(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, batch = unlisted(), ragged_batch((9, 9))
    model.model.layers[0].mlp = Neighbours(model.model.layers[0].mlp).eval()
    expected = model.generate(**batch.inputs, max_new_tokens=NEW, do_sample=False)
    caplog.set_level(logging.INFO, "hf_paged")
    with patched(model):
        got = model.generate(**batch.inputs, max_new_tokens=NEW, do_sample=False)
        assert torch.equal(got, expected)
        assert not is_packed(model, ragged_batch((9, 3)))
    assert "packed tokens give other logits than the same alone" in caplog.text


@pytest.mark.parametrize("verify", [False, True])
def test_verify(verify: bool, caplog: pytest.LogCaptureFixture) -> None:
    """False: what is not known stays padded. True: what is known is compared as well, at once."""
    batch = ragged_batch((9, 3))
    caplog.set_level(logging.INFO, "hf_paged")
    unknown, known = unlisted(), build("llama")
    with patched(unknown, known, verify=verify):
        assert caplog.text.count("was compared packed and alone: equal") == 2 * verify
        assert is_packed(unknown, batch) == verify
        assert is_packed(known, batch)
        for model in (unknown, known):
            assert hf_paged.stats(model).peak_used_blocks > 0


def test_a_comparison_leaves_nothing_behind() -> None:
    model = unlisted()
    with patched(model, verify=True):
        stats = hf_paged.stats(model)
        assert (stats.used_blocks, stats.cached_blocks, stats.computed_tokens) == (0, 0, 0)


def test_a_pool_too_small_to_compare_means_rectangles(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = unlisted(), Batch(torch.tensor([[5]]), torch.tensor([[1]]))
    caplog.set_level(logging.INFO, "hf_paged")
    with patched(model, num_blocks=2):
        model.generate(**batch.inputs, max_new_tokens=2)
    assert "no room to compare tokens packed and alone" in caplog.text


@pytest.mark.parametrize("verify", ["yes", 1, None])
def test_bad_verify(verify: Any) -> None:
    with pytest.raises(ConfigurationError, match="verify must be"):
        hf_paged.patch(build("llama"), verify=verify)


@pytest.mark.parametrize("packed_hooks", [False, True])
def test_what_hooks_see(packed_hooks: bool) -> None:
    """Rows, as ever; with packed_hooks live tokens end to end, and rows that leave."""
    model, batch = build("llama"), ragged_batch((9, 3, 6))
    shapes: list[tuple[int, ...]] = []
    with patched(model, packed_hooks=packed_hooks):
        model.model.layers[1].mlp.register_forward_hook(
            lambda module, args, out: shapes.append(tuple(out.shape[:2]))
        )
        model.generate(**batch.inputs, max_new_tokens=3, min_new_tokens=3)
    prompt = (1, 18) if packed_hooks else (3, 9)
    assert shapes == [prompt, (3, 1), (3, 1)]


def test_a_hook_that_steers_the_last_token_keeps_its_meaning() -> None:
    model, batch = build("llama"), ragged_batch((9, 3, 6))

    def steer(module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
        out = out.clone()
        out[:, -1] += 1.0
        return out

    model.model.layers[1].mlp.register_forward_hook(steer)
    expected = model.generate(**batch.inputs, max_new_tokens=NEW)
    with patched(model):
        assert torch.equal(model.generate(**batch.inputs, max_new_tokens=NEW), expected)


def test_rope_that_depends_on_the_longest_row_stays_in_rectangles() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config = LlamaConfig(**SMALL, max_position_embeddings=8, rope_parameters=rope)
    # A twin, since frequencies that have grown once stay so.
    model, twin, batch = from_config(config), from_config(config), ragged_batch((12, 3))
    expected = twin.generate(**batch.inputs, max_new_tokens=NEW)
    with patched(model):
        assert torch.equal(model.generate(**batch.inputs, max_new_tokens=NEW), expected)
        assert not is_packed(model, batch)


def test_lora_is_packed() -> None:
    from peft import LoraConfig, get_peft_model

    batch = ragged_batch((9, 3, 6))
    model = get_peft_model(build("llama"), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    model.eval()
    expected = model.generate(**batch.inputs, max_new_tokens=NEW)
    with patched(model):
        assert torch.equal(model.generate(**batch.inputs, max_new_tokens=NEW), expected)
        assert is_packed(model, batch)
