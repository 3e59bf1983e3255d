"""A hypothesis machine over KVCacheManager, and a twin in plain lists of every sequence.

K and V of a token depend on everything before it. So the twin knows each token by an *identity*,
a number for (identity of the token before, token, position, version): two slots may be shared
exactly if they hold the same identity. What a slot holds is the business of a subclass, which
keeps identities in a dict or K and V in real tensors.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hf_paged.core.allocation import Allocation, NewTokens
from hf_paged.core.block_table import NO_BLOCK
from hf_paged.core.cache_manager import KVCacheManager
from hf_paged.core.layer_group import group_layers
from hf_paged.core.prefix_index import PrefixNode
from hf_paged.core.sequence import Sequence
from hf_paged.errors import KVCacheFullError

NUM_BLOCKS = 44
BLOCK_SIZE = 4
WINDOWS = (None, 5, None, 5)
GROUPS = group_layers(WINDOWS)
MAX_SEQUENCES = 5
GARBAGE = 0
"""Identity of what a failed forward leaves in the slots that it was to write."""


@dataclass
class Twin:
    """What a sequence must hold, in plain lists."""

    sequence: Sequence
    identities: list[int] = field(default_factory=list)
    version: Hashable = None
    next_position: int = 0
    is_whole: bool = True
    """Every forward held the window."""


@dataclass
class Row:
    """One row of a forward as hypothesis draws it."""

    tokens: list[int]
    version: str
    position: int
    kind: str

    @staticmethod
    def strategy() -> st.SearchStrategy[Row]:
        return st.builds(
            Row,
            tokens=st.one_of(
                st.lists(st.integers(0, 1), min_size=1, max_size=6),
                st.integers(5, 18).map(lambda n: [0] * n),
            ),
            version=st.sampled_from(["A", "A", "B", "unkept"]),
            position=st.sampled_from([0, 0, 0, 3]),
            kind=st.sampled_from(
                ["plain"] * 8 + ["other version", "no version", "no ids", "no positions", "gap"]
            ),
        )


ORDER = st.permutations(range(MAX_SEQUENCES))
ROWS = st.lists(Row.strategy(), min_size=1, max_size=MAX_SEQUENCES)


@dataclass
class Forward:
    """A forward in progress: begun, not yet ended."""

    allocation: Allocation
    twins: list[Twin]
    grown: list[Twin]
    tables_before: list[list[list[int]]]
    hold_window: bool
    slots: list[list[int]]


class ManagerMachine(RuleBasedStateMachine):
    """Random forwards, forks, crops and frees; up to two forwards overlap, as threads do."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = KVCacheManager(NUM_BLOCKS, BLOCK_SIZE, GROUPS, on_emptied=self.on_emptied)
        self.twins: list[Twin] = []
        self.running: list[Forward] = []
        self._identities: dict[tuple[int | None, Any, int, Any], int] = {}

    # -- what a slot holds: for subclasses -----------------------------------------------------

    @abstractmethod
    def on_begin(self, allocation: Allocation) -> None:
        """Poison new blocks, make the copies."""

    @abstractmethod
    def on_emptied(self, block_ids: list[int]) -> None:
        """These blocks hold nothing any more."""

    @abstractmethod
    def write(self, forward: Forward, identities: list[list[int]]) -> None:
        """Store the new tokens of each row, where they have a slot."""

    @abstractmethod
    def check_slots(self, group: int, slots: list[int], identities: list[int]) -> None:
        """Assert that each slot holds its identity."""

    # -- rules ---------------------------------------------------------------------------------

    @initialize(num_sequences=st.integers(1, 3))
    def new_sequences(self, num_sequences: int) -> None:
        for _ in range(num_sequences):
            self.new_sequence()

    @rule()
    @precondition(lambda self: len(self.twins) < MAX_SEQUENCES)
    def new_sequence(self) -> None:
        self.twins.append(Twin(self.manager.new_sequence()))

    @rule(order=ORDER, rows=ROWS, hold_window=st.booleans(), is_committed=st.booleans())
    @precondition(lambda self: self.idle())
    def forward(
        self, order: list[int], rows: list[Row], hold_window: bool, is_committed: bool
    ) -> None:
        num_running = len(self.running)
        self._begin(order, rows, hold_window)
        if len(self.running) > num_running and is_committed:
            self.commit(num_running)
        elif len(self.running) > num_running:
            self.roll_back(num_running)

    @rule(order=ORDER, rows=ROWS, hold_window=st.booleans())
    @precondition(lambda self: len(self.running) < 2 and self.idle())
    def begin(self, order: list[int], rows: list[Row], hold_window: bool) -> None:
        self._begin(order, rows, hold_window)

    def _begin(self, order: list[int], rows: list[Row], hold_window: bool) -> None:
        idle = self.idle()
        twins = [idle[i] for i in order if i < len(idle)][: len(rows)]
        grown, news = self._grow(twins, rows)
        pool = self.manager.pool
        tables = [[list(table.ids) for table in twin.sequence.tables] for twin in twins]
        valid = self._valid_slots()
        before = [pool.ref_count(block) for block in range(NUM_BLOCKS)], pool.free_blocks()
        at_most = sum(
            -(-len(new.identities) // BLOCK_SIZE) - len(old.identities) // BLOCK_SIZE
            for old, new in zip(twins, grown, strict=True)
        ) * len(GROUPS)
        available = pool.num_available
        try:
            allocation = self.manager.begin(news, hold_window=hold_window)
        except KVCacheFullError as error:
            assert at_most > available, f"{at_most} of {available} blocks are at most needed"
            assert error.num_needed_blocks > error.num_available_blocks == available
            assert error.num_rows_that_fit < error.num_rows == len(news)
            assert before == (
                [pool.ref_count(block) for block in range(NUM_BLOCKS)],
                pool.free_blocks(),
            )
            return
        slots = [
            row.slots(group, BLOCK_SIZE) for group in range(len(GROUPS)) for row in allocation.rows
        ]
        forward = Forward(allocation, twins, grown, tables, hold_window, slots)
        self._check_targets(forward, valid)
        self.running.append(forward)
        self.on_begin(allocation)

    @rule(pick=st.integers(0, 1))
    @precondition(lambda self: self.running)
    def commit(self, pick: int) -> None:
        forward = self.running.pop(pick % len(self.running))
        self.write(
            forward,
            [
                new.identities[len(old.identities) :]
                for old, new in zip(forward.twins, forward.grown, strict=True)
            ],
        )
        self.manager.commit(forward.allocation, hold_window=forward.hold_window)
        for twin, grown in zip(forward.twins, forward.grown, strict=True):
            self.twins[self.twins.index(twin)] = grown
            if not forward.hold_window:
                grown.is_whole = False
                assert self.blocks_within_bound(grown.sequence)

    @rule(pick=st.integers(0, 1))
    @precondition(lambda self: self.running)
    def roll_back(self, pick: int) -> None:
        forward = self.running.pop(pick % len(self.running))
        self.write(
            forward,
            [
                [GARBAGE] * (len(new.identities) - len(old.identities))
                for old, new in zip(forward.twins, forward.grown, strict=True)
            ],
        )
        self.manager.rollback(forward.allocation)
        for twin, tables in zip(forward.twins, forward.tables_before, strict=True):
            assert [list(table.ids) for table in twin.sequence.tables] == tables

    @rule(pick=st.integers(0, MAX_SEQUENCES - 1))
    @precondition(lambda self: self.idle() and len(self.twins) < MAX_SEQUENCES)
    def fork(self, pick: int) -> None:
        twin = self._pick(pick)
        child = self.manager.fork(twin.sequence)
        self.twins.append(replace(twin, sequence=child, identities=twin.identities[:]))

    @rule(pick=st.integers(0, MAX_SEQUENCES - 1), num_dropped=st.integers(1, 3))
    @precondition(lambda self: self.idle() and len(self.twins) < MAX_SEQUENCES)
    def fork_and_crop(self, pick: int, num_dropped: int) -> None:
        self.fork(pick)
        self._crop(self.twins[-1], num_dropped, drop=False)

    @rule(
        pick=st.integers(0, MAX_SEQUENCES - 1),
        num_dropped=st.one_of(st.integers(1, 2), st.integers(0, 12)),
        drop=st.booleans(),
    )
    @precondition(lambda self: self.idle())
    def crop(self, pick: int, num_dropped: int, drop: bool) -> None:
        self._crop(self._pick(pick), num_dropped, drop)

    def _crop(self, twin: Twin, num_dropped: int, drop: bool) -> None:
        num_tokens = max(0, len(twin.identities) - num_dropped)
        if not self.manager.can_crop(twin.sequence, num_tokens):
            assert not twin.is_whole
            return
        self.manager.crop(twin.sequence, num_tokens)
        twin.next_position -= len(twin.identities) - num_tokens
        del twin.identities[num_tokens:]
        if drop:
            self.manager.drop_hidden(twin.sequence)
            twin.is_whole = False
            assert self.blocks_within_bound(twin.sequence)

    @rule(pick=st.integers(0, MAX_SEQUENCES - 1))
    @precondition(lambda self: self.idle() and len(self.twins) > 2)
    def free(self, pick: int) -> None:
        twin = self._pick(pick)
        self.twins.remove(twin)
        self.manager.free(twin.sequence)

    @rule()
    @precondition(lambda self: self.manager.pool.num_cached > 4)
    def clear_cached(self) -> None:
        self.manager.clear_cached()
        assert self.manager.pool.num_cached == 0

    # -- invariants ----------------------------------------------------------------------------

    @invariant()
    def accounts_are_whole(self) -> None:
        pool = self.manager.pool
        self.manager.check_integrity()
        assert pool.num_free + pool.num_cached + pool.num_used == NUM_BLOCKS
        assert 0 <= self.manager.utilization <= 1
        if not self.twins:
            assert pool.num_used == pool.num_live_slots == 0

    @invariant()
    def sequences_hold_what_they_see(self) -> None:
        for twin in self.twins:
            assert twin.sequence.num_tokens == len(twin.identities)
            for group, table in enumerate(twin.sequence.tables):
                first = GROUPS[group].num_hidden_tokens(len(twin.identities))
                indices = range(first, len(twin.identities))
                assert all(table[i // BLOCK_SIZE] != NO_BLOCK for i in indices)
                slots = [table[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in indices]
                self.check_slots(group, slots, twin.identities[first:])

    @invariant()
    def published_blocks_hold_what_their_prefix_says(self) -> None:
        pool = self.manager.pool
        for block in range(NUM_BLOCKS):
            content = pool.content(block)
            if content is not None:
                node, group = content
                root = self.manager.index.root(node.root.version, keep=node.root.keep)
                assert node.root is root, "known content that no look-up can find"
                first = block * BLOCK_SIZE
                identities = self._path(node)[-BLOCK_SIZE:]
                self.check_slots(group, list(range(first, first + BLOCK_SIZE)), identities)

    def teardown(self) -> None:
        for forward in self.running:
            self.manager.rollback(forward.allocation)
        for twin in self.twins:
            self.manager.free(twin.sequence)
        self.manager.check_integrity()
        self.manager.clear_cached()
        assert self.manager.pool.num_free == NUM_BLOCKS

    # -- inside --------------------------------------------------------------------------------

    def idle(self) -> list[Twin]:
        """Return the sequences that no forward is working on."""
        busy = {id(twin) for forward in self.running for twin in forward.twins}
        return [twin for twin in self.twins if id(twin) not in busy]

    def blocks_within_bound(self, sequence: Sequence) -> bool:
        """Whether no group holds more than its tokens, or its window, can need."""
        return all(
            group.window is None or len(list(table.held())) <= -(-group.window // BLOCK_SIZE) + 1
            for group, table in zip(GROUPS, sequence.tables, strict=True)
        )

    def _pick(self, pick: int) -> Twin:
        idle = self.idle()
        return idle[pick % len(idle)]

    def _identity(self, before: int | None, token: Any, position: int, version: Any) -> int:
        key = (before, token, position, version)
        return self._identities.setdefault(key, len(self._identities) + 1)

    def _extend(
        self, identities: list[int], tokens: Iterable[Any], position: int, version: Any
    ) -> list[int]:
        identities = identities[:]
        for offset, token in enumerate(tokens):
            before = identities[-1] if identities else None
            identities.append(self._identity(before, token, position + offset, version))
        return identities

    def _path(self, node: PrefixNode) -> list[int]:
        """Return the identities of all tokens of a prefix."""
        if node.key is None or node.parent is None:
            return []
        before = self._path(node.parent)
        version = node.root.version  # type: ignore[attr-defined]
        return self._extend(before, node.key.tokens, node.key.first_position, version)

    def _grow(self, twins: list[Twin], rows: list[Row]) -> tuple[list[Twin], list[NewTokens]]:
        """Return what the sequences of a forward become, and the request."""
        grown, news = [], []
        for twin, row in zip(twins, rows, strict=False):
            version, position = twin.version, twin.next_position
            if not twin.identities:
                version, position = row.version, row.position
            if row.kind == "other version":
                version = (version, "other")
            position += 2 * (row.kind == "gap")
            new = NewTokens(
                twin.sequence, len(row.tokens), row.tokens, position, version, version != "unkept"
            )
            tokens: list[Any] = row.tokens
            if row.kind == "no version":
                new.version, version = None, object()
            elif row.kind == "no ids":
                new.token_ids, tokens = None, [object() for _ in tokens]
            elif row.kind == "no positions":
                new.first_position, tokens = None, [object() for _ in tokens]
            news.append(new)
            grown.append(
                replace(
                    twin,
                    identities=self._extend(twin.identities, tokens, position, version),
                    version=version,
                    next_position=position + len(tokens),
                )
            )
        return grown, news

    def _valid_slots(self) -> list[set[int]]:
        """Return, for each group, the slots that somebody may read as things are."""
        valid: list[set[int]] = []
        for group in range(len(GROUPS)):
            slots = set()
            for twin in self.twins:
                table = twin.sequence.tables[group]
                for i in range(
                    GROUPS[group].num_hidden_tokens(len(twin.identities)), len(twin.identities)
                ):
                    slots.add(table[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE)
            valid.append(slots)
        return valid

    def _check_targets(self, forward: Forward, valid: list[set[int]]) -> None:
        """Assert that nothing is overwritten that a reader, or a rollback, could need."""
        others = [slot for running in self.running for row in running.slots for slot in row]
        written = [slot for row in forward.slots for slot in row if slot >= 0]
        assert len(written) == len(set(written)), "two tokens in one slot"
        assert not set(written) & set().union(*valid), "a slot that is read is to be written"
        assert not set(written) & set(others), "two forwards write one slot"
        for slot in written:
            assert self.manager.pool.content(slot // BLOCK_SIZE) is None, (
                "known content overwritten"
            )


class DictMachine(ManagerMachine):
    """Slots are the keys of a dict: no tensors, many examples."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}
        super().__init__()

    def on_begin(self, allocation: Allocation) -> None:
        self.on_emptied(allocation.new_blocks)
        for source, target in allocation.copies:
            for offset in range(BLOCK_SIZE):
                if source * BLOCK_SIZE + offset in self.held:
                    held = self.held[source * BLOCK_SIZE + offset]
                    self.held[target * BLOCK_SIZE + offset] = held

    def on_emptied(self, block_ids: list[int]) -> None:
        for block in block_ids:
            for slot in range(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE):
                self.held.pop(slot, None)

    def write(self, forward: Forward, identities: list[list[int]]) -> None:
        rows = identities * len(self.manager.groups)
        for slots, new in zip(forward.slots, rows, strict=True):
            self.held.update((s, i) for s, i in zip(slots, new, strict=True) if s >= 0)

    def check_slots(self, group: int, slots: list[int], identities: list[int]) -> None:
        assert [self.held.get(slot) for slot in slots] == identities
