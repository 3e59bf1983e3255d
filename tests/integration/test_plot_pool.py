"""``plot_pool`` of a model at work: beams, windows, other threads, before and after."""

from __future__ import annotations

import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import StoppingCriteria

import hf_paged
from hf_paged.errors import ConfigurationError
from reference import patched
from tiny_models import build, ragged_batch

pytestmark = pytest.mark.core_suite

_model = functools.cache(build)


class Look(StoppingCriteria):
    """Looks at the pool after every step, and stops nothing."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.views: list[hf_paged.PoolView] = []

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.views.append(hf_paged.plot_pool(self.model))
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def check(view: hf_paged.PoolView) -> None:
    """Counts add up, and blocks and tables say the same."""
    assert view.num_free + view.num_cached + view.num_used == view.num_blocks
    for block_id, block in enumerate(view.blocks):
        owners = tuple(
            index
            for index, sequence in enumerate(view.sequences)
            if any(block_id in table for table in sequence.tables)
        )
        assert block.sequences == owners
        assert block.ref_count >= len(owners)
        assert (block.state == "used") == (block.ref_count > 0)


def test_a_model_that_is_not_patched() -> None:
    with pytest.raises(ConfigurationError, match=r"not patched.*hf_paged\.patch"):
        hf_paged.plot_pool(_model("llama"))


def test_a_fork_in_a_hand_written_loop() -> None:
    model, batch = _model("llama"), ragged_batch((10,))
    with patched(model, num_blocks=12), torch.no_grad(), hf_paged.PagedCache(model) as cache:
        model(batch.ids, past_key_values=cache)
        with cache.fork() as twin:
            model(torch.tensor([[5]]), past_key_values=twin)
            view = hf_paged.plot_pool(model)
            tables = [cache.block_tables[0][0], twin.block_tables[0][0]]
            assert [list(s.tables[0]) for s in view.sequences] == tables == [[0, 1, 2], [0, 1, 3]]
            assert [block.ref_count for block in view.blocks[:5]] == [2, 2, 1, 1, 0]
            assert [block.num_filled for block in view.blocks[:5]] == [4, 4, 2, 3, 0]
            check(view)
        assert hf_paged.plot_pool(model).blocks[3].state == "free"


def test_a_released_prompt_stays_cached_until_it_is_cleared() -> None:
    model, batch = _model("llama"), ragged_batch((10,))
    with patched(model, num_blocks=12):
        model.generate(**batch.inputs, max_new_tokens=4, min_new_tokens=4)
        view = hf_paged.plot_pool(model)
        assert [block.state for block in view.blocks[:4]] == ["cached"] * 3 + ["free"]
        assert view.eviction_order == (2, 1, 0), "leaves before the prefixes that they extend"
        hf_paged.clear_prefix_cache(model)
        cleared = hf_paged.plot_pool(model)
        assert cleared.num_free == 12
        assert "12 free" in str(cleared)
        assert "12 free" in cleared._repr_html_()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_four_beams_share_their_prompt(family: str, tmp_path: Path) -> None:
    model, batch = _model(family), ragged_batch((21,))
    with patched(model, num_blocks=60):
        look = Look(model)
        options = dict(num_beams=4, max_new_tokens=12, min_new_tokens=12)
        expected = model.generate(**batch.inputs, **options)
        got = model.generate(**batch.inputs, **options, stopping_criteria=[look])
        assert torch.equal(got, expected), "looking changes no token"
    assert len(look.views) == 12
    for view in look.views:
        assert len(view.sequences) == 4
        check(view)
    view = look.views[6]
    prompt = {sequence.tables[0][:5] for sequence in view.sequences}
    assert len(prompt) == 1, "five full blocks of the prompt, each once"
    assert all(view.blocks[block_id].ref_count == 4 for block_id in prompt.pop())
    if family == "gemma3":
        assert all(sequence.tables[1][0] == -1 for sequence in view.sequences)
    view.save(tmp_path / "beams.png")
    assert (tmp_path / "beams.png").stat().st_size > 5000


def test_a_view_outlives_its_pool() -> None:
    model, batch = build("llama"), ragged_batch((10,))
    hf_paged.patch(model, num_blocks=12, block_size=4)
    cache = hf_paged.PagedCache(model)
    with torch.no_grad():
        model(batch.ids, past_key_values=cache)
    view = hf_paged.plot_pool(model)
    hf_paged.unpatch(model)
    assert "3 used" in str(view)
    assert "3 used" in view._repr_html_()
    with pytest.raises(ConfigurationError, match="not patched"):
        hf_paged.plot_pool(model)
    hf_paged.patch(model, num_blocks=6, block_size=4)
    assert hf_paged.plot_pool(model).num_free == 6


@pytest.mark.timeout(60)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_while_other_threads_generate(family: str) -> None:
    model, batch = _model(family), ragged_batch((21, 9))
    options = dict(num_beams=3, max_new_tokens=16, min_new_tokens=16)
    expected = model.generate(**batch.inputs, **options)
    with patched(model, num_blocks=200):
        begun = threading.Event()

        def generate() -> torch.Tensor:
            begun.set()
            result: torch.Tensor = model.generate(**batch.inputs, **options)
            return result

        views = []
        with ThreadPoolExecutor(2) as threads:
            jobs = [threads.submit(generate) for _ in range(4)]
            begun.wait(30)
            while not all(job.done() for job in jobs):
                view = hf_paged.plot_pool(model)
                views.append(view)
                check(view)
                assert view._repr_html_() and str(view)
        for job in jobs:
            assert torch.equal(job.result(), expected)
    assert any(view.num_shared for view in views)
