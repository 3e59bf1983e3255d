"""Small arrays of a step on their way to a device, in one copy that nobody waits for.

A copy from pageable memory makes the host wait until the device has done all that it was given
before. One from pinned memory does not, but its source must stay as it is until the copy is done,
which may be a step later. So there are a few pinned buffers in turn, each with an event:

    step      1         2         3         4: waits for the copy of step 1, usually long done
    buffer    [0]       [1]       [2]       [0]
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

__all__ = ["DeviceLink", "PinnedRing", "index_of", "send", "size_of"]

_ALIGNMENT = 16  # kernels load 16 bytes at a time
_NUM_BUFFERS = 3


class CopyEvent(Protocol):
    """Becomes true when a copy is done."""

    def synchronize(self) -> None:
        """Wait for it."""


class DeviceLink(Protocol):
    """The way to one device."""

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Return uint8 [num_bytes] that the device can read by itself."""

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> CopyEvent:
        """Queue a copy behind what the calling thread has given to the device; do not wait."""


class PinnedRing:
    """Host buffers in turn, none written before its last copy is done; threads may share it.

    Args:
        link: to the device.
    """

    def __init__(self, link: DeviceLink) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._buffers: list[torch.Tensor | None] = [None] * _NUM_BUFFERS
        self._events: list[CopyEvent | None] = [None] * _NUM_BUFFERS
        self._turn = 0

    def send(self, arrays: Sequence[np.ndarray], target: torch.Tensor) -> None:
        """Queue a copy of ``arrays``, each from a multiple of 16 bytes on, to uint8 ``target``."""
        num_bytes = size_of(arrays)
        with self._lock:
            turn = self._turn
            self._turn = (turn + 1) % _NUM_BUFFERS
            event, buffer = self._events[turn], self._buffers[turn]
            if event is not None:
                event.synchronize()
                self._events[turn] = None
            if buffer is None or buffer.shape[0] < num_bytes:
                buffer = self._buffers[turn] = self._link.host_buffer(2 * num_bytes)
            _write(arrays, buffer)
            self._events[turn] = self._link.copy(buffer[:num_bytes], target[:num_bytes])


class _CudaLink:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> CopyEvent:
        target.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event


@functools.cache
def _ring(device: torch.device) -> PinnedRing | None:
    return PinnedRing(_CudaLink(device)) if device.type == "cuda" else None


def send(
    arrays: Sequence[np.ndarray], device: torch.device, *, into: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Return arrays as tensors on ``device``, without waiting for it.

    Args:
        arrays: contiguous. A CPU needs no copy: there the tensors share their memory.
        device: where to.
        into: uint8 on ``device`` with room for :func:`size_of` bytes, written over; the tensors are
            views of it. Equally shaped arrays come to lie at the same places.

    Returns:
        A tensor for each array, of the same shape and dtype.
    """
    if device.type == "cpu" and into is None:
        return [torch.from_numpy(array) for array in arrays]
    num_bytes = size_of(arrays)
    with torch.inference_mode(False), torch.no_grad():
        if into is None:
            into = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        ring = _ring(device)
        if ring is not None:
            ring.send(arrays, into)
        elif device.type == "cpu":
            _write(arrays, into)
        else:
            staged = torch.empty(num_bytes, dtype=torch.uint8)
            _write(arrays, staged)
            into[:num_bytes].copy_(staged)
    return [
        into[start : start + array.nbytes].view(_dtype(array)).view(array.shape)
        for array, start in zip(arrays, _starts(arrays), strict=True)
    ]


def index_of(indices: Sequence[int], device: torch.device) -> slice | torch.Tensor:
    """Return what selects rows of a tensor on ``device`` without waiting for it.

    >>> index_of([2, 3, 4], torch.device("cpu"))
    slice(2, 5, None)
    """
    if not indices:
        return slice(0)
    first, last = indices[0], indices[-1]
    if last - first == len(indices) - 1 and list(indices) == list(range(first, last + 1)):
        return slice(first, last + 1)
    (index,) = send([np.array(indices, np.int64)], device)
    return index


def size_of(arrays: Sequence[np.ndarray]) -> int:
    """Return the bytes that ``arrays`` take, one aligned after the other.

    >>> size_of([np.zeros(3, np.int32), np.zeros(1, np.int64)])
    24
    """
    return _starts(arrays)[-1] + arrays[-1].nbytes if arrays else 0


def _starts(arrays: Sequence[np.ndarray]) -> list[int]:
    starts, end = [], 0
    for array in arrays:
        starts.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
        end = starts[-1] + array.nbytes
    return starts


def _write(arrays: Sequence[np.ndarray], buffer: torch.Tensor) -> None:
    room = buffer.numpy()
    for array, start in zip(arrays, _starts(arrays), strict=True):
        room[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)


def _dtype(array: np.ndarray) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype
