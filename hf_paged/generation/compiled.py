"""The forward of packed tokens through a compiler: ``patch(model, compile=...)``.

Two graphs serve all steps: one token, and any number from two on, decoding rows and prompts alike.
A graph for each of some numbers of rows would cost a compilation each, padded tokens and, under
"freeze", a copy of the weights each. It would bring little (SmolLM2-135M in fp32, 16 rows, one
thread of a busy AVX2 machine, ms of CPU time a step, some 10% uncertain):

    eager 199    any number 180, frozen 170    16 rows exactly 171, frozen 172
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Hashable
from itertools import chain
from typing import Any

import torch
import xxhash

from hf_paged.cache.packed_batch import PackedCache
from hf_paged.cache.runtime import PagedRuntime
from hf_paged.cache.step_inputs import StepInputs
from hf_paged.core.interrupts import interruptible, uninterrupted
from hf_paged.generation.compiled_graph import CompiledGraph, compile_graph
from hf_paged.generation.recording import Forward
from hf_paged.generation.structure import structure_of

__all__ = ["CompiledForward"]

logger = logging.getLogger("hf_paged")


class CompiledForward:
    """A packed forward of one patched model, compiled when first needed.

    What cannot be compiled runs eagerly; a warning says why, once.

    Args:
        model: the patched causal LM. It is not kept alive, its weights are once compiled.
        base: the part of it that ``runtime.computation`` watches; likewise.
        eager: the packed forward in the model's own code: what is recorded, and what runs where
            nothing can be compiled. It must not keep the model alive either.
        runtime: of the model.
        mode: True: weights are inputs, changes in place are seen. "freeze": packed for inference,
            once.

    Attributes:
        eager_reason: why forwards run eagerly now; None: they are compiled.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        base: torch.nn.Module,
        eager: Forward,
        runtime: PagedRuntime,
        mode: bool | str,
    ) -> None:
        self._model = weakref.ref(model)
        self._base = weakref.ref(base)
        self._eager = eager
        self._runtime = runtime
        self._mode = mode
        self._graphs: dict[bool, CompiledGraph] = {}
        self._key: Hashable = None
        self._freeze = False
        self._has_failed = False
        self._warned: set[str] = set()
        self._lock = threading.RLock()
        self.eager_reason: str | None = "check() has not been called"

    def check(self, version: Hashable | None) -> None:
        """Look at the model again: to be called at the start of each ``generate()``.

        Drops what was compiled for other modules, settings or shapes of weights and, under
        "freeze", for another version. Weights that were replaced are looked up again.

        Args:
            version: ``runtime.computation.fingerprint()``; read under "freeze" only. None: it
                cannot be told, so weights are not frozen.
        """
        with self._lock:
            if self._has_failed:
                return
            self.eager_reason = None
            if not self._runtime.computation.is_determined():
                self._run_eagerly("hooks of the user, dropout or a replaced forward are in the way")
                return
            model, base = self._model(), self._base()
            assert model is not None and base is not None, "a generate() of a model that is gone"
            frozen: Hashable = None
            if self._mode == "freeze":
                head = _digest_outside(model, base)
                if version is None or head is None:
                    self._warn("weights are not frozen: whether they change cannot be told")
                else:
                    frozen = (version, head)
            key = (structure_of(model), frozen)
            if key != self._key:
                self._graphs.clear()
                self._key, self._freeze = key, frozen is not None
            for graph in self._graphs.values():
                graph.load_weights(model)

    def __call__(
        self,
        batch: PackedCache,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        logits_index: torch.Tensor,
    ) -> torch.Tensor:
        """Run the forward of ``batch``, which commits it or, after an exception, rolls it back.

        The first call for one token, and for more, compiles. An exception meanwhile (Ctrl-C) leaves
        the batch unsettled.

        Args:
            batch: good for this forward alone.
            input_ids: [N, 1] or [1, N] int64.
            position_ids: likewise.
            logits_index: [L] int64, which of the N tokens' logits are wanted.

        Returns:
            [L, V].
        """
        num_tokens, num_logits = input_ids.numel(), logits_index.shape[0]
        graph = self._graph(num_tokens, input_ids.device)
        if graph is None:
            return self._eager(batch, input_ids, position_ids, logits_index)
        padding = min(num_tokens, 2) - num_logits  # the graphs want one of one token, else two
        if padding > 0:
            logits_index = torch.nn.functional.pad(logits_index, (0, padding))
        ids, positions = input_ids.view(1, -1), position_ids.view(1, -1)
        inputs = StepInputs(None, 1, num_tokens, None, position_ids)
        with uninterrupted():
            step = batch.begin_forward(inputs, len(batch), is_paged=True)
            is_complete = False
            try:
                with interruptible(), torch.no_grad():
                    logits = graph.run(step, ids, positions, logits_index)
                is_complete = True
            finally:
                batch.end_forward(step, is_complete=is_complete)
        return logits[:num_logits]

    def _graph(self, num_tokens: int, device: torch.device) -> CompiledGraph | None:
        """Return the graph for ``num_tokens``, compiled now if it is new; None: run eagerly."""
        if self.eager_reason is not None:
            return None
        if torch.is_grad_enabled() or torch.is_autocast_enabled(device.type):
            self._warn("forwards with gradients or under autocast run eagerly")
            return None
        is_dynamic = num_tokens > 1
        graph = self._graphs.get(is_dynamic)
        if graph is None:
            with self._lock:
                graph = self._graphs.get(is_dynamic)
                if graph is None and self.eager_reason is None:
                    graph = self._compile(is_dynamic, device)
        return graph

    def _compile(self, is_dynamic: bool, device: torch.device) -> CompiledGraph | None:
        model = self._model()
        assert model is not None, "a forward of a model that is gone"
        try:
            graph = self._graphs[is_dynamic] = compile_graph(
                self._eager,
                model,
                self._runtime,
                device,
                is_dynamic=is_dynamic,
                freeze=self._freeze,
            )
        except Exception as error:  # a compiler's, or what the model's code raised without data
            self._has_failed = True
            self._run_eagerly(f"{type(error).__name__}: {_first_line(error)}")
            return None
        return graph

    def _run_eagerly(self, reason: str) -> None:
        self.eager_reason = reason
        self._warn(f"the forward is not compiled, it runs eagerly: {reason}")

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning("compile=%r: %s", self._mode, message)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")


def _digest_outside(model: torch.nn.Module, base: torch.nn.Module) -> bytes | None:
    """Return a digest of the weights of ``model`` that ``base`` lacks, or None: unreadable.

    The fingerprint of a computation covers what K and V depend on, which the head is no part of.
    """
    digest: Any = xxhash.xxh3_128()
    inside = {id(tensor) for tensor in chain(base.parameters(), base.buffers())}
    for tensor in chain(model.parameters(), model.buffers()):
        if id(tensor) not in inside:
            try:
                flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
                digest.update(flat.numpy())
            except (RuntimeError, TypeError, NotImplementedError):
                return None
    return bytes(digest.digest())
