"""The life of a PagedCache, and what it answers when it is used wrongly."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

import hf_paged
from hf_paged.errors import CacheStateError, ConfigurationError, InputMismatchError
from reference import CACHE_NAME, patched
from session import Session, more
from tiny_models import build

LENGTHS = (9, 3, 6)

_model = functools.cache(build)


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def test_blocks_come_back_by_release_by_with_and_by_garbage_collection() -> None:
    model = _model("llama")
    with patched(model):
        cache = hf_paged.PagedCache(model)
        Session(model, cache, LENGTHS)
        assert hf_paged.stats(model).used_blocks == 6
        cache.release()
        cache.release()
        assert hf_paged.stats(model).used_blocks == 0

        with pytest.raises(KeyError), hf_paged.PagedCache(model) as cache:
            Session(model, cache, LENGTHS)
            raise KeyError
        assert hf_paged.stats(model).used_blocks == 0

        twin = Session(model, hf_paged.PagedCache(model), LENGTHS).cache.fork()
        gc.collect()
        assert hf_paged.stats(model).used_blocks == 6, "the fork lives"
        circle: list[Any] = [twin]
        circle.append(circle)
        del twin, circle
        gc.collect()
        assert hf_paged.stats(model).used_blocks == 0


USES: dict[str, Callable[[PreTrainedModel, Any], Any]] = {
    "forward": lambda model, cache: model(more(3, 1), past_key_values=cache),
    "generate": lambda model, cache: model.generate(
        more(3, 2), **{CACHE_NAME: cache}, max_new_tokens=1
    ),
    "fork": lambda model, cache: cache.fork(),
    "deepcopy": lambda model, cache: copy.deepcopy(cache),
    "crop": lambda model, cache: cache.crop(-1),
    "reorder_cache": lambda model, cache: cache.reorder_cache(torch.tensor([1, 0, 0])),
    "batch_repeat_interleave": lambda model, cache: cache.batch_repeat_interleave(2),
    "reset": lambda model, cache: cache.reset(),
    "update": lambda model, cache: cache.update(torch.ones(3, 2, 1, 8), torch.ones(3, 2, 1, 8), 0),
    "to_dynamic_cache": lambda model, cache: cache.to_dynamic_cache(),
}


@pytest.mark.core_suite
@pytest.mark.parametrize("use", USES)
def test_a_released_cache_is_an_error(use: str) -> None:
    model = _model("llama")
    with patched(model):
        with hf_paged.PagedCache(model) as cache:
            Session(model, cache, LENGTHS)
        before = hf_paged.stats(model)
        with pytest.raises(CacheStateError, match="released"):
            USES[use](model, cache)
        assert hf_paged.stats(model) == before
    assert "released" in repr(cache)


@pytest.mark.parametrize("use", sorted(set(USES) - {"forward", "generate"}))
def test_a_cache_of_an_unpatched_model_is_an_error(use: str) -> None:
    model = _model("llama")
    cache = hf_paged.PagedCache(hf_paged.patch(model, num_blocks=40, block_size=4, debug=True))
    Session(model, cache, LENGTHS)
    hf_paged.unpatch(model)
    with pytest.raises(CacheStateError, match="unpatched"):
        USES[use](model, cache)


# -- errors leave the cache and the pool as they were --------------------------------------------

MISUSES: dict[str, tuple[type[Exception], str, Callable[..., Any]]] = {
    "mask_too_short": (
        InputMismatchError,
        r"\(3, 9\).*\(3, 10\): 9 cached columns and 1 new",
        lambda model, cache: model(
            more(3, 1), past_key_values=cache, attention_mask=torch.ones(3, 9)
        ),
    ),
    "mask_too_long": (
        InputMismatchError,
        r"\(3, 12\).*\(3, 10\)",
        lambda model, cache: model(
            more(3, 1), past_key_values=cache, attention_mask=torch.ones(3, 12)
        ),
    ),
    "mask_missing": (
        InputMismatchError,
        "attention_mask is None.*10 columns",
        lambda model, cache: model(more(3, 1), past_key_values=cache),
    ),
    "mask_shows_padding": (
        InputMismatchError,
        "were padding",
        lambda model, cache: model(
            more(3, 1), past_key_values=cache, attention_mask=torch.ones(3, 10)
        ),
    ),
    "rows": (
        InputMismatchError,
        "holds 3 rows, the inputs have 2",
        lambda model, cache: model(more(2, 1), past_key_values=cache),
    ),
    "update_outside_a_forward": (
        CacheStateError,
        "outside a forward",
        lambda model, cache: cache.update(torch.ones(3, 2, 1, 8), torch.ones(3, 2, 1, 8), 0),
    ),
    "pickle": (CacheStateError, "to_dynamic_cache", lambda model, cache: pickle.dumps(cache)),
}


@pytest.mark.parametrize("name", MISUSES)
def test_a_misuse_has_its_own_error(model: PreTrainedModel, name: str) -> None:
    error, message, misuse = MISUSES[name]
    expected = Session(model, DynamicCache(config=model.config), LENGTHS).feed(more(3, 2))
    with patched(model), hf_paged.PagedCache(model) as cache:
        session = Session(model, cache, LENGTHS)
        before, tables = hf_paged.stats(model), cache.block_tables
        with pytest.raises(error, match=message):
            misuse(model, cache)
        assert hf_paged.stats(model) == before and cache.block_tables == tables
        torch.testing.assert_close(session.feed(more(3, 2)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.core_suite
def test_a_cache_of_another_model_is_an_error() -> None:
    """Whether that one is patched or not."""
    model, patched_too, plain = _model("llama"), _model("llama", 2), _model("llama", 3)
    with patched(model, patched_too), hf_paged.PagedCache(model) as cache:
        Session(model, cache, (4,))
        with pytest.raises(ConfigurationError, match="another model"):
            patched_too(more(1, 1), past_key_values=cache)
        with pytest.raises(CacheStateError, match="outside a forward of the model"):
            plain(more(1, 1), past_key_values=cache)
        with pytest.raises(ConfigurationError, match="not patched"):
            hf_paged.PagedCache(plain)
        assert cache.seq_lens == [4] and hf_paged.stats(patched_too).used_blocks == 0


def test_a_cache_in_a_forward_of_another_thread_is_an_error() -> None:
    """The second thread is told; the first goes on and is right."""
    model = _model("llama")
    expected = Session(model, DynamicCache(config=model.config), (5,)).feed(more(1, 2))
    inside, go_on, results = threading.Event(), threading.Event(), []
    with patched(model), hf_paged.PagedCache(model) as cache:
        session = Session(model, cache, (5,))

        def hold(*args: Any) -> None:
            inside.set()
            assert go_on.wait(30)

        def run() -> None:
            with torch.no_grad():
                results.append(session.feed(more(1, 2)))

        hook = model.model.layers[1].register_forward_pre_hook(hold)
        thread = threading.Thread(target=run)
        thread.start()
        assert inside.wait(30)
        hook.remove()
        try:
            with pytest.raises(CacheStateError, match=r"another thread.*fork\(\)"):
                model(more(1, 1), past_key_values=cache)
        finally:
            go_on.set()
            thread.join(30)
        torch.testing.assert_close(results[0], expected, rtol=1e-4, atol=1e-4)
        assert cache.seq_lens == [7]
