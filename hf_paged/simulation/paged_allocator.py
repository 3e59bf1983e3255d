"""Blocks from the project's own pool, a block table a sequence; nothing is shared."""

from __future__ import annotations

from collections.abc import Iterator

from hf_paged.core.block_pool import BlockPool
from hf_paged.core.block_table import BlockTable
from hf_paged.core.prefix_index import PrefixIndex
from hf_paged.simulation.allocator import Allocator
from hf_paged.simulation.memory_strip import Segment, SlotState, complete
from hf_paged.simulation.request import Request

__all__ = ["PagedAllocator", "pool_strip"]


def pool_strip(pool: BlockPool, block_size: int, num_slots: int) -> list[Segment]:
    """Return the state of every slot of a pool; slots past its last block are holes.

    Args:
        pool: of blocks that know how many of their slots are filled.
        block_size: slots a block.
        num_slots: slots of the whole strip.
    """

    def segments() -> Iterator[Segment]:
        for block_id in range(pool.num_blocks):
            start = block_id * block_size
            num_filled = pool.num_filled(block_id)
            if pool.is_cached(block_id):
                yield Segment(start, block_size, SlotState.CACHED)
            elif pool.ref_count(block_id):
                shared = pool.ref_count(block_id) > 1
                yield Segment(start, num_filled, SlotState.SHARED if shared else SlotState.USED)
                if num_filled < block_size:
                    yield Segment(start + num_filled, block_size - num_filled, SlotState.RESERVED)

    return complete(segments(), num_slots)


class PagedAllocator(Allocator):
    """Hands out blocks of :class:`BlockPool`; each sample has a :class:`BlockTable`.

    Args:
        num_slots: the budget; what is left of it after whole blocks is never used.
        block_size: slots a block.
    """

    name = "paged"

    def __init__(self, num_slots: int, block_size: int) -> None:
        super().__init__(num_slots)
        self.block_size: int = block_size
        self.pool = BlockPool(num_slots // block_size, PrefixIndex(num_groups=1))
        self._tables: dict[int, list[BlockTable]] = {}
        self._lengths: dict[int, int] = {}

    def admit(self, request: Request, num_generated: int = 0) -> bool:
        """Take the lowest free blocks, for each sample its own."""
        length = request.num_prompt_tokens + num_generated
        num_blocks = -(-length // self.block_size)
        if num_blocks * request.num_samples > self.pool.num_available:
            return False
        tables = []
        for _ in range(request.num_samples):
            table = BlockTable()
            for block_id in self.pool.allocate(num_blocks):
                table.append(block_id)
                self.pool.set_num_filled(block_id, self.block_size)
            self.pool.set_num_filled(table[-1], length - (num_blocks - 1) * self.block_size)
            tables.append(table)
        self._tables[request.number] = tables
        self._lengths[request.number] = length
        return True

    def grow(self, request: Request) -> bool:
        """Fill the next slot of the last block, or the first slot of a new one."""
        tables, length = self._tables[request.number], self._lengths[request.number]
        offset = length % self.block_size
        if offset == 0:
            if len(tables) > self.pool.num_available:
                return False
            for table, block_id in zip(tables, self.pool.allocate(len(tables)), strict=True):
                table.append(block_id)
        for table in tables:
            self.pool.set_num_filled(table[-1], offset + 1)
        self._lengths[request.number] = length + 1
        return True

    def free(self, request: Request) -> None:
        """Give every block back, the deepest first."""
        del self._lengths[request.number]
        for table in self._tables.pop(request.number):
            self.pool.free(reversed(table.truncate(0)))

    def num_blocks(self, request: Request) -> int:
        """Return how many blocks the request holds."""
        return sum(len(table) for table in self._tables[request.number])

    @property
    def num_reserved_slots(self) -> int:
        """Slots of the blocks in use."""
        return self.pool.num_used * self.block_size

    @property
    def num_live_slots(self) -> int:
        """Slots of the blocks in use that hold a token."""
        return self.pool.num_live_slots

    def strip(self) -> list[Segment]:
        """Return the state of every block's slots."""
        return pool_strip(self.pool, self.block_size, self.num_slots)
