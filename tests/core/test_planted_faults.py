"""A test of the tests: each planted fault must be caught by the random machine.

Faults are planted in private methods, because a fault sits inside the library and not in its
public face; nothing else here may touch a private name.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from hf_paged.core.allocation import Allocation, AllocationPlanner
from hf_paged.core.block_pool import BlockPool
from hf_paged.core.cache_manager import KVCacheManager
from manager_machine import DictMachine

pytestmark = pytest.mark.core_suite


def run_machine() -> None:
    """Run the machine with the same examples each time, without shrinking what fails."""
    run_state_machine_as_test(
        DictMachine,
        settings=settings(
            max_examples=40,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_sound_manager_passes() -> None:
    """Without a fault the same examples pass."""
    run_machine()


def test_free_of_a_shared_block_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is given back although another sequence still reads it."""
    free = BlockPool.free

    def free_all(self: BlockPool, block_ids: Any) -> list[int]:
        emptied = []
        for block_id in block_ids:
            emptied += free(self, [block_id] * self.ref_count(block_id))
        return emptied

    monkeypatch.setattr(BlockPool, "free", free_all)
    with pytest.raises((AssertionError, KeyError)):
        run_machine()


def test_write_to_a_shared_block_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer does not make its copy."""
    monkeypatch.setattr(AllocationPlanner, "is_writable", lambda *args, **kwargs: True)
    with pytest.raises(AssertionError):
        run_machine()


def test_publish_before_the_write_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look-ups find a block when it is allocated, not when it is written."""
    begin = KVCacheManager.begin

    def begin_and_publish(self: KVCacheManager, *args: Any, **kwargs: Any) -> Allocation:
        allocation = begin(self, *args, **kwargs)
        for row in allocation.rows:
            node = row.base
            for key in row.keys:
                node = self.index.publish(node, key)
                for group, entries in enumerate(row.entries):
                    index = node.depth - 1 - entries[0].index
                    if index >= 0 and node.blocks[group] is None:
                        self.pool.set_content(entries[index].block, node, group)
        return allocation

    monkeypatch.setattr(KVCacheManager, "begin", begin_and_publish)
    with pytest.raises(AssertionError):
        run_machine()
