"""What a digest of weights has to notice, computed on the host and by a device's arithmetic."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from hf_paged.integration.weight_digest import CHUNK_WORDS, digest_on_device, digests

pytestmark = pytest.mark.core_suite


def on_host(tensor: torch.Tensor) -> bytes:
    (digest,) = digests([tensor])
    return digest


WAYS = pytest.mark.parametrize("digest", [on_host, digest_on_device], ids=["host", "device"])
Digest = Callable[[torch.Tensor], bytes]


@pytest.fixture(autouse=True)
def keep_number_of_threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


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


@pytest.mark.parametrize("num_threads", [1, 3])
def test_digests_come_in_the_order_of_their_tensors(num_threads: int) -> None:
    tensors = [torch.full((size,), size) for size in (100_000, 3, 0, 50_000, 3, 7)]
    torch.set_num_threads(num_threads)
    assert list(digests(tensors)) == [on_host(tensor) for tensor in tensors]


def test_what_cannot_be_read_is_raised_at_its_place() -> None:
    readable = torch.ones(4)
    contents = digests([readable, torch.ones(4, device="meta"), readable])
    assert next(contents) == on_host(readable)
    with pytest.raises(NotImplementedError):
        next(contents)
    assert next(contents, None) is None


def test_threads_end_with_the_digests() -> None:
    """Used up, closed in the middle, or raised: no thread is left behind."""
    torch.set_num_threads(2)
    before = threading.active_count()
    tensors = [torch.ones(1000) for _ in range(20)]
    list(digests(tensors))
    assert threading.active_count() == before
    contents = digests(tensors)
    next(contents)
    assert threading.active_count() > before
    contents.close()
    assert threading.active_count() == before
    with pytest.raises(NotImplementedError):
        list(digests([*tensors, torch.ones(4, device="meta")]))
    assert threading.active_count() == before
