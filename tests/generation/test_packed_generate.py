"""generate() computes live tokens only, and nobody can tell by its results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria, StoppingCriteriaList

import hf_paged
from hf_paged.errors import KVCacheFullError
from reference import CACHE_NAME, cache_of, patched, seeded, sequences
from tiny_models import Batch, build, ragged_batch

pytestmark = pytest.mark.core_suite

RAGGED = (9, 3, 14, 1, 6)
NEW = 10
EARLY_EOS = list(range(10, 40))
"""So many eos tokens that rows of a random model end at different times."""


class Watcher(LogitsProcessor):
    """Notes what it is shown; changes nothing. Not known to be row-wise."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.shown: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.used: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.shown.append((input_ids.clone(), scores.clone()))
        if hasattr(type(self.model), "_hf_paged_original_class"):
            self.used.append(hf_paged.stats(self.model).used_blocks)
        return scores


@hf_paged.row_wise
class RowWatcher(Watcher):
    """The same, declared row-wise."""


def padded_then(padding: str) -> Batch:
    return ragged_batch(RAGGED) if padding == "ragged" else ragged_batch((9, 9, 9))


# -- live tokens only --------------------------------------------------------------------------


def test_neither_padding_nor_finished_rows_are_computed() -> None:
    model, batch = build("llama"), ragged_batch(RAGGED)
    options: dict[str, Any] = dict(max_new_tokens=NEW, eos_token_id=EARLY_EOS, pad_token_id=0)
    expected = model.generate(**batch.inputs, **options)
    generated = expected[:, batch.ids.shape[1] :]
    # A row computes its prompt and all but its last token.
    lengths = [
        next((i + 1 for i, token in enumerate(row) if token in EARLY_EOS), NEW)
        for row in generated.tolist()
    ]
    assert len(set(lengths)) > 2, "rows should end at different times"
    live = sum(RAGGED) + sum(length - 1 for length in lengths)
    with patched(model):
        assert torch.equal(model.generate(**batch.inputs, **options), expected)
        stats = hf_paged.stats(model)
    assert stats.computed_tokens == live
    rectangle = len(RAGGED) * (max(RAGGED) + max(lengths) - 1)
    assert stats.padded_tokens_avoided == rectangle - live


def test_blocks_of_a_row_are_free_in_the_step_in_which_it_ends() -> None:
    """transformers#31261, #22340: row 0 meets eos at step 2, row 1 runs on."""
    model, batch = build("llama"), ragged_batch((8, 8))
    second = int(model.generate(**batch.row(0).inputs, max_new_tokens=2)[0, -1])
    options: dict[str, Any] = dict(max_new_tokens=NEW, eos_token_id=second, pad_token_id=0)
    expected = model.generate(**batch.inputs, **options)
    assert expected[0, 10:].tolist() == [0] * (expected.shape[1] - 10)
    watcher = RowWatcher(model)
    with patched(model):
        got = model.generate(**batch.inputs, logits_processor=[watcher], **options)
    assert torch.equal(got, expected)
    # 8 prompt tokens are two blocks of 4; the ninth opens a third one in each row.
    assert watcher.used == [4, 6] + [3] * 3 + [4] * 4 + [5]


def test_equal_prompts_are_computed_once_and_forked() -> None:
    model, batch = build("llama"), ragged_batch((18,))
    options: dict[str, Any] = dict(max_new_tokens=6, do_sample=True, num_return_sequences=8)
    expected = seeded(lambda: model.generate(**batch.inputs, **options))
    with patched(model):
        got = seeded(lambda: model.generate(**batch.inputs, **options))
        assert torch.equal(got, expected)
        stats = hf_paged.stats(model)
        assert stats.computed_tokens == 18 + 8 * 5
        assert stats.cow_copies == 7  # the half-full last block of the prompt
        # A full hit still computes its last block's rest: 18 = 4 blocks and 2 tokens.
        again = seeded(lambda: model.generate(**batch.inputs, **options))
        assert torch.equal(again, expected)
        assert hf_paged.stats(model).computed_tokens == (18 + 40) + (2 + 40)


def test_a_common_prefix_is_computed_once() -> None:
    model, one = build("llama"), ragged_batch((16,))
    tails = ragged_batch((3, 3, 3), seed=9).ids
    ids = torch.cat([one.ids.repeat(3, 1), tails], dim=1)
    expected = model.generate(ids, max_new_tokens=4, attention_mask=torch.ones_like(ids))
    with patched(model):
        got = model.generate(ids, max_new_tokens=4, attention_mask=torch.ones_like(ids))
        assert torch.equal(got, expected)
        assert hf_paged.stats(model).computed_tokens == 16 + 3 * 3 + 3 * 3


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_beams_prefill_once_and_without_padding(family: str) -> None:
    model, batch = build(family), ragged_batch((13, 5))
    options: dict[str, Any] = dict(max_new_tokens=6, num_beams=4)
    expected = model.generate(**batch.inputs, **options)
    with patched(model):
        assert torch.equal(model.generate(**batch.inputs, **options), expected)
        assert hf_paged.stats(model).computed_tokens <= 13 + 5 + 2 * 4 * 5


@pytest.mark.parametrize("max_batch_tokens", [1, 5, 16])
@pytest.mark.parametrize("family", ["llama", "gemma3", "opt"])
def test_prompts_in_chunks(family: str, max_batch_tokens: int) -> None:
    model, batch = build(family), ragged_batch((21, 9, 2))
    expected = model.generate(**batch.inputs, max_new_tokens=NEW)
    with patched(model, max_batch_tokens=max_batch_tokens):
        assert torch.equal(model.generate(**batch.inputs, max_new_tokens=NEW), expected)


# -- small pools -------------------------------------------------------------------------------

STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "samples": dict(do_sample=True, top_k=20, temperature=0.9, num_return_sequences=2),
    "eos": dict(do_sample=True, eos_token_id=EARLY_EOS, repetition_penalty=1.3),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_pools_of_every_size_give_the_same_tokens_and_seed(family: str, strategy: str) -> None:
    """A row takes 6 blocks of each of Llama's one and Gemma's two groups; 5 are too few."""
    model, batch = build(family), ragged_batch(RAGGED)
    options = dict(max_new_tokens=NEW, pad_token_id=0) | STRATEGIES[strategy]
    expected = seeded(lambda: model.generate(**batch.inputs, **options))
    state = torch.get_rng_state()
    needed = 6 if family == "llama" else 6 + 3
    preemptions = []
    for num_blocks in (needed, needed + 1, needed + 2, needed + 4, needed + 9, 30, 60):
        with patched(model, num_blocks=num_blocks):
            got = seeded(lambda: model.generate(**batch.inputs, **options))
            assert not isinstance(got, Exception), (num_blocks, got)
            assert torch.equal(got, expected), num_blocks
            assert torch.equal(torch.get_rng_state(), state), num_blocks
            stats = hf_paged.stats(model)
            assert (stats.running, stats.waiting) == (0, 0)
            assert stats.peak_used_blocks <= num_blocks
            preemptions.append(stats.preemptions)
    assert preemptions[-1] == 0


def test_rows_that_grow_make_the_youngest_give_way() -> None:
    model, batch = build("llama"), ragged_batch((8, 8, 8))
    model.generation_config.eos_token_id = None
    options: dict[str, Any] = dict(max_new_tokens=80, do_sample=True, pad_token_id=0)
    expected = seeded(lambda: model.generate(**batch.inputs, **options))
    with patched(model, num_blocks=55):  # room for 64 more tokens each, not for 80
        got = seeded(lambda: model.generate(**batch.inputs, **options))
        assert torch.equal(got, expected)
        assert hf_paged.stats(model).preemptions > 0


@pytest.mark.parametrize("num_rows", [1, 2, 17, 120])
def test_row_counts(num_rows: int) -> None:
    model = build("llama")
    batch = ragged_batch(tuple(1 + i % 13 for i in range(num_rows)))
    expected = model.generate(**batch.inputs, max_new_tokens=4)
    with patched(model, num_blocks=40):
        assert torch.equal(model.generate(**batch.inputs, max_new_tokens=4), expected)


def test_a_row_that_cannot_fit_is_refused_before_anything_runs() -> None:
    model, batch = build("llama"), ragged_batch((30, 3))
    calls: list[int] = []
    with patched(model, num_blocks=9, packed_hooks=True):
        model.model.layers[0].register_forward_pre_hook(lambda *args: calls.append(1))
        # Nothing but the length ends a row: it is sure to reach 30 + 9 tokens.
        model.generation_config.eos_token_id = None
        with pytest.raises(KVCacheFullError, match="one sequence of 30 prompt tokens, 39 in all"):
            model.generate(**batch.inputs, max_new_tokens=10, pad_token_id=0)
    assert not calls


# -- processors and criteria -------------------------------------------------------------------


@pytest.mark.parametrize("padding", ["ragged", "equal"])
def test_an_unknown_processor_is_shown_what_transformers_shows_it(padding: str) -> None:
    """All rows in order, finished ones too: their ids and what the model computes for them."""
    model, batch = build("llama"), padded_then(padding)
    options: dict[str, Any] = dict(max_new_tokens=NEW, eos_token_id=EARLY_EOS, pad_token_id=0)
    plain = Watcher(model)
    expected = model.generate(**batch.inputs, logits_processor=[plain], **options)
    paged = Watcher(model)
    with patched(model):
        got = model.generate(**batch.inputs, logits_processor=[paged], **options)
    assert torch.equal(got, expected)
    assert len(plain.shown) == len(paged.shown)
    for (ids, scores), (our_ids, our_scores) in zip(plain.shown, paged.shown, strict=True):
        assert torch.equal(ids, our_ids)
        torch.testing.assert_close(our_scores, scores, atol=1e-4, rtol=1e-4)


def test_rows_of_an_unknown_processor_must_fit_together() -> None:
    model, batch = build("llama"), ragged_batch((9, 9, 9))
    with patched(model, num_blocks=8):
        with pytest.raises(KVCacheFullError, match=r"Watcher sees all rows.*hf_paged.row_wise"):
            model.generate(**batch.inputs, max_new_tokens=4, logits_processor=[Watcher(model)])
        assert hf_paged.stats(model).used_blocks == 0
        watcher = RowWatcher(model)
        got = model.generate(**batch.inputs, max_new_tokens=4, logits_processor=[watcher])
    assert torch.equal(got, model.generate(**batch.inputs, max_new_tokens=4))
    assert len(watcher.shown) == 2 * 4, "the third row comes when two have ended"


def test_prefix_allowed_tokens_fn_gets_the_row() -> None:
    model, batch = build("llama"), ragged_batch(RAGGED)

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        return [20 + row, 60 + row, 100 + row]

    options: dict[str, Any] = dict(max_new_tokens=5, prefix_allowed_tokens_fn=allowed)
    expected = model.generate(**batch.inputs, **options)
    with patched(model):
        assert torch.equal(model.generate(**batch.inputs, **options), expected)


class EveryOther(StoppingCriteria):
    """Ends a row when its last token is even; looks at the batch as a whole."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] % 2 == 0


@pytest.mark.parametrize("eos_token_id", [None, EARLY_EOS])
def test_a_users_criterion(eos_token_id: Any) -> None:
    """Without an eos token a row that has ended goes on with real tokens until all have."""
    model, batch = build("llama"), ragged_batch(RAGGED)
    model.generation_config.eos_token_id = eos_token_id
    options: dict[str, Any] = dict(
        max_new_tokens=NEW,
        pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([EveryOther()]),
    )
    expected = model.generate(**batch.inputs, **options)
    with patched(model):
        assert torch.equal(model.generate(**batch.inputs, **options), expected)


def test_max_time_ends_all_rows() -> None:
    model, batch = build("llama"), ragged_batch(RAGGED)
    with patched(model, num_blocks=8):
        got = model.generate(**batch.inputs, max_new_tokens=50, max_time=0.0, pad_token_id=0)
    assert got.shape[1] == max(RAGGED) + 1
    assert torch.equal(got[:, :-1], batch.ids)


class Tokens:
    """A streamer that keeps what it gets."""

    def __init__(self) -> None:
        self.got: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.got.append(value.tolist())

    def end(self) -> None:
        self.got.append("end")


@pytest.mark.parametrize("lengths", [(7,), RAGGED])
def test_streamers(lengths: tuple[int, ...]) -> None:
    model, batch = build("llama"), ragged_batch(lengths)
    streams = []
    for use_pool in (False, True):
        streams.append(Tokens())
        options: dict[str, Any] = dict(max_new_tokens=5, streamer=streams[-1])
        if use_pool:
            with patched(model):
                model.generate(**batch.inputs, **options)
        else:
            model.generate(**batch.inputs, **options)
    assert streams[0].got == streams[1].got
    assert streams[1].got[-1] == "end"


# -- what comes back ---------------------------------------------------------------------------


@pytest.mark.parametrize("do_sample", [False, True])
def test_scores_and_logits_of_all_rows(do_sample: bool) -> None:
    model, batch = build("llama"), ragged_batch(RAGGED)
    options: dict[str, Any] = dict(
        max_new_tokens=NEW,
        eos_token_id=EARLY_EOS,
        pad_token_id=0,
        do_sample=do_sample,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
    )
    expected = seeded(lambda: model.generate(**batch.inputs, **options))
    with patched(model):
        got = seeded(lambda: model.generate(**batch.inputs, **options))
        assert torch.equal(sequences(got), sequences(expected))
        for name in ("scores", "logits"):
            for ours, theirs in zip(got[name], expected[name], strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
        cache_of(got).release()


def test_a_returned_cache_holds_all_rows_or_says_why_not() -> None:
    model, batch = build("llama"), ragged_batch((9, 3, 6))
    options: dict[str, Any] = dict(max_new_tokens=6, pad_token_id=0, return_dict_in_generate=True)
    expected = model.generate(**batch.inputs, **options)
    with patched(model):
        got = model.generate(**batch.inputs, **options)
        cache = cache_of(got)
        assert cache.get_seq_length() == cache_of(expected).get_seq_length() == 9 + 5
        assert cache.seq_lens == [9 + 5, 3 + 5, 6 + 5]
        cache.release()
    with patched(model, num_blocks=5):
        got = model.generate(**batch.inputs, **options)
        assert torch.equal(sequences(got), sequences(expected))
        with pytest.raises(hf_paged.errors.CacheStateError, match="rows left the pool"):
            cache_of(got).fork()


def test_a_cache_of_the_users_own_is_filled() -> None:
    model, batch = build("llama"), ragged_batch((9, 3, 6))
    expected = model.generate(**batch.inputs, max_new_tokens=4)
    with patched(model), hf_paged.PagedCache(model) as cache:
        got = model.generate(**batch.inputs, max_new_tokens=4, **{CACHE_NAME: cache})
        assert torch.equal(got, expected)
        assert cache.seq_lens == [9 + 3, 3 + 3, 6 + 3]
