"""The pool at one moment as plain data: which block is whose, shared, cached or free."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from hf_paged.core.block_pool import BlockStates
from hf_paged.core.block_table import NO_BLOCK
from hf_paged.core.interrupts import whole
from hf_paged.core.sequence import Sequence as KVSequence

if TYPE_CHECKING:
    from hf_paged.cache.runtime import PagedRuntime

__all__ = ["PoolBlock", "PoolCell", "PoolGroup", "PoolSequence", "PoolView", "look_at_pool"]

BlockState = Literal["free", "cached", "used"]


class PoolBlock(NamedTuple):
    """One block; its id is its place in :attr:`PoolView.blocks`.

    Attributes:
        state: "free" holds nothing, "cached" holds a known prefix and belongs to nobody, "used"
            is referred to.
        ref_count: references; more than ``len(sequences)`` only while a forward runs.
        sequences: indices into :attr:`PoolView.sequences` of those whose tables name the block.
        group: index into :attr:`PoolView.groups`; None: not known.
        num_filled: slots that hold a token.
    """

    state: BlockState
    ref_count: int
    sequences: tuple[int, ...]
    group: int | None
    num_filled: int

    @property
    def is_shared(self) -> bool:
        """Whether more than one refers to it."""
        return self.ref_count > 1


_FREE = PoolBlock("free", 0, (), None, 0)


class PoolGroup(NamedTuple):
    """Layers that share blocks.

    Attributes:
        name: "full attention" or "window 8"; numbered where several are alike.
        layers: their indices in the model.
        window: tokens that a query sees; None: all before it.
    """

    name: str
    layers: tuple[int, ...]
    window: int | None


class PoolSequence(NamedTuple):
    """One row of a cache.

    Attributes:
        name: "cache 0 row 1"; caches are numbered in the order in which they were made, and keep
            their number.
        num_tokens: tokens stored, padding left out.
        tables: block ids in order, one table a layer group; -1 lies behind the window.
    """

    name: str
    num_tokens: int
    tables: tuple[tuple[int, ...], ...]


class PoolCell(NamedTuple):
    """A run of blocks that a map shows as one.

    Attributes:
        first: id of the first block.
        last: id of the last one.
        num_used: how many are used, shared ones included.
        num_shared: how many are shared.
        num_cached: how many are cached.
    """

    first: int
    last: int
    num_used: int
    num_shared: int
    num_cached: int

    @property
    def num_blocks(self) -> int:
        """Blocks in the run."""
        return self.last - self.first + 1


@dataclass(frozen=True, repr=False)
class PoolView:
    """The pool of a patched model at one moment; see :func:`hf_paged.plot_pool`.

    Plain data: it keeps no cache alive and does not change any more. A notebook shows it as a
    table, ``rich.print`` in colour, ``print`` without, and :meth:`save` makes a picture of it.

    Attributes:
        block_size: tokens a block.
        bytes_per_block: K and V of ``block_size`` tokens in each layer of a layer group.
        groups: the layer groups of the model.
        sequences: the rows that hold blocks, by cache and row.
        blocks: every usable block; the index is the block's id.
        eviction_order: ids of the cached blocks, the next to give way first.
    """

    block_size: int
    bytes_per_block: int
    groups: tuple[PoolGroup, ...]
    sequences: tuple[PoolSequence, ...]
    blocks: tuple[PoolBlock, ...]
    eviction_order: tuple[int, ...]

    @property
    def num_blocks(self) -> int:
        """Usable blocks."""
        return len(self.blocks)

    @property
    def num_cached(self) -> int:
        """Blocks that hold a known prefix and belong to nobody."""
        return len(self.eviction_order)

    @cached_property
    def num_used(self) -> int:
        """Blocks that are referred to."""
        return sum(block.ref_count > 0 for block in self.blocks)

    @cached_property
    def num_shared(self) -> int:
        """Blocks that more than one refers to; they are used ones as well."""
        return sum(block.ref_count > 1 for block in self.blocks)

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return self.num_blocks - self.num_cached - self.num_used

    @cached_property
    def end_of_map(self) -> int:
        """One more than the highest id that is not free: the lowest free block is taken first."""
        for block_id in range(self.num_blocks - 1, -1, -1):
            if self.blocks[block_id] is not _FREE:
                return block_id + 1
        return 0

    def cells(self, max_cells: int, num_columns: int = 1) -> list[PoolCell]:
        """Cut the pool, up to the last block that is not free, into equal runs.

        Args:
            max_cells: at most so many; a run has 1, 2, 5, 10, 20, ... blocks to keep to it.
            num_columns: of the map; its last row is filled up with free blocks.
        """
        sizes = (nice * 10**power for power in count() for nice in (1, 2, 5))
        size = next(size for size in sizes if -(-self.end_of_map // size) <= max_cells)
        end = -(-self.end_of_map // (size * num_columns)) * size * num_columns
        cells = []
        for first in range(0, min(end, self.num_blocks), size):
            run = self.blocks[first : first + size]
            counts = [block.ref_count for block in run]
            cells.append(
                PoolCell(
                    first,
                    first + len(run) - 1,
                    num_used=len(run) - counts.count(0),
                    num_shared=len(run) - counts.count(0) - counts.count(1),
                    num_cached=len([block for block in run if block.state == "cached"]),
                )
            )
        return cells

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a picture of the block tables, one line a sequence; needs matplotlib.

        Args:
            path: of a new file; the suffix says the format (.png, .svg, .pdf), PNG without one.

        Raises:
            ConfigurationError: matplotlib is not installed, or does not know the format.
        """
        from hf_paged.cache import pool_picture

        pool_picture.save(self, path)

    def __repr__(self) -> str:
        """Tell the counts."""
        return (
            f"PoolView({self.num_blocks} blocks of {self.block_size}: {self.num_used} used, "
            f"{self.num_shared} of them shared, {self.num_cached} cached, {self.num_free} free; "
            f"{len(self.sequences)} sequences)"
        )

    def __str__(self) -> str:
        """Draw the map and the tables, without colour."""
        from hf_paged.cache import pool_text

        return pool_text.to_text(self)

    def __rich__(self) -> Any:
        """Draw the map and the tables in a terminal."""
        from hf_paged.cache import pool_text

        return pool_text.PoolPicture(self)

    def _repr_html_(self) -> str:
        from hf_paged.cache import pool_picture

        return pool_picture.to_html(self)


def look_at_pool(runtime: PagedRuntime) -> PoolView:
    """Return what the pool of ``runtime`` holds now.

    The pool's lock is held while lists are copied, not while they are put together. Blocks of
    garbage-collected caches go back first, as in every call on the pool; nothing else changes.
    """
    rows, names, states = _copy(runtime)
    rows.sort(key=lambda row: names.get(row[0], (sys.maxsize, 0)))
    sequences: list[PoolSequence] = []
    nameless = count()
    for sequence, num_tokens, tables in rows:
        known = sequence in names
        name = "cache {} row {}".format(*names[sequence]) if known else f"sequence {next(nameless)}"
        if any(tables):
            sequences.append(PoolSequence(name, num_tokens, tables))
    groups = runtime.manager.groups
    return PoolView(
        block_size=runtime.block_size,
        bytes_per_block=runtime.bytes_per_block,
        groups=_name_groups([(group.layers, group.window) for group in groups]),
        sequences=tuple(sequences),
        blocks=_make_blocks(states, sequences),
        eviction_order=tuple(states.cached),
    )


_Row = tuple[KVSequence, int, tuple[tuple[int, ...], ...]]


@whole
def _copy(
    runtime: PagedRuntime,
) -> tuple[list[_Row], dict[KVSequence, tuple[int, int]], BlockStates]:
    with runtime.lock:
        runtime.reclaim()
        rows = [
            (sequence, sequence.num_tokens, tuple(tuple(table.ids) for table in sequence.tables))
            for sequence in runtime.manager.sequences
        ]
        return rows, runtime.rows_of_owners(), runtime.manager.pool.states()


def _make_blocks(states: BlockStates, sequences: list[PoolSequence]) -> tuple[PoolBlock, ...]:
    owners: list[tuple[int, ...]] = [()] * len(states.ref_counts)
    groups = [None if content is None else content[1] for content in states.contents]
    for index, sequence in enumerate(sequences):
        joined: dict[tuple[int, ...], tuple[int, ...]] = {}
        for group, table in enumerate(sequence.tables):
            for block_id in table:
                if block_id != NO_BLOCK:
                    others = owners[block_id]
                    owners[block_id] = joined.setdefault(others, (*others, index))
                    groups[block_id] = group
    # Few blocks differ in anything but their id; an object for each would keep the garbage
    # collector busy for half a second.
    made: dict[Any, PoolBlock] = {}
    blocks = [_FREE] * len(states.ref_counts)
    cached = set(states.cached)
    for block_id, ref_count in enumerate(states.ref_counts):
        if ref_count or block_id in cached:
            look = (ref_count, owners[block_id], groups[block_id], states.num_filled[block_id])
            if look not in made:
                made[look] = PoolBlock("used" if ref_count else "cached", *look)
            blocks[block_id] = made[look]
    return tuple(blocks)


def _name_groups(groups: list[tuple[tuple[int, ...], int | None]]) -> tuple[PoolGroup, ...]:
    """Name each group by its window, and number those that are alike."""
    windows = [window for _, window in groups]
    named = []
    for index, (layers, window) in enumerate(groups):
        name = "full attention" if window is None else f"window {window}"
        if windows.count(window) > 1:
            name += f" #{windows[:index].count(window) + 1}"
        named.append(PoolGroup(name, layers, window))
    return tuple(named)
