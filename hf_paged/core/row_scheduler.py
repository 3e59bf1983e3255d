"""Which rows of a call compute in the next forward, which wait, which give way.

    waiting ──enter (first come, first served)──▶ active ──finish──▶ gone
       ▲                                            │
       └──────────── preempt (the youngest) ────────┘

A row is a token stream of which some tokens are computed: prompt, decoding and the return after a
preemption are the same thing, "compute what is not computed yet". Decoding rows bring one token
each; what the token budget leaves goes to prompts, in chunks. Tokens whose blocks are stored are
not computed at all, and what two rows have in common is computed by one of them: the other one
lets it go first and adopts its blocks, or forks it if their prompts are equal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from hf_paged.core.allocation import Allocation, NewTokens
from hf_paged.core.block_table import NO_BLOCK
from hf_paged.core.cache_manager import KVCacheManager
from hf_paged.core.sequence import Sequence
from hf_paged.errors import KVCacheFullError

__all__ = ["BlockStore", "Row", "RowBatch", "RowScheduler"]

_GROWTH_TOKENS = 64
"""A row enters only if it and every active row could grow by so much: or one would soon give way
to another, and what it computed would be computed again."""


class BlockStore(Protocol):
    """Room outside of the pool for blocks of rows that give way."""

    def store(self, block_ids: list[int]) -> list[int] | None:
        """Copy blocks out; return where each one is, or None if there is no room for all."""

    def load(self, slots: list[int], block_ids: list[int]) -> None:
        """Copy blocks in; what is stored stays."""

    def free(self, slots: list[int]) -> None:
        """Forget what is stored."""


@dataclass
class _StoredRow:
    """Blocks of a row that gave way: slots[group][index in the table]."""

    num_tokens: int
    slots: list[dict[int, int]]

    def all_slots(self) -> list[int]:
        return [slot for slots in self.slots for slot in slots.values()]


@dataclass(eq=False)
class Row:
    """One token stream of a request.

    Attributes:
        token_ids: the prompt, then what was generated; grows.
        first_position: position of the first token.
        num_prompt_tokens: how many of the tokens are the prompt.
        max_tokens: tokens that it may come to hold in the pool; None: unknown.
        payload: whatever the caller wants to find here again.
        sequence: what is computed, while the row is active.
        num_cached_tokens: tokens of the prompt that were stored when the row entered.
        stored: its blocks outside of the pool, while it waits after giving way.
    """

    token_ids: list[int]
    first_position: int = 0
    max_tokens: int | None = None
    payload: Any = None
    num_prompt_tokens: int = field(init=False)
    sequence: Sequence | None = field(init=False, default=None)
    num_cached_tokens: int = field(init=False, default=0)
    stored: _StoredRow | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Count the prompt."""
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def num_generated(self) -> int:
        """The row's age."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_growth(self) -> int:
        """Tokens that it may still come to store beyond those it has, as far as is known."""
        if self.max_tokens is None:
            return _GROWTH_TOKENS
        return max(0, self.max_tokens - len(self.token_ids))

    @property
    def num_missing(self) -> int:
        """Tokens that are not computed yet."""
        return len(self.token_ids) - (self.sequence.num_tokens if self.sequence else 0)


@dataclass
class RowBatch:
    """The rows of one forward, in the order of their tokens.

    Attributes:
        rows: at least one.
        allocation: blocks reserved for the forward; to be committed or rolled back.
        token_ids: of all rows, end to end.
        positions: likewise.
        complete: indices of the rows that have no missing token after the forward.
    """

    rows: list[Row]
    allocation: Allocation
    token_ids: list[int]
    positions: list[int]
    complete: list[int]


class RowScheduler:
    """Rows of one call on the pool; the caller holds the pool's lock and runs the forwards.

    Args:
        manager: of the pool.
        reserve: takes the blocks of a forward, :meth:`KVCacheManager.begin` and its copies.
        make_room: called before a row has to give way; returns whether it has freed a block.
        max_batch_tokens: tokens of one forward; decoding rows are never held back by it.
        version: under which K and V are computed; None: nothing is shared.
        keep: whether later calls may find what is computed.
        sequences: where the sequences of active rows are listed, kept up to date.
        store: where rows that give way keep their blocks; None: they compute them again.

    Attributes:
        is_rigid: rows neither wait nor give way: all must fit at once.
        num_preemptions: rows that gave way so far.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        reserve: Callable[[list[NewTokens]], Allocation],
        make_room: Callable[[], bool] = lambda: False,
        *,
        max_batch_tokens: int,
        version: Hashable | None,
        keep: bool,
        sequences: list[Sequence],
        store: BlockStore | None = None,
    ) -> None:
        self._manager = manager
        self._reserve = reserve
        self._make_room = make_room
        self._max_batch_tokens = max_batch_tokens
        self._version = version
        self._keep = keep
        self._sequences = sequences
        self._store = store
        self._waiting: deque[Row] = deque()
        self._active: dict[Row, None] = {}
        self._num_available_before: int | None = None
        self.is_rigid = False
        self.num_preemptions = 0

    def __contains__(self, row: Row) -> bool:
        """Whether ``row`` waits or is active."""
        return row in self._active or row in self._waiting

    @property
    def oldest(self) -> Row:
        """The active row that entered first."""
        return next(iter(self._active))

    @property
    def num_active(self) -> int:
        """Rows that hold blocks or may take some."""
        return len(self._active)

    @property
    def num_waiting(self) -> int:
        """Rows that hold no block and wait for some."""
        return len(self._waiting)

    @property
    def is_filling(self) -> bool:
        """Whether some active row has yet to compute its prompt and none has generated a token.

        Rows that enter together should then decode together, too.
        """
        ages = [row.num_generated for row in self._active]
        return not any(ages) and any(row.num_missing for row in self._active)

    def add(self, row: Row) -> None:
        """Let ``row`` wait for its turn."""
        self._waiting.append(row)
        self._num_available_before = None

    def check_can_ever_fit(self, row: Row, num_tokens: int) -> None:
        """Refuse a row that needs more blocks than the pool has.

        Raises:
            KVCacheFullError: ``num_tokens`` tokens do not fit an empty pool.
        """
        manager = self._manager
        needed, total = manager.num_blocks_at_most(num_tokens), manager.pool.num_blocks
        if needed > total:
            raise KVCacheFullError(
                f"one sequence of {row.num_prompt_tokens} prompt tokens, {num_tokens} in all, "
                f"needs {needed} blocks and the pool has {total} (block_size "
                f"{manager.block_size}): shorten the prompt or max_new_tokens, or patch with "
                f"num_blocks={needed} or more, or a kv_memory= to match.",
                num_needed_blocks=needed,
                num_available_blocks=total,
                num_rows=1,
                num_rows_that_fit=0,
            )

    def next_batch(self) -> RowBatch | None:
        """Choose the rows of the next forward and reserve its blocks.

        Returns:
            None if no row has a missing token: all wait for the caller.

        Raises:
            KVCacheFullError: the oldest row does not fit even alone (or, with ``is_rigid``, the
                rows together); nothing is lost, it may be tried again.
        """
        self._enter()
        # Under a window long chunks want more room for a while: what they see and what they add.
        can_shorten = any(group.window is not None for group in self._manager.groups)
        by_block = False
        while True:
            chosen = self._choose(by_block)
            if not chosen:
                return None
            try:
                allocation = self._reserve(
                    [self._new_tokens(row, row.sequence, n) for row, n in chosen if row.sequence]
                )
            except KVCacheFullError:
                if self._make_room():
                    continue
                if can_shorten and not by_block:
                    by_block = True
                elif self.is_rigid or not self.preempt_youngest():
                    raise
                continue
            return _batch(chosen, allocation)

    def fork_twins(self, row: Row) -> list[Row]:
        """Let rows that wait with the very tokens of ``row``, all computed now, enter as forks.

        Returns:
            The rows that entered; they have no missing token either.
        """
        if self._version is None or row.num_generated or row.sequence is None:
            return []
        twins = [
            twin
            for twin in (*self._active, *self._waiting)
            if twin is not row and twin.num_missing and self._are_twins(row, twin)
        ]
        forked = []
        for twin in twins:
            # Each active row is about to take a block: a new one, or a copy of a shared one.
            num_next = (len(self._active) + 1) * len(self._manager.groups)
            if twin in self._waiting:
                if not self.is_rigid and num_next > self._manager.pool.num_available:
                    break
                self._waiting.remove(twin)
                self._active[twin] = None
            self._release(twin)
            twin.sequence = self._manager.fork(row.sequence)
            self._manager.num_prefix_query_tokens += row.num_prompt_tokens
            self._manager.num_prefix_hit_tokens += row.num_prompt_tokens
            self._sequences.append(twin.sequence)
            twin.num_cached_tokens = row.num_prompt_tokens
            forked.append(twin)
        return forked

    def finish(self, row: Row) -> None:
        """Let ``row`` go, active or waiting; its blocks are free."""
        self._release(row)
        self._forget_stored(row)
        if row in self._active:
            del self._active[row]
        else:
            self._waiting.remove(row)
        self._num_available_before = None

    def preempt_youngest(self) -> bool:
        """Send the row that entered last back to wait; False if only one is left."""
        if len(self._active) < 2:
            return False
        row, _ = self._active.popitem()
        self._move_out(row)
        self._release(row)
        self._waiting.appendleft(row)
        self.num_preemptions += 1
        return True

    def hand_over(self) -> None:
        """Let all rows go, but not their sequences, which are the caller's from now on."""
        for row in self._active:
            row.sequence = None
        self._active.clear()
        self._sequences.clear()

    def close(self) -> None:
        """Let all rows go."""
        for row in self._active:
            self._release(row)
        for row in self._waiting:
            self._forget_stored(row)
        self._active.clear()
        self._waiting.clear()

    # -- inside ------------------------------------------------------------------------------

    def _enter(self) -> None:
        """Let rows enter from the head of the queue as long as they fit."""
        num_available = self._manager.pool.num_available
        if not self._waiting or (self._active and num_available == self._num_available_before):
            return
        num_entering = len(self._waiting) if self.is_rigid else self._num_that_can_enter()
        for _ in range(num_entering):
            self._active[self._waiting.popleft()] = None
        self._num_available_before = None if num_entering else num_available

    def _num_that_can_enter(self) -> int:
        manager = self._manager
        unfinished = [row for row in self._active if row.num_missing > 1]
        growth = max(min(row.num_growth, _GROWTH_TOKENS) for row in (*self._active, *self._waiting))
        num_spare = manager.num_blocks_at_most(growth)

        def wanted() -> Iterator[NewTokens]:
            for row in (*unfinished, *self._waiting):
                sequence = row.sequence or Sequence(len(manager.groups))
                yield self._new_tokens(row, sequence, row.num_missing)

        num_fit = manager.num_that_fit(
            wanted(),
            num_spare_blocks=num_spare,
            num_kept_blocks=num_spare * (len(self._active) - len(unfinished)),
        )
        # The first of all fits alone or fails alone.
        return max(0 if self._active else 1, num_fit - len(unfinished))

    def _choose(self, by_block: bool) -> list[tuple[Row, int]]:
        """Return rows and how many tokens each of them computes next.

        Args:
            by_block: chunks end where a block does.
        """
        chosen: list[tuple[Row, int]] = []
        num_decoding = sum(row.num_missing == 1 for row in self._active)
        # However many rows decode, a prompt goes on by a block at least.
        budget = max(self._max_batch_tokens - num_decoding, self._manager.block_size)
        begun: set[Hashable] = set()
        for row in self._active:
            if row.sequence is not None and row.num_missing <= 1:
                if row.num_missing:
                    chosen.append((row, 1))
                continue
            if not budget:
                continue
            was_open = row.sequence is not None
            sequence = row.sequence or self._open(row)
            marks = self._marks(row, sequence)
            if begun.intersection(marks):
                if not was_open:
                    self._release(row)  # there will be more to adopt
                continue
            begun.update(marks)
            num_tokens = min(row.num_missing, budget)
            if by_block:
                size = self._manager.block_size
                num_tokens = min(num_tokens, size - sequence.num_tokens % size)
            budget -= num_tokens
            chosen.append((row, num_tokens))
        return chosen

    def _open(self, row: Row) -> Sequence:
        sequence = row.sequence = self._manager.new_sequence()
        self._sequences.append(sequence)
        if self._version is not None:
            num_tokens = self._manager.adopt_prefix(
                sequence, row.token_ids, row.first_position, self._version
            )
            if not row.num_generated:
                row.num_cached_tokens = num_tokens
        if row.stored is not None:
            self._move_in(row, sequence, row.stored)
            self._forget_stored(row)
        return sequence

    def _move_out(self, row: Row) -> None:
        """Copy to the store what no other row of the pool would keep."""
        if self._store is None or row.sequence is None:
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
        row.stored = _StoredRow(row.sequence.num_tokens, [{} for _ in self._manager.groups])
        for (group, index, _), slot in zip(places, slots, strict=True):
            row.stored.slots[group][index] = slot

    def _move_in(self, row: Row, sequence: Sequence, stored: _StoredRow) -> None:
        """Copy back what ``sequence`` could not adopt; what is missing is computed again."""
        assert self._store is not None
        num_tokens = stored.num_tokens - sequence.num_tokens
        if num_tokens <= 0:
            return
        try:
            allocation = self._reserve([self._new_tokens(row, sequence, num_tokens)])
        except KVCacheFullError:
            return
        slots, blocks, is_whole = [], [], True
        for group_id, entries in enumerate(allocation.rows[0].entries):
            group = self._manager.groups[group_id]
            num_hidden = group.num_hidden_tokens(stored.num_tokens) // self._manager.block_size
            for entry in entries:
                slot = stored.slots[group_id].get(entry.index)
                if entry.is_written and slot is not None:
                    slots.append(slot)
                    blocks.append(entry.block)
                elif entry.is_written and entry.index >= num_hidden:
                    is_whole = False
        if not is_whole:
            self._manager.rollback(allocation)
            return
        self._store.load(slots, blocks)
        self._manager.commit(allocation, is_computed=False)

    def _forget_stored(self, row: Row) -> None:
        if row.stored is not None and self._store is not None:
            self._store.free(row.stored.all_slots())
            row.stored = None

    def _marks(self, row: Row, sequence: Sequence) -> list[Hashable]:
        """Name what the row is about to compute and others may want as well."""
        if self._version is None:
            return []
        marks: list[Hashable] = []
        if not row.num_generated:
            marks.append((row.first_position, tuple(row.token_ids)))
        size = self._manager.block_size
        start = sequence.num_tokens // size * size
        if len(row.token_ids) >= start + size:
            block = tuple(row.token_ids[start : start + size])
            node = id(sequence.node) if start else None  # a row that has not begun has no root yet
            marks.append((node, row.first_position + start, block))
        return marks

    def _are_twins(self, row: Row, other: Row) -> bool:
        return (
            not other.num_generated
            and row.first_position == other.first_position
            and row.token_ids == other.token_ids
        )

    def _new_tokens(self, row: Row, sequence: Sequence, num_tokens: int) -> NewTokens:
        start = sequence.num_tokens
        return NewTokens(
            sequence,
            num_tokens,
            row.token_ids[start : start + num_tokens],
            row.first_position + start,
            self._version,
            self._keep,
        )

    def _release(self, row: Row) -> None:
        if row.sequence is not None:
            self._sequences.remove(row.sequence)
            self._manager.free(row.sequence)
            row.sequence = None


def _batch(chosen: list[tuple[Row, int]], allocation: Allocation) -> RowBatch:
    batch = RowBatch([row for row, _ in chosen], allocation, [], [], [])
    for index, (row, num_tokens) in enumerate(chosen):
        assert row.sequence is not None
        start = row.sequence.num_tokens
        end = start + num_tokens
        batch.token_ids += row.token_ids[start:end]
        batch.positions += range(row.first_position + start, row.first_position + end)
        if end == len(row.token_ids):
            batch.complete.append(index)
    return batch
