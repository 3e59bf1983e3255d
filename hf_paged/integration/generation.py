"""What a patched model's ``generate()`` does besides what transformers' does.

It makes a :class:`PagedCache` where transformers would have made a DynamicCache, waits for its
turn, and gives the blocks back when it ends, whichever way.
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_paged.cache.paged_cache import PagedCache
from hf_paged.cache.runtime import PagedRuntime, runtime_of
from hf_paged.cache.step_inputs import StepInputs
from hf_paged.core.interrupts import interruptible, uninterrupted, whole
from hf_paged.core.scheduler import Call

__all__ = ["PagedGeneration"]

_SIZED_BY_FAMILY = ("hybrid", "sliding_window", "hybrid_chunked")
"""Old names that published generation configs carry: not a user's choice of a cache."""


@dataclass
class _Generation:
    """One ``generate()`` of a patched model."""

    runtime: PagedRuntime
    names_cache: bool
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
        )
        result: Any = None
        with uninterrupted():
            token = _current.set(generation)
            try:
                with interruptible():
                    result = super().generate(*args, **kwargs)  # type: ignore[misc]
            finally:
                _current.reset(token)
                returned = getattr(result, self._hf_paged_cache_name, None)  # type: ignore[attr-defined]
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
