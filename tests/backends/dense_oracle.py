"""Attention over plain tensors in float64: what every backend is measured by."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from backends.paged_batch import Row


def dense_attention(
    rows: Sequence[Row],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return [N, H, D_v] in float64: no blocks, no tables, one softmax a row."""
    out = []
    for row in rows:
        num_new, num_heads, _ = row.query.shape
        group_size = num_heads // row.key.shape[1]
        key = row.key.double().repeat_interleave(group_size, dim=1)
        value = row.value.double().repeat_interleave(group_size, dim=1)
        scores = scale * torch.einsum("qhd,khd->hqk", row.query.double(), key)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        distance = (
            torch.arange(row.num_tokens) - torch.arange(row.num_past, row.num_tokens)[:, None]
        )
        if alibi_slopes is not None:
            scores = scores + alibi_slopes.double()[:, None, None] * distance
        hidden = (distance > 0) | (distance <= -(window or row.num_tokens + 1))
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            sink = sinks.double()[:, None, None].expand(-1, num_new, 1)
            scores = torch.cat([scores, sink], dim=2)
        weights = scores.softmax(dim=2)[:, :, : row.num_tokens]
        out.append(torch.einsum("hqk,khd->qhd", weights, value))
    return torch.cat(out)


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative L2 distance."""
    return float((out.double() - expected).norm() / expected.norm())
