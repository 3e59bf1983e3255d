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
from itertools import accumulate
from typing import NoReturn

import numpy as np
import torch

from hf_paged.backends.upload import send
from hf_paged.cache.runtime import PagedRuntime
from hf_paged.cache.step import PagedStep
from hf_paged.cache.step_cache import StepCache
from hf_paged.cache.step_inputs import StepInputs
from hf_paged.cache.step_metadata import StepMetadata
from hf_paged.core.allocation import Allocation
from hf_paged.errors import UnsupportedModelError

__all__ = ["PackedBatch", "PackedCache"]


class PackedCache(StepCache):
    """What packed tokens are to transformers: a cache without a padded shape."""

    def gather_past(
        self, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Refuse: packed tokens have no padded shape."""
        self.refuse()

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

    @staticmethod
    def refuse() -> NoReturn:
        """Raise what a model meets that wants more than plain attention.

        Raises:
            UnsupportedModelError: always.
        """
        raise UnsupportedModelError(
            "the model asked for attention that is neither causal nor sliding, or for attention "
            "weights, in a packed forward: expected plain attention. An architecture that needs "
            "more is one for a ModelSpec with packed=False."
        )


class PackedBatch(PackedCache):
    """Blocks that one forward writes and reads, and its tokens; good for that forward alone.

    Args:
        runtime: of the patched model.
        allocation: blocks reserved for the forward. The model's forward commits it or rolls it
            back; until then whoever made this batch must see to it (:attr:`is_settled`).
        token_ids: of the new tokens, N.
        positions: likewise.
        wanted: indices into N, the tokens whose logits are wanted; None: the last of each row.

    Attributes:
        is_settled: whether the allocation was committed or rolled back.
    """

    def __init__(
        self,
        runtime: PagedRuntime,
        allocation: Allocation,
        token_ids: Items[int],
        positions: Items[int],
        wanted: Items[int] | None = None,
    ) -> None:
        super().__init__(runtime)
        self.allocation = allocation
        self.is_settled = False
        self.num_tokens = len(token_ids)
        ends = list(accumulate(row.end - row.start for row in allocation.rows))
        assert self.num_tokens == ends[-1] == len(positions)
        self._arrays = [
            np.array(token_ids, np.int64),
            np.array(positions, np.int64),
            np.array([end - 1 for end in ends] if wanted is None else wanted, np.int64),
        ]
        self._metadata: StepMetadata | None = None

    @property
    def is_decode(self) -> bool:
        """Whether each sequence has one new token."""
        return self.num_tokens == len(self.allocation.rows)

    @property
    def metadata(self) -> StepMetadata:
        """What layers read, on the host."""
        if self._metadata is None:
            self._metadata = self.runtime.build_metadata(self.allocation)
        return self._metadata

    @property
    def wants_all(self) -> bool:
        """Whether the logits of every token are wanted, in their order."""
        return len(self._arrays[2]) == self.num_tokens

    def arrays(self) -> list[np.ndarray]:
        """Return ids [N], positions [N] and the indices of wanted logits [m], on the host."""
        return self._arrays

    def send(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return :meth:`arrays` on ``device``, ids and positions in the shape of this forward."""
        ids, positions, index = send(self._arrays, device)
        if self.is_decode:
            return ids[:, None], positions[:, None], index
        return ids[None], positions[None], index

    def begin_forward(self, inputs: StepInputs, num_layers: int, *, is_paged: bool) -> PagedStep:
        """Return the step over the reserved blocks."""
        self.check_usable()
        assert not self.is_settled, "a packed batch is good for one forward"
        assert inputs.num_rows * inputs.num_columns == self.num_tokens
        if not is_paged:
            self.refuse()
        return PagedStep(
            self,
            self.metadata,
            num_rows=inputs.num_rows,
            num_columns=inputs.num_columns,
            num_layers=num_layers,
            is_paged=True,
        )

    def end_forward(self, step: PagedStep, *, is_complete: bool) -> None:
        """Commit the forward, or roll it back."""
        self.is_settled = True
        self.settle(step, self.allocation, is_complete=is_complete, hold_window=False)

    def end_replay(self, *, is_complete: bool) -> None:
        """Commit a forward that ran without a step, or roll it back."""
        self.is_settled = True
        if is_complete:
            self.commit(self.allocation, hold_window=False)
        else:
            self.roll_back(self.allocation)
