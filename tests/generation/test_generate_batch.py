"""generate_batch(): of each prompt what the unpatched model generates for it alone."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel

from hf_paged import generate_batch
from hf_paged.errors import ConfigurationError
from lone_prompts import (
    EOS,
    OPTIONS,
    PROMPTS,
    TINY,
    alone,
    expected,
    found,
    model_of,
    random_prompts,
    run,
)
from reference import patched
from tiny_models import build
from tiny_tokenizer import build_tokenizer

pytestmark = pytest.mark.core_suite


@pytest.fixture
def model() -> PreTrainedModel:
    return model_of("llama")


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_each_prompt_gets_what_it_gets_alone(family: str) -> None:
    wanted, model = expected(family), model_of(family)
    with patched(model, num_blocks=24, max_batch_tokens=16):
        outputs = run(model, PROMPTS)
    assert found(outputs) == wanted
    assert [output.prompt_ids for output in outputs] == PROMPTS
    reasons = [output.finish_reasons for output in outputs]
    assert reasons == [["stop" if row[-1] in EOS else "length" for row in rows] for rows in wanted]
    assert family != "llama" or {"stop", "length"} == {reason for (reason,) in reasons}
    assert all(output.error is None and output.texts is None for output in outputs)


def test_forms_of_a_prompt(model: PreTrainedModel) -> None:
    prompt, config = PROMPTS[3], GenerationConfig(**OPTIONS | {"max_new_tokens": 3})
    text = " ".join(f"w{token}" for token in prompt)
    forms = [prompt, torch.tensor(prompt), torch.tensor([prompt]), text, (text, None)]
    short = alone(model, prompt, max_new_tokens=3)
    with patched(model, **TINY):
        outputs = run(model, forms[:4], tokenizer=build_tokenizer())
        assert found(outputs) == [expected("llama")[3]] * 4
        pairs = [(prompt, config), (torch.tensor(prompt), config)]
        by_pair = generate_batch(model, pairs)
        assert found(by_pair) == [short, short]
        assert found(generate_batch(model, [prompt], generation_config=config)) == [short]


def test_prompts_are_read_as_there_is_room(model: PreTrainedModel) -> None:
    num_read = 0

    def prompts() -> Iterator[list[int]]:
        nonlocal num_read
        for prompt in random_prompts(40, longest=10):
            num_read += 1
            yield prompt

    with patched(model, num_blocks=8):
        results = generate_batch(model, prompts(), **OPTIONS | {"max_new_tokens": 4})
        assert num_read == 0
        indices = [next(results).index]
        assert 1 <= num_read <= 24  # 16 that wait, and those that run
        indices += [output.index for output in results]
    assert num_read == 40 and sorted(indices) == list(range(40))


def test_samples_depend_on_the_seed_alone(model: PreTrainedModel) -> None:
    options: dict[str, Any] = {"do_sample": True, "num_return_sequences": 3, "top_k": 20}
    pools: list[dict[str, Any]] = [{}, TINY, {"num_blocks": 60, "max_batch_tokens": 4}]
    results = []
    for pool in pools:
        with patched(model, **pool):
            torch.manual_seed(11)
            results.append(found(run(model, PROMPTS, **options)))
    assert results[0] == results[1] == results[2]
    for prompt, rows in zip(PROMPTS, results[0], strict=True):
        assert len(rows) == 3 and all(row[: len(prompt)] == prompt for row in rows)
    assert any(rows[0] != rows[1] for rows in results[0])
    with patched(model):
        torch.manual_seed(11)
        others = run(model, [*random_prompts(5, seed=6), *PROMPTS[5:7]], **options)
        assert found(others)[5:] == results[0][5:7]
        torch.manual_seed(12)
        assert found(run(model, PROMPTS, **options)) != results[0]


def test_stop_strings_and_texts(model: PreTrainedModel) -> None:
    tokenizer, prompts = build_tokenizer(), PROMPTS[:5]
    no_eos = {"eos_token_id": [127]}
    stop = f"w{alone(model, prompts[1], **no_eos)[0][len(prompts[1]) + 2]}"
    options = {**no_eos, "tokenizer": tokenizer, "stop_strings": [stop]}
    wanted = [alone(model, prompt, **options) for prompt in prompts]
    with patched(model, **TINY):
        outputs = run(model, prompts, **options)
    assert found(outputs) == wanted
    assert outputs[1].finish_reasons == ["stop"]
    assert outputs[1].texts is not None and outputs[1].texts[0].endswith(stop)
    for output in outputs:
        new = output.sequences[0][len(output.prompt_ids) :]
        assert output.texts == [tokenizer.decode(new, skip_special_tokens=True)]
        is_short = len(new) < OPTIONS["max_new_tokens"]
        assert output.finish_reasons == [
            "stop" if is_short or stop in output.texts[0] else "length"
        ]


def test_cached_tokens_are_counted(model: PreTrainedModel) -> None:
    prompt = random_prompts(1, seed=9)[0] + [7] * 10
    longer = [*prompt, 8, 9, 10, 11]
    with patched(model):
        first, twin = run(model, [prompt, prompt])
        assert (first.num_cached_tokens, twin.num_cached_tokens) == (0, len(prompt))
        later, extended = run(model, [prompt, longer])
        assert len(prompt) - 4 <= later.num_cached_tokens < len(prompt)
        assert len(prompt) - 4 <= extended.num_cached_tokens < len(longer)


# -- around it -----------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
@pytest.mark.parametrize("progress", [True, False])
def test_a_bar_for_terminals(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, stream: Any, progress: bool
) -> None:
    with patched(model, **TINY):
        monkeypatch.setattr(sys, "stderr", stream())
        run(model, PROMPTS[:3], progress=progress)
        shown = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert bool(shown) == (progress and stream is Terminal)
    if shown:
        assert all(word in shown for word in ("3/3", "tok/s", "/14 blocks", "hits")), shown


@pytest.mark.parametrize(
    "name",
    ["streamer", "inputs", "input_ids", "inputs_embeds", "attention_mask", "past_key_values"],
)
def test_refused_arguments(model: PreTrainedModel, name: str) -> None:
    with patched(model), pytest.raises(ConfigurationError, match=name):
        generate_batch(model, PROMPTS, **{name: object()})


def test_a_model_that_is_not_patched(model: PreTrainedModel) -> None:
    with pytest.raises(ConfigurationError, match="not patched"):
        generate_batch(model, PROMPTS)


@pytest.mark.parametrize("is_pair", [False, True])
def test_beams(model: PreTrainedModel, is_pair: bool) -> None:
    """A config without an eos token takes the model's: rows were once given back with padding."""
    beams: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 2, "length_penalty": -2.0}
    beams |= {"max_new_tokens": 8, "pad_token_id": 0}
    wanted = [alone(model, prompt, **beams) for prompt in PROMPTS[:5]]
    prompts: list[Any] = PROMPTS[:5]
    defaults = model.generation_config.eos_token_id
    try:
        model.generation_config.eos_token_id = EOS
        if is_pair:
            prompts = [(prompt, GenerationConfig(**beams)) for prompt in prompts]
            beams = {}
        with patched(model, num_blocks=40):
            outputs = sorted(generate_batch(model, prompts, **beams), key=lambda o: o.index)
    finally:
        model.generation_config.eos_token_id = defaults
    assert found(outputs) == wanted
    assert any(len(rows[0]) != len(rows[1]) for rows in wanted)
    for output in outputs:
        reasons = ["stop" if row[-1] in EOS else "length" for row in output.sequences]
        assert output.finish_reasons == reasons


def test_beams_wait_for_the_prompts_that_run(model: PreTrainedModel) -> None:
    """They once failed for want of the blocks that other prompts held just then."""
    beam = GenerationConfig(num_beams=3, do_sample=True, **OPTIONS)
    prompts: list[Any] = [*random_prompts(20, longest=14), ([9] * 14, beam), ([8] * 14, beam)]
    config, results = GenerationConfig(**OPTIONS), []
    for num_blocks in (14, 400):
        with patched(model, num_blocks=num_blocks, prefix_caching=False):
            torch.manual_seed(5)
            outputs = list(generate_batch(model, prompts, generation_config=config))
        assert [output.error for output in outputs] == [None] * len(prompts)
        results.append({output.index: output.sequences for output in outputs})
    assert results[0] == results[1]


class Diary(LogitsProcessor):
    """Forbids what it chose at its last call, of whatever prompt; remembers whom it saw."""

    def __init__(self) -> None:
        self.last = torch.tensor([50])
        self.seen: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.append(int(input_ids[0, 0]))
        scores = scores.index_fill(1, self.last, -torch.inf)
        self.last = scores.argmax(-1)
        return scores


def test_a_stateful_processor_sees_one_prompt_after_the_other(model: PreTrainedModel) -> None:
    diary, again = Diary(), Diary()
    wanted = [alone(model, prompt, logits_processor=[diary]) for prompt in PROMPTS[:5]]
    with patched(model, **TINY):
        assert found(run(model, PROMPTS[:5], logits_processor=[again])) == wanted
    assert again.seen == diary.seen


def test_rows_that_must_stay_together_run_alone(model: PreTrainedModel) -> None:
    """Without an eos token rows end together; among other prompts they once could not wait."""
    options = {"num_return_sequences": 3, "do_sample": True, "stop_strings": ["w55"]}
    options |= {"tokenizer": build_tokenizer(), "eos_token_id": None}
    with patched(model, num_blocks=20, max_batch_tokens=8):
        outputs = run(model, PROMPTS, **options)
    assert [output.error for output in outputs] == [None] * len(PROMPTS)
    assert all(len({len(row) for row in output.sequences}) == 1 for output in outputs)


def test_through_a_peft_wrapper() -> None:
    torch.manual_seed(1)
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    wrapped = get_peft_model(build("llama"), lora).eval()
    wanted = [alone(wrapped, prompt) for prompt in PROMPTS[:4]]
    with patched(wrapped, **TINY):
        assert found(run(wrapped, PROMPTS[:4])) == wanted
    assert wanted != expected("llama")[:4]
