"""What a digest of weights has to notice, computed on the host and by a device's arithmetic."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hf_paged.integration import weight_digest
from hf_paged.integration.weight_digest import CHUNK_WORDS, digest_on_device

pytestmark = pytest.mark.core_suite


WAYS = pytest.mark.parametrize(
    "digest", [weight_digest.digest, digest_on_device], ids=["host", "device"]
)
Digest = Callable[[torch.Tensor], bytes]


@WAYS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool])
@pytest.mark.parametrize("shape", [(0,), (), (1,), (3, 5), (64, 33)], ids=str)
def test_equal_contents_in_other_memory_have_one_digest(
    digest: Digest, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensor = torch.randint(0, 2, shape).to(dtype)
    expected = digest(tensor)
    assert digest(tensor.clone()) == expected
    if tensor.dim() == 2:
        assert digest(tensor.T.contiguous().T) == expected, "other strides"


@WAYS
def test_every_change_is_noticed(digest: Digest) -> None:
    weight = torch.randn(64, 33)
    one_bit, one_sign = weight.clone(), weight.clone()
    one_bit.view(torch.int32)[63, 32] ^= 1
    one_sign[0, 0] *= -1
    changed = [
        weight,
        -weight,
        one_bit,
        one_sign,
        weight.flip(0),
        weight.flip(1),
        weight[[1, 0, *range(2, 64)]],
        weight.roll(1),
    ]
    assert len({digest(tensor) for tensor in changed}) == len(changed)


@WAYS
@pytest.mark.parametrize("position", [0, -1])
def test_large_tensors_are_read_to_their_ends_and_in_order(digest: Digest, position: int) -> None:
    weight = torch.zeros(2 * CHUNK_WORDS + 3, dtype=torch.int64)
    weight[0], weight[CHUNK_WORDS] = 1, 2
    before = digest(weight)
    trade = weight.clone()
    trade[0], trade[CHUNK_WORDS] = 2, 1  # equal places in two chunks
    assert digest(trade) != before
    weight[position] += 1
    assert digest(weight) != before


def test_what_cannot_be_read_is_refused() -> None:
    with pytest.raises(NotImplementedError):
        weight_digest.digest(torch.ones(4, device="meta"))
