"""What one forward may read and must write: planned for all its rows before anything changes.

The plan names blocks that do not exist yet by placeholders, ids from ``num_blocks`` on, so that a
plan that does not fit costs nothing. :class:`~hf_paged.core.cache_manager.KVCacheManager` carries
it out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from hf_paged.core.block_pool import BlockPool
from hf_paged.core.layer_group import LayerGroup
from hf_paged.core.prefix_index import BlockKey, PrefixIndex, PrefixNode
from hf_paged.core.sequence import Sequence as KVSequence

__all__ = ["Allocation", "AllocationPlanner", "NewTokens", "RowAllocation"]


@dataclass
class NewTokens:
    """What one forward adds to one sequence.

    Attributes:
        sequence: the row.
        num_tokens: tokens to add, at least 1, padding left out.
        token_ids: their ids, or None if ids do not determine K and V (embeddings, hooks).
        first_position: position of the first, if they are consecutive; else None.
        version: what K and V depend on besides tokens and positions; None: not shareable.
        keep: whether the blocks may stay cached after their last user.
        is_prompt: whether statistics count them as prompt; None: if they are the first.
        is_copied: K and V come from elsewhere, so there is no query that sees one token more than
            later ones.
    """

    sequence: KVSequence
    num_tokens: int
    token_ids: list[int] | None = None
    first_position: int | None = None
    version: Hashable | None = None
    keep: bool = True
    is_prompt: bool | None = None
    is_copied: bool = False


@dataclass
class _Entry:
    """One entry of a block table as a forward needs it."""

    index: int
    block: int
    is_written: bool
    replaces: int | None = None


@dataclass
class RowAllocation:
    """One row of an :class:`Allocation`: tokens ``start`` to ``end - 1`` of its sequence."""

    sequence: KVSequence
    start: int
    end: int
    token_ids: list[int]
    first_position: int
    base: PrefixNode | None
    keys: list[BlockKey]
    entries: list[list[_Entry]] = field(default_factory=list)
    table_lengths: list[int] = field(default_factory=list)
    num_hit_tokens: int = 0
    is_prompt: bool = False

    def slots(self, group: int, block_size: int) -> list[int]:
        """Return the slot of each new token in a layer group, -1 where it is not stored."""
        slots = [-1] * (self.end - self.start)
        for entry in self.entries[group]:
            if entry.is_written:
                first = max(self.start, entry.index * block_size)
                last = min(self.end, (entry.index + 1) * block_size)
                offset = (entry.block - entry.index) * block_size
                slots[first - self.start : last - self.start] = range(first + offset, last + offset)
        return slots


@dataclass
class Allocation:
    """What one forward may read and must write; ended by ``commit`` or ``rollback``.

    Attributes:
        rows: in the order of the request.
        copies: (source, destination) blocks to copy before anything is written.
        new_blocks: blocks taken for this forward, destinations of copies included.
    """

    rows: list[RowAllocation] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    new_blocks: list[int] = field(default_factory=list)
    _num_new: int = 0
    _touched: list[int] = field(default_factory=list)
    _released: Counter[int] = field(default_factory=Counter)
    _released_until: dict[int, int] = field(default_factory=dict)
    _pending_nodes: dict[tuple[int, BlockKey], PrefixNode] = field(default_factory=dict)
    _pending_blocks: dict[tuple[int, int], int] = field(default_factory=dict)


class AllocationPlanner:
    """Plans forwards; changes nothing but the counts that keep prefixes alive.

    Args:
        pool: of the manager.
        block_size: tokens a block.
        groups: layer groups of the model.
    """

    def __init__(self, pool: BlockPool, block_size: int, groups: Sequence[LayerGroup]) -> None:
        self.pool = pool
        self.index: PrefixIndex = pool.index
        self.block_size = block_size
        self.groups = groups

    def plan(
        self,
        rows: Iterable[NewTokens],
        hold_window: bool,
        go_on: Callable[[list[int]], bool] | None = None,
    ) -> tuple[Allocation, list[int]]:
        """Return the plan and, after each row, how many available blocks it has used up.

        The plan ends early with the first row after which ``go_on`` is false of the latter.
        """
        plan, revived, needed = Allocation(), set[int](), []
        for new in rows:
            num_touched = len(plan._touched)
            self._plan_row(plan, new, hold_window)
            touched = plan._touched[num_touched:]
            revived.update(b for b in touched if self.pool.is_cached(b))
            needed.append(plan._num_new + len(revived))
            if go_on is not None and not go_on(needed):
                break
        return plan, needed

    def _plan_row(self, plan: Allocation, new: NewTokens, hold_window: bool) -> None:
        sequence, size = new.sequence, self.block_size
        start = sequence.num_tokens
        row = RowAllocation(
            sequence, start, start + new.num_tokens, new.token_ids or [], 0, None, []
        )
        row.is_prompt = start == 0 if new.is_prompt is None else new.is_prompt
        self._find_prefix(row, new)
        nodes = self._nodes(plan, row)
        first_full = start // size
        hits = Counter[int]()
        for group_id, group in enumerate(self.groups):
            # The last query sees one token more than later ones will.
            end = row.end if new.is_copied else row.end - 1
            hidden = 0 if hold_window else group.num_hidden_tokens(end)
            store_from = max(start, hidden // size * size)
            table = sequence.tables[group_id]
            entries = []
            for index in range(store_from // size, -(-row.end // size)):
                node = nodes[index - first_full] if index - first_full < len(nodes) else None
                if index < len(table):
                    entries.append(self._plan_append(plan, index, table[index], start))
                    continue
                shared = None if node is None else self._shared_block(plan, node, group_id)
                if shared is None:
                    block = self._plan_new(plan)
                    if node is not None:
                        plan._pending_blocks[id(node), group_id] = block
                    entries.append(_Entry(index, block, is_written=True))
                    hits[index] -= len(self.groups)
                else:
                    plan._touched.append(shared)
                    entries.append(_Entry(index, shared, is_written=False))
                    hits[index] += 1
            row.entries.append(entries)
            row.table_lengths.append(len(table))
        row.num_hit_tokens = size * sum(count > 0 for count in hits.values())
        plan.rows.append(row)

    def _find_prefix(self, row: RowAllocation, new: NewTokens) -> None:
        """Set the prefix that the row extends, and the keys of the blocks that become full."""
        sequence = row.sequence
        if new.token_ids is None or new.first_position is None or new.version is None:
            return
        if sequence.num_tokens == 0:
            row.base = self.index.root(new.version, keep=new.keep)
            sequence.tail, sequence.tail_position = [], new.first_position
        elif (
            sequence.node is not None
            and sequence.node.root.version == new.version
            and sequence.next_position == new.first_position
        ):
            row.base = sequence.node
        if row.base is not None:
            row.base.num_sequences += 1
            row.keys = sequence.block_keys(new.token_ids, self.block_size)

    def _nodes(self, plan: Allocation, row: RowAllocation) -> list[PrefixNode]:
        """Return a node for each full block of the row, found or not yet published."""
        nodes, parent = [], row.base
        for key in row.keys:
            assert parent is not None
            node = parent.children.get(key) or plan._pending_nodes.get((id(parent), key))
            if node is None:
                node = self.index.new_node(parent, key)
                plan._pending_nodes[id(parent), key] = node
            nodes.append(node)
            parent = node
        return nodes

    def _shared_block(self, plan: Allocation, node: PrefixNode, group_id: int) -> int | None:
        block = node.blocks[group_id]
        return block if block is not None else plan._pending_blocks.get((id(node), group_id))

    def _plan_append(self, plan: Allocation, index: int, block: int, start: int) -> _Entry:
        """Write into a partly filled block, or into a copy of it if others may read it.

        Rows of this forward that took a copy need the block no more, but a rollback gives it back
        to them: what they hold there, up to their own start, stays as it is.
        """
        released_until = plan._released_until.get(block, 0)
        if start >= released_until and self.is_writable(block, plan._released[block]):
            return _Entry(index, block, is_written=True)
        copy = self._plan_new(plan)
        plan.copies.append((block, copy))
        plan._released[block] += 1
        plan._released_until[block] = max(start, released_until)
        return _Entry(index, copy, is_written=True, replaces=block)

    def is_writable(self, block: int, num_released: int = 0) -> bool:
        """Whether a block's one user may write into it; nobody else reads or finds it."""
        return self.pool.ref_count(block) - num_released == 1 and self.pool.content(block) is None

    def _plan_new(self, plan: Allocation) -> int:
        """Return a placeholder for a block: ids from ``num_blocks`` on are not real yet."""
        plan._num_new += 1
        return self.pool.num_blocks + plan._num_new - 1
