"""Which columns of the padded rectangle hold real tokens.

transformers hands over rectangles [B, T] and a mask over all columns so far [B, P + T]. Padding is
not stored, so the cache remembers which columns were real:

    column   0 1 2 3 4 5          row 0: 6 tokens
    row 0    x x x x x x          row 1: 4 tokens, its first is in column 2
    row 1    . . x x x x
"""

from __future__ import annotations

import torch

from hf_paged.errors import InputMismatchError

__all__ = ["Columns"]


class Columns:
    """The real columns of every row, [B, P] bool on the CPU, grown in place.

    Attributes:
        num_columns: P, padding included.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_columns = 0
        self._real = _no_columns(num_rows, 64)
        self._is_all_real = True

    @property
    def real(self) -> torch.Tensor:
        """[B, P] bool; a view, not to be written."""
        return self._real[:, : self.num_columns]

    @property
    def has_padding(self) -> bool:
        """Whether any column of any row is padding."""
        return not self._is_all_real

    @property
    def has_gaps(self) -> bool:
        """Whether a row has padding after a real token."""
        if self._is_all_real:
            return False
        real = self.real
        return bool((real[:, :-1] & ~real[:, 1:]).any())

    def new_columns(self, mask: torch.Tensor | None, num_new: int) -> tuple[torch.Tensor, bool]:
        """Read the mask of a forward.

        Args:
            mask: [B, P + num_new], nonzero where real; None: everything is.
            num_new: T.

        Returns:
            [B, T] bool, the real new columns, and whether the mask hides stored columns.

        Raises:
            InputMismatchError: a mask of another length, or one that shows columns that were
                padding when they were computed.
        """
        num_rows, num_past = self._real.shape[0], self.num_columns
        if mask is None:
            if self.has_padding:
                raise InputMismatchError(
                    "attention_mask is None, but the cache holds rows with padding: expected a "
                    f"mask of {num_past + num_new} columns ({num_past} cached, {num_new} new)."
                )
            return torch.ones(num_rows, num_new, dtype=torch.bool), False
        if mask.shape != (num_rows, num_past + num_new):
            raise InputMismatchError(
                f"attention_mask has shape {tuple(mask.shape)}, expected "
                f"{(num_rows, num_past + num_new)}: {num_past} cached columns and {num_new} new "
                "ones; pass the mask of all tokens so far."
            )
        mask = mask.detach().to("cpu", torch.bool)
        past = mask[:, :num_past]
        if num_past and not torch.equal(past, self.real):
            if (past & ~self.real).any():
                raise InputMismatchError(
                    "attention_mask shows columns that were padding when they were computed and "
                    "were not stored; pass the mask of the earlier calls, extended by the new "
                    "columns."
                )
            return mask[:, num_past:], True
        return mask[:, num_past:], False

    def is_padded_late(self, real: torch.Tensor) -> bool:
        """Whether a new column is padding although its row has begun.

        The reference computes such a query over the real tokens before it, and ``generate()``
        may go on from its logits (a pad id inside a prompt, padding on the right).

        Args:
            real: [B, T] bool, the new columns.
        """
        has_begun = (real.cumsum(1) > 0) | self.real.any(1, keepdim=True)
        return bool((has_begun & ~real).any())

    def rows_with_gaps(self, real: torch.Tensor) -> list[bool]:
        """Tell for each row whether padding lies between two of its tokens, new ones included.

        Args:
            real: [B, T] bool, the new columns.
        """
        if self._is_all_real and bool(real.all()):
            return [False] * real.shape[0]
        columns = torch.cat([self.real, real], dim=1)
        is_start = columns[:, 1:] & ~columns[:, :-1]
        gaps: list[bool] = (is_start.sum(1) + columns[:, 0] > 1).tolist()
        return gaps

    def append(self, real: torch.Tensor) -> None:
        """Add new columns, [B, T] bool."""
        end = self.num_columns + real.shape[1]
        if end > self._real.shape[1]:
            grown = _no_columns(self._real.shape[0], 2 * end)
            grown[:, : self.num_columns] = self.real
            self._real = grown
        self._real[:, self.num_columns : end] = real
        self.num_columns = end
        self._is_all_real = self._is_all_real and bool(real.all())

    def crop(self, num_columns: int) -> list[int]:
        """Keep the first ``num_columns``; return how many real tokens each row loses."""
        lost: list[int] = self.real[:, num_columns:].sum(1).tolist()
        self.num_columns = num_columns
        self._is_all_real = bool(self.real.all())
        return lost

    def num_real_after(self, num_columns: int) -> list[int]:
        """Return how many real tokens each row has from column ``num_columns`` on."""
        counts: list[int] = self.real[:, num_columns:].sum(1).tolist()
        return counts

    def select(self, rows: list[int]) -> Columns:
        """Return the columns of ``rows``, in that order; a row may occur more than once."""
        selected = Columns(0)
        selected.num_columns = self.num_columns
        selected._real = _no_columns(len(rows), self._real.shape[1])
        selected._real[:] = self._real[torch.tensor(rows, dtype=torch.long)]
        selected._is_all_real = bool(selected.real.all())
        return selected


def _no_columns(num_rows: int, num_columns: int) -> torch.Tensor:
    with torch.inference_mode(False):  # a cache made in inference mode grows outside of it too
        return torch.zeros(num_rows, num_columns, dtype=torch.bool)
