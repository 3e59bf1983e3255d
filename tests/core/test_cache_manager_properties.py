"""Random histories of the manager and of the pool against plain Python."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hf_paged.core.block_pool import BlockPool
from hf_paged.core.prefix_index import BlockKey, PrefixIndex
from manager_machine import DictMachine

pytestmark = pytest.mark.core_suite


class PoolMachine(RuleBasedStateMachine):
    """Allocate, touch, free and publish at random; a Counter holds the references."""

    NUM_BLOCKS = 6

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(num_groups=1)
        self.pool = BlockPool(self.NUM_BLOCKS, self.index)
        self.references: Counter[int] = Counter()
        self.known: dict[int, BlockKey] = {}
        self.cached: list[int] = []

    @rule(num_blocks=st.integers(1, 3))
    @precondition(lambda self: self.pool.num_available >= 3)
    def allocate(self, num_blocks: int) -> None:
        free = self.pool.free_blocks()
        evicted = self.cached[: max(0, num_blocks - len(free))]
        assert self.pool.allocate(num_blocks) == free[:num_blocks] + evicted
        for block in evicted:
            self.cached.remove(block)
            del self.known[block]
        self.references.update(free[:num_blocks] + evicted)

    @rule(pick=st.integers(0, NUM_BLOCKS - 1))
    @precondition(lambda self: self.references or self.cached)
    def touch(self, pick: int) -> None:
        blocks = sorted(self.references) + self.cached
        block = blocks[pick % len(blocks)]
        self.pool.touch(block)
        self.references[block] += 1
        if block in self.cached:
            self.cached.remove(block)

    @rule(pick=st.integers(0, NUM_BLOCKS - 1))
    @precondition(lambda self: self.references)
    def free(self, pick: int) -> None:
        block = sorted(self.references)[pick % len(self.references)]
        self.references[block] -= 1
        is_emptied = not self.references[block] and block not in self.known
        assert self.pool.free([block]) == [block] * is_emptied
        if not self.references[block]:
            del self.references[block]
            if block in self.known:
                self.cached.append(block)

    @rule(pick=st.integers(0, NUM_BLOCKS - 1), token=st.integers(0, 2))
    @precondition(lambda self: self.references)
    def publish(self, pick: int, token: int) -> None:
        block = sorted(self.references)[pick % len(self.references)]
        key = BlockKey((token,), 0)
        if block not in self.known and key not in self.known.values():
            node = self.index.publish(self.index.root("v", keep=True), key)
            self.pool.set_num_filled(block, 1)
            self.pool.set_content(block, node, group=0)
            self.known[block] = key

    @rule()
    def clear_cached(self) -> None:
        assert self.pool.clear_cached() == self.cached
        for block in self.cached:
            del self.known[block]
        self.cached = []

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_used == len(self.references)
        assert self.pool.num_cached == len(self.cached)
        assert self.pool.num_live_slots == len(self.references.keys() & self.known.keys())
        children = self.index.root("v", keep=True).children
        assert {key: node.blocks for key, node in children.items()} == {
            key: [block] for block, key in self.known.items()
        }


TestManager = DictMachine.TestCase
TestManager.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
