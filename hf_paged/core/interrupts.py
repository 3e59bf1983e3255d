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
from collections.abc import Callable
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
            try:
                raise raised
            finally:
                del raised  # or it and this frame would keep each other, and what callers hold

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._arrived[number] = frame


_current: _Deferral | None = None
"""Of the main thread, the only one that handlers run in."""


class uninterrupted:
    """Put Python signal handlers off until the end; nests.

    Not a generator: an interrupt in contextlib's own code would leave it open, and its end would
    come whenever it is collected.
    """

    __slots__ = ("_deferral",)

    def __enter__(self) -> None:
        """Begin, unless an outer one has begun or this is no main thread."""
        global _current
        self._deferral: _Deferral | None = None
        if _current is None and threading.current_thread() is threading.main_thread():
            deferral = _Deferral()
            deferral.begin()
            self._deferral = _current = deferral

    def __exit__(self, *exc_info: object) -> None:
        """Run the handlers that waited."""
        global _current
        if self._deferral is not None:
            _current = None
            self._deferral.end()


class interruptible:
    """Let handlers run again inside :class:`uninterrupted`; those that waited run first."""

    __slots__ = ("_deferral",)

    def __enter__(self) -> None:
        """Begin, if handlers are put off."""
        global _current
        self._deferral: _Deferral | None = None
        if _current is not None and threading.current_thread() is threading.main_thread():
            deferral = _current
            _current = None
            try:
                deferral.end()
            except BaseException:
                deferral.begin()
                _current = deferral
                raise
            self._deferral = deferral

    def __exit__(self, *exc_info: object) -> None:
        """Put handlers off again, even if one raises just now."""
        global _current
        if self._deferral is not None:
            try:
                self._deferral.begin()
            except BaseException:
                self._deferral.begin()
                raise
            finally:
                _current = self._deferral


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
