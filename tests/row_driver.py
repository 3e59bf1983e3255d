"""Plays engine and model for a RowScheduler, and knows what every slot of the pool holds.

K and V of a token depend on everything before it, so a slot holds an *identity*: layer group,
position and all tokens up to this one. The pool is a dict, slot -> identity, that is written and
copied as an allocation says and read as attention would read it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from forwards import table
from hf_paged.core.allocation import Allocation, RowAllocation
from hf_paged.core.block_table import NO_BLOCK
from hf_paged.core.cache_manager import KVCacheManager
from hf_paged.core.layer_group import group_layers
from hf_paged.core.row import Row
from hf_paged.core.row_batch import RowBatch
from hf_paged.core.row_scheduler import RowScheduler
from hf_paged.core.sequence import Sequence as KVSequence

Identity = tuple[int, int, tuple[int, ...]]
Batch = list[tuple[str, list[int]]]


def tokens(first: int, num_tokens: int) -> list[int]:
    """Return what the counting model takes for a text."""
    return list(range(first, first + num_tokens))


def table_of(row: Row, group: int = 0) -> list[int]:
    assert row.sequence is not None
    return table(row.sequence, group)


def lines(driver: RowDriver) -> tuple[int, int]:
    """Return how many rows are active and how many wait."""
    return driver.scheduler.num_active, driver.scheduler.num_waiting


def counting(token_ids: list[int]) -> int:
    """A model that is easy to read: 10, 11, 12, ..."""
    return token_ids[-1] + 1


class RowDriver:
    """Runs rows to their ends, a forward after the other.

    Args:
        num_blocks: of the pool.
        windows: of the model's layers.
        model: returns the next token of a row.
        is_patient: rows that enter together decode together, as in the engine.

    Attributes:
        make_room: asked before a row has to give way; to be replaced.
        batches: rows and tokens of each forward so far, by their names.
        finished: all tokens of each row that has ended.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        block_size: int = 4,
        windows: Sequence[int | None] = (None,),
        max_batch_tokens: int = 64,
        version: Hashable | None = "v",
        keep: bool = True,
        model: Callable[[list[int]], int] = counting,
        is_patient: bool = False,
    ) -> None:
        self._contents: dict[int, Identity] = {}
        self.manager = KVCacheManager(
            num_blocks, block_size, group_layers(windows), on_emptied=self._on_emptied
        )
        self.sequences: list[KVSequence] = []
        self.scheduler = RowScheduler(
            self.manager,
            self.manager.begin,
            lambda: self.make_room(),
            max_batch_tokens=max_batch_tokens,
            version=version,
            keep=keep,
            sequences=self.sequences,
        )
        self.make_room: Callable[[], bool] = lambda: False
        self.batches: list[Batch] = []
        self.finished: dict[str, list[int]] = {}
        self._model = model
        self._is_patient = is_patient
        self._num_new: dict[Row, int] = {}
        self._ready: dict[Row, None] = {}

    def add(
        self,
        name: str,
        prompt: list[int],
        num_new: int = 1,
        *,
        position: int = 0,
        max_new: int | None = None,
    ) -> Row:
        """Add a row that ends after ``num_new`` tokens, though it might come to ``max_new``."""
        max_tokens = len(prompt) + (max_new or num_new) - 1
        row = Row(prompt[:], position, max_tokens=max_tokens, payload=name)
        self._num_new[row] = num_new
        self.scheduler.add(row)
        return row

    def step(self) -> Batch:
        """Run one forward, append tokens to the rows that are ready; return what was computed."""
        batch = self.scheduler.next_batch()
        named: Batch = []
        if batch is not None:
            self._forward(batch)
            named = self._named(batch)
            self.batches.append(named)
            for row in [batch.rows[index] for index in batch.complete]:
                self._ready.update(dict.fromkeys([row, *self.scheduler.fork_twins(row)]))
        if not (self._is_patient and self.scheduler.is_filling):
            self._advance()
        self.manager.check_integrity()
        held = [sequence for sequence in self.manager.sequences if sequence in self.sequences]
        assert len(held) == len(self.sequences)
        return named

    def run(self, max_steps: int = 1000) -> list[Batch]:
        """Run all rows to their ends; return what was computed."""
        first = len(self.batches)
        for _ in range(max_steps):
            if not self.scheduler.num_active + self.scheduler.num_waiting:
                break
            self.step()
        assert not self.scheduler.num_active + self.scheduler.num_waiting, "no end"
        assert not self.sequences
        return self.batches[first:]

    # -- inside --------------------------------------------------------------------------------

    def _advance(self) -> None:
        # A row that had to give way meanwhile computes its last token again.
        ready = [row for row in self._ready if row.sequence is not None and not row.num_missing]
        self._ready = {}
        for row in ready:
            row.token_ids.append(self._model(row.token_ids))
            if row.num_generated == self._num_new[row]:
                self.scheduler.finish(row)
                self.finished[row.payload] = row.token_ids

    def _named(self, batch: RowBatch) -> Batch:
        """Return the tokens of each row; check that the batch lists them end to end."""
        named, token_ids, positions = [], list[int](), list[int]()
        for row, allocated in zip(batch.rows, batch.allocation.rows, strict=True):
            span = range(allocated.start, allocated.end)
            token_ids += row.token_ids[span.start : span.stop]
            positions += [row.first_position + index for index in span]
            named.append((row.payload, row.token_ids[span.start : span.stop]))
        assert (batch.token_ids, batch.positions) == (token_ids, positions)
        missing = [index for index, row in enumerate(batch.rows) if row.num_missing]
        assert sorted([*batch.complete, *missing]) == list(range(len(batch.rows)))
        return named

    def _forward(self, batch: RowBatch) -> None:
        rows = list(zip(batch.rows, batch.allocation.rows, strict=True))
        self._copy(batch.allocation)
        for row, allocated in rows:
            self._write(row, allocated)
        for row, allocated in rows:
            self._read(row, allocated.start, allocated.end)
        self.manager.commit(batch.allocation)
        for row, allocated in rows:
            self._read(row, allocated.end, allocated.end)

    def _copy(self, allocation: Allocation) -> None:
        size = self.manager.block_size
        self._on_emptied(allocation.new_blocks)
        for source, target in allocation.copies:
            for offset in range(size):
                if source * size + offset in self._contents:
                    held = self._contents[source * size + offset]
                    self._contents[target * size + offset] = held

    def _write(self, row: Row, allocated: RowAllocation) -> None:
        for group in range(len(self.manager.groups)):
            slots = allocated.slots(group, self.manager.block_size)
            for index, slot in enumerate(slots, allocated.start):
                if slot >= 0:
                    known = self.manager.pool.content(slot // self.manager.block_size)
                    assert known is None, "known content overwritten"
                    self._contents[slot] = self._identity(row, group, index)

    def _read(self, row: Row, first_query: int, num_tokens: int) -> None:
        """Assert that the table holds what queries from ``first_query`` on see of the past.

        Tokens of a forward are seen as they were computed, whether or not they are stored.
        """
        size = self.manager.block_size
        assert row.sequence is not None
        for group_id, group in enumerate(self.manager.groups):
            table = row.sequence.tables[group_id]
            stored = range(group.num_hidden_tokens(first_query), first_query)
            after = range(max(first_query, group.num_hidden_tokens(num_tokens)), num_tokens)
            for index in (*stored, *after):
                block = table[index // size]
                assert block != NO_BLOCK, f"token {index} of {row.payload} is not stored"
                held = self._contents.get(block * size + index % size)
                assert held == self._identity(row, group_id, index)

    def _identity(self, row: Row, group: int, index: int) -> Identity:
        return group, row.first_position, tuple(row.token_ids[: index + 1])

    def _on_emptied(self, block_ids: list[int]) -> None:
        for block in block_ids:
            for slot in range(
                block * self.manager.block_size, (block + 1) * self.manager.block_size
            ):
                self._contents.pop(slot, None)
