"""A backend for the CPU whose decoding attention reads lengths from tensors, as kernels do."""

from __future__ import annotations

from typing import Any

import torch

from hf_paged.backends.base import LayerView
from hf_paged.backends.metadata import AttentionMetadata
from hf_paged.backends.torch_reference import TorchReferenceBackend
from hf_paged.backends.triton import TritonBackend


class DenseDecodeBackend(TritonBackend):
    """Decoding over whole tables in plain torch; prompts through the oracle. Exact in float32."""

    name = "dense_decode"
    block_size_multiple = 1

    def __init__(self, *, batch_invariant: bool = False) -> None:
        super().__init__(batch_invariant=batch_invariant)
        self._reference = TorchReferenceBackend()

    @classmethod
    def unavailable_reason(cls, device: torch.device) -> str | None:
        return None

    def check_model(self, **_: Any) -> None:
        pass

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
        assert sinks is None and alibi_slopes is None
        if not metadata.is_decode:
            return self._reference.forward(
                query, key, value, view, metadata, scale=scale, window=window, softcap=softcap
            )
        tables, lens = metadata.block_tables.long(), metadata.seq_lens
        num_groups = query.shape[1] // key.shape[1]
        keys, values = (
            cache[tables].flatten(1, 2).repeat_interleave(num_groups, dim=2)
            for cache in (view.key_cache, view.value_cache)
        )
        at = torch.arange(keys.shape[1])
        visible = at < lens[:, None]
        if window is not None:
            visible = visible & (at >= lens[:, None] - window)
        # What is not visible may be NaN.
        keys, values = (x.masked_fill(~visible[:, :, None, None], 0) for x in (keys, values))
        scores = torch.einsum("bhd,bkhd->bhk", query, keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~visible[:, None], -torch.inf)
        weights = scores.softmax(-1).nan_to_num(0)  # a row of padding sees nothing
        return torch.einsum("bhk,bkhd->bhd", weights, values)
