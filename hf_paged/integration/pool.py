"""Look at a patched model's pool, empty it, keep tenants apart in it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import torch

from hf_paged.cache.pool_view import PoolView, look_at_pool
from hf_paged.cache.runtime import runtime_of
from hf_paged.cache.stats import KVCacheStats
from hf_paged.errors import ConfigurationError

__all__ = ["clear_prefix_cache", "plot_pool", "prefix_scope", "reset_stats", "stats", "trim"]


def stats(model: torch.nn.Module) -> KVCacheStats:
    """Return what the pool of ``model`` holds now; changes nothing.

    Raises:
        ConfigurationError: the model is not patched.
    """
    return runtime_of(model).stats()


def plot_pool(model: torch.nn.Module) -> PoolView:
    """Return a picture of the pool of ``model`` as it is now: which block is whose.

    The last line of a notebook cell shows it; in a terminal, ``print`` or ``rich.print`` does.
    Take it while something is stored: in a hand-written loop, in a streamer or a stopping criterion
    of ``generate()``, from another thread. It changes nothing.

    Example:
        >>> print(hf_paged.plot_pool(model))                # doctest: +SKIP
        >>> hf_paged.plot_pool(model).save("pool.png")      # doctest: +SKIP

    Raises:
        ConfigurationError: the model is not patched.
    """
    return look_at_pool(runtime_of(model))


def reset_stats(model: torch.nn.Module) -> None:
    """Set the peak to what is used now, and the counters to 0.

    Raises:
        ConfigurationError: the model is not patched.
    """
    runtime_of(model).reset_stats()


def clear_prefix_cache(model: torch.nn.Module) -> None:
    """Free the blocks that are kept for later calls; those in use stay.

    Raises:
        ConfigurationError: the model is not patched.
    """
    runtime_of(model).clear_prefix_cache()


def trim(model: torch.nn.Module) -> None:
    """Give the memory of free blocks back to the system; cached and used ones stay.

    Raises:
        ConfigurationError: the model is not patched.
    """
    runtime_of(model).trim()


@contextmanager
def prefix_scope(model: torch.nn.Module, scope: Hashable) -> Iterator[None]:
    """Keep what is computed inside apart from every other scope, for this thread or task.

    Args:
        model: a patched model.
        scope: equal scopes share prefixes; a tenant's name, say.

    Raises:
        ConfigurationError: the model is not patched, or ``scope`` has no hash.
    """
    variable = runtime_of(model).scope
    try:
        hash(scope)
    except TypeError as error:
        raise ConfigurationError(
            f"scope is a {type(scope).__name__}, which has no hash: expected e.g. a str."
        ) from error
    token = variable.set(scope)
    try:
        yield
    finally:
        variable.reset(token)
