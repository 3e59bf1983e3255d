"""Patch a model and give it back.

Two objects change their class while they are patched: the causal LM (its ``generate`` pages) and
the module that runs the layers (its ``forward`` begins and ends a paged step). The new classes
are subclasses with the same names, so that everything that goes by names still works, and they
pickle and deep-copy as the classes that they stand in for. Nothing is stored on the modules but
the config views, which pickle as the config.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
import types
from contextvars import ContextVar
from typing import Any, TypeVar

import torch

from hf_paged.cache.packed_batch import PackedCache
from hf_paged.cache.runtime import (
    PagedRuntime,
    find_runtime,
    inner_model,
    register_runtime,
    runtime_of,
)
from hf_paged.cache.step import CURRENT_STEP
from hf_paged.cache.step_cache import StepCache
from hf_paged.cache.step_inputs import StepInputs
from hf_paged.config import KVMemory, PagedConfig
from hf_paged.core.interrupts import interruptible, uninterrupted
from hf_paged.errors import ConfigurationError
from hf_paged.integration import attention
from hf_paged.integration.config_view import config_view
from hf_paged.integration.fingerprint import ModelComputation
from hf_paged.integration.generation import PagedGeneration
from hf_paged.integration.model_spec import ModelSeams, find_seams
from hf_paged.integration.packed_model import PackedModel

__all__ = ["patch", "unpatch"]

ModelT = TypeVar("ModelT", bound=torch.nn.Module)

_INDIFFERENT = frozenset(
    {
        "self",
        "input_ids",
        "attention_mask",
        "position_ids",
        "cache",
        "past_key_values",
        "cache_position",
        "use_cache",
        "labels",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
    }
)
"""Arguments of a forward besides which ids alone determine K and V; token_type_ids is none."""

_inside: ContextVar[object] = ContextVar("inside", default=None)
"""The module whose forward another's wrapper (accelerate's) is about to call again."""


def patch(
    model: ModelT,
    *,
    kv_memory: KVMemory | None = None,
    num_blocks: int | None = None,
    block_size: int | str = "auto",
    backend: str = "auto",
    prefix_caching: bool = True,
    batch_invariant: bool = False,
    max_batch_tokens: int | None = None,
    swap_memory: KVMemory | None = None,
    compile: bool | str = False,
    cuda_graphs: bool | str = "auto",
    packed_hooks: bool = False,
    verify: str | bool = "auto",
    debug: bool = False,
) -> ModelT:
    """Let ``model`` keep its KV cache in a pool of blocks, bounded and shared by all its calls.

    Mutates ``model`` until :func:`unpatch`; memory is committed as blocks are first used.
    Calls without a paged cache (training, ``use_cache=False``, a cache of your own) run the
    model's own code. Patching again with the same arguments changes nothing.

    Args:
        model: a transformers causal LM, or a PEFT wrapper around one.
        kv_memory: limit of the pool: bytes, "2GiB", "512MB", or a fraction in (0, 1) of the
            memory free on the device. Default: half of what is free.
        num_blocks: limit of the pool in blocks, instead of ``kv_memory``.
        block_size: tokens per block, a power of two, or "auto" (16).
        backend: name of an attention backend, or "auto". A named one never falls back.
        prefix_caching: keep blocks after a call and reuse them for equal prefixes.
        batch_invariant: compute the attention of a row in the same order whatever rows come with
            it and however many threads run (the ``cpu`` backend, a little slower). The linear
            layers are torch's: their order is not in our hands.
        max_batch_tokens: tokens that one forward of a packed ``generate()`` computes at most;
            longer prompts come in chunks, beside rows that decode already. Default: 2048.
        swap_memory: room for the blocks of rows that give way when the pool is full: on a CPU a
            temporary file, beside an accelerator pinned host memory. Bytes, a size, or a fraction
            of what is free there. Default: none, such rows are computed again.
        compile: put the forward of packed calls through torch's compiler at its first use, which
            takes seconds to minutes (a log line and a bar tell; a later process finds most of it
            on disk). True: changes of weights are seen. "freeze": weights are packed for
            inference once, a second copy, and again when they have changed. Where nothing can be
            compiled (no C++ compiler, hooks of yours, autocast) one warning says so.
        cuda_graphs: run decoding steps of packed calls as CUDA graphs, captured when a number of
            rows and a length come for the second time. "auto": where the model is on one CUDA
            device and backend and model can be captured; what keeps them from it is logged once.
            True: raise instead. Their memory is outside of ``kv_memory``.
        packed_hooks: compute live tokens only, even if the model carries hooks of yours. They
            then see prompts end to end in [1, N] instead of padded rows, and rows that leave.
        verify: whether rows may lie end to end in one forward is known of some architectures; of
            others a few tokens are computed both ways at the first ``generate()`` ("auto"). True:
            compare now, whatever is known. False: never compare; what is not known stays padded.
        debug: poison unused memory with NaN and check every invariant at every step; slow.

    Returns:
        The same object.

    Raises:
        ConfigurationError: an argument that cannot work, or a model that is patched differently.
        UnsupportedModelError: the model lacks a seam; the message names it.
    """
    config = PagedConfig(
        kv_memory=kv_memory,
        num_blocks=num_blocks,
        block_size=block_size,
        backend=backend,
        prefix_caching=prefix_caching,
        batch_invariant=batch_invariant,
        max_batch_tokens=max_batch_tokens,
        swap_memory=swap_memory,
        compile=compile,
        cuda_graphs=cuda_graphs,
        packed_hooks=packed_hooks,
        verify=verify,
        debug=debug,
    )
    runtime = find_runtime(model)
    if runtime is not None:
        if runtime.config != config:
            raise ConfigurationError(
                f"model is patched with {runtime.config}, got {config}: call "
                "hf_paged.unpatch(model) first."
            )
        return model
    seams = find_seams(inner_model(model))
    device = next(seams.base.parameters()).device
    if device.type == "meta":
        device = torch.device("cpu")
    runtime = PagedRuntime(
        config, seams.layout, device, ModelComputation(seams), seams.layer_devices
    )
    packed_model = PackedModel(seams, runtime)
    attention.register()
    view = config_view(seams.config, runtime)
    taken_over: tuple[Any, ...] = (seams.base, *seams.attentions)
    for module in taken_over:
        module.config = view
    seams.base.__class__ = _paged_base_class(seams, runtime)
    seams.model.__class__ = _paged_model_class(seams)
    register_runtime(seams.model, runtime)
    runtime.packed_model = packed_model
    if verify is True:
        packed_model.obstacle()
    return model


def unpatch(model: ModelT) -> ModelT:
    """Undo :func:`patch`: classes, attributes, config and memory are as before.

    Caches of the model that still live can no longer be used.

    Returns:
        The same object.

    Raises:
        ConfigurationError: the model is not patched, or a ``generate()`` of it is running.
    """
    runtime = runtime_of(model)
    if runtime.scheduler.num_calls:
        raise ConfigurationError(
            f"unpatch() while {runtime.scheduler.num_calls} generate() calls are running: wait for "
            "them to end first."
        )
    target: Any = inner_model(model)
    register_runtime(target, None)
    runtime.close()
    for module in target.modules():
        original_class = getattr(type(module), "_hf_paged_original_class", None)
        if original_class is not None:
            module.__class__ = original_class
            if _is_paged_forward(module.__dict__.get("_old_forward")):
                # accelerate wrapped our wrapper and will one day put back what it found.
                module._old_forward = types.MethodType(original_class.forward, module)
        module_config = module.__dict__.get("config")
        if hasattr(type(module_config), "_hf_paged_original_config"):
            module.config = type(module_config)._hf_paged_original_config
    return model


def _paged_model_class(seams: ModelSeams) -> type:
    cls: Any = type(seams.model)
    namespace = _stand_in(cls) | {"_hf_paged_cache_name": seams.cache_name}
    namespace["generate"] = functools.wraps(cls.generate)(PagedGeneration.generate)
    return types.new_class(
        cls.__name__, (PagedGeneration, cls), exec_body=lambda ns: ns.update(namespace)
    )


def _paged_base_class(seams: ModelSeams, runtime: PagedRuntime) -> type:
    cls = type(seams.base)
    signature = inspect.signature(cls.forward)
    own_warning: Any = cls.warn_if_padding_and_no_attention_mask
    cache_name = seams.cache_name

    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if type(self) is not paged_class:
            return cls.forward(self, *args, **kwargs)
        own_forward = functools.partial(cls.forward, self)
        wrapper = self.__dict__.get("forward")
        is_wrapped_again = wrapper is not None and _inside.get() is self
        # While the model's own code runs a hook may call the model again: a call of its own.
        token = _inside.set(None if wrapper is None or is_wrapped_again else self)
        try:
            if is_wrapped_again:
                return own_forward(*args, **kwargs)
            own_forward = own_forward if wrapper is None else wrapper
            arguments = signature.bind_partial(self, *args, **kwargs).arguments
            arguments |= arguments.pop("kwargs", {})
            cache = arguments.get(cache_name, arguments.get("past_key_values"))
            if not isinstance(cache, StepCache):
                return _run(None, own_forward, args, kwargs)
            if cache.runtime is not runtime:
                raise ConfigurationError(
                    "the cache was made for another model: expected one made by "
                    "hf_paged.PagedCache(this_model)."
                )
            return _run_paged(self, cache, arguments, own_forward, args, kwargs)
        finally:
            _inside.reset(token)

    def get_forward(self: Any) -> Any:
        return types.MethodType(forward, self)

    def set_forward(self: Any, value: Any) -> None:
        if _is_paged_forward(value) and value.__self__ is self:
            self.__dict__.pop("forward", None)
        else:
            self.__dict__["forward"] = value

    def delete_forward(self: Any) -> None:
        if "forward" not in self.__dict__:
            raise AttributeError("forward")
        del self.__dict__["forward"]

    def warn_if_padding_and_no_attention_mask(
        self: Any, input_ids: Any, attention_mask: Any
    ) -> None:
        # Packed tokens have no mask and no padding, and looking at them waits for the device.
        step = CURRENT_STEP.get()
        if step is None or not isinstance(step.cache, PackedCache):
            own_warning(self, input_ids, attention_mask)

    forward._hf_paged = True  # type: ignore[attr-defined]
    namespace = _stand_in(cls) | {
        "warn_if_padding_and_no_attention_mask": warn_if_padding_and_no_attention_mask,
        # A data descriptor: it comes before an instance attribute such as accelerate's hook sets.
        "forward": property(get_forward, set_forward, delete_forward),
    }
    paged_class = types.new_class(cls.__name__, (cls,), exec_body=lambda ns: ns.update(namespace))
    return paged_class


def _stand_in(cls: type) -> dict[str, Any]:
    """Return the namespace of a subclass that goes by the name of ``cls`` and copies as it."""

    def reduce_ex(self: Any, protocol: Any) -> Any:
        # Not copyreg.__newobj__: pickle insists that its class be that of the object.
        return copyreg._reconstructor, (cls, object, None), self.__dict__  # type: ignore[attr-defined]

    return {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__reduce_ex__": reduce_ex,
        "_hf_paged_original_class": cls,
    }


def _is_paged_forward(value: Any) -> bool:
    return isinstance(value, types.MethodType) and hasattr(value.__func__, "_hf_paged")


def _run(step: Any, forward: Any, args: Any, kwargs: Any) -> Any:
    token = CURRENT_STEP.set(step)
    try:
        return forward(*args, **kwargs)
    finally:
        CURRENT_STEP.reset(token)


def _run_paged(
    base: Any, cache: StepCache, arguments: dict[str, Any], forward: Any, args: Any, kwargs: Any
) -> Any:
    """Run a forward as one transaction on ``cache``."""
    inputs, has_plain_mask = _step_inputs(arguments)
    is_paged = has_plain_mask and not base.training and not attention.wants_weights(base, arguments)
    with uninterrupted():
        step = cache.begin_forward(inputs, base.config.num_hidden_layers, is_paged=is_paged)
        is_complete = False
        try:
            with interruptible():
                result = _run(step, forward, args, kwargs)
            is_complete = True
        finally:
            cache.end_forward(step, is_complete=is_complete)
    return result


def _step_inputs(arguments: dict[str, Any]) -> tuple[StepInputs, bool]:
    """Return the inputs of a forward, and whether their mask is a plain one (2D or none)."""
    ids, embeds = arguments.get("input_ids"), arguments.get("inputs_embeds")
    given = ids if ids is not None else embeds
    if given is None:
        raise ConfigurationError(
            "forward got neither input_ids nor inputs_embeds: expected one of them."
        )
    mask = arguments.get("attention_mask")
    is_plain = mask is None or (isinstance(mask, torch.Tensor) and mask.ndim == 2)
    positions = arguments.get("position_ids")
    ids_determine_kv = (
        is_plain
        and embeds is None
        and (positions is None or positions.ndim <= 2)
        and all(value is None for name, value in arguments.items() if name not in _INDIFFERENT)
    )
    inputs = StepInputs(
        input_ids=ids if ids_determine_kv else None,
        num_rows=given.shape[0],
        num_columns=given.shape[1],
        attention_mask=mask if is_plain else None,
        position_ids=positions,
    )
    return inputs, is_plain
