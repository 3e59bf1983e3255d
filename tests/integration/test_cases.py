"""Small inputs distilled from public reports; each stands for its whole kind.

The reference is generate() of the same object, unpatched; blocks of four tokens, so that many are
in play. The report is named in each docstring.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LogitsProcessor

import hf_paged
from hf_paged.errors import InputMismatchError
from reference import patched, seeded, sequences
from tiny_models import FAMILIES, Batch, build, ragged_batch

pytestmark = pytest.mark.core_suite


def _cache_name(model: torch.nn.Module) -> str:
    return type(model)._hf_paged_cache_name


@pytest.mark.parametrize("family", FAMILIES)
def test_every_row_equals_its_solo_run(family: str) -> None:
    """transformers#25790 and #22161: left padding, pad id inside a prompt, pad = eos."""
    model = build(family)
    batch = ragged_batch((3, 9), pad_id=2)
    batch.ids[1, 4] = 2  # the pad id as a real token
    options: dict[str, Any] = dict(
        max_new_tokens=20,
        min_new_tokens=20,
        pad_token_id=2,
        output_logits=True,
        return_dict_in_generate=True,
    )
    with patched(model):
        together = model.generate(**batch.inputs, **options)
        for row in range(2):
            alone = model.generate(**batch.row(row).inputs, **options)
            assert torch.equal(together.sequences[row, -20:], alone.sequences[0, -20:])
            for ours, solo in zip(together.logits, alone.logits, strict=True):
                torch.testing.assert_close(ours[row], solo[0], atol=1e-4, rtol=1e-4)
        del together, alone


def test_opt_starts_at_position_zero_without_position_ids() -> None:
    """nnsight#673: OPT, left padding, no position ids given."""
    model, batch = build("opt"), ragged_batch((3, 9))
    expected = model(batch.ids, attention_mask=batch.mask).logits
    solo = model(batch.row(0).ids).logits
    with patched(model), hf_paged.PagedCache(model) as cache:
        got = model(batch.ids, attention_mask=batch.mask, past_key_values=cache).logits
        real = batch.mask.bool()
        torch.testing.assert_close(got[real], expected[real], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(got[0, -3:], solo[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_right_padding_into_a_plain_forward(family: str) -> None:
    """transformers#29419: logits of valid positions equal the unpadded run."""
    model, left = build(family), ragged_batch((9, 3, 6))
    ids, mask = torch.zeros_like(left.ids), torch.zeros_like(left.mask)
    for row in range(3):
        length = int(left.mask[row].sum())
        ids[row, :length], mask[row, :length] = left.row(row).ids[0], 1
    reference = model(ids, attention_mask=mask, use_cache=True)
    next_ids = torch.full((3, 1), 17)
    longer = torch.cat([mask, torch.ones(3, 1, dtype=torch.long)], 1)
    name = "cache" if "cache" in reference else "past_key_values"
    expected = model(next_ids, attention_mask=longer, **{name: reference[name]}).logits
    with patched(model), hf_paged.PagedCache(model) as cache:
        got = model(ids, attention_mask=mask, past_key_values=cache).logits
        torch.testing.assert_close(
            got[mask.bool()], reference.logits[mask.bool()], atol=1e-4, rtol=1e-4
        )
        assert cache.seq_lens == [9, 3, 6]
        got = model(next_ids, attention_mask=longer, past_key_values=cache).logits
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_one_long_prompt_among_short_ones_costs_its_own_blocks_only() -> None:
    """open-instruct#75."""
    lengths = (101, 1, 1, 1)
    model, batch = build("llama"), ragged_batch(lengths)
    expected = model.generate(**batch.inputs, max_new_tokens=2)
    with patched(model):
        assert torch.equal(model.generate(**batch.inputs, max_new_tokens=2), expected)
        # The second new token is never stored: nothing follows it.
        assert hf_paged.stats(model).peak_used_blocks == sum(-(-(n + 1) // 4) for n in lengths)


def test_a_mask_of_another_length_is_refused() -> None:
    """transformers#47597: a cache of 10 tokens, a mask of 12, one new id."""
    model, batch = build("llama"), ragged_batch((10,))
    with patched(model), hf_paged.PagedCache(model) as cache:
        model(batch.ids, past_key_values=cache)
        for length in (12, 10, 1):
            with pytest.raises(InputMismatchError, match=rf"\(1, {length}\).*\(1, 11\)"):
                model(
                    torch.tensor([[5]]),
                    attention_mask=torch.ones(1, length, dtype=torch.long),
                    past_key_values=cache,
                )
        assert cache.seq_lens == [10]
        model(torch.tensor([[5]]), attention_mask=torch.ones(1, 11), past_key_values=cache)


def test_a_row_that_ends_early_is_padded_and_the_others_go_on() -> None:
    """transformers#31261 and #22340."""
    model, batch = build("llama"), ragged_batch((9, 9))
    free = model.generate(**batch.inputs, max_new_tokens=30, min_new_tokens=30)
    eos = int(free[0, 11])  # row 0 ends at its third token
    expected = model.generate(**batch.inputs, max_new_tokens=30, eos_token_id=eos, pad_token_id=0)
    assert expected[0, -1] == 0
    with patched(model):
        got = model.generate(**batch.inputs, max_new_tokens=30, eos_token_id=eos, pad_token_id=0)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_cache_in_two_calls_continues_the_chat(family: str) -> None:
    """transformers#24841 and MemOS#2301: equals one long run; only new tokens are computed."""
    model, batch = build(family), ragged_batch((9, 3, 6))
    turn = torch.full((3, 4), 17)

    def chat() -> torch.Tensor:
        first = model.generate(
            **batch.inputs, max_new_tokens=5, min_new_tokens=5, return_dict_in_generate=True
        )
        name = "cache" if "cache" in first else "past_key_values"
        ids = torch.cat([first.sequences, turn], 1)
        mask = torch.cat([batch.mask, torch.ones(3, ids.shape[1] - 9, dtype=torch.long)], 1)
        fed.clear()
        return model.generate(ids, attention_mask=mask, max_new_tokens=6, **{name: first[name]})

    fed: list[int] = []
    model.get_input_embeddings().register_forward_hook(lambda m, a, out: fed.append(a[0].shape[1]))
    expected = chat()
    assert fed[0] == 5
    with patched(model, prefix_caching=False):
        assert torch.equal(chat(), expected)
        assert fed[0] == 5  # the last sampled token and the new turn


def test_an_empty_cache_comes_back_as_the_same_object() -> None:
    """transformers#30108."""
    model, batch = build("llama"), ragged_batch((9,))
    with patched(model), hf_paged.PagedCache(model) as cache:
        out = model(batch.ids, **{_cache_name(model): cache})
        assert out[_cache_name(model)] is cache


@pytest.mark.parametrize("family", FAMILIES)
def test_rejected_drafts_free_a_block_only_when_it_is_empty(family: str) -> None:
    """transformers#30312 and #48280: drafts rejected, a sliding window reached meanwhile."""
    model, draft, batch = build(family), build(family, seed=2), ragged_batch((9,))
    greedy = model.generate(**batch.inputs, max_new_tokens=40)
    with patched(model, draft):
        got = model.generate(**batch.inputs, max_new_tokens=40, assistant_model=draft)
        assert torch.equal(got, greedy)
        got = model.generate(**batch.inputs, max_new_tokens=40, prompt_lookup_num_tokens=4)
        assert torch.equal(got, greedy)


@pytest.mark.parametrize("family", FAMILIES)
def test_beams_that_are_all_returned(family: str) -> None:
    """transformers#46612: reorder never skipped; tokens equal, sequence scores close."""
    model, batch = build(family), ragged_batch((9, 3, 6))
    options: dict[str, Any] = dict(
        num_beams=3,
        num_return_sequences=3,
        max_new_tokens=12,
        output_scores=True,
        return_dict_in_generate=True,
    )
    expected = model.generate(**batch.inputs, **options)
    with patched(model):
        got = model.generate(**batch.inputs, **options)
        assert torch.equal(got.sequences, expected.sequences)
        torch.testing.assert_close(
            got.sequences_scores, expected.sequences_scores, atol=1e-4, rtol=1e-4
        )
        del got


def test_forty_eos_ids() -> None:
    """vllm#31081 and #47126: right beam indices with many eos ids."""
    model, batch = build("llama"), ragged_batch((9, 3))
    options: dict[str, Any] = dict(
        num_beams=3,
        max_new_tokens=12,
        eos_token_id=list(range(40, 80)),
        output_scores=True,
        return_dict_in_generate=True,
    )
    expected = model.generate(**batch.inputs, **options)
    with patched(model):
        got = model.generate(**batch.inputs, **options)
        assert torch.equal(got.sequences, expected.sequences)
        assert torch.equal(got.beam_indices, expected.beam_indices)
        del got


def test_two_beams_append_to_a_shared_half_full_block() -> None:
    """Exactly one copy; the parent's bytes are unchanged."""
    model, batch = build("llama"), ragged_batch((6,))
    with patched(model), hf_paged.PagedCache(model) as cache:
        model(batch.ids, past_key_values=cache)
        parent = cache.fork()
        before = [layer.keys.clone() for layer in parent.to_dynamic_cache().layers]
        cache.batch_repeat_interleave(2)
        hf_paged.reset_stats(model)
        parent_tables = parent.block_tables
        model(torch.tensor([[5], [7]]), past_key_values=cache)
        assert hf_paged.stats(model).cow_copies == 2  # the parent is a third reader
        assert parent.block_tables == parent_tables
        for layer, keys in zip(parent.to_dynamic_cache().layers, before, strict=True):
            assert torch.equal(layer.keys, keys)
        parent.release()
        cache.reset()
        model(batch.ids, past_key_values=cache)
        cache.batch_repeat_interleave(2)
        hf_paged.reset_stats(model)
        model(torch.tensor([[5], [7]]), past_key_values=cache)
        assert hf_paged.stats(model).cow_copies == 1


def test_beam_sampling_with_scores_under_a_seed() -> None:
    """Qwen3-VL#334."""
    model, batch = build("qwen3"), ragged_batch((9, 3))
    options: dict[str, Any] = dict(
        do_sample=True,
        num_beams=2,
        max_new_tokens=10,
        output_scores=True,
        return_dict_in_generate=True,
    )
    expected = seeded(lambda: model.generate(**batch.inputs, **options))
    with patched(model):
        got = seeded(lambda: model.generate(**batch.inputs, **options))
        assert torch.equal(got.sequences, expected.sequences)
        for ours, theirs in zip(got.scores, expected.scores, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
        del got


def test_four_samples_from_one_seed_differ_and_equal_the_reference() -> None:
    """vllm#11898."""
    model, batch = build("llama"), ragged_batch((9,))
    options: dict[str, Any] = dict(do_sample=True, num_return_sequences=4, max_new_tokens=12)
    expected = seeded(lambda: model.generate(**batch.inputs, **options))
    assert len(set(map(tuple, expected.tolist()))) == 4
    with patched(model):
        got = seeded(lambda: model.generate(**batch.inputs, **options))
    assert torch.equal(sequences(got), expected)


class _Boom(Exception):
    pass


class _BoomAtStep:
    """Raises in its third call, whatever it is used as."""

    def __init__(self) -> None:
        self.calls = 0

    def put(self, value: Any = None) -> None:
        self.calls += 1
        if self.calls == 3:
            raise _Boom

    def end(self) -> None:
        pass

    def criterion(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.put()
        return torch.zeros(len(input_ids), dtype=torch.bool)

    def processor(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.put()
        return scores


def _as_processor(boom: _BoomAtStep) -> LogitsProcessor:
    class Processor(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return boom.processor(input_ids, scores)

    return Processor()


@pytest.mark.parametrize("where", ["stopping_criteria", "logits_processor", "streamer"])
def test_an_exception_out_of_a_callback_frees_every_block(where: str) -> None:
    """vllm#14326: the exception may even be kept; the next call is fine."""
    model, batch = build("llama"), ragged_batch((9,))
    expected = model.generate(**batch.inputs, max_new_tokens=8)
    boom = _BoomAtStep()
    callback: dict[str, Any] = {
        "stopping_criteria": [boom.criterion],
        "logits_processor": [_as_processor(boom)],
        "streamer": boom,
    }
    with patched(model):
        with pytest.raises(_Boom) as kept:
            model.generate(**batch.inputs, max_new_tokens=8, **{where: callback[where]})
        assert hf_paged.stats(model).used_blocks == 0
        assert torch.equal(model.generate(**batch.inputs, max_new_tokens=8), expected)
        del kept


@pytest.mark.parametrize("error", [KeyboardInterrupt, _Boom])
@pytest.mark.parametrize("num_beams", [1, 3])
def test_an_interrupt_inside_a_layer_leaves_the_pool_whole(
    error: type[BaseException], num_beams: int
) -> None:
    """KeyboardInterrupt inside a layer of the third step; hooks would not see it."""
    model, batch = build("gemma3"), ragged_batch((9, 3))
    options: dict[str, Any] = dict(max_new_tokens=8, num_beams=num_beams)
    expected = model.generate(**batch.inputs, **options)
    calls = 0

    def interrupt(module: torch.nn.Module, args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise error

    with patched(model):
        handle = model.model.layers[2].mlp.register_forward_pre_hook(interrupt)
        with pytest.raises(error):
            model.generate(**batch.inputs, **options)
        handle.remove()
        assert hf_paged.stats(model).used_blocks == 0
        assert torch.equal(model.generate(**batch.inputs, **options), expected)


def test_a_user_cache_is_as_before_a_forward_that_failed() -> None:
    model, batch = build("llama"), ragged_batch((9, 3))
    mask = torch.cat([batch.mask, torch.ones(2, 1, dtype=torch.long)], 1)
    step = dict(input_ids=torch.tensor([[5], [7]]), attention_mask=mask)
    with patched(model), hf_paged.PagedCache(model) as cache:
        model(**batch.inputs, past_key_values=cache)
        expected = model(**step, past_key_values=cache.fork()).logits
        tables = cache.block_tables
        handle = model.model.layers[2].register_forward_pre_hook(lambda m, a: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(**step, past_key_values=cache)
        handle.remove()
        assert (cache.seq_lens, cache.block_tables) == ([9, 3], tables)
        assert torch.equal(model(**step, past_key_values=cache).logits, expected)


def test_eight_equal_prompts_share_all_but_their_tails() -> None:
    """nano-vllm#219: one prompt's blocks and 8 tails; the prompt is computed once."""
    model = build("llama")
    one = ragged_batch((18,))
    batch = Batch(one.ids.repeat(8, 1), one.mask.repeat(8, 1))
    expected = model.generate(**batch.inputs, max_new_tokens=2)
    with patched(model):
        assert torch.equal(model.generate(**batch.inputs, max_new_tokens=2), expected)
        stats = hf_paged.stats(model)
        assert stats.peak_used_blocks == 4 + 8
        assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (8 * 18, 7 * 18)
        assert stats.computed_tokens == 18 + 8


def test_gradients_and_modes_survive_a_patched_life() -> None:
    """transformers#45943 and #48735: patch, generate, train, backward, generate, unpatch."""
    model, twin, batch = build("llama"), build("llama"), ragged_batch((9, 3))
    expected = twin.generate(**batch.inputs, max_new_tokens=6)
    with patched(model):
        assert torch.equal(model.generate(**batch.inputs, max_new_tokens=6), expected)
        for each in (model, twin):
            each.train()
            each(**batch.inputs, labels=batch.ids).loss.backward()
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
        assert model.training
        model.eval()
        assert torch.equal(model.generate(**batch.inputs, max_new_tokens=6), expected)
