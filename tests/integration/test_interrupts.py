"""Interrupted at any moment, the pool is whole and the next call is right."""

from __future__ import annotations

import random
import signal
import time
from typing import Any

import pytest
import torch

import hf_paged
from reference import patched
from tiny_models import build, ragged_batch

NUM_INTERRUPTS = 60


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_interrupts_at_random_times(family: str) -> None:
    """A time limit by SIGALRM is a Ctrl-C that comes when it likes."""
    model, batch = build(family), ragged_batch((5, 11, 3))
    options: dict[str, Any] = dict(max_new_tokens=6, num_beams=2)

    is_running = False

    def interrupt(number: int, frame: object) -> None:
        if is_running:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    random_times = random.Random(1)
    num_interrupted = 0
    try:
        with patched(model):
            expected = model.generate(**batch.inputs, **options)
            start = time.perf_counter()
            model.generate(**batch.inputs, **options)
            duration = time.perf_counter() - start
            for _ in range(4 * NUM_INTERRUPTS):
                try:
                    is_running = True
                    signal.setitimer(signal.ITIMER_REAL, random_times.random() * duration + 1e-4)
                    model.generate(**batch.inputs, **options)
                    is_running = False
                except KeyboardInterrupt:
                    num_interrupted += 1
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                assert hf_paged.stats(model).used_blocks == 0
                if num_interrupted == NUM_INTERRUPTS:
                    break
            # debug mode checks every invariant in each step of this one
            assert torch.equal(model.generate(**batch.inputs, **options), expected)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert num_interrupted > NUM_INTERRUPTS / 2
