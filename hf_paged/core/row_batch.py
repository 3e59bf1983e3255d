"""The rows of one packed forward, and their tokens end to end."""

from __future__ import annotations

from dataclasses import dataclass, field

from hf_paged.core.allocation import Allocation, NewTokens
from hf_paged.core.row import Row

__all__ = ["RowBatch"]


@dataclass
class RowBatch:
    """The rows of one forward, in the order of their tokens.

    Attributes:
        rows: at least one.
        allocation: blocks reserved for the forward; to be committed or rolled back.
        token_ids: of all rows, end to end.
        positions: likewise.
        complete: indices of the rows that have no missing token after the forward.
    """

    rows: list[Row]
    allocation: Allocation
    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    complete: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, chosen: list[tuple[Row, NewTokens]], allocation: Allocation) -> RowBatch:
        """Lay the tokens of the chosen rows end to end."""
        batch = cls([row for row, _ in chosen], allocation)
        for index, (row, tokens) in enumerate(chosen):
            assert tokens.token_ids is not None and tokens.first_position is not None
            batch.token_ids += tokens.token_ids
            first = tokens.first_position
            batch.positions += range(first, first + tokens.num_tokens)
            if row.num_missing == tokens.num_tokens:
                batch.complete.append(index)
        return batch
