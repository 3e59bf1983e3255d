"""The tensors of a step."""

from __future__ import annotations

import pytest
import torch

from backends.paged_batch import PagedBatch, random_rows
from hf_paged.backends.metadata import AttentionMetadata
from hf_paged.backends.registry import create_backend

pytestmark = pytest.mark.core_suite

TENSORS = ("block_tables", "seq_lens", "cu_seqlens_q", "slot_mapping")


def metadata_of(lens: list[tuple[int, int]]) -> AttentionMetadata:
    backend = create_backend("torch", torch.device("cpu"))
    return PagedBatch(random_rows(lens), backend, 4).metadata


@pytest.mark.parametrize(
    ("lens", "is_decode"),
    [
        ([(0, 1)], True),
        ([(9, 1), (0, 1)], True),
        ([(0, 2)], False),
        ([(9, 1), (0, 2)], False),
        ([(3, 5)], False),
    ],
)
def test_decode_is_one_new_token_in_every_row(lens: list[tuple[int, int]], is_decode: bool) -> None:
    assert metadata_of(lens).is_decode is is_decode


def test_to_the_same_device_is_the_object_itself() -> None:
    metadata = metadata_of([(3, 5), (0, 1)])
    assert metadata.to(torch.device("cpu")) is metadata


def test_to_another_device_moves_every_tensor_and_leaves_the_original() -> None:
    metadata = metadata_of([(3, 5), (0, 1)])
    metadata.derived["plan"] = torch.zeros(1)
    moved = metadata.to(torch.device("meta"))
    for name in TENSORS:
        assert getattr(moved, name).device.type == "meta"
        assert getattr(moved, name).dtype == getattr(metadata, name).dtype
        assert getattr(moved, name).shape == getattr(metadata, name).shape
        assert getattr(metadata, name).device.type == "cpu"
    assert (moved.block_size, moved.null_block) == (metadata.block_size, metadata.null_block)
    assert moved.seq_lens_list == metadata.seq_lens_list
    assert moved.query_lens_list == metadata.query_lens_list
    assert moved.derived == {}, "tensors of another device"
