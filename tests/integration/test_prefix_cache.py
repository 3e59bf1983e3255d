"""Prefix blocks are reused across calls, and never where K and V would differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hf_paged
from reference import patched
from tiny_models import Batch, build, ragged_batch

pytestmark = pytest.mark.core_suite


def _hit_tokens(model: torch.nn.Module, batch: Batch, **options: Any) -> int:
    """Generate once; return how many prompt tokens were found in the pool."""
    hf_paged.reset_stats(model)
    model.generate(**batch.inputs, max_new_tokens=4, **options)
    return hf_paged.stats(model).prefix_hit_tokens


def test_a_second_call_finds_the_full_blocks_of_the_first() -> None:
    model, batch = build("llama"), ragged_batch((18,))
    expected = model.generate(**batch.inputs, max_new_tokens=8)
    with patched(model):
        assert _hit_tokens(model, batch) == 0
        assert hf_paged.stats(model).cached_blocks == 5  # 21 of 22 tokens are stored
        assert _hit_tokens(model, batch) == 16
        assert torch.equal(model.generate(**batch.inputs, max_new_tokens=8), expected)
        hf_paged.clear_prefix_cache(model)
        assert hf_paged.stats(model).cached_blocks == 0
        assert _hit_tokens(model, batch) == 0


def test_the_next_turn_of_a_chat_finds_what_was_generated() -> None:
    model, batch = build("llama"), ragged_batch((17,))
    with patched(model):
        tokens = model.generate(**batch.inputs, max_new_tokens=8, min_new_tokens=8)
        turn = torch.cat([tokens, torch.full((1, 3), 9)], 1)
        assert _hit_tokens(model, Batch(turn, torch.ones_like(turn))) == 24


def test_a_padded_row_finds_the_blocks_of_an_unpadded_one() -> None:
    """Positions are per row: padding does not move a prefix."""
    model, batch = build("llama"), ragged_batch((9, 30))
    with patched(model):
        _hit_tokens(model, batch.row(0))
        assert _hit_tokens(model, batch) == 8


def test_hit_and_miss_in_one_batch_in_either_order() -> None:
    """vllm#7018."""
    model, batch = build("llama"), ragged_batch((17, 17))
    swapped = Batch(batch.ids.flip(0), batch.mask.flip(0))
    expected = [model.generate(**b.inputs, max_new_tokens=6) for b in (batch, swapped)]
    for order, tokens in zip((batch, swapped), expected, strict=True):
        with patched(model):
            assert _hit_tokens(model, batch.row(0)) == 0
            assert _hit_tokens(model, order) == 16
            assert torch.equal(model.generate(**order.inputs, max_new_tokens=6), tokens)


def test_a_pool_too_small_for_both_forgets_the_older_prompt() -> None:
    """nano-vllm#163 and kvcached#362: prompts A, B, A."""
    model, batch = build("llama"), ragged_batch((17, 17))
    a, b = batch.row(0), batch.row(1)
    expected = model.generate(**a.inputs, max_new_tokens=4)
    with patched(model, num_blocks=6):
        model.generate(**a.inputs, max_new_tokens=4)
        model.generate(**b.inputs, max_new_tokens=4)
        assert hf_paged.stats(model).evictions > 0
        assert _hit_tokens(model, a) < 16
        assert torch.equal(model.generate(**a.inputs, max_new_tokens=4), expected)


def test_without_prefix_caching_nothing_stays_but_rows_still_share() -> None:
    model, one = build("llama"), ragged_batch((18,))
    batch = Batch(one.ids.repeat(4, 1), one.mask.repeat(4, 1))
    with patched(model, prefix_caching=False):
        assert _hit_tokens(model, batch) == 3 * 18  # three forks of the first row
        assert hf_paged.stats(model).cached_blocks == 0
        assert _hit_tokens(model, one) == 0


def test_scopes_are_kept_apart() -> None:
    model, batch = build("llama"), ragged_batch((18,))
    with patched(model):
        with hf_paged.prefix_scope(model, "tenant-a"):
            assert _hit_tokens(model, batch) == 0
            assert _hit_tokens(model, batch) == 16
        with hf_paged.prefix_scope(model, "tenant-b"):
            assert _hit_tokens(model, batch) == 0
        assert _hit_tokens(model, batch) == 0
        with hf_paged.prefix_scope(model, "tenant-a"):
            assert _hit_tokens(model, batch) == 16


def _adamw(model: torch.nn.Module, **options: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, **options)
    ids = torch.arange(3, 11)[None]
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def _write_through_data(model: torch.nn.Module) -> None:
    weight = model.model.layers[0].self_attn.k_proj.weight
    weight.data.copy_(weight.data.roll(1, 0))


@torch.no_grad()
def _negate(model: torch.nn.Module) -> None:
    model.model.layers[1].self_attn.v_proj.weight.neg_()


def _assign(model: torch.nn.Module) -> None:
    state = {name: t.clone() for name, t in model.state_dict().items()}
    state["model.layers.0.mlp.up_proj.weight"] += 0.1
    model.load_state_dict(state, assign=True)


def _rope(model: torch.nn.Module) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.5)


def _scaling(model: torch.nn.Module) -> None:
    model.model.layers[2].self_attn.scaling *= 2


def _norm_eps(model: torch.nn.Module) -> None:
    model.model.layers[0].input_layernorm.variance_epsilon = 0.5


@pytest.mark.parametrize(
    "change",
    [
        lambda model: _adamw(model, foreach=True),
        lambda model: _adamw(model, fused=True),
        _write_through_data,
        _negate,
        _assign,
        _rope,
        _scaling,
        _norm_eps,
    ],
    ids=["foreach", "fused", "data", "negate", "assign", "rope", "scaling", "eps"],
)
def test_no_stale_kv_after_the_weights_changed(change: Callable[[Any], None]) -> None:
    """vllm#9744 and lmdeploy#4917: prompt, new weights, the prompt again."""
    model, twin, batch = build("llama"), build("llama"), ragged_batch((18, 9))
    with patched(model):
        model.generate(**batch.inputs, max_new_tokens=4)
        change(model)
        change(twin)
        expected = twin.generate(**batch.inputs, max_new_tokens=8)
        assert _hit_tokens(model, batch) == 0
        assert torch.equal(model.generate(**batch.inputs, max_new_tokens=8), expected)


def test_weights_loaded_in_inference_mode() -> None:
    with torch.inference_mode():
        model = build("llama")
    batch = ragged_batch((18,))
    with patched(model), torch.inference_mode():
        model.generate(**batch.inputs, max_new_tokens=4)
        model.model.embed_tokens.weight[int(batch.ids[0, 0])] += 1
        assert _hit_tokens(model, batch) == 0


def test_equal_ids_under_a_changed_autocast_are_not_shared() -> None:
    model, batch = build("llama"), ragged_batch((18,))
    with patched(model):
        _hit_tokens(model, batch)
        hf_paged.clear_prefix_cache(model)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            _hit_tokens(model, batch)
        assert _hit_tokens(model, batch) == 0


def test_embeddings_are_never_shared() -> None:
    """vllm#20261 and LMCache#4086: equal ids, different inputs_embeds."""
    model, batch = build("llama"), ragged_batch((18,))
    embeds = model.get_input_embeddings()(batch.ids).detach()
    both = torch.cat([embeds, embeds * 1.5])
    mask = batch.mask.repeat(2, 1)
    expected = model.generate(inputs_embeds=both, attention_mask=mask, max_new_tokens=6)
    with patched(model):
        model.generate(**batch.inputs, max_new_tokens=4)
        hf_paged.reset_stats(model)
        got = model.generate(inputs_embeds=both, attention_mask=mask, max_new_tokens=6)
        assert torch.equal(got, expected)
        assert hf_paged.stats(model).prefix_hit_tokens == 0


def test_a_users_hook_may_treat_rows_differently() -> None:
    """Activation patching: row 1 of two equal prompts is changed in one layer."""
    model, one = build("llama"), ragged_batch((18,))
    batch = Batch(one.ids.repeat(2, 1), one.mask.repeat(2, 1))

    def steer(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        output[1] *= 0.5
        return output

    model.model.layers[0].mlp.register_forward_hook(steer)
    expected = model.generate(**batch.inputs, max_new_tokens=8)
    assert not torch.equal(expected[0], expected[1])
    with patched(model):
        assert torch.equal(model.generate(**batch.inputs, max_new_tokens=8), expected)
        assert _hit_tokens(model, batch) == 0


def test_other_positions_are_other_blocks() -> None:
    """transformers gives arange positions to a forward without position ids."""
    model, batch = build("llama"), ragged_batch((16,))
    expected = model(batch.ids, position_ids=torch.arange(5, 21)[None]).logits
    with patched(model), hf_paged.PagedCache(model) as first, hf_paged.PagedCache(model) as second:
        model(batch.ids, past_key_values=first)
        hf_paged.reset_stats(model)
        positions = torch.arange(5, 21)[None]
        logits = model(batch.ids, position_ids=positions, past_key_values=second).logits
        assert hf_paged.stats(model).prefix_hit_tokens == 0
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_a_window_needs_its_last_blocks_only(family: str) -> None:
    model, batch = build(family), ragged_batch((30,))
    expected = model.generate(**batch.inputs, max_new_tokens=8)
    with patched(model):
        model.generate(**batch.inputs, max_new_tokens=4, min_new_tokens=4)
        assert _hit_tokens(model, batch) > 0
        assert torch.equal(model.generate(**batch.inputs, max_new_tokens=8), expected)


@pytest.mark.parametrize("family", ["mistral", "gemma3", "gemma2", "phi3", "qwen2"])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_row_holds_no_more_than_its_window(family: str, block_size: int) -> None:
    model, batch = build(family), ragged_batch((60, 9))
    most = -(-8 // block_size) + 1
    with patched(model, block_size=block_size), hf_paged.PagedCache(model) as cache:
        mask = batch.mask
        model(batch.ids, attention_mask=mask, past_key_values=cache)
        for _ in range(30):
            for group, window in enumerate(group.window for group in cache.runtime.manager.groups):
                for table in cache.block_tables[group]:
                    assert window is None or sum(block >= 0 for block in table) <= most
            mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
            model(torch.tensor([[5], [7]]), attention_mask=mask, past_key_values=cache)


@pytest.mark.parametrize("num_layers", [6, 7])
def test_five_sliding_layers_to_one_full_one(num_layers: int) -> None:
    """As in Gemma 3: groups of one layer here, so that all blocks are equal."""
    layer_types = (["sliding_attention"] * 5 + ["full_attention"]) * 2
    model = build("gemma3", num_hidden_layers=num_layers, layer_types=layer_types[:num_layers])
    batch = ragged_batch((30, 9))
    expected = model.generate(**batch.inputs, max_new_tokens=12, num_beams=3)
    with patched(model):
        got = model.generate(**batch.inputs, max_new_tokens=12, num_beams=3)
    assert torch.equal(got, expected)
