"""What tensors hold, in a few bytes each: every element is read, order and sign included.

On a CPU xxh3 reads at the speed of memory. On a device there is no such hash, so words are
multiplied by fixed random odd numbers and summed modulo 2**64. A plain sum or xor of the elements
would not notice a sign flip of a whole tensor or two rows that trade places.
"""

from __future__ import annotations

import functools
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import xxhash

__all__ = ["digest_on_device", "digests"]

CHUNK_WORDS = 1 << 20
"""Words of 8 bytes that share a sum."""


def digests(tensors: Sequence[torch.Tensor]) -> Generator[bytes]:
    """Yield a digest of each tensor; on a CPU as many are read at a time as torch has threads.

    Close it if it is not used up: then nothing is read any more.

    Args:
        tensors: of any dtypes, strides and devices.

    Raises:
        RuntimeError, TypeError, NotImplementedError: a tensor cannot be read; none follows it.
    """
    threads = ThreadPoolExecutor(torch.get_num_threads())
    try:
        on_host = threads.map(
            _digest_on_host, (tensor for tensor in tensors if tensor.device.type == "cpu")
        )
        for tensor in tensors:
            # A device's work is queued by the caller's thread: a stream is current in one thread.
            yield next(on_host) if tensor.device.type == "cpu" else digest_on_device(tensor)
    finally:
        threads.shutdown(cancel_futures=True)


def digest_on_device(tensor: torch.Tensor) -> bytes:
    """Return a digest that is computed where ``tensor`` is; waits for the device.

    Args:
        tensor: of any dtype, shape and strides.
    """
    if tensor.device.type == "meta":
        raise NotImplementedError("the weight is offloaded")
    flat = _bytes_of(tensor)
    words = torch.nn.functional.pad(flat, (0, -flat.shape[0] % 8)).view(torch.int64)
    factors = _factors(tensor.device)
    sums = [(part * factors[: part.shape[0]]).sum() for part in words.split(CHUNK_WORDS)]
    return torch.stack(sums).cpu().numpy().tobytes()


def _digest_on_host(tensor: torch.Tensor) -> bytes:
    return xxhash.xxh3_128_digest(_bytes_of(tensor).numpy().data)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


@functools.cache
def _factors(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, (CHUNK_WORDS,), generator=generator) * 2 + 1
    return factors.to(device)
