"""Every exception that hf_paged raises on purpose.

    HFPagedError
    ├── ConfigurationError      (ValueError)    an argument of the public API is wrong
    ├── UnsupportedModelError   (TypeError)     the model lacks a seam that paging needs
    ├── InputMismatchError      (ValueError)    the inputs of a forward do not fit its cache
    ├── CacheStateError         (RuntimeError)  a cache is used after release, out of range, ...
    ├── KVCacheFullError        (MemoryError)   the pool has fewer blocks than a call needs
    └── PagedGradientError      (RuntimeError)  backward() through a paged cache

Each message names the argument, what was expected, what came, and the remedy.
"""

from __future__ import annotations

import functools

__all__ = [
    "CacheStateError",
    "ConfigurationError",
    "HFPagedError",
    "InputMismatchError",
    "KVCacheFullError",
    "PagedGradientError",
    "UnsupportedModelError",
]


class HFPagedError(Exception):
    """Base of every exception that hf_paged raises on purpose."""


class ConfigurationError(HFPagedError, ValueError):
    """An argument of the public API has a value that cannot work."""


class UnsupportedModelError(HFPagedError, TypeError):
    """The model lacks a seam that paging needs; the message names it."""


class InputMismatchError(HFPagedError, ValueError):
    """The inputs of a forward contradict the cache that came with them."""


class CacheStateError(HFPagedError, RuntimeError):
    """A cache is asked for something that its present state does not allow."""


class KVCacheFullError(HFPagedError, MemoryError):
    """The pool has fewer blocks than a call needs; nothing of the call was written.

    Attributes:
        num_needed_blocks: blocks that the call asked for.
        num_available_blocks: blocks that it could have had (free, or cached and evictable).
        num_rows: rows in the call.
        num_rows_that_fit: how many of them, taken from the first on, would have fitted beside the
            blocks that all of them hold already.
    """

    def __init__(
        self,
        message: str,
        *,
        num_needed_blocks: int,
        num_available_blocks: int,
        num_rows: int,
        num_rows_that_fit: int,
    ) -> None:
        super().__init__(message)
        self.num_needed_blocks = num_needed_blocks
        self.num_available_blocks = num_available_blocks
        self.num_rows = num_rows
        self.num_rows_that_fit = num_rows_that_fit

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with the keyword arguments, for errors that cross a process boundary."""
        return functools.partial(type(self), **self.__dict__), self.args


class PagedGradientError(HFPagedError, RuntimeError):
    """Gradients were asked to flow through K and V that live in the pool."""
