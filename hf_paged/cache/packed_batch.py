"""The ``cache`` argument of one packed forward: the live tokens of many sequences, end to end.

    rectangle [3, 5]           packed [1, 9]
    . . . a b                  a b c d e f g h i
    c d e f g
    . . . h i                  no padding is computed, a sequence may bring any number of tokens

Where every sequence brings one token they lie one below the other, [N, 1]: the shape in which a
decoding step has always reached the model and its hooks.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NoReturn

import torch

from hf_paged.cache.runtime import PagedRuntime
from hf_paged.cache.step import PagedStep
from hf_paged.cache.step_cache import StepCache
from hf_paged.cache.step_inputs import StepInputs
from hf_paged.core.allocation import Allocation
from hf_paged.errors import UnsupportedModelError

__all__ = ["PackedBatch"]


class PackedBatch(StepCache):
    """Blocks that one forward writes and reads; good for that forward alone.

    Args:
        runtime: of the patched model.
        allocation: blocks reserved for the forward. The model's forward commits it or rolls it
            back; until then whoever made this batch must see to it (:attr:`is_settled`).

    Attributes:
        is_settled: whether the allocation was committed or rolled back.
    """

    def __init__(self, runtime: PagedRuntime, allocation: Allocation) -> None:
        super().__init__(runtime)
        self.allocation = allocation
        self.is_settled = False

    @property
    def num_tokens(self) -> int:
        """N, new tokens of all sequences."""
        return sum(row.end - row.start for row in self.allocation.rows)

    @property
    def last_token_index(self) -> list[int]:
        """Where in N the last new token of each sequence is."""
        ends, end = [], 0
        for row in self.allocation.rows:
            end += row.end - row.start
            ends.append(end - 1)
        return ends

    def shape(self, tokens: Items[int], *, device: torch.device) -> torch.Tensor:
        """Return ids or positions of the new tokens, [N] given, in the shape of this forward."""
        packed = torch.tensor(tokens, dtype=torch.int64, device=device)
        is_decode = self.num_tokens == len(self.allocation.rows)
        return packed[:, None] if is_decode else packed[None]

    def begin_forward(self, inputs: StepInputs, num_layers: int, *, is_paged: bool) -> PagedStep:
        """Return the step over the reserved blocks."""
        self.check_usable()
        assert not self.is_settled, "a packed batch is good for one forward"
        assert inputs.num_rows * inputs.num_columns == self.num_tokens
        if not is_paged:
            self._refuse()
        return PagedStep(
            self,
            self.allocation,
            num_rows=inputs.num_rows,
            num_columns=inputs.num_columns,
            num_layers=num_layers,
            token_index=None,
            hold_window=False,
            is_paged=True,
        )

    def end_forward(self, step: PagedStep, *, is_complete: bool) -> None:
        """Commit the forward, or roll it back."""
        self.is_settled = True
        self.settle(step, is_complete=is_complete)

    def gather_past(
        self, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Refuse: packed tokens have no padded shape."""
        self._refuse()

    # A mask that is neither causal nor sliding would be built from these; gather_past refuses it.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: every packed token brings its own position."""
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return 0, likewise."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return the new tokens alone."""
        return query_length, 0

    @property
    def is_initialized(self) -> bool:
        """Whether something is stored; transformers asks."""
        return True

    def _refuse(self) -> NoReturn:
        raise UnsupportedModelError(
            "the model asked for attention that is neither causal nor sliding, or for attention "
            "weights, in a packed forward: expected plain attention. An architecture that needs "
            "more is one for a ModelSpec with packed=False."
        )
