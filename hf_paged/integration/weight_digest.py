"""What a tensor holds, in a few bytes: every element is read, order and sign included.

On a CPU xxh3 reads at the speed of memory. On a device there is no such hash, so words are
multiplied by fixed random odd numbers and summed modulo 2**64. A plain sum or xor of the elements
would not notice a sign flip of a whole tensor or two rows that trade places.
"""

from __future__ import annotations

import functools

import torch
import xxhash

__all__ = ["digest", "digest_on_device"]

CHUNK_WORDS = 1 << 20
"""Words of 8 bytes that share a sum."""


def digest(tensor: torch.Tensor) -> bytes:
    """Return a digest of the elements of ``tensor``.

    One thread reads: a second would save a third of the time on two cores, but Python's pools of
    threads can wait for ever once a Ctrl-C came while they start or end.

    Args:
        tensor: of any dtype, shape, strides and device.

    Raises:
        RuntimeError, TypeError, NotImplementedError: it cannot be read.
    """
    if tensor.device.type == "cpu":
        return xxhash.xxh3_128_digest(_bytes_of(tensor).numpy().data)
    return digest_on_device(tensor)


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


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


@functools.cache
def _factors(device: torch.device) -> torch.Tensor:
    """Return the odd numbers, [CHUNK_WORDS] int64; kept, 8 MiB, since drawing them takes long."""
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, (CHUNK_WORDS,), generator=generator) * 2 + 1
    return factors.to(device)
