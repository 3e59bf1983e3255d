"""A patched model as the packed runner calls it, and whether its rows may lie end to end.

In a packed forward the tokens of all rows lie end to end, so they may meet in attention alone. Of
the architectures that the specs name this is known; of others it is found out once, by comparing
a few tokens packed with the same tokens alone.
"""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from typing import Any

import torch
from transformers.generation.utils import GenerationMixin

from hf_paged.cache.packed_batch import PackedBatch, PackedCache
from hf_paged.cache.runtime import PagedRuntime
from hf_paged.cache.step import reserve
from hf_paged.core.allocation import NewTokens
from hf_paged.core.interrupts import interruptible, uninterrupted
from hf_paged.errors import KVCacheFullError
from hf_paged.generation.compiled import CompiledForward
from hf_paged.generation.recording import Forward
from hf_paged.integration.attention import wants_weights
from hf_paged.integration.fingerprint import has_dynamic_rope, has_user_hooks
from hf_paged.integration.graphing import make_graphs, may_capture
from hf_paged.integration.model_spec import ModelSeams, spec_of

__all__ = ["PackedModel"]

logger = logging.getLogger("hf_paged")

_UNKNOWN = object()
_METHODS = (
    "prepare_inputs_for_generation",
    "_update_model_kwargs_for_generation",
    "_prefill",
    "_sample",
)
"""What transformers calls in a loop that the packed one stands for."""

_PROBE_LENGTHS = (5, 2, 4)
_PROBE_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Relative distance of logits; tokens that meet where they should not differ by their own size."""
_PROBE_TOLERANCE_OF_HALF = 5e-2


class PackedModel:
    """A patched model as the packed runner sees it.

    Args:
        seams: of the model; its modules are kept alive by the model, not by this object.
        runtime: of the model.
    """

    def __init__(self, seams: ModelSeams, runtime: PagedRuntime) -> None:
        self._model_ref = weakref.ref(seams.model)
        self._base_ref = weakref.ref(seams.base)
        self._cache_name = seams.cache_name
        self._runtime = runtime
        self._obstacle: object = _UNKNOWN
        self._may_compile = self._may_capture = True
        self._compiled: CompiledForward | None = None
        if runtime.config.compile:
            self._compiled = CompiledForward(
                seams.model, seams.base, self.forward_eagerly, runtime, runtime.config.compile
            )
        self._graphs = make_graphs(seams, runtime, self._forward)

    def begin_call(self) -> None:
        """Look whether what was compiled or captured still holds; packed forwards may follow.

        Raises:
            ConfigurationError: decoding steps must be captured and cannot.
        """
        if self._graphs is not None:
            self._may_capture = may_capture(self._model, self._runtime)
            if self._may_capture:
                self._graphs.check(self._model)
        if self._compiled is not None:
            self._may_compile = not has_user_hooks(self._model)
            is_frozen = self._runtime.config.compile == "freeze"
            self._compiled.check(self._runtime.computation.fingerprint() if is_frozen else None)

    def close(self) -> None:
        """Let go of what was captured: it holds memory of the device."""
        self._graphs = None

    def forward(self, batch: PackedBatch, device: torch.device) -> torch.Tensor:
        """Run the model on packed tokens, as a graph or compiled if so wished.

        Args:
            batch: brings the tokens and carries their blocks.
            device: of the model's inputs.

        Returns:
            [m, V], the logits that ``batch`` wants.
        """
        if self._graphs is not None and self._may_capture and self._graphs.takes(batch, device):
            return self._graphs(batch)
        return self._forward(batch, *batch.send(device))

    def _forward(
        self,
        batch: PackedCache,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        index: torch.Tensor,
    ) -> torch.Tensor:
        forward: Forward = self.forward_eagerly
        if self._compiled is not None and self._may_compile:
            forward = self._compiled
        return forward(batch, input_ids, position_ids, index)

    def forward_eagerly(
        self,
        batch: PackedCache,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        index: torch.Tensor,
    ) -> torch.Tensor:
        """Run the model's own code on packed tokens; a :data:`Forward`."""
        is_decode = input_ids.shape[1] == 1
        logits: torch.Tensor = self._model(
            input_ids=input_ids,
            position_ids=position_ids,
            use_cache=True,
            return_dict=True,
            logits_to_keep=1 if is_decode else index,
            **{self._cache_name: batch},
        ).logits
        if not is_decode:
            return logits[0]
        return logits[:, 0] if len(index) == len(logits) else logits[index, 0]

    def obstacle(self) -> str | None:
        """Return why this model's rows stay in rectangles now, or None if they need not."""
        base, config = self._base, self._runtime.config
        if wants_weights(base, {}):
            return "its config asks for attention weights"
        replaced = _replaced_method(self._model)
        if replaced is not None:
            return replaced
        if any(module.training for module in base.modules()):
            return "the model is in training mode"
        if not config.packed_hooks and has_user_hooks(self._model):
            return "the model carries hooks, which must see rows as they always did"
        if has_dynamic_rope(base.config):
            return "its RoPE depends on the longest row of the forward"
        if self._obstacle is _UNKNOWN:
            try:
                self._obstacle = self._find_obstacle()
            except (KVCacheFullError, torch.OutOfMemoryError) as error:
                # It may be otherwise next time.
                logger.info("no room to compare tokens packed and alone: %s", error)
                return "there was no room to compare tokens packed and alone"
        obstacle: Any = self._obstacle
        return None if obstacle is None else str(obstacle)

    def compare(self) -> str | None:
        """Return how a few tokens differ packed from the same alone, or None if they do not."""
        device = self._base.device
        vocab_size = self._model.get_input_embeddings().weight.shape[0]
        generator = torch.Generator().manual_seed(0)
        prompts = [
            torch.randint(vocab_size, (length,), generator=generator).tolist()
            for length in _PROBE_LENGTHS
        ]
        try:
            with torch.no_grad():
                alone = torch.stack([self._last_logits(prompt, device) for prompt in prompts])
                packed = self._run_packed(prompts, device)
        except (KVCacheFullError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            return f"comparing raises {type(error).__name__}: {error}"
        tolerance = _PROBE_TOLERANCE.get(alone.dtype, _PROBE_TOLERANCE_OF_HALF)
        distance = float((packed - alone).float().norm() / alone.float().norm())
        if distance <= tolerance:
            return None
        return f"packed tokens give other logits than the same alone (relative L2 {distance:.1e})"

    @property
    def _model(self) -> Any:
        return self._model_ref()

    @property
    def _base(self) -> Any:
        return self._base_ref()

    def _find_obstacle(self) -> str | None:
        config, spec = self._runtime.config, spec_of(self._base.config)
        name = self._base.config.model_type
        if "logits_to_keep" not in self._parameters or "position_ids" not in self._parameters:
            return "its forward takes no logits_to_keep or no position_ids"
        if spec is not None and spec.packed is not None and config.verify is not True:
            return None if spec.packed else f"tokens of {name} meet outside attention"
        own: Any = type(self._model).prepare_inputs_for_generation
        if own is not GenerationMixin.prepare_inputs_for_generation:
            return f"{name} prepares the inputs of its forward in its own way"
        if config.verify is False:
            return f"nothing is known of {name} and verify=False"
        obstacle = self.compare()
        logger.info(
            "%s was compared packed and alone: %s",
            name,
            "equal, its live tokens will be packed" if obstacle is None else obstacle,
        )
        return obstacle

    def _last_logits(self, prompt: list[int], device: torch.device) -> torch.Tensor:
        ids = torch.tensor([prompt], device=device)
        logits: torch.Tensor = self._model(input_ids=ids, use_cache=False).logits
        return logits[0, -1]

    @property
    def _parameters(self) -> frozenset[str]:
        return frozenset(inspect.signature(type(self._model).forward).parameters)

    def _run_packed(self, prompts: list[list[int]], device: torch.device) -> torch.Tensor:
        """Compute all but the last tokens in one forward, the last ones in another."""
        runtime = self._runtime
        with uninterrupted():
            with runtime.lock:
                sequences = [runtime.manager.new_sequence() for _ in prompts]
            try:
                for part in (slice(0, -1), slice(-1, None)):
                    rows = [
                        NewTokens(sequence, len(prompt[part]))
                        for sequence, prompt in zip(sequences, prompts, strict=True)
                    ]
                    allocation = runtime.scheduler.allocate(
                        functools.partial(
                            reserve, runtime, rows, hold_window=False, occasion="a comparison"
                        )
                    )
                    batch = PackedBatch(
                        runtime,
                        allocation,
                        [token for prompt in prompts for token in prompt[part]],
                        [place for prompt in prompts for place in range(len(prompt))[part]],
                    )
                    try:
                        with interruptible():
                            logits = self.forward_eagerly(batch, *batch.send(device))
                    finally:
                        if not batch.is_settled:
                            with runtime.lock:
                                runtime.manager.rollback(allocation)
                return logits
            finally:
                with runtime.lock:
                    # These are nobody's tokens.
                    runtime.manager.num_computed_tokens -= sum(s.num_tokens for s in sequences)
                    for sequence in sequences:
                        runtime.manager.free(sequence)


def _replaced_method(model: Any) -> str | None:
    """Return how the loop of ``generate()`` was changed by the user or by PEFT, or None."""
    for name in _METHODS:
        own = vars(model).get(name)
        if own is not None and getattr(own, "__func__", own) is not getattr(type(model), name):
            return f"{name} of this object was replaced"
        owner = next(
            cls
            for cls in type(model).__mro__
            if name in vars(cls) and not cls.__module__.startswith("hf_paged.")
        )
        if not owner.__module__.startswith("transformers."):
            return f"{owner.__name__} has its own {name}"
    return None
