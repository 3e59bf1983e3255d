"""Decoding steps as CUDA graphs: what a step launches is recorded once and then given as a whole.

A step of a small model is bound by Python, which launches some ten kernels a layer. A graph
launches them all, over the same memory each time: so ids, positions, tables and slots come in one
buffer that stays, and whatever Python computed from their values while capturing would be wrong
later.

    key: rows and table width, both padded to powers of two
    1st step of a key   the model's own code, unpadded
    2nd                 ... over the static buffer, captured ─▶ replayed
    later               one copy into the static buffer ─▶ replayed

Rows that pad a step have no tokens and no slot: attention gives 0 for them, nobody reads on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hf_paged.backends.upload import send, size_of
from hf_paged.cache.packed_batch import PackedBatch, PackedCache
from hf_paged.cache.runtime import PagedRuntime
from hf_paged.cache.step import PagedStep
from hf_paged.cache.step_inputs import StepInputs
from hf_paged.cache.step_metadata import StepMetadata, pad_to
from hf_paged.core.interrupts import interruptible, uninterrupted
from hf_paged.errors import UnsupportedModelError
from hf_paged.generation import device_graph
from hf_paged.generation.device_graph import DeviceGraph
from hf_paged.generation.recording import Forward
from hf_paged.generation.structure import addresses_of, structure_of

__all__ = ["DecodeGraphs"]

logger = logging.getLogger("hf_paged")

_MAX_ROWS = 256


@dataclass
class _Captured:
    """A graph and the memory that it reads and writes."""

    graph: DeviceGraph
    buffer: torch.Tensor
    logits: torch.Tensor


class _CapturedBatch(PackedCache):
    """The ``cache`` argument while a step is captured, over rows that will be other ones later."""

    def __init__(self, runtime: PagedRuntime, metadata: StepMetadata) -> None:
        super().__init__(runtime)
        self._metadata = metadata

    def begin_forward(self, inputs: StepInputs, num_layers: int, *, is_paged: bool) -> PagedStep:
        if not is_paged:
            self.refuse()
        return PagedStep(
            self,
            self._metadata,
            num_rows=inputs.num_rows,
            num_columns=inputs.num_columns,
            num_layers=num_layers,
            is_paged=True,
        )

    def end_forward(self, step: PagedStep, *, is_complete: bool) -> None:
        """Blocks belong to the batch whose rows they are."""
        if is_complete:
            step.check_complete()


class DecodeGraphs:
    """The decoding steps of one model on one device; threads may share it.

    Args:
        forward: packed forward of the model, in its own code or compiled.
        runtime: of the model.
        device: of the model, all of it.
        must: raise where a step cannot be captured; otherwise a warning says so, once, and steps
            run as they are.

    Attributes:
        num_captured: graphs made so far.
        num_replayed: steps that ran as a graph.
    """

    def __init__(
        self, forward: Forward, runtime: PagedRuntime, device: torch.device, *, must: bool
    ) -> None:
        self._forward = forward
        self._runtime = runtime
        self._device = device
        self._must = must
        self._pool = device_graph.make_pool(device)
        self._captured: dict[tuple[int, int], _Captured] = {}
        self._seen: set[tuple[int, int]] = set()
        self._key: Hashable = None
        self._generation = runtime.storage.generation
        self._has_failed = False
        self._turn: torch.cuda.Event | None = None
        self._lock = threading.Lock()
        self.num_captured = self.num_replayed = 0

    def check(self, model: Any) -> None:
        """Drop what was captured over other weights: to be called at each ``generate()``."""
        numerics = (
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
        )
        key = (structure_of(model), addresses_of(model), numerics)
        with self._lock:
            if key != self._key:
                self._forget()
                self._key, self._has_failed = key, False

    def takes(self, batch: PackedBatch, device: torch.device) -> bool:
        """Whether ``batch`` may run as a graph: plain decoding, in no special mode of torch.

        Args:
            batch: the step.
            device: of the model's inputs; it may have been moved.
        """
        return (
            device == self._device
            and batch.is_decode
            and batch.wants_all
            and batch.num_tokens <= _MAX_ROWS
            and not self._has_failed
            and not torch.is_grad_enabled()
            and not torch.is_autocast_enabled(device.type)
            and not torch._C._len_torch_dispatch_stack()  # it wants to see every operation
        )

    def __call__(self, batch: PackedBatch) -> torch.Tensor:
        """Run a step that :meth:`takes` likes; commits ``batch`` or rolls it back.

        Returns:
            [B, V] logits, memory of their own.

        Raises:
            UnsupportedModelError: it cannot be captured, and must be.
        """
        num_rows, width = batch.num_tokens, batch.metadata.width
        key = (1 << (num_rows - 1).bit_length(), width)
        with self._lock:
            if self._generation != self._runtime.storage.generation:
                self._forget()  # the pool has other tensors now
            captured = self._captured.get(key)
            if captured is None and key not in self._seen:
                self._seen.add(key)
            elif captured is None and not self._has_failed:
                captured = self._try_to_capture(batch, *key)
        if captured is None:
            return self._forward(batch, *batch.send(self._device))
        with uninterrupted():
            is_complete = False
            try:
                with interruptible(), self._lock:
                    self._await_turn()
                    send(self._arrays(batch, *key), self._device, into=captured.buffer)
                    captured.graph.replay()
                    logits = captured.logits[:num_rows].clone()
                    self._end_turn()
                self.num_replayed += 1
                is_complete = True
            finally:
                batch.end_replay(is_complete=is_complete)
        return logits

    def _forget(self) -> None:
        self._captured.clear()
        self._seen.clear()
        self._generation = self._runtime.storage.generation

    def _try_to_capture(self, batch: PackedBatch, num_rows: int, width: int) -> _Captured | None:
        start = time.perf_counter()
        try:
            with uninterrupted():  # a torn capture would leave the device in it
                captured = self._capture(batch, num_rows, width)
        except Exception as error:  # whatever the model's code or the device meets
            self._has_failed = True
            self._forget()
            reason = f"{type(error).__name__}: {str(error).strip() or 'no message'}"
            if self._must:
                raise UnsupportedModelError(
                    f"cuda_graphs=True, but a decoding step cannot be captured: {reason}. Pass "
                    "cuda_graphs='auto' to run without where that is so."
                ) from error
            logger.warning("decoding steps run without CUDA graphs: %s", reason)
            return None
        self._captured[num_rows, width] = captured
        self.num_captured += 1
        logger.info(
            "captured decoding for up to %d rows of up to %d tokens in %.2f s",
            num_rows,
            width * self._runtime.block_size,
            time.perf_counter() - start,
        )
        return captured

    def _capture(self, batch: PackedBatch, num_rows: int, width: int) -> _Captured:
        arrays = self._arrays(batch, num_rows, width)
        with torch.inference_mode(False):  # or it could not be written outside of that mode
            buffer = torch.empty(size_of(arrays), dtype=torch.uint8, device=self._device)
        ids, positions, index, *tables = send(arrays, self._device, into=buffer)
        runtime = self._runtime
        shown = batch.metadata.padded(num_rows, width)
        # All that Python may see of the lengths: no row can ever be longer.
        shown.seq_lens = np.full(num_rows, width * runtime.block_size, np.int32)
        shown.place(self._device, tables)

        def forward() -> torch.Tensor:
            cache = _CapturedBatch(runtime, shown)
            return self._forward(cache, ids[:, None], positions[:, None], index)

        forward()  # kernels are loaded, libraries set up; K and V are those of this very step
        graph = device_graph.make_graph(self._device, self._pool)
        return _Captured(graph, buffer, graph.capture(forward))

    def _await_turn(self) -> None:
        """Let this thread's stream wait for the last replay, which may be on another's."""
        if self._turn is not None:
            torch.cuda.current_stream(self._device).wait_event(self._turn)

    def _end_turn(self) -> None:
        if self._device.type == "cuda":
            self._turn = torch.cuda.current_stream(self._device).record_event()

    @staticmethod
    def _arrays(batch: PackedBatch, num_rows: int, width: int) -> list[np.ndarray]:
        """Return what a step reads, padded: ids, positions, wanted logits, then its metadata."""
        ids, positions, _ = batch.arrays()
        return [
            pad_to(ids, (num_rows,), 0),
            pad_to(positions, (num_rows,), 0),
            np.arange(num_rows),
            *batch.metadata.padded(num_rows, width).arrays(),
        ]
