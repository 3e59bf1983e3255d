"""Signal handlers wait while the pool changes, and run as soon as it is whole."""

from __future__ import annotations

import signal
import threading

import pytest

from hf_paged.core.interrupts import interruptible, uninterrupted, whole

pytestmark = pytest.mark.core_suite


class Alarm(Exception):
    pass


@pytest.fixture(autouse=True)
def raising_handler():
    def handler(number: int, frame: object) -> None:
        raise Alarm

    before = signal.signal(signal.SIGUSR1, handler)
    yield
    assert signal.getsignal(signal.SIGUSR1) is handler
    signal.signal(signal.SIGUSR1, before)


def test_a_signal_waits_for_the_end() -> None:
    done = []
    with pytest.raises(Alarm), uninterrupted():
        signal.raise_signal(signal.SIGUSR1)
        done.append("the rest of the block")
    assert done


def test_nested_blocks_wait_for_the_outermost() -> None:
    done = []
    with pytest.raises(Alarm), uninterrupted():
        with uninterrupted():
            signal.raise_signal(signal.SIGUSR1)
        done.append("after the inner block")
    assert done


def test_an_island_of_interruptible_code() -> None:
    done = []
    with pytest.raises(Alarm), uninterrupted():
        try:
            with interruptible():
                signal.raise_signal(signal.SIGUSR1)
                done.append("never")
        finally:
            signal.raise_signal(signal.SIGUSR1)
            done.append("clean-up, whole")
    assert done == ["clean-up, whole"]


def test_what_waited_runs_when_an_island_begins() -> None:
    with uninterrupted():
        signal.raise_signal(signal.SIGUSR1)
        with pytest.raises(Alarm), interruptible():
            pytest.fail("the handler comes first")


def test_an_error_of_the_block_is_kept_beside_the_signal() -> None:
    with pytest.raises(Alarm) as caught, uninterrupted():
        signal.raise_signal(signal.SIGUSR1)
        raise ValueError("of the block")
    assert isinstance(caught.value.__context__, ValueError)


def test_other_threads_pass_through() -> None:
    results = []

    @whole
    def work() -> int:
        with interruptible():
            return 5

    thread = threading.Thread(target=lambda: results.append(work()))
    with uninterrupted():
        thread.start()
        thread.join()
    assert results == [5]
