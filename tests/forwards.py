"""Short words for what a forward does to a KVCacheManager."""

from __future__ import annotations

from collections.abc import Sequence as Items

from hf_paged.core.allocation import Allocation, NewTokens
from hf_paged.core.cache_manager import KVCacheManager
from hf_paged.core.layer_group import group_layers
from hf_paged.core.sequence import Sequence

PROMPT = list(range(10, 20))


def make_manager(
    num_blocks: int, block_size: int = 4, windows: Items[int | None] = (None,)
) -> KVCacheManager:
    return KVCacheManager(num_blocks, block_size, group_layers(windows))


def new(
    sequence: Sequence, tokens: list[int], *, position: int | None = None, version: str = "v"
) -> NewTokens:
    """Ask for tokens at the positions that follow."""
    first = sequence.num_tokens if position is None else position
    return NewTokens(sequence, len(tokens), tokens, first, version)


def run(manager: KVCacheManager, *rows: NewTokens, hold_window: bool = False) -> Allocation:
    """Run one forward to its end."""
    allocation = manager.begin(rows, hold_window=hold_window)
    manager.commit(allocation, hold_window=hold_window)
    manager.check_integrity()
    return allocation


def start(manager: KVCacheManager, tokens: list[int], **options: str) -> Sequence:
    """Return a sequence that holds ``tokens``."""
    sequence = manager.new_sequence()
    run(manager, new(sequence, tokens, **options))
    return sequence


def table(sequence: Sequence, group: int = 0) -> list[int]:
    return list(sequence.tables[group].ids)


def figures(manager: KVCacheManager) -> tuple[int, int, int]:
    """Return free, cached and used blocks."""
    manager.check_integrity()
    return manager.pool.num_free, manager.pool.num_cached, manager.pool.num_used
