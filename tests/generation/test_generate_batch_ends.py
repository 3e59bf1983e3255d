"""generate_batch(): prompts that fail, iterators that end early, calls in between."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel

import hf_paged
from hf_paged import generate_batch
from hf_paged.errors import ConfigurationError, KVCacheFullError
from lone_prompts import (
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
from reference import CACHE_NAME, patched
from tiny_tokenizer import build_tokenizer

pytestmark = pytest.mark.core_suite


@pytest.fixture
def model() -> PreTrainedModel:
    return model_of("llama")


# -- prompts that fail -----------------------------------------------------------------------------

BAD: dict[str, tuple[Any, type[Exception]]] = {
    "empty": ([], ConfigurationError),
    "no tokenizer": ("w5 w6", ConfigurationError),
    "no sequence": (5, ConfigurationError),
    "floats": (torch.ones(3), ConfigurationError),
    "a batch": (torch.ones(2, 3, dtype=torch.long), ConfigurationError),
    "no config": (([5, 6], "config"), ConfigurationError),
    "outside of the vocabulary": ([5, 128], ConfigurationError),
    "negative": ([-1, 5], ConfigurationError),
    "too long for the pool": ([5] * 100, KVCacheFullError),
}


def test_a_bad_prompt_fails_alone(model: PreTrainedModel) -> None:
    bad = {2 * i: case for i, case in enumerate(BAD.values())}
    prompts = [bad[i][0] if i in bad else PROMPTS[i // 2] for i in range(2 * len(BAD))]
    with patched(model, **TINY):
        outputs = run(model, prompts)
    for index, output in enumerate(outputs):
        if index in bad:
            assert isinstance(output.error, bad[index][1]), (prompts[index], output)
            assert (output.sequences, output.finish_reasons) == ([], [])
        else:
            assert output.error is None and output.sequences == expected("llama")[index // 2]


@pytest.mark.parametrize("is_declared", [True, False], ids=["row-wise", "stateful"])
def test_a_processor_that_raises_for_one_prompt(model: PreTrainedModel, is_declared: bool) -> None:
    class Picky(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if input_ids.shape[1] > 18 and 77 in input_ids[:, :2]:
                raise ValueError("a token of the third step")
            return scores

    processor = hf_paged.row_wise(Picky()) if is_declared else Picky()
    prompts = [*PROMPTS[:4], [77] * 16, *PROMPTS[4:]]
    with patched(model, num_blocks=40):
        outputs = run(model, prompts, logits_processor=[processor])
    failed = outputs.pop(4)
    assert isinstance(failed.error, ValueError) and failed.sequences == []
    assert found(outputs) == expected("llama")


def test_a_prompt_that_grows_out_of_the_pool(model: PreTrainedModel) -> None:
    """Its length is not known before: it runs, others give way to it, and it fails alone."""
    long = GenerationConfig(max_new_tokens=200, pad_token_id=0, eos_token_id=[127])
    short = GenerationConfig(**OPTIONS)
    prompts = [(prompt, short) for prompt in PROMPTS]
    prompts[1:1] = [([9, 4], long), ([4, 9], long)]
    with patched(model, num_blocks=36):
        outputs = list(generate_batch(model, prompts))
        assert hf_paged.stats(model).preemptions > 0
    outputs.sort(key=lambda output: output.index)
    failed = [outputs.pop(1), outputs.pop(1)]
    assert all(isinstance(output.error, KVCacheFullError) for output in failed)
    assert found(outputs) == expected("llama")


# -- the iterator --------------------------------------------------------------------------------


class Interruption(Exception):
    pass


def close(model: Any) -> None:
    results = generate_batch(model, PROMPTS, **OPTIONS)
    next(results)
    assert hf_paged.stats(model).used_blocks > 0
    results.close()  # type: ignore[attr-defined]


def break_out(model: Any) -> None:
    for _ in generate_batch(model, PROMPTS, **OPTIONS):
        break


def raise_in_the_loop(model: Any) -> None:
    with pytest.raises(Interruption):
        for _ in generate_batch(model, PROMPTS, **OPTIONS):
            raise Interruption


def raise_in_the_prompts(model: Any) -> None:
    def prompts() -> Iterator[list[int]]:
        yield from random_prompts(20)
        raise Interruption

    with pytest.raises(Interruption):
        list(generate_batch(model, prompts(), **OPTIONS))


def collect(model: Any) -> None:
    results = generate_batch(model, PROMPTS, **OPTIONS)
    next(results)
    cycle: list[Any] = [results]
    cycle.append(cycle)
    del results, cycle
    gc.collect()


ENDS = [close, break_out, raise_in_the_loop, raise_in_the_prompts, collect]


@pytest.mark.parametrize("end", ENDS)
def test_an_end_before_the_last_result(model: PreTrainedModel, end: Callable[[Any], None]) -> None:
    with patched(model, **TINY):
        end(model)
        stats = hf_paged.stats(model)
        assert (stats.used_blocks, stats.running, stats.waiting) == (0, 0, 0)
        assert found(run(model, PROMPTS[:4])) == expected("llama")[:4]
        assert alone(model, PROMPTS[5]) == expected("llama")[5]


def test_calls_between_two_results(model: PreTrainedModel) -> None:
    outputs = []
    with patched(model, num_blocks=60), torch.no_grad():
        logits = model(torch.tensor([PROMPTS[2]]), use_cache=False).logits
        for output in generate_batch(model, PROMPTS, **OPTIONS):
            outputs.append(output)
            if len(outputs) in (1, 6):
                assert alone(model, PROMPTS[3]) == expected("llama")[3]
                with hf_paged.PagedCache(model) as cache:
                    again = model(torch.tensor([PROMPTS[2]]), **{CACHE_NAME: cache}).logits
                torch.testing.assert_close(again, logits)
                assert found(run(model, PROMPTS[:1])) == expected("llama")[:1]
    assert found(sorted(outputs, key=lambda output: output.index)) == expected("llama")


def test_another_thread_may_go_on(model: PreTrainedModel) -> None:
    """The iterator's own preparation once waited for the iterator's call to end, for ever."""
    with patched(model, **TINY):
        results = generate_batch(model, random_prompts(30, seed=8), **OPTIONS)
        outputs = [next(results)]
        thread = threading.Thread(target=lambda: outputs.extend(results), daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive() and len(outputs) == 30


def test_the_scope_is_that_of_the_call(model: PreTrainedModel) -> None:
    prompt = [5] * 20
    with patched(model):
        with hf_paged.prefix_scope(model, "a"):
            run(model, [prompt])
        with hf_paged.prefix_scope(model, "b"):
            results: Any = generate_batch(model, [prompt], **OPTIONS)
        with hf_paged.prefix_scope(model, "a"):
            assert next(results).num_cached_tokens == 0
            results.close()
            assert run(model, [prompt])[0].num_cached_tokens > 0


def test_a_forward_that_raises_for_one_prompt_loses_no_other() -> None:
    """GPT-2 has 256 positions; the second prompt grows beyond them in the middle."""
    model = model_of("gpt2")
    prompts = [[5] * 10, [6] * 252, [7] * 10, [8] * 9]
    options: dict[str, Any] = {"eos_token_id": None}
    wanted = [
        model.generate(torch.tensor([prompt]), **OPTIONS | options).tolist()
        for index, prompt in enumerate(prompts)
        if index != 1
    ]
    with patched(model):
        outputs = run(model, prompts, **options)
        assert isinstance(outputs.pop(1).error, IndexError)
        assert found(outputs) == wanted


def test_stop_strings_are_packed() -> None:
    """The tokenizer that they need is no argument of the model's forward."""
    model, tokenizer = model_of("llama"), build_tokenizer()
    ids = torch.tensor([PROMPTS[0] + PROMPTS[1]])
    options: dict[str, Any] = dict(max_new_tokens=9, stop_strings=["w9"], tokenizer=tokenizer)
    wanted = model.generate(ids, **options)
    with patched(model):
        assert torch.equal(model.generate(ids, **options), wanted)
        model.generate(ids, **options)
        assert hf_paged.stats(model).padded_tokens_avoided > 0, "a rectangle computes it all again"
