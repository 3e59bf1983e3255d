"""The attention function that transformers calls in a paged forward."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from hf_paged.cache.step import CURRENT_STEP
from hf_paged.errors import UnsupportedModelError
from hf_paged.integration.masks import is_marker, paged_mask, window_of_marker

__all__ = ["PAGED_ATTENTION", "paged_attention", "register", "wants_weights"]

PAGED_ATTENTION = "hf_paged"
"""The name that a config answers with while a paged forward runs."""


def register() -> None:
    """Make the paged functions known to transformers; no model uses them before it is patched."""
    AttentionInterface.register(PAGED_ATTENTION, paged_attention)
    AttentionMaskInterface.register(PAGED_ATTENTION, paged_mask)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend to the pool instead of ``key`` and ``value``, which ``update`` has stored already.

    Args:
        module: the attention module; ``layer_idx`` names its layer.
        query: [B, H, T, D].
        key: [B, H_kv, T, D], as ``PagedCache.update`` returned it.
        value: [B, H_kv, T, D_v], likewise.
        attention_mask: a marker of :mod:`hf_paged.integration.masks`.
        scaling: factor on the scores; 1 / sqrt(D) if None, as in sdpa.
        softcap: as in Gemma 2; left out where the user's own implementation leaves it out.
        s_aux: [H] attention sinks.
        position_bias: refused.
        kwargs: what transformers' own implementations ignore as well.

    Returns:
        [B, T, H, D_v] and no weights.

    Raises:
        UnsupportedModelError: the layer wants what paging cannot give.
    """
    step = CURRENT_STEP.get()
    assert step is not None, "the paged attention is reachable only from a paged forward"
    layer = module.layer_idx
    assert isinstance(layer, int)
    if attention_mask is None or not is_marker(attention_mask):
        raise UnsupportedModelError(
            f"layer {layer} got {_describe(attention_mask)} as its mask: expected the one that "
            "transformers' mask functions made for this forward."
        )
    if position_bias is not None:
        raise UnsupportedModelError(f"layer {layer} uses position_bias, which paging lacks.")
    if softcap is not None and _is_sdpa(module):
        if _sdpa_raises_on_softcap():
            raise UnsupportedModelError(
                f"layer {layer} uses softcap={softcap}, which sdpa does not support: load the "
                "model with attn_implementation='eager'."
            )
        softcap = None
    out = step.attend(
        query,
        key,
        value,
        layer,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=window_of_marker(attention_mask),
        softcap=softcap,
        sinks=s_aux,
    )
    return out, None


def _is_sdpa(module: torch.nn.Module) -> bool:
    config: Any = module.config
    return bool(config._attn_implementation_internal == "sdpa")


@cache
def _sdpa_raises_on_softcap() -> bool:
    """Whether transformers' sdpa refuses softcap (5.24) or ignores it (5.17)."""
    one = torch.zeros(1, 1, 1, 1)
    try:
        ALL_ATTENTION_FUNCTIONS["sdpa"](torch.nn.Module(), one, one, one, None, softcap=1.0)
    except ValueError:
        return True
    return False


def _describe(mask: object) -> str:
    if isinstance(mask, torch.Tensor):
        return f"a tensor of shape {tuple(mask.shape)}"
    return "None" if mask is None else f"a {type(mask).__name__}"


def wants_weights(base: Any, arguments: dict[str, Any]) -> bool:
    """Whether the caller wants attention weights and the user's implementation has them."""
    wanted = arguments.get("output_attentions")
    if wanted is None:
        wanted = getattr(base.config, "output_attentions", False)
    return bool(wanted) and base.config._attn_implementation_internal != "sdpa"
