"""A hand-written decoding loop over a cache."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from tiny_models import ragged_batch


class Session:
    """Feeds left-padded rows to a model and keeps ids and mask, as a hand-written loop would.

    Args:
        model: patched or not.
        cache: grows with each :meth:`feed`.
        lengths: of the prompts that are fed first.
        cache_name: by which the model is given the cache.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: Cache,
        lengths: tuple[int, ...],
        cache_name: str = "past_key_values",
    ) -> None:
        self.model, self.cache, self.cache_name = model, cache, cache_name
        batch = ragged_batch(lengths)
        self.mask = batch.mask[:, :0]
        self.last = self.feed(batch.ids, batch.mask)

    def feed(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits of the last column."""
        mask = torch.ones_like(ids) if mask is None else mask
        self.mask = torch.cat([self.mask, mask], dim=1)
        positions = (self.mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        options = {"attention_mask": self.mask, "position_ids": positions}
        self.result = self.model(ids, **options, **{self.cache_name: self.cache})
        self.last = self.result.logits[:, -1]
        return self.last

    def greedy(self, num_tokens: int) -> torch.Tensor:
        """Go on from the last logits; return the ids chosen, [B, num_tokens]."""
        chosen = []
        for _ in range(num_tokens):
            chosen.append(self.last.argmax(-1, keepdim=True))
            self.feed(chosen[-1])
        return torch.cat(chosen, dim=1)


def more(num_rows: int, num_tokens: int, seed: int = 17) -> torch.Tensor:
    """Return random ids without padding, [B, T]."""
    return ragged_batch((num_tokens,) * num_rows, seed=seed).ids
