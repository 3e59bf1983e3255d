"""A stream of copies that is as late as a real one may be."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class DelayedStream:
    """Copies when compute waits for it, as late as a real stream may."""

    def __init__(self) -> None:
        self._queue: deque[tuple[int, Callable[[], None]]] = deque()
        self._num_queued = 0

    def queue(self, copies: Callable[[], None]) -> int:
        self._num_queued += 1
        self._queue.append((self._num_queued, copies))
        return self._num_queued

    def make_compute_wait(self, event: int) -> None:
        while self._queue and self._queue[0][0] <= event:
            self._queue.popleft()[1]()

    @property
    def num_pending(self) -> int:
        return len(self._queue)
