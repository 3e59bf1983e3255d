"""Runs requests on a patched model, a packed forward after the other.

    schedule (core) ─▶ forward (the user's model) ─▶ choose tokens (request) ─▶ rows leave

All live tokens of all rows go end to end through one forward: no padding is computed, stored
prefixes are skipped, equal prompts are computed once. Steps of decoding alone have the shape
[rows, 1].
"""

from __future__ import annotations

from itertools import accumulate

import torch

from hf_paged.backends.upload import index_of
from hf_paged.cache.packed_batch import PackedBatch
from hf_paged.cache.paged_cache import PagedCache
from hf_paged.cache.runtime import PagedRuntime
from hf_paged.cache.step import reserve
from hf_paged.core.allocation import Allocation, NewTokens
from hf_paged.core.interrupts import interruptible, uninterrupted, whole
from hf_paged.core.row import Row
from hf_paged.core.row_batch import RowBatch
from hf_paged.core.row_scheduler import RowScheduler
from hf_paged.core.row_swap import RowSwap
from hf_paged.errors import KVCacheFullError
from hf_paged.generation.request import Request

__all__ = ["Engine"]


class Engine:
    """Rows of one thread's requests on the pool; a context manager that gives all blocks back.

    Args:
        runtime: of the patched model; a call must be admitted.
        device: of the model's inputs.
    """

    def __init__(self, runtime: PagedRuntime, device: torch.device) -> None:
        assert runtime.packed_model is not None
        self._runtime = runtime
        self._model = runtime.packed_model
        self._model.begin_call()
        self._device = device
        version, keep = runtime.version(is_first_forward=True, is_prompt=True)
        owned = runtime.own_rows(self)
        file = runtime.block_file
        self._scheduler = RowScheduler(
            runtime.manager,
            self._reserve,
            self._let_finished_leave,
            max_batch_tokens=runtime.max_batch_tokens,
            version=version,
            keep=keep,
            sequences=owned.sequences,
            swap=None if file is None else RowSwap(runtime.manager, self._reserve, file),
        )
        self._num_computed_tokens = 0
        self._requests: list[Request] = []
        self._culprit: object | None = None
        self._ready: list[tuple[list[Row], torch.Tensor]] = []

    @whole
    def __enter__(self) -> Engine:
        """Begin; return the engine itself."""
        with self._runtime.lock:
            self._runtime.row_schedulers.add(self._scheduler)
        return self

    @whole
    def __exit__(self, *exc_info: object) -> None:
        """Give all blocks back."""
        with self._runtime.lock:
            self._scheduler.close()
            self._runtime.row_schedulers.discard(self._scheduler)
            self._runtime.num_preemptions += self._scheduler.num_preemptions

    @property
    def num_waiting(self) -> int:
        """Rows that were added and hold nothing yet."""
        return self._scheduler.num_waiting

    @whole
    def add(self, request: Request) -> None:
        """Queue the rows of ``request``; one with a culprit must be the only one.

        Raises:
            KVCacheFullError: a row can never fit; nothing was queued.
        """
        with self._runtime.lock:
            for row in request.rows:
                num_tokens = row.num_prompt_tokens
                if request.lengths_are_known and row.max_tokens is not None:
                    num_tokens = max(num_tokens, row.max_tokens)
                self._scheduler.check_can_ever_fit(row, num_tokens)
            self._culprit = request.culprit
            self._scheduler.is_rigid = request.culprit is not None
            for row in request.rows:
                self._scheduler.add(row)
            self._requests.append(request)

    @whole
    def drop(self, request: Request) -> None:
        """Let all rows of ``request`` go, finished or not."""
        with self._runtime.lock:
            self._requests.remove(request)
            for row in request.rows:
                if row in self._scheduler:
                    self._scheduler.finish(row)

    def run(self, request: Request) -> None:
        """Generate all tokens of an added, only request.

        Raises:
            KVCacheFullError: a row does not fit the pool alone, or rows that must stay together
                do not fit it together.
        """
        while not request.is_finished:
            self.step()
        request.finish()
        num_avoided = request.num_padded_tokens - self._num_computed_tokens
        self._runtime.num_avoided_tokens += max(0, num_avoided)

    def prefill(self, rows: list[Row]) -> torch.Tensor:
        """Compute the prompts of ``rows`` and nothing else.

        Returns:
            [B, V], the logits of their last tokens.

        Raises:
            KVCacheFullError: they do not fit together.
        """
        with uninterrupted(), self._runtime.lock:
            self._scheduler.is_rigid = True
            for row in rows:
                self._scheduler.add(row)
        while self._num_ready < len(rows):
            self._compute()
        ready, logits = self._take_ready()
        index = {row: index for index, row in enumerate(ready)}
        return logits[index_of([index[row] for row in rows], logits.device)]

    def step(self) -> None:
        """Run one forward, choose the next tokens of the rows that are ready for it.

        Raises:
            KVCacheFullError: the oldest row does not fit, even alone; nothing is lost.
        """
        self._compute()
        if self._culprit is not None:
            if self._num_ready < self._scheduler.num_active:
                return
        elif self._scheduler.is_filling:
            return  # rows that enter together decode together
        self._advance()

    @whole
    def hand_over(self, rows: list[Row], cache: PagedCache, real: torch.Tensor) -> bool:
        """Let ``cache`` hold what ``rows`` have computed; False if some of them have left.

        Args:
            rows: all that there are.
            cache: an empty one.
            real: [B, C] bool on the CPU, the columns of the rectangle that are no padding.
        """
        with self._runtime.lock:
            sequences = [row.sequence for row in rows if row.sequence is not None]
            if len(sequences) != len(rows):
                return False
            self._scheduler.hand_over()
            cache.take_over(sequences, real)
            return True

    # -- inside ------------------------------------------------------------------------------

    @property
    def _num_ready(self) -> int:
        return len({row for rows, _ in self._ready for row in rows if row.sequence is not None})

    def _compute(self) -> None:
        """Run one forward, if some row has a token to compute."""
        with uninterrupted():
            try:
                batch = self._runtime.scheduler.allocate(self._scheduler.next_batch)
            except KVCacheFullError as error:
                if self._culprit is None:
                    raise
                raise _blame(error, self._culprit) from error
            if batch is None:
                assert self._ready, "no row computes and none is ready: this would never end"
                return
            self._runtime.count_step()
            packed = self._pack(batch)
            try:
                with interruptible():
                    logits = self._model.forward(packed, self._device)
            finally:
                if not packed.is_settled:
                    with self._runtime.lock:
                        self._runtime.manager.rollback(batch.allocation)
            self._num_computed_tokens += len(batch.token_ids)
            rows = [batch.rows[index] for index in batch.complete]
            if not rows:
                return
            self._ready.append((rows, logits))
            with self._runtime.lock:
                for index, row in enumerate(rows):
                    if twins := self._scheduler.fork_twins(row):
                        self._ready.append((twins, logits[index].expand(len(twins), -1)))

    def _reserve(self, rows: list[NewTokens]) -> Allocation:
        return reserve(self._runtime, rows, hold_window=False, occasion=self._runtime.occasion)

    def _pack(self, batch: RowBatch) -> PackedBatch:
        ends = list(accumulate(row.end - row.start for row in batch.allocation.rows))
        wanted = [ends[index] - 1 for index in batch.complete] or [ends[-1] - 1]
        return PackedBatch(
            self._runtime, batch.allocation, batch.token_ids, batch.positions, wanted
        )

    def _advance(self, errors: dict[Request, Exception] | None = None) -> None:
        """Choose the next tokens of all rows that are ready; let rows leave that have ended.

        Args:
            errors: takes what a request raises; None: it is raised.
        """
        if not self._ready:
            return
        rows, logits = self._take_ready()
        if self._scheduler.num_waiting:
            self._let_finished_leave()
        ages: dict[tuple[Request, int], list[int]] = {}
        for index, row in enumerate(rows):
            ages.setdefault((row.payload.request, row.num_generated), []).append(index)
        for (request, _), found in ages.items():
            found.sort(key=lambda index: rows[index].payload.index)
            of_group = [rows[index] for index in found]
            try:
                request.advance(of_group, logits[index_of(found, logits.device)])
            except Exception as error:
                if errors is None:
                    raise
                errors[request] = error
            if not request.keeps_finished:
                self._let_ended_go(request, request.rows if request.is_finished else of_group)

    def _take_ready(self) -> tuple[list[Row], torch.Tensor]:
        """Return the rows that wait for their next token, and their logits."""
        rows = [row for rows, _ in self._ready for row in rows]
        parts = [logits for _, logits in self._ready]
        self._ready = []
        logits = parts[0] if len(parts) == 1 else torch.cat(parts)
        # A row that had to give way meanwhile computes its last token again, or has done so.
        last = {row: index for index, row in enumerate(rows) if row.sequence is not None}
        here = sorted(last.values())
        if len(here) < len(rows):
            return [rows[index] for index in here], logits[index_of(here, logits.device)]
        return rows, logits

    def _let_finished_leave(self) -> bool:
        """Give up rows that have ended and are computed on for show; False if there are none."""
        found = False
        for request in self._requests:
            if request.keeps_finished and request.stop_keeping_finished():
                found = self._let_ended_go(request, request.rows) or found
        return found

    @whole
    def _let_ended_go(self, request: Request, rows: list[Row]) -> bool:
        ended = [row for row in rows if request.has_ended(row) and row in self._scheduler]
        with self._runtime.lock:
            for row in ended:
                self._scheduler.finish(row)
        return bool(ended)


def _blame(error: KVCacheFullError, culprit: object) -> KVCacheFullError:
    """Say why the rows could neither wait nor give way."""
    name = culprit if isinstance(culprit, str) else type(culprit).__name__
    message = (
        f"{error} They must all be in the pool at once, because {name} sees all rows of the batch "
        "at every step. If it treats each row by itself, declare it with hf_paged.row_wise(), and "
        "rows will wait for each other; or pass fewer rows at a time."
    )
    return KVCacheFullError(message, **error.__dict__)
