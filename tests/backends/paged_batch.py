"""Random rows of tokens, once as plain tensors and once in blocks.

Dimensions: L tokens of a row, n of them new, N new tokens of all rows end to end, H query heads,
H_kv key/value heads, D head dim, D_v head dim of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_paged.backends.base import AttentionBackend, LayerView
from hf_paged.backends.metadata import AttentionMetadata


@dataclass(frozen=True)
class Row:
    """One row: query [n, H, D], key [L, H_kv, D], value [L, H_kv, D_v]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return self.key.shape[0]

    @property
    def num_past(self) -> int:
        return self.key.shape[0] - self.query.shape[0]


def random_rows(
    lens: Sequence[tuple[int, int]],
    *,
    num_kv_heads: int = 2,
    group_size: int = 2,
    head_dim: int = 8,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> list[Row]:
    """Return a row for each (past tokens, new tokens) of ``lens``."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return [
        Row(
            draw(num_new, num_kv_heads * group_size, head_dim),
            draw(num_past + num_new, num_kv_heads, head_dim),
            draw(num_past + num_new, num_kv_heads, value_dim or head_dim),
        )
        for num_past, num_new in lens
    ]


class PagedBatch:
    """Rows whose past lies in shuffled physical blocks, as a step hands them to a backend.

    Every slot that holds no token is ``poison``. So is what the dead entries of the tables name,
    behind the window and past a row's end: a step names the null block there, but nobody has a
    reason to read it.

    Args:
        rows: see :func:`random_rows`.
        backend: chooses the layout.
        block_size: tokens a block.
        window: of the layer group; what lies behind it is not held.
        poison: fills what must not be read.
        seed: of the order of the physical blocks.

    Attributes:
        view: K and V of the past.
        metadata: of the new tokens.
        query, key, value: of the new tokens, [N, H, D], [N, H_kv, D], [N, H_kv, D_v].
        token_slots: of each row, the slot of every token that is held after the forward, by index.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        backend: AttentionBackend,
        block_size: int,
        *,
        window: int | None = None,
        poison: float = torch.nan,
        seed: int = 0,
    ) -> None:
        self.backend = backend
        held = [_held_entries(row, block_size, window) for row in rows]
        num_blocks = sum(map(len, held)) + 3
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
        dead = order.pop()
        tables = [{entry: order.pop() for entry in entries} for entries in held]
        self.token_slots = [
            {
                token: table[token // block_size] * block_size + token % block_size
                for token in range(row.num_tokens)
                if token // block_size in table
                and (token < row.num_past or _is_stored(token, row, block_size, window))
            }
            for row, table in zip(rows, tables, strict=True)
        ]
        width = max(-(-row.num_tokens // block_size) for row in rows)
        query_lens = [row.query.shape[0] for row in rows]
        self.metadata = AttentionMetadata(
            block_size=block_size,
            null_block=num_blocks,
            block_tables=torch.tensor(
                [[table.get(entry, dead) for entry in range(width)] for table in tables],
                dtype=torch.int32,
            ),
            seq_lens=torch.tensor([row.num_tokens for row in rows], dtype=torch.int32),
            cu_seqlens_q=torch.tensor([0, *query_lens]).cumsum(0).int(),
            slot_mapping=torch.tensor(
                [
                    slots.get(token, -1)
                    for row, slots in zip(rows, self.token_slots, strict=True)
                    for token in range(row.num_past, row.num_tokens)
                ],
                dtype=torch.int64,
            ),
            seq_lens_list=[row.num_tokens for row in rows],
            query_lens_list=query_lens,
        )
        self.query = torch.cat([row.query for row in rows])
        self.key = torch.cat([row.key[row.num_past :] for row in rows])
        self.value = torch.cat([row.value[row.num_past :] for row in rows])
        self.view = LayerView(
            self._cache([row.key for row in rows], rows, poison),
            self._cache([row.value for row in rows], rows, poison),
        )

    def forward(self, **arguments: Any) -> torch.Tensor:
        """Write the new tokens and attend, as each layer does; ``scale`` defaults to 0.3."""
        self.backend.write(self.key, self.value, self.view, self.metadata)
        return self.backend.forward(
            self.query, self.key, self.value, self.view, self.metadata, **{"scale": 0.3} | arguments
        )

    def _cache(
        self, states: Sequence[torch.Tensor], rows: Sequence[Row], poison: float
    ) -> torch.Tensor:
        num_blocks, block_size = self.metadata.null_block + 1, self.metadata.block_size
        shape = self.backend.cache_shape(num_blocks, block_size, *states[0].shape[1:])
        cache = torch.full(shape, poison, dtype=torch.float32).to(states[0].dtype)
        cache[-1] = 0  # the null block
        tokens = by_slot(self.backend, cache)
        for row, state, slots in zip(rows, states, self.token_slots, strict=True):
            for token, slot in slots.items():
                if token < row.num_past:
                    tokens[slot // block_size, slot % block_size] = state[token]
        return cache


def by_slot(backend: AttentionBackend, cache: torch.Tensor) -> torch.Tensor:
    """Return a view [num_blocks, block_size, H_kv, D] of a cache in the backend's own layout."""
    layout = backend.cache_shape(2, 3, 5, 7)
    return cache.permute(*(layout.index(size) for size in (2, 3, 5, 7)))


def _held_entries(row: Row, block_size: int, window: int | None) -> list[int]:
    """Return which entries of the table name a block during the forward."""
    past_entries = range(-(-row.num_past // block_size))
    if window is not None:
        seen_by_first_query = max(0, row.num_past - window + 1)
        past_entries = past_entries[seen_by_first_query // block_size :]
    new_tokens = range(row.num_past, row.num_tokens)
    stored = (t // block_size for t in new_tokens if _is_stored(t, row, block_size, window))
    return sorted({*past_entries, *stored})


def _is_stored(token: int, row: Row, block_size: int, window: int | None) -> bool:
    """Whether a new token lies in a block that the last query sees, at least in part."""
    if window is None:
        return True
    return token // block_size >= max(0, row.num_tokens - window) // block_size
