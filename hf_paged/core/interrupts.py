"""Keep signals from tearing what must be done whole.

Python runs signal handlers between any two bytecodes of the main thread, and many of them raise:
KeyboardInterrupt on Ctrl-C, a time limit's exception on SIGALRM. Raised half-way through a change
of block tables and reference counts, it would leave a pool that no longer adds up. So while the
main thread changes the pool, handlers wait, some tenth of a millisecond a step; the model's own
code stays interruptible.
"""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FrameType
from typing import Any, TypeVar, cast

__all__ = ["interruptible", "is_from_signal_handler", "uninterrupted", "whole"]

_SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGVTALRM")
    if hasattr(signal, name)
)

F = TypeVar("F", bound=Callable[..., Any])


class _Deferral:
    """Python handlers put off, and the signals that came meanwhile."""

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._arrived: dict[int, FrameType | None] = {}

    def begin(self) -> None:
        """Take the place of every handler that is written in Python."""
        try:
            for number in _SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._note)
        except BaseException:
            self._arrived.clear()
            self.end()
            raise

    def end(self) -> None:
        """Put every handler back, whatever one of them raises meanwhile; run those that waited."""
        raised: BaseException | None = None
        while self._handlers:
            try:
                number, handler = next(iter(self._handlers.items()))
                signal.signal(number, handler)
                del self._handlers[number]
                if number in self._arrived:
                    handler(number, self._arrived.pop(number))
            except BaseException as error:
                raised = error
        if raised is not None:
            raise raised

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._arrived[number] = frame


_current: _Deferral | None = None
"""Of the main thread, the only one that handlers run in."""


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Put Python signal handlers off until the end; nests."""
    global _current
    if _current is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    deferral = _Deferral()
    deferral.begin()
    _current = deferral
    try:
        yield
    finally:
        _current = None
        deferral.end()


@contextmanager
def interruptible() -> Iterator[None]:
    """Let handlers run again inside :func:`uninterrupted`; those that waited run first."""
    global _current
    deferral = _current
    if deferral is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        _current = None
        deferral.end()
        yield
    finally:
        deferral.begin()
        _current = deferral


def whole(function: F) -> F:
    """Decorate a function that must run without interruption."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with uninterrupted():
            return function(*args, **kwargs)

    return cast("F", run)


def is_from_signal_handler(error: BaseException) -> bool:
    """Whether ``error`` was raised by the handler of a signal, such as a time limit's."""
    handlers = (signal.getsignal(number) for number in _SIGNALS)
    codes = {getattr(handler, "__code__", None) for handler in handlers} - {None}
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code in codes for frame, _ in frames)
