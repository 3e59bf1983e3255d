"""When a call may be packed: what must be true of the model, and of the call.

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

from hf_paged.cache.packed_batch import PackedBatch
from hf_paged.cache.paged_cache import PagedCache
from hf_paged.cache.runtime import PagedRuntime
from hf_paged.cache.step import reserve
from hf_paged.core.allocation import NewTokens
from hf_paged.core.interrupts import interruptible, uninterrupted
from hf_paged.errors import KVCacheFullError
from hf_paged.generation.compiled import CompiledForward
from hf_paged.integration.fingerprint import has_dynamic_rope, has_user_hooks
from hf_paged.integration.model_spec import ModelSeams, spec_of

__all__ = ["PackedModel", "find_prompts", "why_not_packed"]

logger = logging.getLogger("hf_paged")

_KNOWN_ARGUMENTS = frozenset(
    {
        "assistant_tokenizer",
        "attention_mask",
        "cache",
        "logits_to_keep",
        "past_key_values",
        "position_ids",
        "tokenizer",
        "use_cache",
    }
)
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
        self._obstacle_found: list[str | None] = []
        self._compiled: CompiledForward | None = None
        if runtime.config.compile:
            self._compiled = CompiledForward(
                seams.model, seams.base, self._forward_eager, runtime, runtime.config.compile
            )

    def begin_call(self) -> None:
        """Look whether what was compiled still holds; packed forwards may follow."""
        if self._compiled is not None:
            is_frozen = self._runtime.config.compile == "freeze"
            self._compiled.check(self._runtime.computation.fingerprint() if is_frozen else None)

    def forward(
        self,
        batch: PackedBatch,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        index: torch.Tensor,
    ) -> torch.Tensor:
        """Run the model on packed tokens, compiled if so wished.

        Args:
            batch: carries the blocks.
            input_ids: [1, N] or [N, 1].
            position_ids: likewise.
            index: [m], the tokens whose logits are wanted.

        Returns:
            [m, V].
        """
        run = self._forward_eager if self._compiled is None else self._compiled
        return run(batch, input_ids, position_ids, index)

    def _forward_eager(
        self,
        batch: PackedBatch,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        index: torch.Tensor,
    ) -> torch.Tensor:
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
        if any(module.training for module in base.modules()):
            return "the model is in training mode"
        if not config.packed_hooks and has_user_hooks(self._model):
            return "the model carries hooks, which must see rows as they always did"
        if has_dynamic_rope(base.config):
            return "its RoPE depends on the longest row of the forward"
        if not self._obstacle_found:
            self._obstacle_found.append(self._find_obstacle())
        return self._obstacle_found[0]

    def compare(self) -> str | None:
        """Return how a few tokens differ packed from the same alone, or None if they do not."""
        device = self._base.device
        vocab_size = self._model.get_input_embeddings().weight.shape[0]
        generator = torch.Generator().manual_seed(0)
        prompts = [
            torch.randint(vocab_size, (length,), generator=generator).tolist()
            for length in _PROBE_LENGTHS
        ]
        with torch.no_grad():
            alone = torch.stack(
                [
                    self._model(
                        input_ids=torch.tensor([prompt], device=device), use_cache=False
                    ).logits[0, -1]
                    for prompt in prompts
                ]
            )
            try:
                packed = self._run_packed(prompts, device)
            except KVCacheFullError as error:
                return (
                    f"the pool is too small to compare packed tokens with the same alone: {error}"
                )
            except Exception as error:
                return f"a packed forward raises {type(error).__name__}: {error}"
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
                    positions = [p for prompt in prompts for p in range(len(prompt))[part]]
                    allocation = runtime.scheduler.allocate(
                        functools.partial(
                            reserve, runtime, rows, hold_window=False, occasion="a comparison"
                        )
                    )
                    batch = PackedBatch(runtime, allocation)
                    try:
                        with interruptible():
                            logits = self._forward_eager(
                                batch,
                                batch.shape([t for p in prompts for t in p[part]], device=device),
                                batch.shape(positions, device=device),
                                torch.tensor(batch.last_token_index, device=device),
                            )
                    finally:
                        if not batch.is_settled:
                            with runtime.lock:
                                runtime.manager.rollback(allocation)
                return logits
            finally:
                with runtime.lock:
                    for sequence in sequences:
                        runtime.manager.free(sequence)


def why_not_packed(
    cache: Any, config: Any, model_kwargs: dict[str, Any], *, synced_gpus: bool
) -> str | None:
    """Return why a call of ``_sample`` runs as a rectangle, as far as the call decides.

    Args:
        cache: what the call carries.
        config: its GenerationConfig.
        model_kwargs: what its forwards would get.
        synced_gpus: as transformers passes it.
    """
    if not isinstance(cache, PagedCache) or cache.is_initialized:
        return "its cache holds rows already" if isinstance(cache, PagedCache) else "no paged cache"
    if config.is_assistant:
        return "it drafts tokens for another model"
    if synced_gpus:
        return "synced_gpus"
    wants_layers = config.output_attentions or config.output_hidden_states
    if config.return_dict_in_generate and wants_layers:
        return "it returns attentions or hidden states of whole rows"
    given = sorted(
        k for k, v in model_kwargs.items() if k not in _KNOWN_ARGUMENTS and v is not None
    )
    if given:
        return f"the model's forward takes {given}"
    if model_kwargs.get("use_cache") is False:
        return "use_cache=False"
    return None


def find_prompts(
    input_ids: torch.Tensor, mask: torch.Tensor | None, position_ids: torch.Tensor | None
) -> tuple[list[list[int]], list[int]] | str:
    """Take the padding off left-padded prompts.

    Args:
        input_ids: [B, P].
        mask: [B, P], nonzero where real; None: everything is.
        position_ids: [B, P] or [1, P]; None: positions count real tokens.

    Returns:
        The tokens of each row and the position of its first one; or why rows have no such form.
    """
    num_rows, num_columns = input_ids.shape
    if num_rows == 0 or num_columns == 0:
        return "there are no tokens"
    num_padding = [0] * num_rows
    if mask is not None:
        if mask.shape != input_ids.shape:
            return "its mask has another shape than its tokens"
        real = mask.bool()
        if not bool(real[:, -1].all()) or bool((real[:, :-1] & ~real[:, 1:]).any()):
            return "padding lies elsewhere than on the left"
        num_padding = (num_columns - real.sum(1)).tolist()
    first_positions = [0] * num_rows
    if position_ids is not None:
        if position_ids.ndim != 2:
            return "its positions have more dimensions than tokens have"
        positions = position_ids.expand(num_rows, num_columns).tolist()
        for row, (start, given) in enumerate(zip(num_padding, positions, strict=True)):
            first = given[start]
            if given[start:] != list(range(first, first + num_columns - start)):
                return "positions are not consecutive"
            first_positions[row] = first
    prompts = [ids[start:] for start, ids in zip(num_padding, input_ids.tolist(), strict=True)]
    return prompts, first_positions
