"""What the accounting costs: in Python calls where they tell, else as a ratio of two times."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from time import process_time
from types import FrameType
from typing import Any

import pytest

from forwards import make_manager, new
from hf_paged.core.cache_manager import KVCacheManager
from hf_paged.core.sequence import Sequence

pytestmark = pytest.mark.core_suite


def num_calls(function: Callable[[], object]) -> int:
    """Return how many Python and C functions are called."""
    count = 0

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    previous = sys.getprofile()
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(previous)
    return count


def life(num_sequences: int, prompt: list[int]) -> None:
    """Allocate, append, fork and free many sequences, in one batch each."""
    manager = make_manager(4 * num_sequences + 8)
    sequences = [manager.new_sequence() for _ in range(num_sequences)]
    manager.commit(manager.begin([new(s, [*prompt, i]) for i, s in enumerate(sequences)]))
    manager.commit(manager.begin([new(s, [1]) for s in sequences]))
    forks = [manager.fork(sequence) for sequence in sequences]
    manager.commit(manager.begin([new(s, [1]) for s in forks]))
    for sequence in sequences + forks:
        manager.free(sequence)
    assert manager.pool.num_used == 0


@pytest.mark.parametrize("prompt", [[], [7] * 8], ids=["own blocks", "shared blocks"])
def test_many_sequences_are_linear(prompt: list[int]) -> None:
    """Four times the sequences, four times the calls (hidden loops in C show in the next test)."""
    few, many = (num_calls(lambda n=n: life(n, prompt)) for n in (500, 2000))
    assert many < 4.2 * few


@pytest.mark.parametrize("prompt", [[], [7] * 8], ids=["own blocks", "shared blocks"])
def test_ten_thousand_sequences_take_linear_time(prompt: list[int]) -> None:
    """16 times the sequences: quadratic work would take 256 times as long, caches that miss 2.

    The collector is off, as its passes over all living objects are work of its own that grows.
    """

    def best(num_sequences: int, num_runs: int) -> float:
        times = []
        for _ in range(num_runs):
            begin = process_time()
            life(num_sequences, prompt)
            times.append(process_time() - begin)
        return min(times)

    gc.collect()
    gc.disable()
    try:
        assert best(10_000, 2) < 80 * best(625, 8)
    finally:
        gc.enable()


def decode_calls(manager: KVCacheManager, sequence: Sequence) -> int:
    """Return the calls of one more token that stays in its block."""
    return num_calls(lambda: manager.commit(manager.begin([new(sequence, [1])])))


@pytest.mark.parametrize("windows", [[None], [8], [None, 8]])
def test_append_inside_a_block_does_not_depend_on_the_length(windows: list[int | None]) -> None:
    """A token after 17 tokens costs the same as one after 100,001."""
    manager = make_manager(60_000, 4, windows)
    short, long = manager.new_sequence(), manager.new_sequence()
    manager.commit(manager.begin([new(short, [1] * 17), new(long, [2] * 100_001)]))
    decode_calls(manager, short)
    decode_calls(manager, long)
    assert decode_calls(manager, long) == decode_calls(manager, short)


def test_crop_is_linear_in_the_blocks_it_frees() -> None:
    """Twice as long takes twice the calls, and the tail never holds more than a block."""

    def crop(num_tokens: int) -> int:
        manager = make_manager(num_tokens)
        sequence = manager.new_sequence()
        manager.commit(manager.begin([new(sequence, [1] * num_tokens)]))
        return num_calls(lambda: manager.crop(sequence, 1))

    assert crop(4000) < 2.2 * crop(2000)
