"""Rows that give way keep their blocks in a file: nothing is computed twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hf_paged
from delayed_stream import DelayedStream
from hf_paged.cache import block_file
from hf_paged.errors import ConfigurationError
from reference import patched, seeded
from tiny_models import build, ragged_batch


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_blocks_come_back(family: str, prefix_caching: bool) -> None:
    model, batch = build(family), ragged_batch((8, 11, 6))
    model.generation_config.eos_token_id = None
    options: dict[str, Any] = dict(max_new_tokens=90, do_sample=True, pad_token_id=0)
    expected = seeded(lambda: model.generate(**batch.inputs, **options))
    # Full attention: 25 blocks a row in the end; a window of 8: at most 3 in each group.
    num_blocks = {"llama": 58, "gemma3": 50, "mistral": 7}[family]
    computed = {}
    for swap_memory in (None, "1MiB"):
        with patched(
            model,
            num_blocks=num_blocks,
            swap_memory=swap_memory,
            prefix_caching=prefix_caching,
        ):
            got = seeded(lambda: model.generate(**batch.inputs, **options))
            assert torch.equal(got, expected)
            stats = hf_paged.stats(model)
            computed[swap_memory] = stats.computed_tokens
            if family != "mistral":
                assert stats.preemptions > 0
            assert (stats.swapped_in_blocks > 0) == (stats.swapped_out_blocks > 0)
            assert (stats.swapped_out_blocks > 0) == (
                swap_memory is not None and stats.preemptions > 0
            )
    live = 8 + 11 + 6 + 3 * 89
    assert computed["1MiB"] == live
    assert computed[None] >= live


@pytest.mark.parametrize("debug", [False, True])
def test_blocks_come_back_from_copies_that_are_late(
    debug: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block that gives way is another row's in the same step, while it is still being copied."""
    stream = DelayedStream()
    monkeypatch.setattr(block_file, "copy_stream", lambda device: stream)
    model, batch = build("llama"), ragged_batch((8, 11, 6))
    model.generation_config.eos_token_id = None
    options: dict[str, Any] = dict(max_new_tokens=90, do_sample=True, pad_token_id=0)
    expected = seeded(lambda: model.generate(**batch.inputs, **options))
    with patched(model, num_blocks=58, swap_memory="1MiB", prefix_caching=False, debug=debug):
        assert torch.equal(seeded(lambda: model.generate(**batch.inputs, **options)), expected)
        stats = hf_paged.stats(model)
        assert stats.swapped_in_blocks > 0
        assert stats.computed_tokens == 8 + 11 + 6 + 3 * 89


def test_too_little_room_means_computing_again() -> None:
    model, batch = build("llama"), ragged_batch((8, 11, 6))
    model.generation_config.eos_token_id = None
    options: dict[str, Any] = dict(max_new_tokens=90, pad_token_id=0)
    expected = model.generate(**batch.inputs, **options)
    with patched(model, num_blocks=58, swap_memory=3 * 2048):
        assert torch.equal(model.generate(**batch.inputs, **options), expected)
        stats = hf_paged.stats(model)
        assert stats.preemptions > 0
        assert stats.swapped_out_blocks == 0


@pytest.mark.parametrize("swap_memory", [0, -1, "2 bananas", 100, "4000TiB"])
def test_bad_sizes(swap_memory: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"swap_memory={swap_memory!r}"):
        hf_paged.patch(build("llama"), num_blocks=10, swap_memory=swap_memory)
