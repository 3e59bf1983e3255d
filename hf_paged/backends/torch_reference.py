"""The oracle: attention over blocks as one reads it in a textbook, in float64.

Slow on purpose. Every other backend is tested against it.
"""

from __future__ import annotations

import torch

from hf_paged.backends.base import AttentionBackend, LayerView
from hf_paged.backends.metadata import AttentionMetadata

__all__ = ["TorchReferenceBackend"]


class TorchReferenceBackend(AttentionBackend):
    """Row by row and slot by slot; K and V as [num_blocks, block_size, H_kv, D]."""

    name = "torch_reference"

    @classmethod
    def unavailable_reason(cls, device: torch.device) -> str | None:
        """Runs wherever torch runs."""
        return None

    def cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> tuple[int, ...]:
        """Return NHD: the tokens of a block one after the other."""
        return (num_blocks, block_size, num_kv_heads, head_dim)

    def write(
        self, key: torch.Tensor, value: torch.Tensor, view: LayerView, metadata: AttentionMetadata
    ) -> None:
        """Store token after token."""
        for token, slot in enumerate(metadata.slot_mapping.tolist()):
            if slot >= 0:
                block, offset = divmod(slot, metadata.block_size)
                view.key_cache[block, offset] = key[token]
                view.value_cache[block, offset] = value[token]

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        view: LayerView,
        metadata: AttentionMetadata,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend row by row; new tokens come from ``key`` and ``value``, old ones from slots."""
        out = query.new_zeros(*query.shape[:2], value.shape[-1])
        begin = 0
        rows = zip(metadata.seq_lens_list, metadata.query_lens_list, strict=True)
        for row, (seq_len, query_len) in enumerate(rows):
            end = begin + query_len
            table = metadata.block_tables[row].tolist()
            past = [
                table[i // metadata.block_size] * metadata.block_size + i % metadata.block_size
                for i in range(seq_len - query_len)
            ]
            past_key, past_value = self.gather(view, torch.tensor(past, device=query.device))
            k = torch.cat([past_key, key[begin:end]]).double()
            v = torch.cat([past_value, value[begin:end]]).double()
            group_size = query.shape[1] // k.shape[1]
            for head in range(query.shape[1]):
                scores = query[begin:end, head].double() @ k[:, head // group_size].T * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                at = torch.arange(seq_len - query_len, seq_len, device=query.device)[:, None]
                seen = torch.arange(seq_len, device=query.device)[None, :]
                if alibi_slopes is not None:
                    scores = scores + alibi_slopes[head].double() * (seen - at)
                visible = seen <= at
                if window is not None:
                    visible &= seen > at - window
                scores = scores.masked_fill(~visible, -torch.inf)
                if sinks is not None:
                    sink = sinks[head].double().expand(query_len, 1)
                    scores = torch.cat([scores, sink], dim=1)
                weights = scores.softmax(dim=-1)[:, :seq_len]
                # A row that sees nothing of a slot must not read it: 0 * NaN is NaN.
                visible_value = v[:, head // group_size].masked_fill(~visible.any(0)[:, None], 0)
                out[begin:end, head] = (weights @ visible_value).to(out.dtype)
            begin = end
        return out

    def gather(self, view: LayerView, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Index the caches as one long list of slots."""
        slots = slots.long()
        return view.key_cache.flatten(0, 1)[slots], view.value_cache.flatten(0, 1)[slots]
