"""Copies that nobody waits for: the pinned ring before each step, the side stream of swapping.

On a device the streams are kept busy for tens of milliseconds, so that a copy that comes too late
or a buffer that is written too early shows. On a CPU stand-ins put copies off until somebody waits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import numpy as np
import torch
from runner import Check, Machine, expect

from hf_paged.backends.triton import TritonBackend
from hf_paged.backends.upload import PinnedRing, send, size_of
from hf_paged.cache import block_file
from hf_paged.cache.block_file import BlockFile
from hf_paged.cache.layout import KVLayout
from hf_paged.cache.storage import KVStorage

NUM_SENDS = 12
DELAY = 30.0
"""Milliseconds."""


class Delayed:
    """Runs what it is given when somebody waits for it, in order."""

    def __init__(self) -> None:
        self._queue: deque[tuple[object, Callable[[], None]]] = deque()

    def add(self, function: Callable[[], None]) -> object:
        event = object()
        self._queue.append((event, function))
        return event

    def finish(self, event: object = None) -> None:
        """Run all up to ``event``; None: all."""
        if event is not None and all(event is not queued for queued, _ in self._queue):
            return
        while self._queue:
            queued, function = self._queue.popleft()
            function()
            if queued is event:
                return


class DelayedLink:
    """A way to a device whose copies are late."""

    def __init__(self, *, may_wait: bool = True) -> None:
        self.delayed = Delayed()
        self._may_wait = may_wait

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> Any:
        def copy() -> None:
            target.copy_(source)

        event = self.delayed.add(copy)
        wait = self.delayed.finish if self._may_wait else lambda event: None
        return mock.Mock(synchronize=lambda: wait(event))


class DelayedStream:
    """A side stream whose copies are late."""

    def __init__(self, *_: object) -> None:
        self.delayed = Delayed()
        self.queue = self.delayed.add
        self.make_compute_wait = self.delayed.finish


def arrays_of(step: int) -> list[np.ndarray]:
    # Multiples of 16 bytes: what lies between two arrays is nobody's.
    return [
        np.full(64, step, np.int32),
        np.arange(step, step + 8),
        np.full((4, 5), -step, np.int32),
    ]


def arrived(buffers: list[torch.Tensor]) -> list[bool]:
    """Return whether each buffer holds what its step sent."""
    found = []
    for step, buffer in enumerate(buffers):
        expected = torch.zeros_like(buffer, device="cpu")
        send(arrays_of(step), torch.device("cpu"), into=expected)
        found.append(torch.equal(buffer.cpu(), expected))
    return found


def ring(machine: Machine) -> str:
    num_bytes = size_of(arrays_of(0))
    buffers = [
        torch.zeros(num_bytes, dtype=torch.uint8, device=machine.device) for _ in range(NUM_SENDS)
    ]
    if not machine.is_cuda:
        for may_wait in (False, True):
            link = DelayedLink(may_wait=may_wait)
            pinned = PinnedRing(link)
            for step, buffer in enumerate(buffers):
                pinned.send(arrays_of(step), buffer)
            link.delayed.finish()
            expect(may_wait or not all(arrived(buffers)), "the stand-in does not delay")
        expect(all(arrived(buffers)), "a buffer was written before its copy was done")
        return f"{NUM_SENDS} sends over late copies"
    for _ in range(3):  # pinned buffers are allocated
        send(arrays_of(0), machine.device, into=buffers[0])
    source = torch.zeros(64, dtype=torch.int32).pin_memory()
    target = torch.zeros(64, dtype=torch.int32, device=machine.device)
    machine.synchronize()
    machine.sleep(DELAY)
    target.copy_(source, non_blocking=True)
    source.fill_(7)
    expect(bool((target == 7).all()), "the delay does not work: nothing is shown by this check")

    for buffer in buffers:
        buffer.zero_()
    machine.synchronize()
    taken = []
    for step, buffer in enumerate(buffers):
        machine.sleep(DELAY)
        start = time.perf_counter()
        send(arrays_of(step), machine.device, into=buffer)
        taken.append(1e3 * (time.perf_counter() - start))
    machine.synchronize()
    wrong = [step for step, is_right in enumerate(arrived(buffers)) if not is_right]
    expect(not wrong, f"sends {wrong} arrived changed: a buffer was written too early")
    expect(sum(taken[:3]) < DELAY, f"the first three sends waited: {taken[:3]} ms")
    expect(max(taken[3:]) > DELAY / 3, "no send waited for its buffer: the delay does not work")
    return f"{NUM_SENDS} sends right; the first 3 took {sum(taken[:3]):.2f} ms of {3 * DELAY:.0f}"


def side_stream(machine: Machine) -> str:
    """A block that leaves is not overwritten before it has left; one that returns is not read."""
    layout = KVLayout((None, None), 2, 16, torch.float32)
    storage = KVStorage(TritonBackend(), layout, 8, 16, [machine.device] * 2)
    state = torch.zeros(1, 2, 16, device=machine.device)
    storage.view(0, state, state)
    (pool,) = storage.tensors()
    stand_in = mock.patch.object(block_file, "copy_stream", DelayedStream)
    with nullcontext() if machine.is_cuda else stand_in:
        file = BlockFile(storage, 8)
        file.free(file.store([0, 1]) or [])  # pinned memory and the stream are made
        file.await_blocks([0, 1])
        machine.synchronize()
        stream = file._streams[machine.device]
        seen, milliseconds = {}, 0.0
        for is_awaited in (False, True):
            start = time.perf_counter()
            if machine.is_cuda:
                machine.sleep(DELAY)
            pool[1].fill_(1)
            if machine.is_cuda:
                stream.queue(lambda: machine.sleep(DELAY))
            slots = file.store([1])
            assert slots is not None
            if is_awaited:
                file.await_blocks([1])
            pool[1].fill_(2)
            file.load(slots, [3])
            seen[is_awaited] = pool[3].clone()
            milliseconds = 1e3 * (time.perf_counter() - start)
            machine.synchronize()
            file.await_blocks([1])
            file.free(slots)
    expect(bool((seen[False] == 2).all()), "the delay does not work: nothing is shown here")
    expect(bool((seen[True] == 1).all()), "a block was overwritten before it was copied out")
    expect(bool((pool[1] == 2).all()), "what was written after the copy is lost")
    if machine.is_cuda:
        expect(milliseconds < DELAY, f"the host waited {milliseconds:.1f} ms")
    return f"a late copy out and back in, {milliseconds:.1f} ms on the host"


CHECKS = (Check("transfers/ring", ring), Check("transfers/side-stream", side_stream))
