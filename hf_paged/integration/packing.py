"""Which calls of ``_sample`` may be packed; of the model ``packed_model`` tells."""

from __future__ import annotations

from typing import Any

import torch

from hf_paged.cache.paged_cache import PagedCache

__all__ = ["find_prompts", "why_not_packed"]

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
    if not isinstance(cache, PagedCache):
        return "it has no paged cache"
    if cache.is_initialized or cache.records_past:
        return "its cache holds rows already, or is to keep what falls behind a window"
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
        if position_ids.shape not in ((num_rows, num_columns), (1, num_columns)):
            return "its positions have another shape than its tokens"
        positions = position_ids.expand(num_rows, num_columns).tolist()
        for row, (start, given) in enumerate(zip(num_padding, positions, strict=True)):
            first = given[start]
            if given[start:] != list(range(first, first + num_columns - start)):
                return "positions are not consecutive"
            first_positions[row] = first
    prompts = [ids[start:] for start, ids in zip(num_padding, input_ids.tolist(), strict=True)]
    return prompts, first_positions
