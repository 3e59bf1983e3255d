"""How a CUDA graph is captured, on a device that is not there: what is told to torch, and when."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from hf_paged.generation import device_graph

pytestmark = pytest.mark.core_suite

CUDA = torch.device("cuda:1")


class FakeCuda:
    """Stands for torch.cuda: writes down what happens, and on which stream."""

    def __init__(self) -> None:
        self.current = "compute"
        self.log: list[str] = []
        self.fails_at_end = False

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fake = self

        class Stream:
            def __init__(self, name: str) -> None:
                self.name = name

            def wait_stream(self, other: Any) -> None:
                fake.log.append(f"{self.name} waits for {other.name}")

        class Graph:
            def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
                fake.log.append(f"begin on {fake.current}, {capture_error_mode}, {pool}")

            def capture_end(self) -> None:
                fake.log.append(f"end on {fake.current}")
                if fake.fails_at_end:
                    raise RuntimeError("operation failed due to a previous error during capture")

            def replay(self) -> None:
                fake.log.append("replay")

        @contextmanager
        def stream(which: Stream) -> Iterator[None]:
            before, fake.current = fake.current, which.name
            try:
                yield
            finally:
                fake.current = before

        @contextmanager
        def device(which: Any) -> Iterator[None]:
            fake.log.append(f"device {which}")
            yield

        for name, value in dict(
            CUDAGraph=Graph,
            Stream=lambda device: Stream("capture"),
            current_stream=lambda *a: Stream(fake.current),
            stream=stream,
            device=device,
            current_device=lambda: 1,
        ).items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(
            torch._C,
            "_cuda_endAllocateToPool",
            lambda device, pool: fake.log.append(f"release {pool} of {device}"),
            raising=False,
        )
        device_graph._capture_stream.cache_clear()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    fake = FakeCuda()
    fake.install(monkeypatch)
    yield fake
    device_graph._capture_stream.cache_clear()


def test_a_capture_is_on_a_stream_of_its_own_behind_and_before_compute(cuda: FakeCuda) -> None:
    graph = device_graph.make_graph(CUDA, "a pool")
    out = graph.capture(lambda: cuda.log.append(f"launch on {cuda.current}") or torch.ones(1))
    assert out.tolist() == [1]
    graph.replay()
    assert cuda.log == [
        "device cuda:1",
        "capture waits for compute",
        "begin on capture, thread_local, a pool",
        "launch on capture",
        "end on capture",
        "compute waits for capture",
        "replay",
    ]


def test_a_capture_that_fails_says_why_and_leaves_stream_and_allocator(cuda: FakeCuda) -> None:
    """torch.cuda.graph() raises what ends the capture, and stays on its stream."""
    cuda.fails_at_end = True

    def look() -> torch.Tensor:
        raise ValueError("a value was read")

    with pytest.raises(ValueError, match="a value was read"):
        device_graph.make_graph(CUDA, "a pool").capture(look)
    assert cuda.current == "compute"
    assert cuda.log[-2:] == ["end on capture", "release a pool of 1"]
    cuda.fails_at_end = False
    device_graph.make_graph(CUDA, "a pool").capture(lambda: torch.ones(1))
