"""The engine of ``generate_batch``: what goes wrong in a request ends that request alone."""

from __future__ import annotations

import torch

from hf_paged.cache.runtime import PagedRuntime
from hf_paged.core.interrupts import is_from_signal_handler, whole
from hf_paged.core.row import Row
from hf_paged.errors import KVCacheFullError
from hf_paged.generation.engine import Engine
from hf_paged.generation.request import Request

__all__ = ["BatchEngine"]


class BatchEngine(Engine):
    """Many requests, none of which has a culprit; rows of all ages side by side.

    Args:
        runtime: of the patched model; a call must be admitted.
        device: of the model's inputs.
    """

    def __init__(self, runtime: PagedRuntime, device: torch.device) -> None:
        super().__init__(runtime, device)
        self._suspects: dict[Row, int] = {}

    @property
    def num_running_tokens(self) -> int:
        """Tokens generated so far for requests that have not ended."""
        return sum(row.num_generated for request in self._requests for row in request.rows)

    def step_isolated(self) -> list[tuple[Request, Exception | None]]:
        """Run one step; what goes wrong in a request ends that request alone.

        Rows do not wait for others to have the same age.

        Returns:
            The requests that have ended, which are dropped, and what ended them if it was an error.
        """
        errors: dict[Request, Exception] = {}
        try:
            self._compute()
        except Exception as error:
            if is_from_signal_handler(error):
                raise
            self._find_guilty(error, errors)
        self._advance(errors)
        ended: list[tuple[Request, Exception | None]] = []
        for request in tuple(self._requests):
            if request in errors or request.is_finished:
                self.drop(request)
                ended.append((request, errors.get(request)))
        self._clear_suspects()
        return ended

    @whole
    def _find_guilty(self, error: Exception, errors: dict[Request, Exception]) -> None:
        """Blame the row for which a forward raised, if it can be told; if not, find out.

        Rows that were in such a forward come back one by one. Each joins those that have shown
        their innocence by a forward without an error.
        """
        with self._runtime.lock:
            active = self._scheduler.active
            suspects = active if len(active) == 1 else [r for r in active if r in self._suspects]
            if isinstance(error, KVCacheFullError):
                errors[self._scheduler.oldest.payload.request] = error
            elif len(suspects) == 1:
                errors[suspects[0].payload.request] = error
            else:
                self._suspects = {row: row.num_generated for row in active}
                self._scheduler.max_active = 1
                # Of all: a forward that raised after its commit has taken logits along.
                self._scheduler.send_back_all()
                self._ready = []

    def _clear_suspects(self) -> None:
        """Clear rows that have a token more than when they came under suspicion."""
        if not self._suspects:
            return
        self._suspects = {
            row: num_generated
            for row, num_generated in self._suspects.items()
            if row in self._scheduler and row.num_generated == num_generated
        }
        self._scheduler.max_active = self._scheduler.num_active + 1 if self._suspects else None
