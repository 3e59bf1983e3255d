"""How large things are made: blocks, the pool, the file for rows that give way."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping

import torch

from hf_paged.backends.base import AttentionBackend
from hf_paged.cache.block_file import BlockFile
from hf_paged.cache.memory import num_free_bytes, num_total_bytes
from hf_paged.cache.storage import KVStorage
from hf_paged.config import PagedConfig, parse_kv_memory
from hf_paged.errors import ConfigurationError

__all__ = ["choose_block_size", "choose_num_blocks", "make_block_file"]


def choose_block_size(config: PagedConfig, backend: AttentionBackend) -> int:
    """Return tokens a block.

    Args:
        config: what the user asked for.
        backend: knows what it takes and likes.

    Raises:
        ConfigurationError: the backend cannot take what was asked.
    """
    if config.block_size == "auto":
        return backend.default_block_size
    block_size, multiple = int(config.block_size), backend.block_size_multiple
    if block_size % multiple:
        raise ConfigurationError(
            f"block_size={block_size} does not suit backend {backend.name!r}: expected a "
            f"multiple of {multiple}; pass block_size='auto' or {multiple}."
        )
    return block_size


def choose_num_blocks(config: PagedConfig, bytes_on: Mapping[torch.device, int]) -> int:
    """Return the usable blocks of the pool.

    Args:
        config: what the user asked for.
        bytes_on: K and V of one block, on each device that will hold some of them.

    Raises:
        ConfigurationError: no block fits, or more is asked than there is.
    """
    bytes_per_block = sum(bytes_on.values())
    if config.num_blocks is not None:
        num_blocks, asked = config.num_blocks, f"num_blocks={config.num_blocks}"
    else:
        free = {device: num_free_bytes(device) for device in bytes_on}
        kv_memory = 0.5 if config.kv_memory is None else config.kv_memory
        asked = f"kv_memory={config.kv_memory!r}"
        # A fraction is one of each device, anything else is shared out as the layers are.
        num_blocks = min(
            parse_kv_memory(kv_memory, num_free_bytes=free[device]) // num_bytes
            if isinstance(kv_memory, float) and kv_memory < 1
            else parse_kv_memory(kv_memory, num_free_bytes=0) // bytes_per_block
            for device, num_bytes in bytes_on.items()
        )
        num_blocks -= 1  # the null block is inside the limit
        if num_blocks < 1:
            raise ConfigurationError(
                f"{asked} holds no block: expected at least {2 * bytes_per_block} bytes (one "
                f"block and the null block), {min(free.values())} bytes are free; raise kv_memory "
                "or lower block_size."
            )
    for device, num_bytes in bytes_on.items():
        total = num_total_bytes(device)
        if num_blocks * num_bytes > total:
            raise ConfigurationError(
                f"{asked} is more than {device} has: {num_blocks * num_bytes} bytes asked, "
                f"{total} there; pass less, e.g. kv_memory=0.5 for half of what is free."
            )
    return num_blocks


def make_block_file(
    config: PagedConfig, storage: KVStorage, bytes_per_block: int, device: torch.device
) -> BlockFile | None:
    """Return room for blocks of rows that give way, if the user grants some.

    Args:
        config: what the user asked for.
        storage: of the pool.
        bytes_per_block: K and V of one block.
        device: where the pool lies.

    Raises:
        ConfigurationError: no block fits, or more is asked than is free.
    """
    if config.swap_memory is None:
        return None
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if device.type != "cpu":
        free = num_free_bytes(torch.device("cpu"))
    num_bytes = parse_kv_memory(config.swap_memory, num_free_bytes=free)
    if not bytes_per_block <= num_bytes <= free:
        raise ConfigurationError(
            f"swap_memory={config.swap_memory!r} is {num_bytes} bytes: expected at least "
            f"{bytes_per_block}, one block, and at most {free}, which are free "
            f"{'in ' + tempfile.gettempdir() if device.type == 'cpu' else 'on the host'}."
        )
    return BlockFile(storage, num_bytes // bytes_per_block)
