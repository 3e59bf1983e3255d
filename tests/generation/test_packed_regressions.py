"""What a reader of the first version found, each with the case that showed it."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, StoppingCriteria, StoppingCriteriaList

import hf_paged
from reference import CACHE_NAME, patched, sequences
from tiny_models import CONFIGS, build, from_config, ragged_batch

EARLY_EOS = list(range(10, 40))


class Never(StoppingCriteria):
    """Sees all rows; ends none."""

    def __init__(self) -> None:
        self.shown: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.shown.append(input_ids.clone())
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Tokens:
    def __init__(self) -> None:
        self.got: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.got.append(value.tolist())

    def end(self) -> None:
        self.got.append("end")


def test_rows_that_end_apart_before_a_users_criterion_and_a_streamer() -> None:
    """The loop once waited for ever for rows that had left."""
    model, batch = build("llama"), ragged_batch((9, 3, 14, 1, 6))
    seen = []
    results = []
    for is_patched in (False, True):
        criterion, streamer = Never(), Tokens()
        options: dict[str, Any] = dict(
            max_new_tokens=10,
            eos_token_id=EARLY_EOS,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([criterion]),
            streamer=streamer,
        )
        if is_patched:
            with patched(model):
                results.append(model.generate(**batch.inputs, **options))
                computed = hf_paged.stats(model).computed_tokens
        else:
            results.append(model.generate(**batch.inputs, **options))
        seen.append((criterion.shown, streamer.got))
    assert torch.equal(*results)
    for ours, theirs in zip(seen[1][0], seen[0][0], strict=True):
        assert torch.equal(ours, theirs)
    assert seen[0][1] == seen[1][1]
    num_ages = results[0].shape[1] - 14
    assert computed < 33 + 5 * (num_ages - 1), "rows that have ended are not computed"


def test_a_forward_that_raises_after_its_commit() -> None:
    """generate_batch() once waited for ever for logits that were lost with the exception."""
    model = build("llama")
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    wanted = [model.generate(torch.tensor([p]), max_new_tokens=4)[0].tolist() for p in prompts]
    fuses = [True]

    def blow(*args: Any) -> None:
        if fuses:
            fuses.pop()
            raise RuntimeError("out of memory")

    with patched(model, packed_hooks=True):
        hook = model.lm_head.register_forward_pre_hook(blow)
        outputs = {o.index: o for o in hf_paged.generate_batch(model, prompts, max_new_tokens=4)}
        hook.remove()
    assert [outputs[i].sequences for i in range(3)] == [[w] for w in wanted]


def test_a_time_limit_is_no_prompts_error() -> None:
    model = build("llama")

    def expire(number: int, frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, expire)
    try:
        with patched(model, packed_hooks=True):
            hook = model.lm_head.register_forward_pre_hook(
                lambda *args: signal.raise_signal(signal.SIGALRM)
            )
            with pytest.raises(TimeoutError):
                list(hf_paged.generate_batch(model, [[5, 6], [7]], max_new_tokens=4))
            hook.remove()
    finally:
        signal.signal(signal.SIGALRM, before)


class OwnInputs(LlamaForCausalLM):
    """A user's subclass that shifts what the forward gets."""

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        inputs["input_ids"] = (inputs["input_ids"] + 1) % 128
        return inputs


def test_a_users_own_preparation_of_inputs_is_not_bypassed() -> None:
    model, batch = build("llama"), ragged_batch((9, 3))
    model.__class__ = OwnInputs
    expected = model.generate(**batch.inputs, max_new_tokens=6)
    with patched(model):
        assert torch.equal(model.generate(**batch.inputs, max_new_tokens=6), expected)


def test_leading_pad_ids_of_a_prompt_are_tokens() -> None:
    model = build("llama")
    prompt = [5, 7, 9, 11, 30]
    ids = torch.tensor([prompt])
    wanted = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4)
    with patched(model):
        (output,) = hf_paged.generate_batch(model, [prompt], max_new_tokens=4, pad_token_id=5)
    assert output.sequences == wanted.tolist()


def test_a_config_that_asks_for_attention_weights() -> None:
    model = from_config(CONFIGS["llama"], attn_implementation="eager")
    batch = ragged_batch((9, 3))
    model.config.output_attentions = True
    expected = model.generate(**batch.inputs, max_new_tokens=4)
    try:
        with patched(model):
            got = model.generate(**batch.inputs, max_new_tokens=4)
        assert torch.equal(sequences(got), sequences(expected))
    finally:
        model.config.output_attentions = False


def test_swap_begins_in_inference_mode() -> None:
    model, batch = build("llama"), ragged_batch((8, 11, 6))
    model.generation_config.eos_token_id = None
    options: dict[str, Any] = dict(max_new_tokens=90, pad_token_id=0)
    expected = model.generate(**batch.inputs, **options)
    with patched(model, num_blocks=58, swap_memory="1MiB"):
        with torch.inference_mode():
            model.generate(**batch.inputs, **options)
        assert hf_paged.stats(model).swapped_out_blocks > 0
        hf_paged.clear_prefix_cache(model)
        assert torch.equal(model.generate(**batch.inputs, **options), expected)


def test_positions_longer_than_the_prompt() -> None:
    model, batch = build("llama"), ragged_batch((6, 6))
    options: dict[str, Any] = dict(max_new_tokens=4, position_ids=torch.arange(9).expand(2, 9))
    expected = model.generate(**batch.inputs, **options)
    with patched(model):
        assert torch.equal(model.generate(**batch.inputs, **options), expected)


def test_a_cache_that_records_the_past_keeps_it() -> None:
    model, batch = build("mistral"), ragged_batch((14, 9))
    with patched(model), hf_paged.PagedCache(model) as cache:
        cache.activate_past_recording()
        model.generate(**batch.inputs, max_new_tokens=8, **{CACHE_NAME: cache})
        cache.crop(-9)
        assert cache.seq_lens == [14 + 7 - 9, 9 + 7 - 9]
