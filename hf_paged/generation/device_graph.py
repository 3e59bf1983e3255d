"""Work of a device that is recorded once and given again: CUDA graphs."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import torch

__all__ = ["DeviceGraph", "make_graph", "make_pool"]

_one_at_a_time = threading.Lock()
"""Of captures in this process: the allocator is told of each."""


class DeviceGraph(Protocol):
    """Recorded work; it reads and writes the memory that it was recorded over."""

    def capture(self, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Record what ``function`` launches, without running it; return what it returns."""

    def replay(self) -> None:
        """Run what was recorded, behind everything that the device was given so far."""


class _CudaGraph:
    def __init__(self, device: torch.device, pool: Any) -> None:
        self._device = device
        self._pool = pool
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        # torch.cuda.graph() would wait for the whole device, which another thread may be using,
        # and would leave this thread on its stream if the capture fails.
        with _one_at_a_time, torch.cuda.device(self._device):
            compute, stream = torch.cuda.current_stream(), _capture_stream(self._device)
            stream.wait_stream(compute)
            with torch.cuda.stream(stream):
                self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    out = function()
                except BaseException:
                    self._abandon()
                    raise
                self._graph.capture_end()
            compute.wait_stream(stream)
            return out

    def replay(self) -> None:
        self._graph.replay()

    def _abandon(self) -> None:
        """End a capture that failed; what it raises would hide why."""
        with suppress(RuntimeError):
            self._graph.capture_end()
        with suppress(RuntimeError):  # an invalid capture leaves the allocator in it
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return one stream a device: cuBLAS keeps a workspace for each that it has seen."""
    return torch.cuda.Stream(device)


def make_pool(device: torch.device) -> Any:
    """Return a handle of memory that graphs of ``device`` can share."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def make_graph(device: torch.device, pool: Any) -> DeviceGraph:
    """Return an empty graph; graphs with the same ``pool`` share memory, and run one at a time."""
    return _CudaGraph(device, pool)
