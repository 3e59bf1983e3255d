"""Who may use the pool, and who waits: calls of several threads on one pool.

A call is one ``generate()``. Calls of other threads are admitted beside the running ones only if
the worst case of all of them fits, so that admitted calls never wait for each other. The first
call is always admitted; if it does not fit alone, it fails alone.

Rows of one call wait and give way to each other in :mod:`hf_paged.core.row_scheduler`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TypeVar

from hf_paged.core.interrupts import interruptible, whole
from hf_paged.errors import KVCacheFullError

__all__ = ["Call", "Scheduler"]

T = TypeVar("T")

_POLL_SECONDS = 0.05
"""Blocks of a garbage-collected cache come back without a signal: look again after this."""


@dataclass(eq=False)
class Call:
    """One ``generate()`` from its admission to its end.

    Attributes:
        num_reserved_blocks: the most blocks that it can come to hold.
        num_steps: forwards whose blocks were reserved.
        version: under which its K and V are computed; None before the first forward.
        keep: whether later calls may find what it computes.
    """

    num_reserved_blocks: int
    thread_id: int = field(default_factory=threading.get_ident)
    num_steps: int = 0
    version: Hashable | None = None
    keep: bool = False


class Scheduler:
    """Admits calls and lets them wait for each other's blocks.

    Args:
        num_blocks: usable blocks of the pool.
        reclaim: takes back the blocks of caches that were garbage-collected; called with the
            lock held.

    Attributes:
        lock: guards the pool, its sequences and this object; re-entrant.
    """

    def __init__(self, num_blocks: int, reclaim: Callable[[], None]) -> None:
        self.lock = threading.Condition(threading.RLock())
        self._num_blocks = num_blocks
        self._reclaim = reclaim
        self._calls: list[Call] = []
        self._waiting: set[int] = set()

    @property
    def num_calls(self) -> int:
        """Calls that are running."""
        return len(self._calls)

    def admit(self, num_reserved_blocks: int) -> Call:
        """Start a call, after waiting for calls of other threads if it does not fit beside them.

        Returns:
            The call; the caller must :meth:`finish` it.
        """
        with self.lock:
            while (
                sum(call.num_reserved_blocks for call in self._others()) + num_reserved_blocks
                > self._num_blocks
            ):
                if not self._wait_for_others():
                    break
            call = Call(num_reserved_blocks)
            self._calls.append(call)
            return call

    @whole
    def finish(self, call: Call) -> None:
        """End a call; those that wait look again."""
        with self.lock:
            self._calls.remove(call)
            self.lock.notify_all()

    @whole
    def allocate(self, attempt: Callable[[], T]) -> T:
        """Return ``attempt()``, tried again each time another thread's call has ended.

        Raises:
            KVCacheFullError: it does not fit, and no call is running that could give way.
        """
        with self.lock:
            while True:
                self._reclaim()
                try:
                    return attempt()
                except KVCacheFullError:
                    if not self._wait_for_others():
                        raise

    def _others(self) -> list[Call]:
        return [call for call in self._calls if call.thread_id != threading.get_ident()]

    def _wait_for_others(self) -> bool:
        """Wait for news; False if no call of another thread is running (all wait, or none is)."""
        if all(call.thread_id in self._waiting for call in self._others()):
            return False
        me = threading.get_ident()
        self._waiting.add(me)
        try:
            with interruptible():
                self.lock.wait(_POLL_SECONDS)
        finally:
            self._waiting.discard(me)
        return True
