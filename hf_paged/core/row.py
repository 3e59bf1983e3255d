"""One token stream of a request, from its prompt to its last token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hf_paged.core.sequence import Sequence

__all__ = ["Row", "StoredRow"]


@dataclass
class StoredRow:
    """Blocks of a row that gave way.

    Attributes:
        num_tokens: that the row had computed.
        slots: for each layer group, where the block of a table entry is stored.
    """

    num_tokens: int
    slots: list[dict[int, int]]

    def all_slots(self) -> list[int]:
        """Return every slot that is taken."""
        return [slot for slots in self.slots for slot in slots.values()]


@dataclass(eq=False)
class Row:
    """One token stream of a request.

    Attributes:
        token_ids: the prompt, then what was generated; grows.
        first_position: position of the first token.
        num_prompt_tokens: how many of the tokens are the prompt.
        max_tokens: tokens that it may come to hold in the pool; None: unknown.
        payload: whatever the caller wants to find here again.
        sequence: what is computed, while the row is active.
        num_cached_tokens: tokens of the prompt that were stored when the row entered.
        stored: its blocks outside of the pool, while it waits after giving way.
    """

    token_ids: list[int]
    first_position: int = 0
    max_tokens: int | None = None
    payload: Any = None
    num_prompt_tokens: int = field(init=False)
    sequence: Sequence | None = field(init=False, default=None)
    num_cached_tokens: int = field(init=False, default=0)
    stored: StoredRow | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Count the prompt."""
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def num_generated(self) -> int:
        """The row's age."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_missing(self) -> int:
        """Tokens that are not computed yet."""
        return len(self.token_ids) - (self.sequence.num_tokens if self.sequence else 0)
