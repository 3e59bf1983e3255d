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

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator

from hf_paged.core.allocation import Allocation, NewTokens
from hf_paged.core.cache_manager import KVCacheManager
from hf_paged.core.row import Row
from hf_paged.core.row_batch import RowBatch
from hf_paged.core.row_swap import RowSwap
from hf_paged.core.sequence import Sequence
from hf_paged.errors import KVCacheFullError

__all__ = ["RowScheduler"]

_GROWTH_TOKENS = 64
"""A row enters only if it and every active row could grow by so much: or one would soon give way
to another, and what it computed would be computed again."""


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
        swap: lets rows that give way keep their blocks; None: they compute them again.

    Attributes:
        is_rigid: rows neither wait nor give way: all must fit at once.
        max_active: rows that may be active at a time; None: as many as fit.
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
        swap: RowSwap | None = None,
    ) -> None:
        self._manager = manager
        self._reserve = reserve
        self._make_room = make_room
        self._max_batch_tokens = max_batch_tokens
        self._version = version
        self._keep = keep
        self._sequences = sequences
        self._swap = swap
        self._waiting: OrderedDict[Row, None] = OrderedDict()
        self._active: dict[Row, None] = {}
        self._num_available_before: int | None = None
        self.is_rigid = False
        self.max_active: int | None = None
        self.num_preemptions = 0

    def __contains__(self, row: Row) -> bool:
        """Whether ``row`` waits or is active."""
        return row in self._active or row in self._waiting

    @property
    def active(self) -> list[Row]:
        """Rows that hold blocks or may take some, in the order in which they entered."""
        return list(self._active)

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
        self._waiting[row] = None
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
                allocation = self._reserve([tokens for _, tokens in chosen])
            except KVCacheFullError:
                if self._make_room():
                    self._enter()
                elif can_shorten and not by_block:
                    by_block = True
                elif self.is_rigid or not self._preempt_youngest():
                    raise
            else:
                return RowBatch.of(chosen, allocation)

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
                del self._waiting[twin]
                self._active[twin] = None
            self._release(twin)
            self._forget(twin)
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
        self._forget(row)
        if row in self._active:
            del self._active[row]
        else:
            del self._waiting[row]
        self._num_available_before = None

    def send_back_all(self) -> None:
        """Send all active rows back to wait."""
        while self._preempt_youngest(num_left=0):
            pass

    def hand_over(self) -> None:
        """Let all rows go, but not their sequences, which are the caller's from now on."""
        for row in self._active:
            row.sequence = None
            self._forget(row)
        self._active.clear()
        self._sequences.clear()

    def close(self) -> None:
        """Let all rows go."""
        for row in (*self._active, *self._waiting):
            self._release(row)
            self._forget(row)
        self._active.clear()
        self._waiting.clear()

    # -- inside ------------------------------------------------------------------------------

    def _enter(self) -> None:
        """Let rows enter from the head of the queue as long as they fit."""
        num_available = self._manager.pool.num_available
        if not self._waiting or (self._active and num_available == self._num_available_before):
            return
        num_entering = len(self._waiting) if self.is_rigid else self._num_that_can_enter()
        if self.max_active is not None:
            num_entering = min(num_entering, max(0, self.max_active - len(self._active)))
        for _ in range(num_entering):
            self._active[self._waiting.popitem(last=False)[0]] = None
        self._num_available_before = None if num_entering else num_available

    def _num_that_can_enter(self) -> int:
        manager = self._manager
        unfinished = [row for row in self._active if row.num_missing > 1]
        growth = max(_growth(row) for row in (*self._active, *self._waiting))
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

    def _preempt_youngest(self, num_left: int = 1) -> bool:
        """Send the row that entered last back to wait; False if only ``num_left`` are left."""
        if len(self._active) <= num_left:
            return False
        row = next(reversed(self._active))
        if self._swap is not None:
            self._swap.move_out(row)
        self._release(row)
        del self._active[row]
        self._waiting[row] = None
        self._waiting.move_to_end(row, last=False)
        self.num_preemptions += 1
        return True

    def _choose(self, by_block: bool) -> list[tuple[Row, NewTokens]]:
        """Return rows and what each of them computes next.

        Args:
            by_block: chunks end where a block does.
        """
        chosen: list[tuple[Row, NewTokens]] = []
        num_decoding = sum(row.num_missing == 1 for row in self._active if row.sequence is not None)
        # However many rows decode, a prompt goes on by a block at least.
        budget = max(self._max_batch_tokens - num_decoding, self._manager.block_size)
        begun: set[Hashable] = set()
        for row in self._active:
            if row.sequence is not None and row.num_missing <= 1:
                if row.num_missing:
                    chosen.append((row, self._new_tokens(row, row.sequence, 1)))
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
            chosen.append((row, self._new_tokens(row, sequence, num_tokens)))
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
        if self._swap is not None and row.stored is not None:
            num_tokens = row.stored.num_tokens - sequence.num_tokens
            if num_tokens > 0:
                self._swap.move_in(row.stored, self._new_tokens(row, sequence, num_tokens))
            self._forget(row)
        return sequence

    def _forget(self, row: Row) -> None:
        if self._swap is not None:
            self._swap.forget(row)

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
            is_prompt=start < row.num_prompt_tokens,
        )

    def _release(self, row: Row) -> None:
        if row.sequence is not None:
            self._sequences.remove(row.sequence)
            self._manager.free(row.sequence)
            row.sequence = None


def _growth(row: Row) -> int:
    """Return how many tokens a row should have room for besides those it has."""
    if row.max_tokens is None:
        return _GROWTH_TOKENS
    return min(_GROWTH_TOKENS, max(0, row.max_tokens - len(row.token_ids)))
