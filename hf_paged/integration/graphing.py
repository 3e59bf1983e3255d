"""Whether decoding steps of a model may run as CUDA graphs, where its own Python runs no more."""

from __future__ import annotations

import functools
import logging
from itertools import chain
from typing import Any

import torch

from hf_paged.cache.runtime import PagedRuntime
from hf_paged.errors import ConfigurationError
from hf_paged.generation.decode_graphs import DecodeGraphs
from hf_paged.generation.graph_probe import probe_backend
from hf_paged.generation.recording import Forward
from hf_paged.integration.fingerprint import has_user_hooks
from hf_paged.integration.model_spec import ModelSeams

__all__ = ["make_graphs", "may_capture"]

logger = logging.getLogger("hf_paged")

GRAPH_DEVICE_TYPES = frozenset({"cuda"})

_LIBRARIES = frozenset(
    {
        "accelerate",
        "auto_gptq",
        "awq",
        "bitsandbytes",
        "gptqmodel",
        "hf_paged",
        "hqq",
        "optimum",
        "peft",
        "torch",
        "torchao",
        "transformers",
    }
)
"""Whose modules compute from their inputs, weights and settings alone, the same at every step."""


def make_graphs(seams: ModelSeams, runtime: PagedRuntime, forward: Forward) -> DecodeGraphs | None:
    """Return what runs decoding steps as CUDA graphs, if they are wished for and possible.

    Args:
        seams: of the model.
        runtime: of the model.
        forward: packed forward of the model; must not keep it alive.

    Raises:
        ConfigurationError: they must be, and cannot.
    """
    wish = runtime.config.cuda_graphs
    if wish is False:
        return None
    weights = chain(seams.model.parameters(), seams.model.buffers())
    devices = {str(weight.device) for weight in weights}
    device, reason = seams.layer_devices[0], None
    if device.type not in GRAPH_DEVICE_TYPES:
        if wish == "auto":
            return None
        reason = f"the model is on {device}, not on a CUDA device"
    elif devices != {str(device)}:  # offloaded weights are on "meta"
        reason = f"the model is on {' and '.join(sorted(devices))}, not on one device"
    else:
        reason = probe_backend(runtime.backend, runtime.layout, runtime.block_size, device)
    if reason is None:
        return DecodeGraphs(forward, runtime, device, must=wish is True)
    if wish is True:
        raise ConfigurationError(
            f"cuda_graphs=True, but decoding steps cannot be captured: {reason}. Pass "
            "cuda_graphs='auto' to run without where that is so."
        )
    logger.info("decoding steps run without CUDA graphs: %s", reason)
    return None


def may_capture(model: torch.nn.Module, runtime: PagedRuntime) -> bool:
    """Whether this model's own Python need not run at every step now.

    Raises:
        ConfigurationError: it must not, and must.
    """
    must = runtime.config.cuda_graphs is True
    reason = None
    if has_user_hooks(model):
        reason = "the model carries hooks or a replaced forward"
    elif not must and (foreign := _foreign_code(model)) is not None:
        reason = f"{foreign} is code of your own, which may do more than compute"
    if reason is None:
        return True
    if must:
        raise ConfigurationError(
            f"cuda_graphs=True, but decoding steps cannot be captured: {reason}. Remove them, or "
            "pass cuda_graphs='auto' to run without where that is so."
        )
    _say_once(reason)
    return False


@functools.cache
def _say_once(reason: str) -> None:
    logger.info("decoding steps run without CUDA graphs: %s", reason)


def _foreign_code(model: torch.nn.Module) -> str | None:
    """Return a class of module whose forward is of no library known to compute and nothing else."""
    seen: set[type] = set()
    for module in model.modules():
        cls = type(module)
        if cls in seen:
            continue
        seen.add(cls)
        forward: Any = getattr(cls, "_hf_paged_original_class", cls).forward
        if forward.__module__.partition(".")[0] not in _LIBRARIES:
            return cls.__name__
    return None
