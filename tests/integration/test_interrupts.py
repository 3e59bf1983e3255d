"""Interrupted at any moment, the pool is whole and the next call is right."""

from __future__ import annotations

import gc
import random
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import hf_paged
from reference import patched, sequences
from tiny_models import build, ragged_batch

NUM_INTERRUPTS = 60


WAYS: dict[str, tuple[dict[str, Any], int]] = {
    "beams": (dict(num_beams=2), 400),
    "packed": (dict(), 400),
    "returned cache": (dict(return_dict_in_generate=True), 400),
    "rows that wait": (dict(num_return_sequences=2, do_sample=True), 20),
}
"""Arguments of generate(), and the blocks of the pool."""


@pytest.fixture(autouse=True)
def no_collector_callbacks() -> Iterator[None]:
    """Hypothesis leaves one; an interrupt inside it is reported and lost, as in a finalizer."""
    callbacks = gc.callbacks[:]
    gc.callbacks.clear()
    yield
    gc.callbacks.extend(callbacks)


@pytest.fixture(autouse=True)
def lost_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt in a callback of a weak reference is lost: Python reports it and goes on.

    pytest keeps what is reported, and with it the frames that were running and the caches that they
    name: blocks stayed in use.
    """
    report = sys.unraisablehook

    def report_others(unraisable: Any) -> None:
        if unraisable.exc_type is not KeyboardInterrupt:
            report(unraisable)

    monkeypatch.setattr(sys, "unraisablehook", report_others)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_interrupts_at_random_times(family: str, way: str) -> None:
    """A time limit by SIGALRM is a Ctrl-C that comes when it likes."""
    model, batch = build(family), ragged_batch((5, 11, 3))
    options, num_blocks = WAYS[way]
    is_running = False

    def run() -> torch.Tensor:
        torch.manual_seed(3)
        return sequences(model.generate(**batch.inputs, max_new_tokens=6, **options))

    def interrupt(number: int, frame: object) -> None:
        if is_running:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    random_times = random.Random(1)
    num_interrupted = 0
    try:
        with patched(model, num_blocks=num_blocks):
            expected = run()
            start = time.perf_counter()
            run()
            duration = time.perf_counter() - start
            for _ in range(4 * NUM_INTERRUPTS):
                try:
                    is_running = True
                    signal.setitimer(signal.ITIMER_REAL, random_times.random() * duration + 1e-4)
                    run()
                    is_running = False
                except KeyboardInterrupt:
                    num_interrupted += 1
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                assert hf_paged.stats(model).used_blocks == 0
                assert torch.is_grad_enabled()
                if num_interrupted == NUM_INTERRUPTS:
                    break
            # debug mode checks every invariant in each step of this one
            assert torch.equal(run(), expected)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert num_interrupted > NUM_INTERRUPTS / 2
