"""The tensors of a step."""

from __future__ import annotations

import pytest
import torch

from backends.paged_batch import PagedBatch, random_rows
from hf_paged.backends.metadata import AttentionMetadata
from hf_paged.backends.registry import create_backend

pytestmark = pytest.mark.core_suite


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
