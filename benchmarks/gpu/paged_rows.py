"""Random rows of tokens in blocks, and attention over the same rows in float64.

Dimensions: L tokens of a row, n of them new, N new tokens of all rows end to end, H query heads,
H_kv key/value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hf_paged.backends.base import AttentionBackend, LayerView
from hf_paged.backends.metadata import AttentionMetadata

GARBAGE = 2**30
"""In entries of a block table that no kernel may read: far out of the pool."""

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
"""Relative L2 distance to float64; tf32 would be at 3e-4."""


class PagedRows:
    """Rows whose past lies in shuffled blocks; whatever holds no token is NaN or garbage.

    K and V of a block lie together, with NaN between one block and the next.

    Args:
        lens: (past tokens, new tokens) of each row; a row (-1, 1) is padding: a query, no token.
        backend: writes and attends.
        device: of everything.
        dtype: of query, K and V.
        block_size: tokens a block.
        num_kv_heads: H_kv.
        group: H / H_kv.
        head_dim: D.
        window: of the layer; what is behind it is not held.
        garbage: in dead entries of the tables; None: the null block, as a step writes it.
        seed: of all numbers and of the order of the blocks.
    """

    def __init__(
        self,
        lens: Sequence[tuple[int, int]],
        backend: AttentionBackend,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        *,
        block_size: int = 16,
        num_kv_heads: int = 4,
        group: int = 4,
        head_dim: int = 128,
        window: int | None = None,
        garbage: int | None = GARBAGE,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        self.backend = backend
        self.scale = head_dim**-0.5
        self.lens = [(max(past, 0), past + new, new) for past, new in lens]
        num_new = sum(new for _, _, new in self.lens)
        self.query = draw(num_new, num_kv_heads * group, head_dim)
        self.rows = [
            (draw(total, num_kv_heads, head_dim), draw(total, num_kv_heads, head_dim))
            for _, total, _ in self.lens
        ]
        self.key, self.value = (self._new_tokens(part) for part in (0, 1))

        held = [_held(past, total, block_size, window) for past, total, _ in self.lens]
        num_blocks = sum(len(entries) for entries in held) + 2
        order = torch.randperm(num_blocks, generator=generator).tolist()
        width = max(1, max(-(-total // block_size) for _, total, _ in self.lens))
        tables = torch.full((len(lens), width), num_blocks if garbage is None else garbage)
        for row, entries in enumerate(held):
            for entry in entries:
                tables[row, entry] = order.pop()

        sizes = (block_size, num_kv_heads, head_dim)
        half = block_size * num_kv_heads * head_dim
        self.pool = torch.full((num_blocks + 1, 2 * half + 16), torch.nan, device=device).to(dtype)
        self.pool[num_blocks] = 0
        self.view = LayerView(
            self.pool[:, :half].unflatten(1, sizes),
            self.pool[:, half : 2 * half].unflatten(1, sizes),
        )
        slots = []
        for row, (past, total, new) in enumerate(self.lens):
            at = torch.arange(total)
            stored = torch.tensor([token // block_size in held[row] for token in at.tolist()])
            # Of a block behind the window tokens are held only if the past had it already.
            last = max(0, total - (window or total)) // block_size
            stored = stored.bool() & ((at < past) | (at // block_size >= last))
            places = tables[row, at // block_size] * block_size + at % block_size
            slots.append(torch.where(stored, places, -1)[total - min(new, total) :])
            if new > total:
                slots[-1] = torch.tensor([-1])
            old = stored & (at < past)
            index = at[old].to(device)
            where = (
                (places[old] // block_size).to(device),
                (places[old] % block_size).to(device),
            )
            self.view.key_cache[where] = self.rows[row][0][index]
            self.view.value_cache[where] = self.rows[row][1][index]
        query_lens = [new for _, _, new in self.lens]
        self.metadata = AttentionMetadata(
            block_size=block_size,
            null_block=num_blocks,
            block_tables=tables.to(device, torch.int32),
            seq_lens=torch.tensor([total for _, total, _ in self.lens]).to(device, torch.int32),
            cu_seqlens_q=torch.tensor([0, *query_lens]).cumsum(0).to(device, torch.int32),
            slot_mapping=torch.cat(slots).to(device),
            seq_lens_list=[total for _, total, _ in self.lens],
            query_lens_list=query_lens,
        )

    def write(self) -> None:
        """Store the new tokens."""
        self.backend.write(self.key, self.value, self.view, self.metadata)

    def attend(self, **attention: Any) -> torch.Tensor:
        """Return [N, H, D] from the backend."""
        return self.backend.forward(
            self.query,
            self.key,
            self.value,
            self.view,
            self.metadata,
            **{"scale": self.scale} | attention,
        )

    def expected(
        self,
        *,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return [N, H, D] in float64: no blocks, no tables, one softmax a row."""
        out = []
        first = 0
        for (key, value), (_, total, new) in zip(self.rows, self.lens, strict=True):
            query = self.query[first : first + new].double()
            first += new
            if total == 0:
                out.append(torch.zeros_like(query))
                continue
            group = query.shape[1] // key.shape[1]
            keys, values = (x.double().repeat_interleave(group, dim=1) for x in (key, value))
            scores = self.scale * torch.einsum("qhd,khd->hqk", query, keys)
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            at = torch.arange(total, device=key.device)
            distance = at - at[total - new :, None]
            if alibi_slopes is not None:
                scores = scores + alibi_slopes.double()[:, None, None] * distance
            hidden = distance > 0
            if window is not None:
                hidden = hidden | (distance <= -window)
            scores = scores.masked_fill(hidden, -torch.inf)
            if sinks is not None:
                sink = sinks.double()[:, None, None].expand(-1, new, 1)
                scores = torch.cat([scores, sink], dim=2)
            weights = scores.softmax(dim=2)[:, :, :total]
            out.append(torch.einsum("hqk,khd->qhd", weights, values))
        return torch.cat(out)

    def _new_tokens(self, part: int) -> torch.Tensor:
        """Return K or V of the new tokens; padding brings zeros."""
        new = []
        for row, (past, total, num_new) in zip(self.rows, self.lens, strict=True):
            states = row[part]
            padding = num_new - (total - past)
            new.append(states[past:])
            if padding:
                new.append(states.new_zeros(padding, *states.shape[1:]))
        return torch.cat(new)


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative L2 distance; NaN counts as infinite."""
    error = float((out.double() - expected.double()).norm() / expected.double().norm())
    return error if error == error else float("inf")


def _held(past: int, total: int, block_size: int, window: int | None) -> set[int]:
    """Return which entries of a row's table name a block during the forward."""
    seen, stored = 0, past
    if window is not None:
        seen = max(0, past - window + 1)  # by the first new token
        stored = max(past, max(0, total - window) // block_size * block_size)
    old = range(seen // block_size, -(-past // block_size))
    return {*old, *(token // block_size for token in range(stored, total))}
