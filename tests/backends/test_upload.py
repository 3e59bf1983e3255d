"""Arrays on their way to a device: one copy, no wait, and no buffer written too early."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_paged.backends import upload
from hf_paged.backends.upload import PinnedRing, index_of, send, size_of

pytestmark = pytest.mark.core_suite

CPU = torch.device("cpu")


class DelayedLink:
    """A device that copies when somebody waits for it, or never: as late as a real one may."""

    def __init__(self) -> None:
        self.queue: deque[Callable[[], None]] = deque()
        self.num_waits = 0
        self.num_buffers = 0

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        self.num_buffers += 1
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> Any:
        done = []

        def run() -> None:
            target.copy_(source)
            done.append(True)

        self.queue.append(run)
        link = self

        class Event:
            def synchronize(self) -> None:
                while not done:
                    link.num_waits += 1
                    link.queue.popleft()()

        return Event()

    def finish(self) -> None:
        while self.queue:
            self.queue.popleft()()


def test_a_buffer_is_not_written_before_its_last_copy_is_done() -> None:
    """A pinned source that changes under a copy in flight sends what came later."""
    link = DelayedLink()
    ring = PinnedRing(link)
    targets = [torch.zeros(16, dtype=torch.uint8) for _ in range(10)]
    for step, target in enumerate(targets):
        ring.send([np.full(4, step, np.int32)], target)
    link.finish()
    for step, target in enumerate(targets):
        assert target.view(torch.int32).tolist() == [step] * 4


def test_a_step_does_not_wait_for_the_one_before() -> None:
    link = DelayedLink()
    ring = PinnedRing(link)
    for _ in range(3):
        ring.send([np.zeros(4, np.int32)], torch.zeros(16, dtype=torch.uint8))
    assert link.num_waits == 0
    ring.send([np.zeros(4, np.int32)], torch.zeros(16, dtype=torch.uint8))
    assert link.num_waits == 1, "the fourth waits for the first"
    assert link.num_buffers == 3


def test_a_ring_grows_with_what_is_sent() -> None:
    link = DelayedLink()
    ring = PinnedRing(link)
    for num_bytes in (16, 4096, 32, 100_000, 8):
        array = np.arange(num_bytes, dtype=np.uint8)
        target = torch.zeros(num_bytes, dtype=torch.uint8)
        ring.send([array], target)
        link.finish()
        assert np.array_equal(target.numpy(), array)


ARRAYS = st.lists(
    st.tuples(
        st.sampled_from([np.int32, np.int64, np.uint8, np.float32]),
        st.lists(st.integers(0, 3), min_size=1, max_size=3),
    ),
    min_size=1,
    max_size=6,
)


@given(ARRAYS)
@settings(deadline=None)
def test_tensors_are_views_of_one_buffer_at_the_same_aligned_places(spec: Any) -> None:
    arrays = [np.full(shape, i + 1, dtype) for i, (dtype, shape) in enumerate(spec)]
    buffer = torch.zeros(size_of(arrays), dtype=torch.uint8)
    first = send(arrays, CPU, into=buffer)
    again = send([array + 1 for array in arrays], CPU, into=buffer)
    for array, one, two in zip(arrays, first, again, strict=True):
        assert one.shape == array.shape
        assert torch.equal(two, torch.from_numpy(array + array.dtype.type(1)))
        assert one.data_ptr() == two.data_ptr()
        if array.size:
            assert (one.data_ptr() - buffer.data_ptr()) % 16 == 0


def test_a_cpu_needs_no_copy() -> None:
    array = np.arange(5)
    (tensor,) = send([array], CPU)
    array[0] = 7
    assert tensor[0] == 7


def test_a_device_gets_one_copy_of_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    link = DelayedLink()

    class Counting(PinnedRing):
        def send(self, arrays: Any, target: torch.Tensor) -> None:
            sent.append(size_of(arrays))
            super().send(arrays, target)

    ring = Counting(link)
    monkeypatch.setattr(upload, "_ring", lambda device: ring)
    buffer = torch.zeros(64, dtype=torch.uint8)
    one, two = send([np.arange(3), np.arange(2, dtype=np.int32)], CPU, into=buffer)
    link.finish()
    assert sent == [40]
    assert (one.tolist(), two.tolist()) == ([0, 1, 2], [0, 1])


@given(st.lists(st.integers(0, 9), max_size=9))
@settings(deadline=None)
def test_index_of_selects_what_a_list_would(indices: list[int]) -> None:
    rows = torch.arange(30).view(10, 3)
    assert torch.equal(rows[index_of(indices, CPU)], rows[indices])


def test_inference_mode_leaves_tensors_that_can_be_written_outside() -> None:
    with torch.inference_mode():
        (tensor,) = send([np.arange(3)], CPU, into=torch.zeros(24, dtype=torch.uint8))
    assert tensor.tolist() == [0, 1, 2]
