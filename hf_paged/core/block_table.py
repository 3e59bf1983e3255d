"""The blocks of one sequence in one layer group, in the order of its tokens."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

__all__ = ["NO_BLOCK", "BlockTable"]

NO_BLOCK = -1
"""Entry of a block that was never stored or was freed: it lies behind the group's window."""


class BlockTable:
    """Entry ``i`` holds tokens ``i * block_size`` to ``(i + 1) * block_size - 1``.

        window 8, block_size 4, 18 tokens:   [ -1, -1, 7, 2, 9 ]
                                               behind   the last 8 tokens, whole blocks

    The entries are C ints: a step copies them into a tensor with one memcpy a row.
    """

    __slots__ = ("_num_dropped", "ids")

    def __init__(self, ids: array[int] | None = None, num_dropped: int = 0) -> None:
        self.ids: array[int] = array("i") if ids is None else ids
        self._num_dropped = num_dropped

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> int:
        return self.ids[index]

    def __setitem__(self, index: int, block_id: int) -> None:
        self.ids[index] = block_id

    def held(self) -> Iterator[int]:
        """Yield the block ids that are really held, in order."""
        return (block_id for block_id in self.ids[self._num_dropped :] if block_id != NO_BLOCK)

    def copy(self) -> BlockTable:
        """Return a table of its own with the same entries; references are the caller's."""
        return BlockTable(self.ids[:], self._num_dropped)

    def append(self, block_id: int) -> None:
        """Add the block of the next ``block_size`` tokens."""
        self.ids.append(block_id)

    def skip_to(self, num_entries: int) -> None:
        """Fill up with NO_BLOCK: tokens that are behind the window before they were stored."""
        if num_entries > len(self.ids):
            self.ids.extend([NO_BLOCK] * (num_entries - len(self.ids)))

    def drop_before(self, index: int) -> list[int]:
        """Give up all entries before ``index``; return the block ids that were held there."""
        dropped = [b for b in self.ids[self._num_dropped : index] if b != NO_BLOCK]
        for i in range(self._num_dropped, min(index, len(self.ids))):
            self.ids[i] = NO_BLOCK
        self._num_dropped = max(self._num_dropped, min(index, len(self.ids)))
        return dropped

    def truncate(self, num_entries: int) -> list[int]:
        """Give up all entries from ``num_entries`` on; return the block ids held there."""
        cut = [block_id for block_id in self.ids[num_entries:] if block_id != NO_BLOCK]
        del self.ids[num_entries:]
        self._num_dropped = min(self._num_dropped, num_entries)
        return cut
