"""What a patched model's ``generate()`` does besides what transformers' does.

It makes a :class:`PagedCache` where transformers would have made a DynamicCache, waits for its
turn, and gives the blocks back when it ends, whichever way.
"""

from __future__ import annotations

import logging
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_paged.cache.paged_cache import PagedCache
from hf_paged.cache.runtime import PagedRuntime, runtime_of
from hf_paged.cache.step_inputs import StepInputs
from hf_paged.core.interrupts import interruptible, uninterrupted, whole
from hf_paged.core.row import Row
from hf_paged.core.scheduler import Call
from hf_paged.generation.engine import Engine
from hf_paged.generation.preparation import COLLECTED
from hf_paged.generation.request import Request, SampleArguments
from hf_paged.integration.packing import find_prompts, why_not_packed

__all__ = ["PagedGeneration"]

logger = logging.getLogger("hf_paged")

_SIZED_BY_FAMILY = ("hybrid", "sliding_window", "hybrid_chunked")
"""Old names that published generation configs carry: not a user's choice of a cache."""


@dataclass
class _Generation:
    """One ``generate()`` of a patched model."""

    runtime: PagedRuntime
    names_cache: bool
    collected: list[SampleArguments] | None
    call: Call | None = None
    token: Token[Call | None] | None = None
    caches: list[PagedCache] = field(default_factory=list)


_current: ContextVar[_Generation | None] = ContextVar("current_generation", default=None)


class PagedGeneration:
    """Mixed into the class of a patched causal LM, in front of it."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as transformers does, from the pool; see ``GenerationMixin.generate``."""
        given = kwargs.get("generation_config") or (args[1] if len(args) > 1 else None)
        named = kwargs.get("cache_implementation") or getattr(given, "cache_implementation", None)
        generation = _Generation(
            runtime_of(self),  # type: ignore[arg-type]
            names_cache=named is not None,
            collected=COLLECTED.get(),
        )
        returned: Any = None
        is_grad_enabled = torch.is_grad_enabled()
        with uninterrupted():
            token = _current.set(generation)
            # A processor may call generate() again: that one is not for collecting.
            collecting = COLLECTED.set(None)
            try:
                with interruptible():
                    result: Any = super().generate(*args, **kwargs)  # type: ignore[misc]
                # Not before: an interrupt on the way out of there loses the result.
                returned = getattr(result, self._hf_paged_cache_name, None)  # type: ignore[attr-defined]
            finally:
                COLLECTED.reset(collecting)
                _current.reset(token)
                # An interrupt inside of no_grad's own code would leave gradients off for good.
                torch.set_grad_enabled(is_grad_enabled)
                for cache in generation.caches:
                    if cache is not returned:
                        cache.release()
                if generation.call is not None and generation.token is not None:
                    generation.runtime.current_call.reset(generation.token)
                    generation.runtime.scheduler.finish(generation.call)
        return result

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> Any:
        generation = _current.get()
        name = self._hf_paged_cache_name  # type: ignore[attr-defined]
        if generation is not None and _wants_paging(generation, generation_config):
            if model_kwargs.get(name) is None:
                with uninterrupted():
                    model_kwargs[name] = PagedCache(self)  # type: ignore[arg-type]
                    generation.caches.append(model_kwargs[name])
                if generation_config.is_assistant:
                    model_kwargs[name].activate_past_recording()
                _admit(generation, generation_config, batch_size, max_cache_length)
                return None
            if isinstance(model_kwargs[name], PagedCache):
                _admit(generation, generation_config, batch_size, max_cache_length)
        return super()._prepare_cache_for_generation(  # type: ignore[misc]
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )

    def _sample(
        self,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        cache: Any = model_kwargs.get(self._hf_paged_cache_name)  # type: ignore[attr-defined]
        prompts = _find_packed_prompts(
            self, input_ids, generation_config, model_kwargs, synced_gpus=synced_gpus
        )
        if prompts is None:
            return super()._sample(  # type: ignore[misc]
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                synced_gpus=synced_gpus,
                streamer=streamer,
                **model_kwargs,
            )
        generation = _current.get()
        arguments = SampleArguments(
            input_ids,
            *prompts,
            logits_processor,
            stopping_criteria,
            generation_config,
            streamer,
            must_fill_cache=generation is None or cache not in generation.caches,
        )
        if generation is not None and generation.collected is not None:
            generation.collected.append(arguments)
            return input_ids
        request = Request(arguments)
        runtime = cache.runtime
        with Engine(runtime, _device_of_inputs(self, input_ids)) as engine:
            engine.add(request)
            engine.run(request)
            if generation_config.return_dict_in_generate or request.must_fill_cache:
                real = _real_columns(input_ids, model_kwargs, request.num_ages - 1)
                if not (request.keeps_finished and engine.hand_over(request.rows, cache, real)):
                    cache.abandon(
                        "rows left the pool before generate() ended, since it was too small for "
                        "all of them; patch with a larger one, or pass fewer rows."
                    )
        if not generation_config.return_dict_in_generate:
            return request.sequences
        return _output(request, cache)

    def _prefill(
        self,
        input_ids: torch.Tensor,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        name = self._hf_paged_cache_name  # type: ignore[attr-defined]
        cache = model_kwargs.get(name)
        if generation_config.num_beams > 1:
            prompts = _find_packed_prompts(
                self, input_ids, generation_config, model_kwargs, synced_gpus=False
            )
            if prompts is not None:
                return _prefill_packed(self, input_ids, prompts, model_kwargs)
        if generation_config.prefill_chunk_size is not None and isinstance(cache, PagedCache):
            num_past = cache.get_seq_length()
            mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
            if input_ids.shape[1] > num_past:
                new_ids = input_ids[:, num_past:]
                num_new = new_ids.shape[1]
                cache.check_prompt(
                    StepInputs(
                        input_ids=new_ids,
                        num_rows=new_ids.shape[0],
                        num_columns=num_new,
                        attention_mask=mask,
                        position_ids=None if positions is None else positions[..., -num_new:],
                    )
                )
        return super()._prefill(  # type: ignore[misc]
            input_ids, generation_config, model_kwargs, *args, **kwargs
        )


def _find_packed_prompts(
    model: Any,
    input_ids: torch.Tensor,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    *,
    synced_gpus: bool,
) -> tuple[list[list[int]], list[int]] | None:
    """Return the prompts without padding and their first positions; None: run as a rectangle."""
    cache: Any = model_kwargs.get(model._hf_paged_cache_name)
    if isinstance(cache, PagedCache):
        cache.check_usable()
    found: Any = why_not_packed(cache, generation_config, model_kwargs, synced_gpus=synced_gpus)
    if found is None:
        found = cache.runtime.packed_model.obstacle()
    if found is None:
        mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
        found = find_prompts(input_ids, mask, positions)
    if isinstance(found, str):
        logger.debug("generate() runs as a rectangle: %s", found)
        return None
    prompts: tuple[list[list[int]], list[int]] = found
    return prompts


def _prefill_packed(
    model: Any,
    input_ids: torch.Tensor,
    prompts: tuple[list[list[int]], list[int]],
    model_kwargs: dict[str, Any],
) -> Any:
    """Compute the prompts of beams without padding, each once; return what a forward returns."""
    cache = model_kwargs[model._hf_paged_cache_name]
    runtime = cache.runtime
    rows = [Row(ids, first) for ids, first in zip(*prompts, strict=True)]
    with Engine(runtime, _device_of_inputs(model, input_ids)) as engine:
        logits = engine.prefill(rows).to(input_ids.device)
        is_whole = engine.hand_over(rows, cache, _real_columns(input_ids, model_kwargs, 0))
        assert is_whole
    return CausalLMOutputWithPast(
        logits=logits[:, None],
        **{model._hf_paged_cache_name: cache},
    )


def _device_of_inputs(model: Any, input_ids: torch.Tensor) -> torch.device:
    """Return where the forward takes ids: prompts may lie on a CPU beside a model on a GPU."""
    device: torch.device = model.device
    return input_ids.device if device.type == "meta" else device


def _real_columns(
    input_ids: torch.Tensor, model_kwargs: dict[str, Any], num_fed: int
) -> torch.Tensor:
    """Return which columns of a rectangle are real, [B, P + num_fed] bool on the CPU.

    Args:
        input_ids: [B, P], the prompts.
        model_kwargs: may have the prompts' mask.
        num_fed: generated tokens that were fed again; the last one never is.
    """
    mask = model_kwargs.get("attention_mask")
    real = torch.ones_like(input_ids) if mask is None else mask
    return torch.nn.functional.pad(real.to("cpu", torch.bool), (0, num_fed), value=True)


def _output(request: Request, cache: PagedCache) -> Any:
    make: Any = GenerateDecoderOnlyOutput
    name = "cache" if "cache" in make.__dataclass_fields__ else "past_key_values"
    return make(
        sequences=request.sequences, scores=request.scores, logits=request.logits, **{name: cache}
    )


def _wants_paging(generation: _Generation, generation_config: Any) -> bool:
    if generation_config.use_cache is False or generation.names_cache:
        return False
    return generation_config.cache_implementation in (None, *_SIZED_BY_FAMILY)


@whole
def _admit(
    generation: _Generation, generation_config: Any, batch_size: int, max_cache_length: int
) -> None:
    """Wait for this call's turn; its worst case is every row grown to the maximal length."""
    if generation.call is not None:
        return
    runtime = generation.runtime
    num_rows = batch_size * max(generation_config.num_beams, generation_config.num_return_sequences)
    num_blocks = num_rows * runtime.manager.num_blocks_at_most(max_cache_length + 1)
    generation.call = runtime.scheduler.admit(num_blocks)
    generation.token = runtime.current_call.set(generation.call)
