"""Which tokens a layer may see: recognised from the mask function that transformers builds.

In a paged forward no mask is built. The registered mask function recognises the pattern (causal,
or causal with a window) and returns a marker, a tensor without elements whose shape spells the
pattern. The model's own code hands it to the layers that it is meant for, so the layer learns its
window from the same source as the reference's attention does. A pattern that is not recognised
turns the step over to the model's own attention, with the mask that it asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function

from hf_paged.cache.step import CURRENT_STEP
from hf_paged.errors import UnsupportedModelError

__all__ = ["is_marker", "paged_mask", "window_of_marker"]

logger = logging.getLogger("hf_paged")

_UNRECOGNISED = object()


def paged_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """Return a marker for the attention pattern; registered with transformers as a mask function.

    An unusual mask after a marker was given out gets one that no layer may use: Qwen2-MoE asks for
    a mask with a window of 0 beside the causal one, and its layers take the causal one.
    """
    step = CURRENT_STEP.get()
    assert step is not None, "the paged mask function is reachable only from a paged forward"
    window = _recognise(kwargs["mask_function"])
    if window is not _UNRECOGNISED:
        step.masks_issued = True
        return _marker(window, kwargs.get("device"))
    if step.masks_issued:
        return torch.empty((1, 1, 0, 0), dtype=torch.int8, device=kwargs.get("device"))
    logger.info("unusual attention mask: this forward runs the model's own attention")
    step.is_paged = False
    functions: dict[str, Any] = ALL_MASK_ATTENTION_FUNCTIONS._global_mapping
    own = functions.get(kwargs["config"]._attn_implementation)
    mask: torch.Tensor | None = None if own is None else own(*args, **kwargs)
    return mask


def is_marker(mask: object) -> bool:
    """Whether ``mask`` came from :func:`paged_mask`."""
    return isinstance(mask, torch.Tensor) and mask.ndim == 4 and mask.shape[:3] == (1, 1, 0)


def window_of_marker(mask: torch.Tensor) -> int | None:
    """Return the window that a marker spells, None for full causal attention.

    Raises:
        UnsupportedModelError: the mask is an unusual one among markers.
    """
    if mask.dtype != torch.bool:
        raise UnsupportedModelError(
            "the model mixes plain causal masks with one that is none in one forward: expected "
            "causal or sliding masks only."
        )
    return mask.shape[3] or None


def _marker(window: Any, device: Any) -> torch.Tensor:
    return torch.empty((1, 1, 0, window or 0), dtype=torch.bool, device=device)


def _recognise(mask_function: Callable[..., Any]) -> Any:
    """Return the window of a causal mask function, None for full, _UNRECOGNISED for others.

    transformers builds ``and_masks(sliding_window_overlay(w), causal_mask_function)``.
    """
    if mask_function is causal_mask_function:
        return None
    parts = _closure(mask_function, "and_masks.<locals>.and_mask").get("mask_functions")
    if isinstance(parts, tuple) and len(parts) == 2 and parts[1] is causal_mask_function:
        overlay = _closure(parts[0], "sliding_window_overlay.<locals>.inner_mask")
        window = overlay.get("sliding_window")
        if isinstance(window, int) and window > 0:
            return window
    return _UNRECOGNISED


def _closure(function: Any, qualname: str) -> dict[str, Any]:
    """Return the closed-over variables of ``function`` if it is the one meant."""
    if (
        getattr(function, "__qualname__", None) != qualname
        or function.__module__ != causal_mask_function.__module__
    ):
        return {}
    cells = function.__closure__ or ()
    return {
        name: cell.cell_contents
        for name, cell in zip(function.__code__.co_freevars, cells, strict=True)
    }
