"""PagedCache answers every question of transformers' Cache as the reference's DynamicCache does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

import hf_paged
from hf_paged.errors import CacheStateError, ConfigurationError
from reference import patched
from session import Session, more
from tiny_models import build

IS_OLD = Version(transformers.__version__) < Version("5.18")
"""crop() of these versions takes the number of columns to keep, if it is positive."""

_model = functools.cache(build)


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def answers(cache: Cache) -> dict[str, Any]:
    """What transformers asks a cache about itself."""
    layers = range(len(cache))
    found = {
        "len": len(cache),
        "seq_length": [cache.get_seq_length(), *(cache.get_seq_length(i) for i in layers)],
        "max_length": [cache.get_max_length(), *(cache.get_max_length(i) for i in layers)],
        "query_offset": [cache.get_query_offset(), *(cache.get_query_offset(i) for i in layers)],
        "mask_sizes": [cache.get_mask_sizes(n, i) for n in (1, 3) for i in layers],
        "is_sliding": cache.is_sliding,
        "is_linear": cache.is_linear,
        "is_croppable": cache.is_croppable,
        "is_compileable": cache.is_compileable,
        "is_initialized": cache.is_initialized,
    }
    if not IS_OLD:
        found["is_dummy"] = cache.is_dummy
        found["is_recording_past"] = [cache.is_recording_past(i) for i in layers]
    return found


@pytest.mark.parametrize("is_recording", [False, True])
def test_answers_are_those_of_a_dynamic_cache(model: PreTrainedModel, is_recording: bool) -> None:
    """Empty, after a prompt of 5, beyond the window of 8, and far beyond it."""

    def ask(cache: Cache) -> list[dict[str, Any]]:
        if is_recording:
            cache.activate_past_recording()
        found = [answers(cache)]
        session = Session(model, cache, (5, 2))
        found.append(answers(cache))
        for num_tokens in (2, 1, 1, 7, 1):
            if is_recording:
                cache.crop(0)  # 5.17 raises without
            session.feed(more(2, num_tokens))
            found.append(answers(cache))
        return found

    expected = ask(DynamicCache(config=model.config))
    with patched(model), hf_paged.PagedCache(model) as cache:
        assert ask(cache) == expected


def test_lists_have_a_value_a_layer(model: PreTrainedModel) -> None:
    """Also when empty: all([]) of is_linear would be True. On 5.17 these are extras of ours."""
    with patched(model), hf_paged.PagedCache(model) as cache:
        num_layers = model.config.num_hidden_layers
        assert cache.is_linear == cache.is_dummy == [False] * num_layers
        assert len(cache.is_sliding) == len(cache) == num_layers
        assert cache.is_compileable is False and type(cache).is_compileable is False
        assert cache.is_croppable
        assert [cache.is_recording_past(i) for i in range(num_layers)] == [False] * num_layers


def test_batch_size_is_the_number_of_rows(model: PreTrainedModel) -> None:
    with patched(model), hf_paged.PagedCache(model) as cache:
        assert cache.batch_size == -1
        Session(model, cache, (5, 2, 3))
        assert cache.batch_size == 3
        cache.batch_repeat_interleave(2)
        assert cache.batch_size == 6
        cache.reset()
        assert cache.batch_size == -1


ROW_OPERATIONS: dict[str, tuple[Callable[[Any], None], list[int]]] = {
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
    "reorder_to_the_same": (lambda cache: cache.reorder_cache(torch.tensor([0, 1, 2])), [0, 1, 2]),
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([2, 0])), [2, 0]),
    "select_by_mask": (
        lambda cache: cache.batch_select_indices(torch.tensor([False, True, True])),
        [1, 2],
    ),
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
}


@pytest.mark.parametrize("name", ROW_OPERATIONS)
def test_row_operations_give_the_logits_of_the_reference(model: PreTrainedModel, name: str) -> None:
    """Each row then goes on with tokens of its own, so rows that shared a block part."""
    operation, rows = ROW_OPERATIONS[name]

    def run(cache: Cache) -> list[torch.Tensor]:
        session = Session(model, cache, (10, 3, 6))
        operation(cache)
        session.mask = session.mask[rows]
        return [session.feed(more(len(rows), n, seed=n)) for n in (1, 2, 9)]

    expected = run(DynamicCache(config=model.config))
    with patched(model), hf_paged.PagedCache(model) as cache:
        torch.testing.assert_close(run(cache), expected, rtol=1e-4, atol=1e-4)
        assert cache.seq_lens == [[10, 3, 6][row] + 12 for row in rows]


def test_a_reorder_copies_no_tensor(model: PreTrainedModel) -> None:
    with patched(model), hf_paged.PagedCache(model) as cache:
        Session(model, cache, (8, 4))
        tables = cache.block_tables
        cache.reorder_cache(torch.tensor([1, 0]))
        assert cache.block_tables == [[rows[1], rows[0]] for rows in tables]
        cache.reorder_cache(torch.tensor([0, 0]))
        assert cache.block_tables == [[rows[1], rows[1]] for rows in tables]
        assert hf_paged.stats(model).cow_copies == 0


# -- crop ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_removed", [0, 1, 3, 6])
def test_a_crop_forgets_the_last_columns(model: PreTrainedModel, num_removed: int) -> None:
    """With the past recorded, a window that the draft has passed comes back whole."""

    def run(cache: Cache) -> tuple[list[torch.Tensor], int]:
        cache.activate_past_recording()
        session = Session(model, cache, (9, 3, 6))
        cache.crop(0)
        session.feed(more(3, 6))
        cache.crop(-num_removed)
        session.mask = session.mask[:, : 15 - num_removed]
        length = cache.get_seq_length()
        logits = []
        for num_tokens in (1, 3, 2):
            logits.append(session.feed(more(3, num_tokens, seed=num_tokens)))
            cache.crop(0)
        return logits, length

    expected, expected_length = run(DynamicCache(config=model.config))
    with patched(model), hf_paged.PagedCache(model) as cache:
        logits, length = run(cache)
        assert length == expected_length == 15 - num_removed
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_a_crop_of_everything_leaves_an_empty_cache(model: PreTrainedModel) -> None:
    with patched(model), hf_paged.PagedCache(model) as cache:
        first = Session(model, cache, (6, 2)).last
        cache.crop(-6)
        assert cache.get_seq_length() == 0 and cache.seq_lens == [0, 0]
        assert hf_paged.stats(model).used_blocks == 0
        torch.testing.assert_close(Session(model, cache, (6, 2)).last, first)


def test_a_crop_frees_a_block_only_when_it_is_empty() -> None:
    model = _model("llama")
    with patched(model), hf_paged.PagedCache(model) as cache:
        Session(model, cache, (10, 5))
        used = []
        for _ in range(5):
            used.append(hf_paged.stats(model).used_blocks)
            cache.crop(-1)
        assert used == [5, 4, 3, 3, 3], "lengths (10, 5), (9, 4), (8, 3), (7, 2), (6, 1)"


@pytest.mark.core_suite
def test_a_positive_crop_reads_as_in_the_installed_version() -> None:
    """Up to 5.17 it is the length to keep, more than there is changes nothing; later an error."""
    model = _model("llama")
    with patched(model), hf_paged.PagedCache(model) as cache:
        Session(model, cache, (9, 3))
        if IS_OLD:
            for number, length in ((20, 9), (7, 7), (7, 7)):
                cache.crop(number)
                assert cache.get_seq_length() == length
            cache.crop(max_length=5)
            assert cache.seq_lens == [5, 0]
        else:
            with pytest.raises(ValueError, match="negative integer"):
                cache.crop(7)
            assert cache.get_seq_length() == 9


def test_a_crop_beyond_the_length_is_an_error(model: PreTrainedModel) -> None:
    with patched(model), hf_paged.PagedCache(model) as cache:
        Session(model, cache, (6, 2))
        before = hf_paged.stats(model)
        with pytest.raises(CacheStateError, match=r"crop\(-7\).* 6 columns"):
            cache.crop(-7)
        with pytest.raises(ConfigurationError, match="crop"):
            cache.crop()
        assert hf_paged.stats(model) == before and cache.seq_lens == [6, 2]


def test_a_crop_behind_a_forgotten_window_is_an_error() -> None:
    """Without activate_past_recording() the tokens are gone; the cache still works afterwards."""
    model = _model("gemma3")

    def run(cache: Cache) -> torch.Tensor:
        session = Session(model, cache, (20,))
        with pytest.raises(RuntimeError, match="activate_past_recording"):
            cache.crop(-9)
        return session.feed(more(1, 2))

    expected = run(DynamicCache(config=model.config))
    with patched(model), hf_paged.PagedCache(model) as cache:
        torch.testing.assert_close(run(cache), expected, rtol=1e-4, atol=1e-4)


# -- reset, errors -------------------------------------------------------------------------------


def test_a_reset_cache_is_as_good_as_new(model: PreTrainedModel) -> None:
    """Also for another number of rows."""
    expected = Session(model, DynamicCache(config=model.config), (6, 2)).last
    with patched(model), hf_paged.PagedCache(model) as cache:
        Session(model, cache, (9, 3, 6))
        cache.reset()
        assert cache.get_seq_length() == 0 and not cache.is_initialized and cache.seq_lens == []
        assert hf_paged.stats(model).used_blocks == 0
        torch.testing.assert_close(
            Session(model, cache, (6, 2)).last, expected, rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("index", [-1, 2])
@pytest.mark.parametrize("name", ["reorder_cache", "batch_select_indices"])
def test_a_row_out_of_range_is_an_error(model: PreTrainedModel, name: str, index: int) -> None:
    with patched(model), hf_paged.PagedCache(model) as cache:
        Session(model, cache, (6, 2))
        before, tables = hf_paged.stats(model), cache.block_tables
        with pytest.raises(CacheStateError, match=f"{index} is out of range.*0 to 1"):
            getattr(cache, name)(torch.tensor([0, index]))
        assert hf_paged.stats(model) == before and cache.block_tables == tables
