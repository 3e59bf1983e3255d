"""What a user may set when patching a model: frozen and validated."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from hf_paged.errors import ConfigurationError

__all__ = ["KVMemory", "PagedConfig", "parse_kv_memory"]

KVMemory = int | float | str
"""Bytes (1 << 30), a size ("2GiB", "512MB"), or a fraction in (0, 1) of the free memory."""

_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE = re.compile(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([a-zA-Z]*)\s*")


@dataclass(frozen=True)
class PagedConfig:
    """The arguments of :func:`hf_paged.patch`; two equal ones make a second patch a no-op.

    Attributes:
        kv_memory: limit of the pool, see :data:`KVMemory`; None: chosen from the machine.
        num_blocks: limit of the pool in blocks, instead of ``kv_memory``.
        block_size: tokens per block, a power of two, or "auto" (16, or what the backend needs).
            Memory wasted per sequence and layer group is at most ``block_size - 1`` slots.
        backend: name of a registered backend, or "auto".
        prefix_caching: keep blocks after a call and reuse them.
        batch_invariant: a row's attention output does not depend on the other rows' bits or number.
        max_batch_tokens: tokens that one forward of a packed call computes at most, decoding rows
            aside; None: 2048.
        swap_memory: room outside of the pool for rows that give way, see :data:`KVMemory`; None:
            they are computed again.
        compile: False, True or "freeze", see :func:`hf_paged.patch`.
        cuda_graphs: "auto", True or False, see :func:`hf_paged.patch`.
        packed_hooks: run models that carry the user's own hooks packed as well.
        verify: "auto", True or False, see :func:`hf_paged.patch`.
        debug: poison blocks with NaN and check every invariant at every step.

    Raises:
        ConfigurationError: a value that cannot work.
    """

    kv_memory: KVMemory | None = None
    num_blocks: int | None = None
    block_size: int | str = "auto"
    backend: str = "auto"
    prefix_caching: bool = True
    batch_invariant: bool = False
    max_batch_tokens: int | None = None
    swap_memory: KVMemory | None = None
    compile: bool | str = False
    cuda_graphs: bool | str = "auto"
    packed_hooks: bool = False
    verify: str | bool = "auto"
    debug: bool = False

    def __post_init__(self) -> None:
        """Refuse what no machine and no backend could make work."""
        if self.kv_memory is not None and self.num_blocks is not None:
            raise ConfigurationError(
                f"kv_memory={self.kv_memory!r} and num_blocks={self.num_blocks!r} both limit the "
                "pool: expected one of them at most; drop one."
            )
        if self.kv_memory is not None:
            parse_kv_memory(self.kv_memory, num_free_bytes=2**62)
        if self.swap_memory is not None:
            parse_kv_memory(self.swap_memory, num_free_bytes=2**62, name="swap_memory")
        if self.num_blocks is not None and not _is_int(self.num_blocks, at_least=1):
            raise ConfigurationError(
                f"num_blocks must be an integer of at least 1, got {self.num_blocks!r}; pass e.g. "
                "num_blocks=1024, or kv_memory='2GiB'."
            )
        if self.block_size != "auto" and not (
            _is_int(self.block_size, at_least=1) and int(self.block_size).bit_count() == 1
        ):
            raise ConfigurationError(
                f"block_size must be 'auto' or a power of two, got {self.block_size!r}; pass e.g. "
                "block_size=16."
            )
        if not isinstance(self.backend, str):
            raise ConfigurationError(
                f"backend must be a name or 'auto', got {self.backend!r} of type "
                f"{type(self.backend).__name__}; pass backend='auto'."
            )
        if self.max_batch_tokens is not None and not _is_int(self.max_batch_tokens, at_least=1):
            raise ConfigurationError(
                f"max_batch_tokens must be an integer of at least 1, got {self.max_batch_tokens!r};"
                " pass e.g. max_batch_tokens=2048."
            )
        if self.compile != "freeze" and not isinstance(self.compile, bool):
            raise ConfigurationError(
                f"compile must be False, True or 'freeze', got {self.compile!r}."
            )
        for name in ("verify", "cuda_graphs"):
            value = getattr(self, name)
            if value != "auto" and not isinstance(value, bool):
                raise ConfigurationError(f"{name} must be 'auto', True or False, got {value!r}.")
        for name in ("prefix_caching", "batch_invariant", "packed_hooks", "debug"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigurationError(
                    f"{name} must be True or False, got {getattr(self, name)!r}."
                )


def parse_kv_memory(kv_memory: KVMemory, *, num_free_bytes: int, name: str = "kv_memory") -> int:
    """Turn what a user wrote into bytes.

    >>> parse_kv_memory("2GiB", num_free_bytes=0)
    2147483648
    >>> parse_kv_memory(0.5, num_free_bytes=1000)
    500

    Args:
        kv_memory: bytes, a size with a unit, or a fraction in (0, 1) of ``num_free_bytes``.
        num_free_bytes: memory free on the device, used by a fraction only.
        name: of the argument, for errors.

    Raises:
        ConfigurationError: anything else, zero and negative values included.
    """
    expected = "expected bytes above 0, a size such as '2GiB' or '512MB', or a fraction in (0, 1)"
    num_bytes: float = 0
    if isinstance(kv_memory, str):
        match = _SIZE.fullmatch(kv_memory)
        unit = (match.group(2).lower() or "b") if match else ""
        if match is None or unit not in _UNITS:
            raise ConfigurationError(f"{name}={kv_memory!r} is no size: {expected}.")
        num_bytes = int(Fraction(match.group(1)) * _UNITS[unit])
    elif isinstance(kv_memory, bool) or not isinstance(kv_memory, (int, float)):
        raise ConfigurationError(
            f"{name}={kv_memory!r} is of type {type(kv_memory).__name__}: {expected}."
        )
    elif isinstance(kv_memory, float) and 0 < kv_memory < 1:
        num_bytes = kv_memory * num_free_bytes
    elif isinstance(kv_memory, int) or kv_memory.is_integer():
        num_bytes = kv_memory
    if num_bytes < 1 and not (isinstance(kv_memory, float) and 0 < kv_memory < 1):
        raise ConfigurationError(f"{name}={kv_memory!r} is out of range: {expected}.")
    return int(num_bytes)


def _is_int(value: object, *, at_least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least
