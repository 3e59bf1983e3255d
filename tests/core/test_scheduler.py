"""Calls of several threads on one pool: who starts, who waits, who fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import pytest

from hf_paged.core.scheduler import Scheduler
from hf_paged.errors import KVCacheFullError

pytestmark = [pytest.mark.core_suite, pytest.mark.timeout(20)]

T = TypeVar("T")
SOON = 5.0
"""Seconds after which something that must happen has not happened."""
A_WHILE = 0.15
"""Seconds for which something that must not happen is watched; the scheduler polls each 0.05."""


def make_scheduler(num_blocks: int = 10, reclaim: Callable[[], None] = lambda: None) -> Scheduler:
    return Scheduler(num_blocks, reclaim)


def in_thread(function: Callable[[], T]) -> Future[T]:
    """Run ``function`` in a thread of its own."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(function)
    pool.shutdown(wait=False)
    return future


def is_waiting(future: Future[T]) -> bool:
    try:
        future.result(A_WHILE)
    except TimeoutError:
        return True
    return False


def full() -> KVCacheFullError:
    return KVCacheFullError(
        "full", num_needed_blocks=2, num_available_blocks=1, num_rows=1, num_rows_that_fit=0
    )


def test_first_call_is_always_admitted() -> None:
    """A call that can not fit starts: whether it really fails is found out block by block."""
    scheduler = make_scheduler(num_blocks=10)
    call = scheduler.admit(1000)
    assert call.num_reserved_blocks == 1000
    scheduler.finish(call)


def test_calls_that_fit_together_run_together() -> None:
    """The worst cases of both fill the pool exactly."""
    scheduler = make_scheduler(num_blocks=10)
    scheduler.admit(4)
    assert in_thread(lambda: scheduler.admit(6)).result(SOON).num_reserved_blocks == 6


def test_second_call_waits_for_the_end_of_the_first() -> None:
    """The worst cases do not fit together, so the second starts when the first has ended."""
    scheduler = make_scheduler(num_blocks=10)
    first = scheduler.admit(6)
    second = in_thread(lambda: scheduler.admit(5))
    assert is_waiting(second)
    scheduler.finish(first)
    scheduler.finish(second.result(SOON))


def test_nested_call_does_not_wait_for_its_own_thread() -> None:
    """A generate() inside a generate(), as with a draft model, would wait for ever."""
    scheduler = make_scheduler(num_blocks=10)

    def nested() -> int:
        outer = scheduler.admit(10)
        inner = scheduler.admit(10)
        scheduler.finish(inner)
        scheduler.finish(outer)
        return inner.num_reserved_blocks

    assert in_thread(nested).result(SOON) == 10


def test_call_is_finished_once() -> None:
    """A second finish() is a mistake of ours and says so."""
    scheduler = make_scheduler()
    call = scheduler.admit(1)
    scheduler.finish(call)
    with pytest.raises(ValueError):
        scheduler.finish(call)


def test_allocate_returns_the_attempt() -> None:
    """What fits does not wait, with or without a call."""
    assert make_scheduler().allocate(lambda: "blocks") == "blocks"


def test_allocate_alone_raises_at_once() -> None:
    """Nobody runs who could give way."""
    scheduler = make_scheduler()
    scheduler.admit(1)
    attempts = []

    def attempt() -> None:
        attempts.append(1)
        raise full()

    with pytest.raises(KVCacheFullError):
        scheduler.allocate(attempt)
    assert len(attempts) == 1


def test_allocate_retries_after_another_call_ends() -> None:
    """The attempt fails while the other call runs, and succeeds after it."""
    scheduler = make_scheduler()
    other = scheduler.admit(1)
    is_room = threading.Event()

    def attempt() -> str:
        if not is_room.is_set():
            raise full()
        return "blocks"

    waiting = in_thread(lambda: scheduler.allocate(attempt))
    assert is_waiting(waiting)
    is_room.set()
    scheduler.finish(other)
    assert waiting.result(SOON) == "blocks"


def test_allocate_raises_when_the_last_other_call_has_ended() -> None:
    """A call that does not fit alone fails, though not before it is alone."""
    scheduler = make_scheduler()
    other = scheduler.admit(1)

    def attempt() -> None:
        raise full()

    waiting = in_thread(lambda: scheduler.allocate(attempt))
    assert is_waiting(waiting)
    scheduler.finish(other)
    with pytest.raises(KVCacheFullError):
        waiting.result(SOON)


def test_other_errors_are_not_retried() -> None:
    """Only a full pool is worth waiting for."""
    scheduler = make_scheduler()
    scheduler.admit(1)

    def attempt() -> None:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        in_thread(lambda: scheduler.allocate(attempt)).result(SOON)


def test_two_calls_that_both_wait_do_not_deadlock() -> None:
    """The second to run dry raises; the first goes on with the blocks of the second."""
    scheduler = make_scheduler()
    is_room = threading.Event()
    both_admitted = threading.Barrier(2, timeout=SOON)

    def call() -> str:
        mine = scheduler.admit(5)
        both_admitted.wait()

        def attempt() -> str:
            if not is_room.is_set():
                raise full()
            return "blocks"

        try:
            return scheduler.allocate(attempt)
        except KVCacheFullError:
            with scheduler.lock:
                is_room.set()
            return "full"
        finally:
            scheduler.finish(mine)

    calls = [in_thread(call), in_thread(call)]
    assert sorted(future.result(SOON) for future in calls) == ["blocks", "full"]


def test_reclaim_before_each_attempt() -> None:
    """Blocks of garbage-collected caches come back first, with the lock held."""
    story: list[str] = []
    scheduler = make_scheduler(reclaim=lambda: story.append("reclaim"))

    def attempt() -> str:
        story.append("attempt")
        if len(story) < 4:
            raise full()
        return "blocks"

    other = in_thread(lambda: scheduler.admit(1)).result(SOON)
    assert scheduler.allocate(attempt) == "blocks"
    assert story == ["reclaim", "attempt"] * 2
    scheduler.finish(other)


def test_lock_is_reentrant() -> None:
    """A reclaim may free sequences, which takes the lock again."""
    scheduler = make_scheduler()
    with scheduler.lock, scheduler.lock:
        assert scheduler.allocate(lambda: 1) == 1
