"""Every block of the pool is free, cached or used; this file moves them between the three."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from hf_paged.core.prefix_index import PrefixIndex, PrefixNode

__all__ = ["BlockPool", "BlockStates"]


class BlockStates(NamedTuple):
    """The pool at one moment: copies, so that it may go on meanwhile.

    Attributes:
        ref_counts: of each block.
        num_filled: slots of each block that hold a token.
        contents: the prefix and the layer group that each block is known to hold.
        cached: ids of cached blocks, the next to be evicted first.
    """

    ref_counts: list[int]
    num_filled: list[int]
    contents: list[tuple[PrefixNode, int] | None]
    cached: list[int]


class BlockPool:
    """Reference counts, contents and life of ``num_blocks`` blocks.

        free ──allocate──▶ used (ref_count > 0) ──free──▶ cached (holds a known prefix)
          ▲                  ▲      │                        │   │
          └──────────────────┼──────┘ (holds nothing known)  │   │
          └──────────────────┼────────────evict──────────────┘   │
                             └──────────────touch────────────────┘

    The lowest free block is taken first, so that memory behind high ids is never touched by a
    small load. A cached block is evicted least recently used first; a sequence gives its blocks
    back deepest first, and whoever holds a block of a full-attention group holds all blocks
    before it, so leaves go before the prefixes that they extend.

    Args:
        num_blocks: usable blocks, ids 0 to ``num_blocks - 1``.
        index: the prefixes that blocks hold; eviction removes them there.
    """

    def __init__(self, num_blocks: int, index: PrefixIndex) -> None:
        self.num_blocks = num_blocks
        self.index = index
        self.num_evictions = 0
        self.num_live_slots = 0
        self._free: list[int] = list(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._ref_counts = [0] * num_blocks
        self._contents: list[tuple[PrefixNode, int] | None] = [None] * num_blocks
        self._num_filled = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that hold a known prefix and that nobody refers to."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks with ``ref_count > 0``."""
        return self.num_blocks - len(self._free) - len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that :meth:`allocate` could return now, by eviction if need be."""
        return len(self._free) + len(self._cached)

    def ref_count(self, block_id: int) -> int:
        """References to the block from block tables."""
        return self._ref_counts[block_id]

    def content(self, block_id: int) -> tuple[PrefixNode, int] | None:
        """Return the prefix (and layer group) that the block is known to hold."""
        return self._contents[block_id]

    def is_cached(self, block_id: int) -> bool:
        """Whether the block is kept for its content alone."""
        return block_id in self._cached

    def free_blocks(self) -> list[int]:
        """Return the ids of all free blocks, ascending."""
        return sorted(self._free)

    def states(self) -> BlockStates:
        """Return a copy of what is known of every block; changes nothing."""
        return BlockStates(
            self._ref_counts[:], self._num_filled[:], self._contents[:], list(self._cached)
        )

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks for writing, each with one reference; the caller frees them.

        Args:
            num_blocks: at most :attr:`num_available`.

        Returns:
            Free ids, lowest first, then evicted ones.
        """
        assert num_blocks <= self.num_available, f"{num_blocks} > {self.num_available} available"
        taken = []
        for _ in range(num_blocks):
            if not self._free:
                self._evict()
            block_id = heapq.heappop(self._free)
            self._ref_counts[block_id] = 1
            taken.append(block_id)
        return taken

    def touch(self, block_id: int) -> None:
        """Add a reference to a used or cached block."""
        if self._ref_counts[block_id] == 0:
            del self._cached[block_id]
            self.num_live_slots += self._num_filled[block_id]
        self._ref_counts[block_id] += 1

    def free(self, block_ids: Iterable[int]) -> list[int]:
        """Drop one reference to each block, in the order given (deepest first, please).

        Returns:
            The ids that now hold nothing.
        """
        emptied = []
        for block_id in block_ids:
            assert self._ref_counts[block_id] > 0, f"block {block_id} freed twice"
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id]:
                continue
            self.num_live_slots -= self._num_filled[block_id]
            content = self._contents[block_id]
            if content is not None and content[0].root.keep:
                self._cached[block_id] = None
            else:
                self._empty(block_id)
                emptied.append(block_id)
        return emptied

    def set_content(self, block_id: int, node: PrefixNode, group: int) -> None:
        """Record that a used block now holds a prefix; from here on it is never written."""
        assert self._ref_counts[block_id] > 0 and self._contents[block_id] is None
        node.store(group, block_id)
        self._contents[block_id] = (node, group)

    def set_num_filled(self, block_id: int, num_slots: int) -> None:
        """Record how many slots of a used block hold a token."""
        self.num_live_slots += num_slots - self._num_filled[block_id]
        self._num_filled[block_id] = num_slots

    def num_filled(self, block_id: int) -> int:
        """Return how many slots of the block hold a token."""
        return self._num_filled[block_id]

    def clear_cached(self) -> list[int]:
        """Empty every cached block; used ones stay. Return the ids that now hold nothing."""
        emptied = list(self._cached)
        for block_id in emptied:
            self._cached.pop(block_id)
            self._empty(block_id)
        return emptied

    def check_integrity(self) -> None:
        """Assert that free, cached and used are disjoint and add up; print what fails."""
        free, cached = set(self._free), set(self._cached)
        used = {b for b in range(self.num_blocks) if self._ref_counts[b] > 0}
        assert len(free) == len(self._free), "a block is twice in the free list"
        assert not free & cached and not free & used and not cached & used, (
            f"not disjoint: free & cached {free & cached}, free & used {free & used}, "
            f"cached & used {cached & used}"
        )
        assert len(free) + len(cached) + len(used) == self.num_blocks, (
            f"free {len(free)} + cached {len(cached)} + used {len(used)} != {self.num_blocks}"
        )
        live = sum(self._num_filled[b] for b in used)
        assert live == self.num_live_slots, f"live slots {self.num_live_slots} != counted {live}"
        for block_id, content in enumerate(self._contents):
            if content is not None:
                node, group = content
                assert node.blocks[group] == block_id, (
                    f"block {block_id} and its prefix disagree: {node.blocks[group]}"
                )
            assert (block_id in cached) <= (content is not None), f"{block_id} cached, no content"

    def _evict(self) -> None:
        block_id, _ = self._cached.popitem(last=False)
        self.num_evictions += 1
        self._empty(block_id)

    def _empty(self, block_id: int) -> None:
        content = self._contents[block_id]
        if content is not None:
            node, group = content
            self._contents[block_id] = None
            node.forget(group)
            self.index.prune(node)
        self._num_filled[block_id] = 0
        heapq.heappush(self._free, block_id)
