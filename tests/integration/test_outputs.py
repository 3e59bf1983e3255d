"""Every argument and output of generate(): what the patched model returns is what it always did."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, PreTrainedModel, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import hf_paged
from reference import CACHE_NAME, cache_of, patched, seeded, sequences
from tiny_models import build, ragged_batch
from tiny_tokenizer import build_tokenizer

FAMILIES = ("llama", "gemma3", "opt")
NEW = 7
DECODING = {"greedy": {}, "sampling": {"do_sample": True}, "beams": {"num_beams": 3}}

_model = functools.cache(build)


def both(model: PreTrainedModel, **options: Any) -> tuple[Any, Any]:
    """Generate for a left-padded batch unpatched, then patched."""
    options = {"max_new_tokens": NEW, **ragged_batch((9, 3, 6)).inputs, **options}
    expected = seeded(lambda: model.generate(**options))
    with patched(model):
        got = seeded(lambda: model.generate(**options))
        for result in (expected, got):
            if isinstance(result, Exception):
                raise result
        if not isinstance(got, torch.Tensor):
            cache_of(got).release()
    return expected, got


def assert_tokens_equal(model: PreTrainedModel, **options: Any) -> torch.Tensor:
    """Compare the tokens of the unpatched and the patched model, and return them."""
    expected, got = both(model, **options)
    assert torch.equal(sequences(got), sequences(expected))
    return sequences(got)


# -- what generate() returns ---------------------------------------------------------------------


@pytest.mark.parametrize("decoding", DECODING)
@pytest.mark.parametrize("field", ["scores", "logits"])
def test_scores_and_logits_are_close_at_every_step(
    model: PreTrainedModel, field: str, decoding: str
) -> None:
    expected, got = both(
        model, **DECODING[decoding], return_dict_in_generate=True, **{f"output_{field}": True}
    )
    assert torch.equal(got.sequences, expected.sequences)
    torch.testing.assert_close(got[field], expected[field], rtol=1e-4, atol=1e-4)
    if decoding == "beams":
        torch.testing.assert_close(got.sequences_scores, expected.sequences_scores)
        assert torch.equal(got.beam_indices, expected.beam_indices)


@pytest.mark.parametrize("decoding", ["greedy", "beams"])
def test_hidden_states_of_real_positions_are_close(model: PreTrainedModel, decoding: str) -> None:
    expected, got = both(
        model, **DECODING[decoding], return_dict_in_generate=True, output_hidden_states=True
    )
    mask = ragged_batch((9, 3, 6)).mask.repeat_interleave(3 if decoding == "beams" else 1, dim=0)
    assert len(got.hidden_states) == len(expected.hidden_states) == NEW
    for step, (states, expected_states) in enumerate(
        zip(got.hidden_states, expected.hidden_states, strict=True)
    ):
        for state, expected_state in zip(states, expected_states, strict=True):
            assert state.shape == expected_state.shape
            real = mask.bool() if step == 0 else torch.ones(state.shape[:2], dtype=torch.bool)
            torch.testing.assert_close(state[real], expected_state[real], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("decoding", ["greedy", "beams"])
def test_attentions_are_the_weights_of_eager(family: str, decoding: str) -> None:
    """Same shapes as the reference's, sliding layers too; weights of the real queries."""
    model = _model(family, attn_implementation="eager")
    expected, got = both(
        model, **DECODING[decoding], return_dict_in_generate=True, output_attentions=True
    )
    mask = ragged_batch((9, 3, 6)).mask.repeat_interleave(3 if decoding == "beams" else 1, dim=0)
    assert torch.equal(got.sequences, expected.sequences)
    for step, (layers, expected_layers) in enumerate(
        zip(got.attentions, expected.attentions, strict=True)
    ):
        for weights, expected_weights in zip(layers, expected_layers, strict=True):
            assert weights.shape == expected_weights.shape
            real = mask.bool() if step == 0 else torch.ones(weights.shape[0], 1, dtype=torch.bool)
            of_query = weights.transpose(1, 2)[real], expected_weights.transpose(1, 2)[real]
            torch.testing.assert_close(*of_query, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_attentions_of_sdpa_are_what_sdpa_returns(family: str) -> None:
    """Whatever transformers does when sdpa is asked for weights: raise, or return None."""
    model, batch = _model(family, attn_implementation="sdpa"), ragged_batch((9, 3, 6))

    def run() -> Any:
        options = {"return_dict_in_generate": True, "output_attentions": True}
        return seeded(lambda: model.generate(**batch.inputs, **options, max_new_tokens=NEW))

    expected = run()
    with patched(model):
        got = run()
        if isinstance(expected, Exception):
            assert type(got) is type(expected) and str(got) == str(expected)
        else:
            assert torch.equal(got.sequences, expected.sequences)
            assert got.attentions == expected.attentions, "layers of None"
            cache_of(got).release()


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
def test_forward_gives_hidden_states_and_attentions(attn_implementation: str) -> None:
    """Also in a hand-written forward over a paged cache."""
    model = _model("gemma3", attn_implementation=attn_implementation)
    ids = ragged_batch((11, 11)).ids
    options = {"output_hidden_states": True, "output_attentions": attn_implementation == "eager"}
    with torch.no_grad():
        expected = model(ids, **options)
        with patched(model), hf_paged.PagedCache(model) as cache:
            got = model(ids, past_key_values=cache, **options)
    torch.testing.assert_close(got.logits, expected.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got.hidden_states, expected.hidden_states, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got.attentions, expected.attentions, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("decoding", ["greedy", "sampling"])
def test_the_returned_cache_continues_a_chat(model: PreTrainedModel, decoding: str) -> None:
    """Only the new tokens are computed in the second turn; the tokens are the reference's."""
    batch, turn = ragged_batch((9, 3, 6)), ragged_batch((4, 4, 4), seed=11).ids

    def chat() -> tuple[torch.Tensor, Any]:
        options = {"max_new_tokens": NEW, "return_dict_in_generate": True, **DECODING[decoding]}
        first = model.generate(**batch.inputs, **options, eos_token_id=None)
        ids = torch.cat([first.sequences, turn], dim=1)
        mask = torch.cat([batch.mask, torch.ones_like(ids[:, batch.mask.shape[1] :])], dim=1)
        computed: list[int] = []
        hook = model.get_input_embeddings().register_forward_hook(
            lambda module, args, output: computed.append(output.shape[1])
        )
        second = model.generate(
            ids, attention_mask=mask, **{CACHE_NAME: cache_of(first)}, **options, eos_token_id=None
        )
        hook.remove()
        assert cache_of(second) is cache_of(first)
        assert computed == [turn.shape[1] + 1] + [1] * (NEW - 1)
        return second.sequences, cache_of(second)

    expected, _ = seeded(chat)
    with patched(model):
        tokens, cache = seeded(chat)
        assert cache.get_seq_length() == tokens.shape[1] - 1
        assert cache.seq_lens == [length + 4 + 2 * NEW - 1 for length in (9, 3, 6)]
        cache.release()
    assert torch.equal(tokens, expected)


# -- what generate() accepts ---------------------------------------------------------------------

PROCESSORS: dict[str, dict[str, Any]] = {
    "min_new_tokens": {"min_new_tokens": 6, "eos_token_id": list(range(40))},
    "forced_eos": {"forced_eos_token_id": 5},
    "suppressed": {"suppress_tokens": list(range(60)), "begin_suppress_tokens": [70, 71]},
    "sequence_bias": {"sequence_bias": [[[5], 6.0], [[5, 9], 9.0], [[100], -9.0]]},
    "bad_words": {"bad_words_ids": [[token] for token in range(40, 100)] + [[5, 9]]},
    "length_penalty": {"exponential_decay_length_penalty": (2, 1.5), "eos_token_id": [2, 60, 80]},
    "encoder_penalties": {"encoder_repetition_penalty": 1.4, "repetition_penalty": 1.2},
    "sampling_warpers": {"do_sample": True, "min_p": 0.02, "typical_p": 0.9, "top_p": 0.95},
    "renormalised_beams": {"num_beams": 3, "renormalize_logits": True, "length_penalty": 0.3},
    "early_stopping": {"num_beams": 3, "early_stopping": True, "eos_token_id": list(range(40))},
    "remove_invalid": {"remove_invalid_values": True, "no_repeat_ngram_size": 2},
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_logits_processors(model: PreTrainedModel, name: str) -> None:
    assert_tokens_equal(model, **PROCESSORS[name])


def test_forced_bos_token() -> None:
    """It acts on prompts of one token."""
    ids = torch.tensor([[5], [9]])
    tokens = assert_tokens_equal(
        _model("llama"), input_ids=ids, attention_mask=ids > 0, forced_bos_token_id=77
    )
    assert tokens[:, 1].tolist() == [77, 77]


class ForbidEvenAfter(LogitsProcessor):
    """A user's processor with state: it counts the calls and looks at the ids."""

    def __init__(self, num_calls: int) -> None:
        self.left = num_calls

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        scores = scores.scatter(1, input_ids[:, -2:], -5.0)
        if self.left < 0:
            scores[:, ::2] = -torch.inf
        return scores


class StopAtSum(StoppingCriteria):
    """A user's criterion: a row ends when its ids add up to a limit."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids.sum(1) > 900


@pytest.mark.parametrize("decoding", DECODING)
def test_a_users_processor_and_criterion(model: PreTrainedModel, decoding: str) -> None:
    batch = ragged_batch((9, 3, 6))
    options = {"max_new_tokens": 16, **batch.inputs, **DECODING[decoding]}

    def run() -> Any:
        return model.generate(
            **options, logits_processor=[ForbidEvenAfter(4)], stopping_criteria=[StopAtSum()]
        )

    expected = seeded(run)
    with patched(model):
        got = seeded(run)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("decoding", DECODING)
def test_prefix_allowed_tokens_fn(model: PreTrainedModel, decoding: str) -> None:
    """Row i may only say tokens that are i modulo 3."""
    tokens = assert_tokens_equal(
        model,
        **DECODING[decoding],
        prefix_allowed_tokens_fn=lambda row, ids: [t for t in range(3, 128) if t % 3 == row],
    )
    new = tokens[:, 9:]
    assert torch.equal(new % 3, torch.arange(3)[:, None].expand_as(new))


class Recorder(BaseStreamer):
    """Keeps what it is given, and notes the end."""

    def __init__(self) -> None:
        self.pieces: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.pieces.append(value.tolist())

    def end(self) -> None:
        self.pieces.append("end")


@pytest.mark.parametrize("decoding", ["greedy", "sampling"])
def test_streamer_gets_every_token_as_it_comes(model: PreTrainedModel, decoding: str) -> None:
    streams = [Recorder(), Recorder()]
    unused = iter(streams)
    inputs = ragged_batch((9,)).inputs

    def run() -> Any:
        return model.generate(
            **inputs, **DECODING[decoding], max_new_tokens=NEW, streamer=next(unused)
        )

    expected = seeded(run)
    with patched(model):
        got = seeded(run)
    assert torch.equal(got, expected)
    assert streams[1].pieces == streams[0].pieces
    assert streams[1].pieces[-1] == "end" and len(streams[1].pieces) == got.shape[1] - 9 + 2


def test_stop_strings(model: PreTrainedModel) -> None:
    """Any word that ends in a 3 or a 7 ends its row."""
    tokens = assert_tokens_equal(model, tokenizer=build_tokenizer(), stop_strings=["3", "7"])
    assert (tokens == 0).any() or tokens.shape[1] < 9 + NEW, "some row ended"


def test_max_time_ends_the_call(model: PreTrainedModel) -> None:
    tokens = assert_tokens_equal(model, max_time=1e-9)
    assert tokens.shape[1] == 10, "one token, then the clock is looked at"


@pytest.mark.parametrize("chunk_size", [4, 5])
@pytest.mark.parametrize("decoding", ["greedy", "beams"])
def test_chunked_prefill(model: PreTrainedModel, decoding: str, chunk_size: int) -> None:
    assert_tokens_equal(model, **DECODING[decoding], prefill_chunk_size=chunk_size)


@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("decoding", DECODING)
def test_inputs_embeds(model: PreTrainedModel, decoding: str, with_ids: bool) -> None:
    """Prompts given as embeddings, padded, with or without ids beside them."""
    batch = ragged_batch((9, 3, 6))
    embeds = model.get_input_embeddings()(batch.ids).detach() + 0.01
    ids = {"input_ids": batch.ids} if with_ids else {"input_ids": None}
    assert_tokens_equal(model, **DECODING[decoding], **ids, inputs_embeds=embeds)


def test_guidance_with_a_negative_prompt(model: PreTrainedModel) -> None:
    """The unconditional branch keeps a cache of its own, beside the paged one."""
    negative = ragged_batch((5, 2, 4), seed=13)
    options = {"negative_prompt_ids": negative.ids, "negative_prompt_attention_mask": negative.mask}
    assert_tokens_equal(model, guidance_scale=1.7, **options)
    assert_tokens_equal(model, guidance_scale=1.7)


def test_several_return_sequences_share_nothing_wrong(model: PreTrainedModel) -> None:
    """Samples and beams of one prompt, with as many rows returned as asked for."""
    for options in ({"do_sample": True}, {"num_beams": 4}):
        tokens = assert_tokens_equal(model, **options, num_return_sequences=3)
        assert tokens.shape[0] == 9


@pytest.mark.parametrize("decoding", DECODING)
def test_dropout_draws_what_it_always_drew(family: str, decoding: str) -> None:
    """generate() of a model in training mode, under a seed."""
    model = build(family, attention_dropout=0.3, dropout=0.3).train()
    assert_tokens_equal(model, **DECODING[decoding])
