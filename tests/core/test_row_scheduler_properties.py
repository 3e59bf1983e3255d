"""Random rows on small pools: the tokens of a model that has no cache, whatever gives way."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from forwards import make_manager, start
from hf_paged.errors import KVCacheFullError
from row_driver import RowDriver

pytestmark = pytest.mark.core_suite

WINDOWS: list[Sequence[int | None]] = [(None,), (8,), (None, 4)]
GUEST_STAYS = 6
"""Steps for which somebody else holds blocks of the pool."""


def model(token_ids: list[int]) -> int:
    """Depends on every token, and says so little that rows often agree."""
    value = 7
    for token in token_ids:
        value = (31 * value + token + 1) % 1009
    return value % 2


@dataclass
class Spec:
    """A row as hypothesis draws it."""

    prompt: list[int]
    num_new: int
    max_new: int
    position: int
    arrives: int
    leaves: int | None

    @property
    def expected(self) -> list[int]:
        """What the model generates by itself."""
        tokens = self.prompt[:]
        for _ in range(self.num_new):
            tokens.append(model(tokens))
        return tokens


PROMPTS = st.one_of(
    st.lists(st.integers(0, 3), min_size=1, max_size=6),
    st.builds(
        lambda num_common, tail: [0] * num_common + tail,
        st.integers(1, 20),
        st.lists(st.integers(0, 1), max_size=4),
    ),
)
ROWS = st.lists(
    st.builds(
        Spec,
        prompt=PROMPTS,
        num_new=st.integers(1, 16),
        max_new=st.sampled_from(
            [1, 1, 5, 20]
        ),  # too low: the room that was left for others is not enough
        position=st.sampled_from([0, 0, 0, 3]),
        arrives=st.sampled_from([0, 0, 0, 2, 5]),
        leaves=st.sampled_from([None, None, None, 4]),
    ),
    min_size=2,
    max_size=8,
)


@given(
    specs=ROWS,
    windows=st.sampled_from(WINDOWS),
    block_size=st.sampled_from([4, 4, 3, 1]),
    num_spare_blocks=st.sampled_from([0, 1, 2, 8]),
    max_batch_tokens=st.sampled_from([1, 4, 6, 10, 64]),
    version=st.sampled_from(["v", "v", "v", None]),
    keep=st.booleans(),
    is_patient=st.booleans(),
    guest_arrives=st.sampled_from([None, None, 1, 3]),
)
@settings(max_examples=200, deadline=None)
def test_every_row_gets_its_tokens(
    specs: list[Spec],
    windows: Sequence[int | None],
    block_size: int,
    num_spare_blocks: int,
    max_batch_tokens: int,
    version: str | None,
    keep: bool,
    is_patient: bool,
    guest_arrives: int | None,
) -> None:
    """Each in a bounded number of forwards; the driver checks K and V of each."""
    longest = max(len(spec.expected) - 1 for spec in specs)
    num_blocks = make_manager(1, block_size, windows).num_blocks_at_most(longest)
    driver = RowDriver(
        num_blocks + num_spare_blocks,
        block_size=block_size,
        windows=windows,
        max_batch_tokens=max_batch_tokens,
        version=version,
        keep=keep,
        model=model,
        is_patient=is_patient,
    )
    scheduler, manager = driver.scheduler, driver.manager
    rows, guests = {}, []
    # The oldest row goes on by a token in each forward, unless it waits for others to be complete.
    num_steps = sum(len(spec.expected) + 1 for spec in specs) + GUEST_STAYS + 10
    for step in range(num_steps):
        for index, spec in enumerate(specs):
            if spec.arrives == step:
                rows[index] = driver.add(
                    str(index),
                    spec.prompt,
                    spec.num_new,
                    position=spec.position,
                    max_new=spec.max_new,
                )
            elif spec.leaves == step and index in rows and rows[index] in scheduler:
                scheduler.finish(rows[index])
        if step == guest_arrives and manager.pool.num_available >= len(windows):
            held = manager.pool.num_available // len(windows) * block_size
            guests.append(start(manager, [2] * held, version="guest"))
        if guests and step == guest_arrives + GUEST_STAYS:
            manager.free(guests.pop())
        with suppress(*[KVCacheFullError for _ in guests]):
            batch = driver.step()
            num_tokens = sum(len(tokens) for _, tokens in batch)
            num_single = sum(len(tokens) == 1 for _, tokens in batch)
            assert num_tokens <= max(max_batch_tokens, num_single + block_size)
    for index, spec in enumerate(specs):
        if spec.leaves is None or str(index) in driver.finished:
            assert driver.finished[str(index)] == spec.expected
    assert (scheduler.num_active, scheduler.num_waiting, driver.sequences) == (0, 0, [])
    assert manager.pool.num_used == 0
    event(f"{min(5, scheduler.num_preemptions)} preemptions")
