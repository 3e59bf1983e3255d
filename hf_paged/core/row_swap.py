"""Rows that give way may keep their blocks outside of the pool, and bring them back.

What other rows of the pool refer to stays there anyway, and is adopted again. The rest is copied
out block by block; coming back is a forward whose K and V are copied instead of computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from hf_paged.core.allocation import Allocation, NewTokens
from hf_paged.core.block_table import NO_BLOCK
from hf_paged.core.cache_manager import KVCacheManager
from hf_paged.core.row import Row, StoredRow
from hf_paged.errors import KVCacheFullError

__all__ = ["BlockStore", "RowSwap"]


class BlockStore(Protocol):
    """Room outside of the pool for blocks of rows that give way."""

    def store(self, block_ids: list[int]) -> list[int] | None:
        """Copy blocks out; return where each one is, or None if there is no room for all."""

    def load(self, slots: list[int], block_ids: list[int]) -> None:
        """Copy blocks in; what is stored stays."""

    def free(self, slots: list[int]) -> None:
        """Forget what is stored."""


class RowSwap:
    """Moves rows between the pool and a store; the pool's lock must be held.

    Args:
        manager: of the pool.
        reserve: takes the blocks of a forward, :meth:`KVCacheManager.begin` and its copies.
        store: keeps blocks.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        reserve: Callable[[list[NewTokens]], Allocation],
        store: BlockStore,
    ) -> None:
        self._manager = manager
        self._reserve = reserve
        self._store = store

    def move_out(self, row: Row) -> None:
        """Copy to the store what no other row keeps in the pool, if there is room for it."""
        if row.sequence is None:
            return
        pool = self._manager.pool
        places = [
            (group, index, block)
            for group, table in enumerate(row.sequence.tables)
            for index, block in enumerate(table.ids)
            if block != NO_BLOCK and pool.ref_count(block) == 1
        ]
        slots = self._store.store([block for _, _, block in places])
        if slots is None:
            return
        row.stored = StoredRow(row.sequence.num_tokens, [{} for _ in self._manager.groups])
        for (group, index, _), slot in zip(places, slots, strict=True):
            row.stored.slots[group][index] = slot

    def move_in(self, stored: StoredRow, tokens: NewTokens) -> None:
        """Copy back what is needed; if that is not all there, the row computes it again.

        Args:
            stored: stays as it is, see :meth:`forget`.
            tokens: up to the last one stored, from the first one that could not be adopted on.
        """
        tokens.is_copied = True
        try:
            allocation = self._reserve([tokens])
        except KVCacheFullError:
            return
        written = [
            (stored.slots[group_id].get(entry.index), entry.block)
            for group_id, entries in enumerate(allocation.rows[0].entries)
            for entry in entries
            if entry.is_written
        ]
        slots = [slot for slot, _ in written if slot is not None]
        if len(slots) < len(written):
            self._manager.rollback(allocation)
            return
        try:
            self._store.load(slots, [block for _, block in written])
        except BaseException:
            self._manager.rollback(allocation)
            raise
        self._manager.commit(allocation, is_computed=False)

    def forget(self, row: Row) -> None:
        """Give up what is stored of ``row``."""
        if row.stored is not None:
            self._store.free(row.stored.all_slots())
            row.stored = None
