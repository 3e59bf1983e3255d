"""What must be true of a model for paging, and where to take hold of it.

A regular architecture needs no description: its seams are found by looking. A :class:`ModelSpec`
says what looking cannot tell. Ours lie in ``patches/``, one file an irregular architecture; third
parties add theirs by the entry-point group ``hf_paged.patches``.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from itertools import chain
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from hf_paged.cache.layout import KVLayout
from hf_paged.errors import ConfigurationError, UnsupportedModelError

__all__ = ["ModelSeams", "ModelSpec", "find_seams", "spec_of"]

logger = logging.getLogger("hf_paged")

ENTRY_POINT_GROUP = "hf_paged.patches"


@dataclass(frozen=True)
class ModelSpec:
    """What looking at an architecture cannot tell.

    Attributes:
        model_types: ``config.model_type`` of the text model, one or more.
        layers_module: dotted path from the causal LM to the module whose forward takes the cache
            and runs the layers, e.g. "model.decoder"; None: found by looking.
        unsupported: why the architecture cannot be paged; None: it can.
        packed: whether tokens of different rows meet in attention alone, so that rows may lie end
            to end in one forward; None: unknown, found out by comparing.
    """

    model_types: tuple[str, ...]
    layers_module: str | None = None
    unsupported: str | None = None
    packed: bool | None = None


@dataclass(frozen=True)
class ModelSeams:
    """Where to take hold of one model.

    Attributes:
        model: the causal LM, whose ``generate`` is taken over.
        base: the module whose forward takes the cache and runs the layers.
        attentions: one attention module a layer, in layer order.
        config: the config object that all of them read.
        cache_name: the forward's name for the cache ("cache", or "past_key_values" before 5.24).
        layout: what a token stores.
    """

    model: PreTrainedModel
    base: PreTrainedModel
    attentions: tuple[Any, ...]
    config: PreTrainedConfig
    cache_name: str
    layout: KVLayout

    @property
    def layer_devices(self) -> list[torch.device]:
        """Where each layer computes now, under a ``device_map`` in several places."""
        default = next((weight.device for weight in self.base.parameters()), torch.device("cpu"))
        return [_device_of(attention, default) for attention in self.attentions]


def find_seams(model: torch.nn.Module) -> ModelSeams:
    """Find where to take hold of ``model``; changes nothing.

    Raises:
        UnsupportedModelError: a seam is missing; the message names it.
    """
    if not isinstance(model, PreTrainedModel):
        inside = next((n for n in ("_orig_mod", "module", "model") if hasattr(model, n)), None)
        raise UnsupportedModelError(
            f"model is a {type(model).__name__}: expected a transformers causal LM such as "
            "AutoModelForCausalLM.from_pretrained(...) returns, or a PEFT wrapper around one"
            f"{f'; patch its .{inside}' if inside else ''}."
        )
    name = type(model).__name__
    config = model.config.get_text_config(decoder=True)
    spec = spec_of(config)
    if spec is not None and spec.unsupported is not None:
        raise UnsupportedModelError(f"{name} cannot be paged: {spec.unsupported}.")
    if model.config.is_encoder_decoder or not model.can_generate():
        raise UnsupportedModelError(
            f"{name} has no generate() of a causal LM (encoders, encoder-decoders and headless "
            "models have none): load the model with AutoModelForCausalLM and patch that."
        )
    if getattr(config, "add_cross_attention", False):
        raise _missing(name, "a cache of self-attention alone", "models with cross-attention")
    base = _find_base(model, spec)
    if not base._supports_attention_backend:
        raise _missing(
            name, "attention through ALL_ATTENTION_FUNCTIONS (_supports_attention_backend)", ""
        )
    attentions = _find_attentions(base)
    if not attentions:
        raise _missing(name, "attention modules with layer_idx and config", "")
    if not all(getattr(attention, "is_causal", False) for attention in attentions):
        raise _missing(name, "causal attention in every layer (is_causal)", "")
    layer_types = set(getattr(config, "layer_types", None) or ())
    if "chunked_attention" in layer_types and len(layer_types) > 1:
        # Which mask is made first, and so whether the others are markers, goes by a set's order.
        raise _missing(name, "full or sliding attention in every layer", "some layers go by chunks")
    if any(hasattr(attention, "kv_b_proj") for attention in attentions):
        raise _missing(
            name,
            "a cache of the K and V that attention uses",
            "multi-head latent attention makes them of a latent",
        )
    if any(attention.config is not base.config for attention in attentions):
        raise _missing(name, "one config object that all attention modules read", "")
    layer_ids = [attention.layer_idx for attention in attentions]
    if layer_ids != list(range(config.num_hidden_layers)):
        raise _missing(
            name,
            f"one attention module for each of {config.num_hidden_layers} layers",
            f"layer_idx found: {layer_ids}",
        )
    parameters = inspect.signature(base.forward).parameters
    cache_name = next((n for n in ("cache", "past_key_values") if n in parameters), None)
    if cache_name is None:
        raise _missing(name, f"a cache argument of {type(base).__name__}.forward", "")
    return ModelSeams(
        model,
        base,
        attentions,
        base.config,
        cache_name,
        _find_layout(name, model, config, uses_sinks=any(hasattr(a, "sinks") for a in attentions)),
    )


def spec_of(config: Any) -> ModelSpec | None:
    """Return what is declared of the architecture of a text model's config."""
    return _specs().get(config.model_type)


def _device_of(module: torch.nn.Module, default: torch.device) -> torch.device:
    """Return where ``module`` computes; accelerate keeps offloaded weights elsewhere."""
    weights = chain(module.parameters(), module.buffers())  # quantized ones may be buffers
    device = next((weight.device for weight in weights), default)
    if device.type != "meta":
        return device
    execution_device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    return torch.device("cpu" if execution_device is None else execution_device)


def _missing(name: str, seam: str, detail: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{name} cannot be paged, it lacks this seam: {seam}{f' ({detail})' if detail else ''}. "
        "If it has the seam in another form, describe it by a ModelSpec; otherwise use the model "
        "unpatched."
    )


def _find_base(model: PreTrainedModel, spec: ModelSpec | None) -> PreTrainedModel:
    """Return the innermost PreTrainedModel that holds every attention module of the text model."""
    if spec is not None and spec.layers_module is not None:
        base = model.get_submodule(spec.layers_module)
        assert isinstance(base, PreTrainedModel)
        return base
    text_model: Any = getattr(model, "get_decoder", lambda: model)()
    base = text_model if isinstance(text_model, PreTrainedModel) else model
    while True:
        wanted = len(_find_attentions(base))
        inner = [
            module
            for module in base.modules()
            if module is not base
            and isinstance(module, PreTrainedModel)
            and len(_find_attentions(module)) == wanted
        ]
        if not wanted or not inner:
            return base
        base = inner[0]


def _find_attentions(base: torch.nn.Module) -> tuple[Any, ...]:
    found = [
        module
        for module in base.modules()
        if isinstance(getattr(module, "layer_idx", None), int)
        and "Attention" in type(module).__name__
        and isinstance(getattr(module, "config", None), PreTrainedConfig)
    ]
    return tuple(sorted(found, key=lambda module: int(module.layer_idx)))


def _find_layout(name: str, model: PreTrainedModel, config: Any, *, uses_sinks: bool) -> KVLayout:
    """Read the layout from the layers that transformers itself would make for this config."""
    windows: list[int | None] = []
    layers = DynamicCache(config=config).layers
    for index, layer in enumerate(layers):
        if type(layer) is DynamicLayer:
            windows.append(None)
        elif type(layer) is DynamicSlidingWindowLayer:
            windows.append(layer.sliding_window)
        else:
            raise _missing(
                name,
                "layers that cache K and V of every token, or of a window",
                f"layer {index} wants a {type(layer).__name__}",
            )
    if len(windows) != config.num_hidden_layers:
        raise _missing(
            name,
            "K and V of its own in every layer",
            f"{config.num_hidden_layers} layers share {len(windows)} caches",
        )
    try:
        num_heads = config.num_attention_heads
        num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    except RuntimeError as error:  # transformers' answer where an attribute differs by layer
        raise _missing(
            name, "the same number and size of heads in every layer", str(error)
        ) from error
    if not isinstance(num_kv_heads, int) or not isinstance(head_dim, int):
        raise _missing(name, "the same number and size of heads in every layer", "")
    dtype = model.dtype if model.dtype.is_floating_point else torch.get_default_dtype()
    return KVLayout(tuple(windows), num_kv_heads, head_dim, dtype, uses_sinks)


@cache
def _specs() -> dict[str, ModelSpec]:
    """Return the spec of each model type; a third party's goes before ours."""
    specs: dict[str, ModelSpec] = {}
    for spec in (*_own_specs(), *_third_party_specs()):
        specs.update(dict.fromkeys(spec.model_types, spec))
    return specs


def _own_specs() -> Iterator[ModelSpec]:
    package = importlib.import_module(ENTRY_POINT_GROUP)
    for module_info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{ENTRY_POINT_GROUP}.{module_info.name}")
        yield module.SPEC


def _third_party_specs() -> Iterator[ModelSpec]:
    for entry_point in entry_points(group=ENTRY_POINT_GROUP):
        spec = entry_point.load()
        if not isinstance(spec, ModelSpec):
            raise ConfigurationError(
                f"entry point {entry_point.name!r} of group {ENTRY_POINT_GROUP!r} is a "
                f"{type(spec).__name__}: expected a ModelSpec."
            )
        yield spec
