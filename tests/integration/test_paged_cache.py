"""PagedCache in hand-written loops: lengths, forks, and the way to a DynamicCache."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

import hf_paged
from reference import CACHE_NAME, cache_of, patched
from session import Session, more
from tiny_models import build, ragged_batch

LENGTHS = (9, 3, 6)

_model = functools.cache(build)


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


# -- hand-written loops --------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted({"past_key_values", CACHE_NAME}))
def test_a_greedy_loop_under_either_name(model: PreTrainedModel, name: str) -> None:
    """Left-padded rows; the very cache that was passed comes back."""
    expected = Session(model, DynamicCache(config=model.config), LENGTHS, name).greedy(14)
    with patched(model), hf_paged.PagedCache(model) as cache:
        session = Session(model, cache, LENGTHS, name)
        assert cache_of(session.result) is cache
        assert torch.equal(session.greedy(14), expected)
        assert cache.seq_lens == [23, 17, 20]
        assert cache.get_seq_length() == 23


def test_a_loop_without_mask_and_positions(model: PreTrainedModel) -> None:
    """In chunks of several sizes, each longer or shorter than a block."""
    ids = ragged_batch((21, 21)).ids
    expected = model(ids).logits
    with patched(model), hf_paged.PagedCache(model) as cache:
        pieces = ids.split([1, 7, 4, 1, 8], dim=1)
        logits = [model(piece, past_key_values=cache).logits for piece in pieces]
    torch.testing.assert_close(torch.cat(logits, dim=1), expected, rtol=1e-4, atol=1e-4)


def test_padding_takes_no_block_and_no_column_of_its_own() -> None:
    """Exact block ids: lowest free first, rows of 9, 3 and 6 tokens in blocks of 4."""
    model = _model("llama")
    with patched(model), hf_paged.PagedCache(model) as cache:
        Session(model, cache, LENGTHS)
        assert cache.block_tables == [[[0, 1, 2], [3], [4, 5]]]
        assert hf_paged.stats(model).live_tokens == sum(LENGTHS)


def test_blocks_behind_a_window_are_freed_in_their_group() -> None:
    """A window of 8 needs 3 blocks of 4 at most; the full group keeps all."""
    model = _model("gemma3")
    with patched(model), hf_paged.PagedCache(model) as cache:
        Session(model, cache, (9,)).greedy(21)
        [sliding], [full] = sorted(cache.block_tables, key=lambda table: min(table[0]))
        assert sliding[:5] == [-1] * 5 and -1 not in full
        assert len([block for block in sliding if block != -1]) <= 3
        assert len(full) == len(sliding) == 8


# -- forks ---------------------------------------------------------------------------------------

FORKS: dict[str, Callable[[Any], Any]] = {
    "fork": lambda cache: cache.fork(),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
}


@pytest.mark.parametrize("name", FORKS)
def test_a_fork_shares_every_block_and_goes_its_own_way(model: PreTrainedModel, name: str) -> None:
    expected = []
    for seed in (1, 2):
        session = Session(model, DynamicCache(config=model.config), LENGTHS)
        expected.append([session.feed(more(3, n, seed)) for n in (2, 9)])
    with patched(model), hf_paged.PagedCache(model) as cache:
        session = Session(model, cache, LENGTHS)
        used = hf_paged.stats(model).used_blocks
        with FORKS[name](cache) as twin:
            assert hf_paged.stats(model).used_blocks == used
            assert twin.block_tables == cache.block_tables and twin is not cache
            branch = copy.copy(session)
            branch.cache = twin
            for i, n in enumerate((2, 9)):
                for cut, seed in ((session, 1), (branch, 2)):
                    got = cut.feed(more(3, n, seed))
                    torch.testing.assert_close(got, expected[seed - 1][i], rtol=1e-4, atol=1e-4)
        assert cache.seq_lens == [length + 11 for length in LENGTHS], "the fork's end is not ours"


def test_a_fork_outlives_its_parent(model: PreTrainedModel) -> None:
    expected = Session(model, DynamicCache(config=model.config), LENGTHS).greedy(6)
    with patched(model):
        session = Session(model, hf_paged.PagedCache(model), LENGTHS)
        twin = session.cache.fork()
        session.cache.release()
        session.cache = twin
        assert torch.equal(session.greedy(6), expected)
        twin.release()


def test_a_tree_search_over_forks(model: PreTrainedModel) -> None:
    """Three branches at each of three levels; scores are those of whole sequences."""
    prompt = ragged_batch((10,)).ids
    leaves: dict[tuple[int, ...], float] = {}

    def grow(cache: hf_paged.PagedCache, logits: torch.Tensor, path: tuple[int, ...], score: float):
        if len(path) == 3:
            leaves[path] = score
            return
        for token in logits.topk(3).indices.tolist():
            with cache.fork() as branch:
                out = model(torch.tensor([[token]]), past_key_values=branch).logits[0, -1]
                gain = logits.log_softmax(-1)[token].item()
                grow(branch, out, (*path, token), score + gain)

    with patched(model):
        with hf_paged.PagedCache(model) as cache:
            grow(cache, model(prompt, past_key_values=cache).logits[0, -1], (), 0.0)
        peak = hf_paged.stats(model).peak_used_blocks
        assert peak <= len(cache.runtime.manager.groups) * (3 + 3), "a path, not a tree"
    assert len(leaves) == 27
    for path, score in leaves.items():
        logits = model(torch.cat([prompt, torch.tensor([path])], dim=1)).logits[0, 9:12]
        gains = logits.log_softmax(-1).gather(1, torch.tensor(path)[:, None])
        assert abs(gains.sum().item() - score) < 1e-3


# -- the way to a DynamicCache -------------------------------------------------------------------


def test_to_dynamic_cache_has_the_reference_s_tensors(model: PreTrainedModel) -> None:
    """In real columns; and layer by layer what sliding layers keep."""
    reference = DynamicCache(config=model.config)
    session = Session(model, reference, LENGTHS)
    session.feed(more(3, 5))
    mask = session.mask.bool()
    with patched(model), hf_paged.PagedCache(model) as cache:
        Session(model, cache, LENGTHS).feed(more(3, 5))
        dynamic = cache.to_dynamic_cache()
    for layer, expected in zip(dynamic.layers, reference.layers, strict=True):
        assert type(layer) is type(expected)
        assert layer.get_mask_sizes(2) == expected.get_mask_sizes(2)
        for states, wanted in ((layer.keys, expected.keys), (layer.values, expected.values)):
            assert states.shape == wanted.shape
            real = mask[:, -states.shape[2] :]
            got = states.transpose(1, 2)[real]
            torch.testing.assert_close(got, wanted.transpose(1, 2)[real], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lengths", [LENGTHS, (9, 9), (20, 2)])
def test_to_dynamic_cache_continues_unpatched(
    model: PreTrainedModel, lengths: tuple[int, ...]
) -> None:
    """The cache goes on as it was; its copy goes on in the unpatched model."""
    expected = Session(model, DynamicCache(config=model.config), lengths).greedy(16)
    with patched(model), hf_paged.PagedCache(model) as cache:
        session = Session(model, cache, lengths)
        start = session.greedy(6)
        left = copy.copy(session)
        left.cache = cache.to_dynamic_cache()
        beside = copy.copy(left)
        beside.cache = copy.deepcopy(left.cache)
        for going_on in (session, beside):
            assert torch.equal(torch.cat([start, going_on.greedy(10)], dim=1), expected)
    assert torch.equal(torch.cat([start, left.greedy(10)], dim=1), expected)


def test_to_dynamic_cache_continues_in_generate(model: PreTrainedModel) -> None:
    """Taken from generate(), given to generate() of the unpatched model."""
    batch = ragged_batch(LENGTHS)
    expected = model.generate(**batch.inputs, max_new_tokens=16, eos_token_id=None)
    with patched(model):
        options = {"return_dict_in_generate": True, "eos_token_id": None}
        first = model.generate(**batch.inputs, max_new_tokens=7, **options)
        dynamic = cache_of(first).to_dynamic_cache()
        cache_of(first).release()
    mask = torch.cat([batch.mask, torch.ones(3, 7, dtype=torch.long)], dim=1)
    got = model.generate(
        first.sequences,
        attention_mask=mask,
        **{CACHE_NAME: dynamic},
        max_new_tokens=9,
        eos_token_id=None,
    )
    assert torch.equal(got, expected)


def test_to_dynamic_cache_of_an_empty_cache(model: PreTrainedModel) -> None:
    with patched(model), hf_paged.PagedCache(model) as cache:
        dynamic = cache.to_dynamic_cache()
        assert dynamic.get_seq_length() == 0
        expected = Session(model, DynamicCache(config=model.config), LENGTHS).last
        assert torch.equal(Session(model, dynamic, LENGTHS).last, expected)
