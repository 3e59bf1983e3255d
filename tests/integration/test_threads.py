"""Several threads on one patched model: each result is that of the runs one after another."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, StoppingCriteria

import hf_paged
from hf_paged.errors import KVCacheFullError
from reference import patched
from session import Session
from tiny_models import build, ragged_batch

pytestmark = pytest.mark.timeout(60)  # a deadlock fails

NEW = 8
Job = Callable[[PreTrainedModel], Any]
_model = functools.cache(build)


def job(lengths: tuple[int, ...], seed: int, **options: Any) -> Job:
    """Return a generate() call on a batch of its own."""
    batch = ragged_batch(lengths, seed=seed)
    options = {"max_new_tokens": NEW, "eos_token_id": None, **options}
    return lambda model: model.generate(**batch.inputs, **options)


JOBS: list[Job] = [
    job((9, 3, 6), 1),
    job((9, 3, 6), 1),  # the same prompts at the same time
    job((5, 12), 2, num_beams=3),
    job((7,), 3, num_beams=4, num_return_sequences=2),
    job((13, 2, 2, 2), 4),
    job((9, 3), 5, prefill_chunk_size=4),
]


def run_in_threads(model: PreTrainedModel, jobs: Sequence[Job]) -> list[Any]:
    """Run all at once; return what each returned, or the exception that it raised."""
    barrier = threading.Barrier(len(jobs), timeout=30)

    def run(one: Job) -> Any:
        barrier.wait()
        try:
            return one(model)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result(timeout=50) for future in [pool.submit(run, one) for one in jobs]]


def assert_all_equal(results: Sequence[Any], expected: Sequence[torch.Tensor]) -> None:
    for index, (got, wanted) in enumerate(zip(results, expected, strict=True)):
        if isinstance(got, Exception):
            raise got
        assert torch.equal(got, wanted), f"job {index}"


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_threads_give_the_tokens_of_sequential_runs(
    model: PreTrainedModel, prefix_caching: bool
) -> None:
    expected = [one(model) for one in JOBS]
    with patched(model, prefix_caching=prefix_caching):
        for _ in range(1 + prefix_caching):
            assert_all_equal(run_in_threads(model, JOBS), expected)


def test_calls_wait_for_each_other_when_the_pool_is_small(model: PreTrainedModel) -> None:
    """Each fits alone; no two of the larger ones fit together."""
    expected = [one(model) for one in JOBS]
    needed = []
    with patched(model):
        for one in JOBS:
            hf_paged.clear_prefix_cache(model)
            hf_paged.reset_stats(model)
            one(model)
            needed.append(hf_paged.stats(model).peak_used_blocks)
    with patched(model, num_blocks=max(needed)):
        assert sum(needed) > 2 * max(needed)
        assert_all_equal(run_in_threads(model, JOBS), expected)
        assert hf_paged.stats(model).peak_used_blocks <= max(needed)


def test_an_exception_in_one_thread_leaves_the_others_right(model: PreTrainedModel) -> None:
    """Its blocks come back, so a call that waits for them goes on."""

    class Fail(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            if input_ids.shape[1] > 12:
                raise RuntimeError("the user's own")
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    failing = job((9, 3, 6), 6, stopping_criteria=[Fail()])
    expected = [one(model) for one in JOBS[:3]]
    for num_blocks in (400, 60):
        with patched(model, num_blocks=num_blocks):
            first, *results, last = run_in_threads(model, [failing, *JOBS[:3], failing])
            assert str(first) == str(last) == "the user's own"
            assert_all_equal(results, expected)


@pytest.mark.parametrize("kind", ["prompt", "growth"])
def test_a_call_that_never_fits_fails_alone(model: PreTrainedModel, kind: str) -> None:
    """Too long a prompt fails at once, too long a row when the pool is used up."""
    too_much = {
        "prompt": job((200,), 7),
        "growth": job((4, 4, 4, 4), 8, max_new_tokens=200),
    }[kind]
    jobs = [too_much, *JOBS[:3], too_much]
    expected = [one(model) for one in JOBS[:3]]
    with patched(model, num_blocks=46):
        first, *results, last = run_in_threads(model, jobs)
        assert isinstance(first, KVCacheFullError) and isinstance(last, KVCacheFullError)
        assert_all_equal(results, expected)


def test_a_plain_forward_beside_them_is_untouched(model: PreTrainedModel) -> None:
    """Bit for bit, also with a DynamicCache and with gradients; the config reads as always."""
    batch = ragged_batch((9, 3, 6))
    implementation = model.config._attn_implementation

    def plain(model: PreTrainedModel) -> torch.Tensor:
        with torch.no_grad():
            return model(**batch.inputs).logits

    def dynamic(model: PreTrainedModel) -> torch.Tensor:
        with torch.no_grad():
            return Session(model, DynamicCache(config=model.config), (9, 3, 6)).greedy(NEW)

    def gradient(model: PreTrainedModel) -> torch.Tensor:
        loss = model(**batch.inputs, labels=batch.ids, use_cache=False).loss
        weight = model.get_input_embeddings().weight
        return torch.autograd.grad(loss, weight)[0]

    def reading(model: PreTrainedModel) -> torch.Tensor:
        assert all(model.config._attn_implementation == implementation for _ in range(2000))
        return torch.zeros(0)

    jobs = [JOBS[0], plain, dynamic, JOBS[2], gradient, reading]
    expected = [one(model) for one in jobs]
    with patched(model):
        for _ in range(3):
            assert_all_equal(run_in_threads(model, jobs), expected)


def test_hand_written_loops_and_forks_in_threads(model: PreTrainedModel) -> None:
    """Each thread continues a fork of one cache; shared blocks are copied by whoever writes."""
    start = Session(model, DynamicCache(config=model.config), (10, 3))

    def go_on(seed: int, cache: Any) -> Job:
        def run(model: PreTrainedModel) -> torch.Tensor:
            branch = Session.__new__(Session)
            branch.__dict__ |= start.__dict__ | {"cache": cache}
            with torch.no_grad():
                branch.feed(ragged_batch((2, 2), seed=seed).ids)
                return branch.greedy(NEW)

        return run

    seeds = range(4)
    copies: list[Any] = []
    for _ in seeds:
        copies.append(DynamicCache(config=model.config))
        Session(model, copies[-1], (10, 3))
    expected = [go_on(seed, copy)(model) for seed, copy in zip(seeds, copies, strict=True)]
    with patched(model), hf_paged.PagedCache(model) as cache, torch.no_grad():
        start = Session(model, cache, (10, 3))
        forks = [cache.fork() for _ in seeds]
        jobs = [go_on(seed, fork) for seed, fork in zip(seeds, forks, strict=True)]
        assert_all_equal(run_in_threads(model, jobs), expected)
        assert cache.seq_lens == [10, 3] and hf_paged.stats(model).cow_copies > 0
        for fork in forks:
            fork.release()


def test_two_patched_models_in_threads() -> None:
    """Each has its pool; a forward of one reads the other's settings never."""
    models = [_model("llama"), _model("gemma3")]
    expected = [one(m) for m in models for one in JOBS[:2]]

    def on(model: PreTrainedModel, one: Job) -> Job:
        return lambda _: one(model)

    with patched(*models):
        got = run_in_threads(models[0], [on(m, one) for m in models for one in JOBS[:2]])
    assert_all_equal(got, expected)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() == before
