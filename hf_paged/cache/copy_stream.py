"""Copies between a device and the host that run beside what the device computes.

compute   ──forward──┐ forward ─────── forward ─────┐ forward that writes block 7
copies               └─▶ block 7 ─▶ host, event ────▶  waits for the event, the host does not
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

__all__ = ["CopyStream", "copy_stream"]


class CopyStream(Protocol):
    """Where copies of one device are queued."""

    def queue(self, copies: Callable[[], None]) -> Any:
        """Start ``copies`` after all that compute was given so far; return an event."""

    def make_compute_wait(self, event: Any) -> None:
        """Let what compute is given from now on start after ``event``."""


class _Immediate:
    """A CPU computes and copies in one thread."""

    def queue(self, copies: Callable[[], None]) -> None:
        copies()

    def make_compute_wait(self, event: None) -> None:
        pass


class _CudaStream:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def queue(self, copies: Callable[[], None]) -> torch.cuda.Event:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copies()
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def make_compute_wait(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)


def copy_stream(device: torch.device) -> CopyStream:
    """Return a stream beside the one that computes on ``device``, if it has such."""
    return _CudaStream(device) if device.type == "cuda" else _Immediate()
