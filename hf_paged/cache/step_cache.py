"""What the ``cache`` argument of a paged forward is to transformers and to the patched model.

The patched model begins and ends a step on it, the model's layers hand it their K and V. Whose rows
they are is up to the subclass: :class:`~hf_paged.cache.paged_cache.PagedCache` holds rows across
forwards, :class:`~hf_paged.cache.packed_batch.PackedBatch` carries one forward of the runner.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from transformers.cache_utils import Cache

from hf_paged.cache.runtime import PagedRuntime
from hf_paged.cache.step import CURRENT_STEP, PagedStep
from hf_paged.cache.step_inputs import StepInputs
from hf_paged.core.allocation import Allocation
from hf_paged.errors import CacheStateError

__all__ = ["StepCache"]


class StepCache(Cache):
    """A transformers ``Cache`` whose K and V lie in the pool.

    Args:
        runtime: of the model that it serves.
    """

    is_compileable = False

    def __init__(self, runtime: PagedRuntime) -> None:
        super().__init__(layers=[])
        self.runtime = runtime

    # -- one forward -------------------------------------------------------------------------

    @abstractmethod
    def begin_forward(self, inputs: StepInputs, num_layers: int, *, is_paged: bool) -> PagedStep:
        """Return the step of a forward; :meth:`end_forward` must follow."""

    @abstractmethod
    def end_forward(self, step: PagedStep, *, is_complete: bool) -> None:
        """Commit a forward, or roll it back."""

    @abstractmethod
    def gather_past(
        self, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the stored K and V of ``layer`` in the padded shape of the model's own masks."""

    def settle(
        self, step: PagedStep, allocation: Allocation, *, is_complete: bool, hold_window: bool
    ) -> None:
        """Make the new tokens valid, or leave the pool as it was before the forward.

        Args:
            step: of the forward.
            allocation: its blocks; rolled back if the step is not complete or cannot be committed.
            is_complete: whether the model's forward returned.
            hold_window: keep what falls behind a window, because a crop may bring it back.
        """
        if not is_complete:
            self.roll_back(allocation)
            return
        try:
            step.check_complete()
            self.commit(allocation, hold_window=hold_window)
        except BaseException:
            self.roll_back(allocation)
            raise

    def commit(self, allocation: Allocation, *, hold_window: bool) -> None:
        """Make the new tokens of a forward valid."""
        with self.runtime.lock:
            self.runtime.manager.commit(allocation, hold_window=hold_window)
            if self.runtime.config.debug:
                self.runtime.manager.check_integrity()

    def roll_back(self, allocation: Allocation) -> None:
        """Leave the pool as it was before a forward."""
        with self.runtime.lock:
            self.runtime.manager.rollback(allocation)
            if self.runtime.config.debug:
                self.runtime.manager.check_integrity()

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store K and V of one layer; called by the model's attention modules.

        Raises:
            CacheStateError: outside a forward of the patched model.
        """
        step = CURRENT_STEP.get()
        if step is None or step.cache is not self:
            self.check_usable()
            raise CacheStateError(
                "PagedCache.update() outside a forward of the model that it was made for: "
                "expected model(..., past_key_values=cache) of the patched model."
            )
        return step.update(key_states, value_states, layer_idx)

    def check_usable(self) -> None:
        """Raise if the pool behind this cache is gone.

        Raises:
            CacheStateError: the model was unpatched.
        """
        if not self.runtime.is_active:
            raise CacheStateError(
                "the model of this cache was unpatched and its memory is gone; patch it again and "
                "make a new cache."
            )

    # -- layers, as transformers asks for them -----------------------------------------------

    def __len__(self) -> int:
        """Return the number of layers."""
        return self.runtime.layout.num_layers

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return a layer's window, -1 for full attention; without a layer, the largest."""
        windows = self.runtime.layout.windows
        if layer_idx is not None:
            return windows[layer_idx] or -1
        return max(window or -1 for window in windows)

    @property
    def is_sliding(self) -> list[bool]:
        """Whether each layer has a window."""
        return [window is not None for window in self.runtime.layout.windows]

    @property
    def is_linear(self) -> list[bool]:
        """False for every layer; a list, since ``all([])`` is True."""
        return [False] * len(self)

    @property
    def is_dummy(self) -> list[bool]:
        """False for every layer."""
        return [False] * len(self)
