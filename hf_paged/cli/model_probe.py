"""What a model stores for a token: measured on a model without weights, made of its config.

Formulas over config attributes go wrong where architectures differ: multi-head latent attention,
heads that change from layer to layer, names of their own. One forward on torch's meta device costs
no memory and shows the tensors that the cache really gets.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils import logging as hub_logging
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.utils import logging as transformers_logging

from hf_paged.cli.kv_footprint import KVFootprint, LayerFootprint
from hf_paged.errors import ConfigurationError, HFPagedError, UnsupportedModelError
from hf_paged.integration.model_spec import find_seams

__all__ = ["ModelProbe", "probe_model"]

_BY_HAND = "or describe the model by --layers, --kv-heads, --head-dim and --dtype"

_PROBE_DTYPE = torch.bfloat16
"""What the model without weights computes in: experts in fp32 do not run on the meta device."""


@dataclass(frozen=True)
class ModelProbe:
    """What looking at a model without weights has shown.

    Attributes:
        architecture: class of the causal LM.
        dtype: of the weights.
        footprint: what is stored.
        max_positions: tokens that the config allows in a sequence; None: it does not say.
        refusal: why ``hf_paged.patch`` refuses the model; None: it takes it.
        notes: what a reader of the figures should know.
    """

    architecture: str
    dtype: torch.dtype
    footprint: KVFootprint
    max_positions: int | None
    refusal: str | None
    notes: tuple[str, ...]


def probe_model(name: str, dtype: torch.dtype | None = None) -> ModelProbe:
    """Look at the model of that name; downloads its config at most, and runs no remote code.

    Args:
        name: id on the Hugging Face hub, folder with a config.json, or such a file.
        dtype: of the weights; None: the config's.

    Raises:
        ConfigurationError: there is no such model.
        UnsupportedModelError: it keeps something else than K and V, or cannot be measured.
    """
    with _quiet():
        whole_config = _read_config(name)
        config: Any = whole_config.get_text_config(decoder=True)
        notes = []
        if config is not whole_config:
            notes.append(f"the figures are those of the text model ({config.model_type})")
        if dtype is None:
            dtype = getattr(config, "dtype", None) or getattr(whole_config, "dtype", None)
        if not isinstance(dtype, torch.dtype):
            dtype = torch.float32
            notes.append("the config names no dtype: float32 assumed, --dtype says another one")
        model, cache = _run_without_weights(name, config)
        footprint = _measure(name, config, cache, dtype)
        refusal = None
        try:
            find_seams(model)
        except HFPagedError as error:
            refusal = str(error)
        except Exception as error:  # a config that does not answer what every other one does
            refusal = f"{type(error).__name__}: {_first_sentence(error)}"
    num_silent = footprint.num_layers - len(footprint.layers)
    if num_silent > 0:
        notes.append(
            f"{num_silent} of {footprint.num_layers} layers store nothing: they share the K and V "
            "of others or have no attention"
        )
    max_positions = getattr(config, "max_position_embeddings", None)
    return ModelProbe(
        architecture=type(model).__name__,
        dtype=dtype,
        footprint=footprint,
        max_positions=max_positions if isinstance(max_positions, int) else None,
        refusal=refusal,
        notes=tuple(notes),
    )


def _read_config(name: str) -> PreTrainedConfig:
    path = Path(name)
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_local and not path.exists():
        raise ConfigurationError(
            f"MODEL={name!r} is no folder: expected one with a config.json, or the id of a model "
            "on the Hugging Face hub; correct the path."
        )
    if path.is_dir() and not (path / "config.json").exists():
        raise ConfigurationError(
            f"MODEL={name!r} has no config.json: expected the folder of a model that "
            f"save_pretrained() wrote; name another one, {_BY_HAND}."
        )
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        where = "the folder" if path.exists() else "the Hugging Face hub or its local copy"
        raise ConfigurationError(
            f"MODEL={name!r} cannot be read from {where} ({_first_sentence(error)}): check the "
            f"name and the connection, give a local folder, {_BY_HAND}."
        ) from error
    assert isinstance(config, PreTrainedConfig)
    return config


def _run_without_weights(name: str, config: Any) -> tuple[torch.nn.Module, DynamicCache]:
    """Return the model on the meta device and the cache of one token that ran through it."""
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"MODEL={name!r} is an encoder-decoder ({config.model_type}): expected a causal LM."
        )
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise UnsupportedModelError(
            f"MODEL={name!r} is no causal LM: AutoModelForCausalLM knows none of model type "
            f"{config.model_type!r}; name another model, {_BY_HAND}."
        )
    try:
        for index, layer in enumerate(DynamicCache(config=config).layers):
            _check_kind(name, index, layer)
        with torch.device("meta"), torch.no_grad():
            auto: Any = AutoModelForCausalLM
            model: torch.nn.Module = auto.from_config(
                config, dtype=_PROBE_DTYPE, attn_implementation="eager"
            ).eval()
            return model, _store_one_token(model, config)
    except HFPagedError:
        raise
    # Hundreds of architectures run here; what they stumble over on an odd config is their own.
    except Exception as error:
        raise UnsupportedModelError(
            f"MODEL={name!r} ({config.model_type}) cannot be measured without its weights "
            f"({type(error).__name__}: {_first_sentence(error)}): check its config, {_BY_HAND}."
        ) from error


def _store_one_token(model: torch.nn.Module, config: Any) -> DynamicCache:
    """Run one token, with or without a mask: some models look into the one, some for the other."""
    parameters = inspect.signature(model.forward).parameters
    cache_name = "cache" if "cache" in parameters else "past_key_values"
    ones = torch.ones(1, 1, dtype=torch.long)
    masks: list[dict[str, Any]] = [{"attention_mask": ones}, {}]
    while True:
        cache = DynamicCache(config=config)
        arguments: dict[str, Any] = {"input_ids": ones, cache_name: cache, "use_cache": True}
        try:
            model(**arguments, **masks.pop())
        except Exception:
            if not masks:
                raise
        else:
            return cache


def _check_kind(name: str, index: int, layer: object) -> None:
    kind = type(layer).__name__
    # DummyLayer, since transformers 5.24: a layer that stores nothing.
    if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) and kind != "DummyLayer":
        raise UnsupportedModelError(
            f"MODEL={name!r} keeps something else than K and V in layer {index} (transformers "
            f"makes a {kind} for it): expected full or sliding attention in every layer; "
            "hf_paged cannot plan this model."
        )


def _measure(name: str, config: Any, cache: DynamicCache, dtype: torch.dtype) -> KVFootprint:
    layers = []
    for index, layer in enumerate(cache.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None:
            continue
        if keys.shape[-2] != 1:
            raise UnsupportedModelError(
                f"MODEL={name!r} stores {keys.shape[-2]} tokens for one in layer {index}: expected "
                f"K and V of each token alone; name another model, {_BY_HAND}."
            )
        window = layer.sliding_window if type(layer) is DynamicSlidingWindowLayer else None
        num_bytes = sum(
            tensor.numel() * (dtype if tensor.dtype is _PROBE_DTYPE else tensor.dtype).itemsize
            for tensor in (keys, values)
        )
        layers.append(LayerFootprint(num_bytes, window))
    if not layers:
        raise UnsupportedModelError(
            f"MODEL={name!r} ({config.model_type}) stores no K and V in any layer: expected a "
            "causal LM with attention."
        )
    return KVFootprint(tuple(layers), max(len(cache.layers), int(config.num_hidden_layers)))


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence what transformers and the hub say about a model that nobody will use."""
    verbosity, hub_verbosity = transformers_logging.get_verbosity(), hub_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.ERROR)
    hub_logging.set_verbosity(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        hub_logging.set_verbosity(hub_verbosity)


def _first_sentence(error: BaseException) -> str:
    words = " ".join(str(error).split())
    return words.partition(". ")[0].rstrip(".:") or type(error).__name__
