"""One token stream: how many tokens are stored, in which blocks, under which prefix."""

from __future__ import annotations

from hf_paged.core.block_table import BlockTable
from hf_paged.core.prefix_index import BlockKey, PrefixNode

__all__ = ["Sequence"]


class Sequence:
    """State of one row; only :class:`~hf_paged.core.cache_manager.KVCacheManager` changes it.

    Attributes:
        num_tokens: tokens whose K and V are valid (padding is never counted).
        tables: one block table for each layer group.
        node: the deepest full block that look-ups may find; None: nothing of this sequence is
            shareable from here on (embeddings, odd positions, hooks, changed weights).
        tail: tokens after ``node``, not yet a full block.
        tail_position: position of ``tail[0]``, or of the token that comes next.
    """

    __slots__ = ("node", "num_tokens", "tables", "tail", "tail_position")

    def __init__(self, num_groups: int) -> None:
        self.num_tokens = 0
        self.tables = [BlockTable() for _ in range(num_groups)]
        self.node: PrefixNode | None = None
        self.tail: list[int] = []
        self.tail_position = 0

    def move_to(self, node: PrefixNode | None) -> None:
        """Make ``node`` the deepest known full block."""
        if node is not None:
            node.num_sequences += 1
        if self.node is not None:
            self.node.num_sequences -= 1
        self.node = node

    def block_keys(self, tokens: list[int], block_size: int) -> list[BlockKey]:
        """Return the keys of the blocks that become full when ``tokens`` follow the tail."""
        stream = self.tail + tokens
        return [
            BlockKey(tuple(stream[start : start + block_size]), self.tail_position + start)
            for start in range(0, len(stream) - block_size + 1, block_size)
        ]

    @property
    def next_position(self) -> int:
        """Position that keeps the tokens after ``node`` consecutive."""
        return self.tail_position + len(self.tail)
