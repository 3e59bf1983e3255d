"""Blocks outside of the pool: copied beside what is computed, and never too late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from delayed_stream import DelayedStream
from hf_paged.backends.base import AttentionBackend
from hf_paged.backends.torch_gather import TorchGatherBackend
from hf_paged.backends.triton import TritonBackend
from hf_paged.cache import block_file
from hf_paged.cache.block_file import BlockFile
from hf_paged.cache.layout import KVLayout
from hf_paged.cache.storage import KVStorage

pytestmark = pytest.mark.core_suite


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> DelayedStream:
    stream = DelayedStream()
    monkeypatch.setattr(block_file, "copy_stream", lambda device: stream)
    return stream


def make_storage(backend: AttentionBackend, num_blocks: int = 8) -> KVStorage:
    layout = KVLayout((None, None), 2, 16, torch.float32)
    storage = KVStorage(backend, layout, num_blocks, 16)
    for layer in (0, 1):
        new = torch.zeros(1, 2, 16)
        view = storage.view(layer, new, new)
        for part, cache in enumerate((view.key_cache, view.value_cache)):
            for block in range(num_blocks):
                cache[block] = 100 * layer + 10 * part + block
    return storage


def contents(storage: KVStorage, block: int) -> list[float]:
    new = torch.zeros(1, 2, 16)
    views = [storage.view(layer, new, new) for layer in (0, 1)]
    return [
        float(cache[block].unique().item()) for v in views for cache in (v.key_cache, v.value_cache)
    ]


BACKENDS = pytest.mark.parametrize(
    "backend", [TorchGatherBackend(), TritonBackend()], ids=["apart", "block-major"]
)


@BACKENDS
def test_blocks_come_back_as_they_left(backend: Any) -> None:
    storage = make_storage(backend)
    file = BlockFile(storage, 3)
    slots = file.store([5, 2])
    assert slots == [0, 1]
    assert file.store([1, 3]) is None, "no room for both"
    assert file.store([7]) == [2]
    file.load([1, 0], [0, 4])
    assert contents(storage, 0) == [2, 12, 102, 112]
    assert contents(storage, 4) == [5, 15, 105, 115]
    file.free([0, 1])
    assert file.store([3, 6]) == [0, 1]
    assert (file.num_stored, file.num_loaded) == (5, 2)


def test_one_copy_a_block_where_storage_is_block_major(stream: DelayedStream) -> None:
    assert len(make_storage(TritonBackend()).tensors()) == 1
    assert len(make_storage(TorchGatherBackend()).tensors()) == 4


@BACKENDS
def test_a_block_on_its_way_out_is_not_written_before_it_has_left(
    backend: Any, stream: DelayedStream
) -> None:
    storage = make_storage(backend)
    file = BlockFile(storage, 4)
    assert file.store([5, 2]) == [0, 1]
    assert stream.num_pending, "nobody has waited so far"
    file.await_blocks([0, 1, 3])
    assert stream.num_pending, "these are none of them"
    file.await_blocks([3, 2])
    assert not stream.num_pending
    for tensor in storage.tensors():
        tensor[2] = tensor[5] = -1  # the pool's next user
    file.load([0, 1], [2, 5])
    assert contents(storage, 2) == [5, 15, 105, 115]
    assert contents(storage, 5) == [2, 12, 102, 112]


@BACKENDS
def test_what_comes_in_is_there_for_the_next_forward(backend: Any, stream: DelayedStream) -> None:
    storage = make_storage(backend)
    file = BlockFile(storage, 4)
    assert file.store([5]) == [0]
    file.load([0], [1])
    assert contents(storage, 1) == [5, 15, 105, 115]


def test_a_slot_that_is_stored_again_holds_the_later_block(stream: DelayedStream) -> None:
    storage = make_storage(TorchGatherBackend())
    file = BlockFile(storage, 1)
    assert file.store([5]) == [0]
    file.load([0], [1])
    file.free([0])
    assert file.store([6]) == [0]
    file.load([0], [2])
    assert contents(storage, 1) == [5, 15, 105, 115]
    assert contents(storage, 2) == [6, 16, 106, 116]


def test_a_copy_that_fails_leaves_no_slot_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    file = BlockFile(make_storage(TorchGatherBackend()), 2)

    class Broken(DelayedStream):
        def queue(self, copies: Callable[[], None]) -> int:
            raise RuntimeError("the device is gone")

    monkeypatch.setattr(block_file, "copy_stream", lambda device: Broken())
    with pytest.raises(RuntimeError, match="gone"):
        file.store([0, 1])
    monkeypatch.setattr(block_file, "copy_stream", lambda device: DelayedStream())
    file = BlockFile(make_storage(TorchGatherBackend()), 2)
    assert file.store([0, 1]) == [0, 1]
