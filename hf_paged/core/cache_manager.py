"""Which blocks a forward reads, writes and copies: all of it before the first is written.

One forward is one transaction. :meth:`KVCacheManager.begin` plans it for all rows or for none,
the caller makes the copies and runs the model, then :meth:`~KVCacheManager.commit` or
:meth:`~KVCacheManager.rollback` ends it. Nothing that a forward computes is shareable before its
commit, except among the rows of that same forward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence

from hf_paged.core.allocation import Allocation, AllocationPlanner, NewTokens, RowAllocation
from hf_paged.core.block_pool import BlockPool
from hf_paged.core.block_table import NO_BLOCK
from hf_paged.core.layer_group import LayerGroup
from hf_paged.core.prefix_index import PrefixIndex, PrefixNode
from hf_paged.core.sequence import Sequence as KVSequence
from hf_paged.errors import KVCacheFullError

__all__ = ["KVCacheManager"]


class KVCacheManager:
    """Sequences, their block tables and the prefixes that they share.

    Args:
        num_blocks: usable blocks of the pool.
        block_size: tokens a block.
        groups: layer groups of the model.
        on_emptied: called with block ids that hold nothing any more (debug mode poisons them).
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        groups: Sequence[LayerGroup],
        on_emptied: Callable[[list[int]], None] | None = None,
    ) -> None:
        self.block_size = block_size
        self.groups = tuple(groups)
        self.index = PrefixIndex(len(self.groups))
        self.pool = BlockPool(num_blocks, self.index)
        self._planner = AllocationPlanner(self.pool, block_size, self.groups)
        self.peak_used_blocks = 0
        self.utilization_at_peak = 1.0
        self.num_prefix_query_tokens = 0
        self.num_prefix_hit_tokens = 0
        self.num_cow_copies = 0
        self.num_computed_tokens = 0
        self._on_emptied = on_emptied
        self._sequences: dict[KVSequence, None] = {}
        self._num_adopted: dict[KVSequence, int] = {}
        self._released: Counter[int] = Counter()

    # -- one forward -------------------------------------------------------------------------

    def begin(
        self, rows: Iterable[NewTokens], *, hold_window: bool = False, occasion: str = "forward"
    ) -> Allocation:
        """Reserve every block that a forward writes, or none.

        Mutates the block tables of the rows; :meth:`commit` or :meth:`rollback` must follow.

        Args:
            rows: what the forward adds, one entry a sequence.
            hold_window: keep what falls behind a window, because a crop may bring it back.
            occasion: what the blocks are for, named by the error.

        Raises:
            KVCacheFullError: too few blocks; nothing has changed.
        """
        plan, needed = self._planner.plan(rows, hold_window)
        if needed and needed[-1] > self.pool.num_available:
            self._unpin(plan)
            raise self._full_error(needed, occasion)
        return self._execute(plan)

    def check_fits(self, rows: Iterable[NewTokens], *, occasion: str) -> None:
        """Raise what :meth:`begin` would raise, and change nothing.

        Raises:
            KVCacheFullError: too few blocks.
        """
        plan, needed = self._planner.plan(rows, hold_window=False)
        self._unpin(plan)
        if needed and needed[-1] > self.pool.num_available:
            raise self._full_error(needed, occasion)

    def num_that_fit(
        self, rows: Iterable[NewTokens], *, num_spare_blocks: int, num_kept_blocks: int
    ) -> int:
        """Return how many of ``rows``, from the first on, fit together; change nothing.

        What rows share with each other and with stored prefixes is counted once.

        Args:
            rows: consumed up to the first one that does not fit.
            num_spare_blocks: blocks that must stay available for each row that fits.
            num_kept_blocks: blocks that must stay available besides.
        """

        def fit(needed: list[int]) -> bool:
            taken = needed[-1] + num_spare_blocks * len(needed) + num_kept_blocks
            return taken <= self.pool.num_available

        plan, needed = self._planner.plan(rows, hold_window=False, go_on=fit)
        self._unpin(plan)
        return len(needed) if not needed or fit(needed) else len(needed) - 1

    def commit(
        self, allocation: Allocation, *, hold_window: bool = False, is_computed: bool = True
    ) -> None:
        """Make valid what the forward wrote: lengths, full blocks, windows.

        Frees blocks that lie wholly behind a window, and the sources of copies.

        Args:
            allocation: what :meth:`begin` returned.
            hold_window: as there.
            is_computed: False: K and V were copied from elsewhere; only statistics tell.
        """
        for row in allocation.rows:
            for entries in row.entries:
                for entry in entries:
                    if entry.is_written:
                        filled = min(row.end - entry.index * self.block_size, self.block_size)
                        self.pool.set_num_filled(entry.block, filled)
            row.sequence.num_tokens = row.end
            if not is_computed:
                continue
            self.num_computed_tokens += row.end - row.start
            num_adopted = self._num_adopted.pop(row.sequence, 0)
            self.num_prefix_hit_tokens += num_adopted + row.num_hit_tokens
            if row.base is not None and (row.is_prompt or num_adopted):
                self.num_prefix_query_tokens += num_adopted + row.end - row.start
        self.num_cow_copies += len(allocation.copies)
        self._record_peak()
        for row in allocation.rows:
            self._publish(row)
            if not hold_window:
                self.drop_hidden(row.sequence)
        self._released -= allocation._released
        self._free(allocation._released.elements())
        self._unpin(allocation)

    def rollback(self, allocation: Allocation) -> None:
        """Undo :meth:`begin`: the sequences are as they were before the forward."""
        for row in allocation.rows:
            for table, entries, length in zip(
                row.sequence.tables, row.entries, row.table_lengths, strict=True
            ):
                table.truncate(length)
                for entry in entries:
                    if entry.replaces is not None:
                        table[entry.index] = entry.replaces
        self._released -= allocation._released
        self._free(reversed(allocation._touched))
        self._free(reversed(allocation.new_blocks))
        self._unpin(allocation)

    # -- sequences ---------------------------------------------------------------------------

    def new_sequence(self) -> KVSequence:
        """Return an empty sequence; the caller frees it."""
        sequence = KVSequence(len(self.groups))
        self._sequences[sequence] = None
        return sequence

    def fork(self, parent: KVSequence) -> KVSequence:
        """Return a sequence with the same tokens in the same blocks; the caller frees it.

        Linear in the parent's blocks; no K or V is copied before one of the two writes.
        """
        child = self.new_sequence()
        child.num_tokens = parent.num_tokens
        child.tables = [table.copy() for table in parent.tables]
        for table in child.tables:
            for block_id in table.held():
                self.pool.touch(block_id)
        child.tail = parent.tail[:]
        child.tail_position = parent.tail_position
        child.move_to(parent.node)
        return child

    def adopt_prefix(
        self, sequence: KVSequence, token_ids: list[int], first_position: int, version: Hashable
    ) -> int:
        """Give an empty sequence the stored blocks of the longest prefix of its tokens.

        These tokens need not be computed. The last token is never among them: its logits are
        what the caller is after. They count as hits when the sequence's first forward commits.

        Args:
            sequence: mutated; holds no token yet.
            token_ids: of the whole prompt.
            first_position: position of the first.
            version: under which K and V must have been computed.

        Returns:
            Tokens adopted, a multiple of the block size.
        """
        assert sequence.num_tokens == 0
        path = self.index.find(version, token_ids[:-1], first_position, self.block_size)
        depth = next((d for d in range(len(path), 0, -1) if self._is_stored(path[:d])), 0)
        if depth == 0:
            return 0
        for group_id, (group, table) in enumerate(zip(self.groups, sequence.tables, strict=True)):
            first = group.num_hidden_tokens(depth * self.block_size) // self.block_size
            table.skip_to(first)
            for node in path[first:depth]:
                block = node.blocks[group_id]
                assert block is not None
                self.pool.touch(block)
                table.append(block)
        sequence.num_tokens = depth * self.block_size
        sequence.tail, sequence.tail_position = [], first_position + sequence.num_tokens
        self._move(sequence, path[depth - 1])
        self._num_adopted[sequence] = sequence.num_tokens
        self._record_peak()
        return sequence.num_tokens

    def _is_stored(self, path: list[PrefixNode]) -> bool:
        """Whether every group has the blocks of ``path`` that tokens after it can see."""
        return all(
            node.blocks[group_id] is not None
            for group_id, group in enumerate(self.groups)
            for node in path[
                group.num_hidden_tokens(len(path) * self.block_size) // self.block_size :
            ]
        )

    def free(self, sequence: KVSequence) -> None:
        """Drop all references of ``sequence``; blocks with a known prefix stay cached."""
        assert sequence in self._sequences, "sequence freed twice"
        del self._sequences[sequence]
        self._num_adopted.pop(sequence, None)
        self._free(self._cut(sequence, 0))
        self._move(sequence, None)
        sequence.num_tokens = 0

    def crop(self, sequence: KVSequence, num_tokens: int) -> None:
        """Forget the tokens from ``num_tokens`` on; a block is freed only when it is empty.

        Args:
            sequence: to be cropped.
            num_tokens: tokens that stay, at most ``sequence.num_tokens``.
        """
        assert 0 <= num_tokens <= sequence.num_tokens
        size = self.block_size
        self._free(self._cut(sequence, -(-num_tokens // size)))
        offset = num_tokens % size
        for table in sequence.tables:
            block_id = (
                table[num_tokens // size] if offset and len(table) * size > num_tokens else -1
            )
            if block_id != NO_BLOCK and self._planner.is_writable(block_id):
                self.pool.set_num_filled(block_id, offset)
        node = sequence.node
        while node is not None and node.depth * size > num_tokens:
            assert node.key is not None
            sequence.tail = list(node.key.tokens)
            sequence.tail_position = node.key.first_position
            node = node.parent
        if node is not None:
            del sequence.tail[num_tokens - node.depth * size :]
        self._move(sequence, node)
        sequence.num_tokens = num_tokens

    def can_crop(self, sequence: KVSequence, num_tokens: int) -> bool:
        """Whether a crop to ``num_tokens`` leaves every window whole."""
        size = self.block_size
        for group, table in zip(self.groups, sequence.tables, strict=True):
            first = group.num_hidden_tokens(num_tokens) // size
            if any(table[i] == NO_BLOCK for i in range(first, -(-num_tokens // size))):
                return False
        return True

    def drop_hidden(self, sequence: KVSequence) -> None:
        """Free the blocks that lie wholly behind the window of their group."""
        for group, table in zip(self.groups, sequence.tables, strict=True):
            if group.window is not None:
                hidden = group.num_hidden_tokens(sequence.num_tokens) // self.block_size
                self._free(table.drop_before(hidden))

    def clear_cached(self) -> None:
        """Forget every prefix that nobody uses; used blocks stay and stay shareable."""
        self._emptied(self.pool.clear_cached())

    # -- figures -----------------------------------------------------------------------------

    @property
    def utilization(self) -> float:
        """Distinct live token slots over the slots of used blocks; 1.0 when nothing is used."""
        used = self.pool.num_used
        return self.pool.num_live_slots / (used * self.block_size) if used else 1.0

    @property
    def num_stored_sequences(self) -> int:
        """Sequences that hold a token."""
        return sum(sequence.num_tokens > 0 for sequence in self._sequences)

    @property
    def sequences(self) -> list[KVSequence]:
        """All sequences that were not freed yet, oldest first."""
        return list(self._sequences)

    def reset_stats(self) -> None:
        """Set the peak to what is used now and every counter to 0."""
        self.peak_used_blocks = self.pool.num_used
        self.utilization_at_peak = self.utilization
        self.num_prefix_query_tokens = self.num_prefix_hit_tokens = self.num_cow_copies = 0
        self.num_computed_tokens = 0
        self.pool.num_evictions = 0

    def num_blocks_at_most(self, num_tokens: int) -> int:
        """Return the most blocks that a sequence of ``num_tokens`` holds in all groups."""
        total = 0
        for group in self.groups:
            blocks = -(-num_tokens // self.block_size)
            if group.window is not None:
                blocks = min(blocks, -(-group.window // self.block_size) + 1)
            total += blocks
        return total

    def check_integrity(self) -> None:
        """Assert every invariant of DESIGN section 11; print the equation that fails."""
        self.pool.check_integrity()
        references = Counter(
            block_id
            for sequence in self._sequences
            for table in sequence.tables
            for block_id in table.held()
        )
        references += self._released  # a running forward holds what its rollback needs
        for block_id in range(self.pool.num_blocks):
            assert references[block_id] == self.pool.ref_count(block_id), (
                f"block {block_id}: {references[block_id]} references from tables, "
                f"ref_count {self.pool.ref_count(block_id)}"
            )
        for sequence in self._sequences:
            if sequence.node is not None:
                covered = sequence.node.depth * self.block_size + len(sequence.tail)
                assert covered == sequence.num_tokens, f"{covered} != {sequence.num_tokens} tokens"

    # -- inside ------------------------------------------------------------------------------

    def _execute(self, plan: Allocation) -> Allocation:
        num_blocks = self.pool.num_blocks
        for block in plan._touched:
            if block < num_blocks:
                self.pool.touch(block)
        new = plan.new_blocks = self.pool.allocate(plan._num_new)

        def resolve(block: int) -> int:
            return block if block < num_blocks else new[block - num_blocks]

        for block in plan._touched:
            if block >= num_blocks:
                self.pool.touch(resolve(block))
        plan._touched = [resolve(block) for block in plan._touched]
        plan.copies = [(source, resolve(copy)) for source, copy in plan.copies]
        for row in plan.rows:
            for table, entries in zip(row.sequence.tables, row.entries, strict=True):
                for entry in entries:
                    entry.block = resolve(entry.block)
                    if entry.index < len(table):
                        table[entry.index] = entry.block
                    else:
                        table.skip_to(entry.index)
                        table.append(entry.block)
        self._released += plan._released
        return plan

    def _publish(self, row: RowAllocation) -> None:
        """Let look-ups find the blocks that became full; keep one of two equal blocks."""
        sequence, node = row.sequence, row.base
        if node is None:
            self._move(sequence, None)
            sequence.tail = []
            return
        for key in row.keys:
            index, node = node.depth, self.index.publish(node, key)
            for group_id, entries in enumerate(row.entries):
                if index < entries[0].index:
                    continue  # behind the window: this forward did not store all of it
                own, stored = entries[index - entries[0].index].block, node.blocks[group_id]
                if own == stored:
                    continue
                if stored is None:
                    self.pool.set_content(own, node, group_id)
                else:
                    self.pool.touch(stored)
                    sequence.tables[group_id][index] = stored
                    self._free([own])
        sequence.tail += row.token_ids
        del sequence.tail[: len(row.keys) * self.block_size]
        sequence.tail_position += len(row.keys) * self.block_size
        self._move(sequence, node)

    def _move(self, sequence: KVSequence, node: PrefixNode | None) -> None:
        previous = sequence.node
        sequence.move_to(node)
        self.index.prune(previous)

    def _unpin(self, plan: Allocation) -> None:
        """Let go of the prefixes that the rows extend: evictions could prune them till now."""
        for row in plan.rows:
            if row.base is not None:
                row.base.num_sequences -= 1
                self.index.prune(row.base)

    def _cut(self, sequence: KVSequence, num_entries: int) -> list[int]:
        """Truncate all tables; return what they held, deepest block first."""
        cut = []
        for table in sequence.tables:
            skipped = len(table)
            for depth, block_id in enumerate(reversed(table.truncate(num_entries))):
                cut.append((depth - skipped, block_id))
        return [block_id for _, block_id in sorted(cut, key=lambda item: item[0])]

    def _free(self, block_ids: Iterable[int]) -> None:
        self._emptied(self.pool.free(block_ids))

    def _emptied(self, block_ids: list[int]) -> None:
        if block_ids and self._on_emptied is not None:
            self._on_emptied(block_ids)

    def _record_peak(self) -> None:
        if self.pool.num_used > self.peak_used_blocks:
            self.peak_used_blocks = self.pool.num_used
            self.utilization_at_peak = self.utilization

    def _full_error(self, needed: list[int], occasion: str) -> KVCacheFullError:
        available = self.pool.num_available
        fit = sum(count <= available for count in needed)
        smaller = "pass fewer rows (prompts x beams) at a time"
        if len(needed) == 1:
            smaller = "shorten the prompt"
        return KVCacheFullError(
            f"the KV cache is full at {occasion}: {needed[-1]} more blocks needed, {available} "
            f"available of {self.pool.num_blocks}, {self.pool.num_used} in use (block_size "
            f"{self.block_size}); {fit} of {len(needed)} rows would fit. Patch with num_blocks="
            f"{self.pool.num_used + needed[-1]} or more, or a kv_memory= to match, {smaller}, or "
            "release caches that are no longer needed.",
            num_needed_blocks=needed[-1],
            num_available_blocks=available,
            num_rows=len(needed),
            num_rows_that_fit=fit,
        )
