"""The machine of the manager again, over real tensors: what is gathered is what was computed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

from hf_paged.backends.metadata import AttentionMetadata
from hf_paged.backends.torch_gather import TorchGatherBackend
from hf_paged.cache.layout import KVLayout
from hf_paged.cache.storage import KVStorage
from hf_paged.core.allocation import Allocation
from hf_paged.core.block_table import NO_BLOCK
from manager_machine import BLOCK_SIZE, GROUPS, NUM_BLOCKS, WINDOWS, Forward, ManagerMachine

pytestmark = pytest.mark.core_suite

NUM_KV_HEADS, HEAD_DIM = 2, 3
LAYOUT = KVLayout(WINDOWS, NUM_KV_HEADS, HEAD_DIM, torch.float32)


def build_metadata(allocation: Allocation, group: int) -> AttentionMetadata:
    """Put a group's view of a forward into tensors, as hf_paged/cache/step.py does."""
    rows = allocation.rows
    tables = [list(row.sequence.tables[group].ids) for row in rows]
    width = max(len(table) for table in tables)
    padded = [table + [NO_BLOCK] * (width - len(table)) for table in tables]
    block_tables = torch.tensor(padded, dtype=torch.int32)
    query_lens = [row.end - row.start for row in rows]
    seq_lens = [row.end for row in rows]
    return AttentionMetadata(
        block_size=BLOCK_SIZE,
        null_block=NUM_BLOCKS,
        block_tables=torch.where(block_tables == NO_BLOCK, NUM_BLOCKS, block_tables),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32),
        slot_mapping=torch.tensor([slot for row in rows for slot in row.slots(group, BLOCK_SIZE)]),
        seq_lens_list=seq_lens,
        query_lens_list=query_lens,
    )


class StorageMachine(ManagerMachine):
    """Slots are rows of the tensors of KVStorage; what holds nothing is NaN, as in debug mode."""

    def __init__(self) -> None:
        self.backend = TorchGatherBackend()
        self.storage = KVStorage(self.backend, LAYOUT, NUM_BLOCKS, BLOCK_SIZE)
        self.computed = torch.randn(
            1024,
            len(WINDOWS),
            2,
            NUM_KV_HEADS,
            HEAD_DIM,
            generator=torch.Generator().manual_seed(0),
        )
        super().__init__()

    def key_value(self, identities: list[int], layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V [n, H_kv, D] that ``layer`` computes for tokens: random, a row each."""
        states = self.computed[torch.tensor(identities, dtype=torch.int64) % 1024, layer]
        return states[:, 0], states[:, 1]

    def on_begin(self, allocation: Allocation) -> None:
        self.storage.poison(allocation.new_blocks)
        self.storage.copy_blocks(allocation.copies)

    def on_emptied(self, block_ids: list[int]) -> None:
        self.storage.poison(block_ids)

    def write(self, forward: Forward, identities: list[list[int]]) -> None:
        packed = [identity for row in identities for identity in row]
        for group_id, group in enumerate(GROUPS):
            metadata = build_metadata(forward.allocation, group_id)
            for layer in group.layers:
                key, value = self.key_value(packed, layer)
                self.backend.write(key, value, self.storage.view(layer, key, value), metadata)

    def check_slots(self, group: int, slots: list[int], identities: list[int]) -> None:
        if not slots:
            return
        for layer in GROUPS[group].layers:
            expected = self.key_value(identities, layer)
            view = self.storage.view(layer, *expected)
            stored = self.backend.gather(view, torch.tensor(slots))
            for name, mine, theirs in zip("KV", stored, expected, strict=True):
                assert torch.equal(mine, theirs), f"{name} of layer {layer} differs"


TestStorage = StorageMachine.TestCase
TestStorage.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


def test_null_block_stays_zero() -> None:
    """Entries behind the window read the null block: copies and poison leave it alone."""
    storage = KVStorage(TorchGatherBackend(), LAYOUT, 2, BLOCK_SIZE)
    new = torch.ones(1, NUM_KV_HEADS, HEAD_DIM)
    view = storage.view(0, new, new)
    storage.copy_blocks([(0, 1)])
    storage.poison([0, 1])
    assert view.key_cache[:2].isnan().all()
    assert not view.key_cache[2].any()
    assert not view.value_cache[2].any()


def test_copy_reaches_every_layer() -> None:
    """One copy of a block copies K and V of each layer of its group, bit for bit."""
    storage = KVStorage(TorchGatherBackend(), LAYOUT, 3, BLOCK_SIZE)
    new = torch.ones(1, NUM_KV_HEADS, HEAD_DIM)
    views = [storage.view(layer, new, new) for layer in GROUPS[0].layers]
    for number, view in enumerate(views, start=1):
        view.key_cache[2], view.value_cache[2] = number, -number
    storage.copy_blocks([(2, 0)])
    for number, view in enumerate(views, start=1):
        assert (view.key_cache[0] == number).all()
        assert (view.value_cache[0] == -number).all()
        assert not view.key_cache[1].any()
