"""The random numbers of one ``generate()``, exactly as transformers draws them.

transformers draws once an age for the whole batch, rows that have ended included: row i at age t
gets the i-th token of the t-th draw. Here some rows are missing, and others come late:

    age           0          1          2          3
    first draw    rows 0 1   rows 0 1   row 0      row 0       each consumes what 3 rows consume
    later         row 2      row 2                             from the state kept before that draw
"""

from __future__ import annotations

import torch

from hf_paged.backends.upload import index_of

__all__ = ["Draws"]


class Draws:
    """Draws tokens for some rows at a time, the same as in a draw for all rows.

    Whenever no ``sample`` runs, the generator is where transformers' draws of the ages so far would
    have left it.

    Args:
        num_rows: rows of the whole batch.
        device: where probabilities lie and random numbers are drawn.
        is_replayable: keep the generator's state before each age (5 kB on a CPU), so that rows may
            ask for an age that was drawn before.
        generator: on ``device``; None: torch's default one of ``device``.
    """

    def __init__(
        self,
        num_rows: int,
        *,
        device: torch.device,
        is_replayable: bool,
        generator: torch.Generator | None = None,
    ) -> None:
        self._num_rows = num_rows
        self._device = device
        self._is_replayable = is_replayable
        self._generator = generator
        self._num_ages = 0
        self._states: list[torch.Tensor] = []
        self._batch: torch.Tensor | None = None

    def sample(self, probs: torch.Tensor, rows: list[int], age: int) -> torch.Tensor:
        """Draw one token for each of some rows, which all have the same age.

        Args:
            probs: [k, V] contiguous; nonnegative, finite, no row all zero. V is the same in every
                call.
            rows: k >= 1 different indices into the batch, in any order.
            age: the next one that was not drawn yet, or, if replayable, one that was.

        Returns:
            [k] int64, in the order of ``rows``.
        """
        assert rows, "a draw is for at least one row"
        if age < self._num_ages:
            assert self._is_replayable, f"age {age} is asked for again, and no states were kept"
            return self._replay(probs, rows, age)
        assert age == self._num_ages, f"age {age} is drawn before age {self._num_ages}"
        state = self._get_state() if self._is_replayable else None
        tokens = self._draw(probs, rows, self._num_rows)
        if state is not None:
            self._states.append(state)
        self._num_ages += 1
        return tokens

    def finish(self) -> None:
        """Forget states and buffer; no age can be asked for again."""
        self._states.clear()
        self._is_replayable = False
        self._batch = None

    def _replay(self, probs: torch.Tensor, rows: list[int], age: int) -> torch.Tensor:
        # Random numbers come row by row on a CPU, so rows behind the last one that is asked for
        # change nothing. On CUDA the number of rows decides which thread draws what.
        num_drawn = max(rows) + 1 if self._device.type == "cpu" else self._num_rows
        frontier = self._get_state()
        self._set_state(self._states[age])
        try:
            return self._draw(probs, rows, num_drawn)
        finally:
            self._set_state(frontier)

    def _draw(self, probs: torch.Tensor, rows: list[int], num_drawn: int) -> torch.Tensor:
        """Draw for the first ``num_drawn`` rows of the batch; return the tokens of ``rows``."""
        if rows == list(range(num_drawn)):
            return torch.multinomial(probs, 1, generator=self._generator).squeeze(1)
        if self._batch is None:
            self._batch = probs.new_ones(self._num_rows, probs.shape[1])
        # What rows held before stays in the others: their tokens are drawn and thrown away.
        at = index_of(rows, probs.device)
        self._batch[at] = probs
        try:
            drawn = torch.multinomial(self._batch[:num_drawn], 1, generator=self._generator)
        except RuntimeError:
            self._batch = None  # it may hold what multinomial refused
            raise
        return drawn.squeeze(1)[at]

    def _get_state(self) -> torch.Tensor:
        if self._generator is not None:
            return self._generator.get_state()
        if self._device.type == "cpu":
            return torch.get_rng_state()
        state: torch.Tensor = torch.get_device_module(self._device).get_rng_state(self._device)
        return state

    def _set_state(self, state: torch.Tensor) -> None:
        if self._generator is not None:
            self._generator.set_state(state)
        elif self._device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(self._device).set_rng_state(state, self._device)
