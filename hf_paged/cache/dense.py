"""Copies of what a cache stores, in the padded shape that transformers' own code reads.

Dimensions: B rows, C columns, H_kv key/value heads, D head dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from hf_paged.core.block_table import NO_BLOCK

if TYPE_CHECKING:
    from hf_paged.cache.paged_cache import PagedCache

__all__ = ["StoredTokens", "find_stored", "gather", "to_dynamic_cache"]


class StoredTokens(NamedTuple):
    """Where the stored tokens of one layer group are, and where they belong.

    Attributes:
        rows: [n] int64.
        columns: [n] int64, counted from ``first_column``.
        slots: [n] int64.
        first_column: the first column that the group's window can still see.
        num_columns: C, columns from there on.
    """

    rows: torch.Tensor
    columns: torch.Tensor
    slots: torch.Tensor
    first_column: int
    num_columns: int


def find_stored(cache: PagedCache, group: int) -> StoredTokens:
    """Return the tokens that ``cache`` stores in a layer group; changes nothing."""
    layer = cache.runtime.manager.groups[group].layers[0]
    num_columns, first_column = cache.get_mask_sizes(0, layer)
    size = cache.runtime.block_size
    rows, columns, slots = [], [], []
    for row, sequence in enumerate(cache.sequences):
        table = sequence.tables[group]
        real = torch.nonzero(cache.columns.real[row])[:, 0].tolist()
        for token, column in enumerate(real[: sequence.num_tokens]):
            block = table[token // size] if token // size < len(table) else NO_BLOCK
            if column >= first_column and block != NO_BLOCK:
                rows.append(row)
                columns.append(column - first_column)
                slots.append(block * size + token % size)
    tensors = [torch.tensor(found, dtype=torch.int64) for found in (rows, columns, slots)]
    return StoredTokens(tensors[0], tensors[1], tensors[2], first_column, num_columns)


def gather(
    cache: PagedCache, layer: int, stored: StoredTokens, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy a layer's stored K and V into the padded shape.

    Args:
        cache: an initialised cache.
        layer: index in the model.
        stored: of the layer's group.
        key: [*, H_kv, *, D] on the device and in the dtype to return.
        value: [*, H_kv, *, D_v].

    Returns:
        [B, H_kv, C, D] and [B, H_kv, C, D_v], zeros where nothing is stored.
    """
    runtime, device = cache.runtime, key.device
    view = runtime.storage.view(layer, key.transpose(1, 2), value.transpose(1, 2))
    found = runtime.backend.gather(view, stored.slots.to(device))
    gathered = []
    for new, states in zip((key, value), found, strict=True):
        shape = (len(cache.sequences), stored.num_columns, new.shape[1], new.shape[-1])
        out = new.new_zeros(shape)
        out[stored.rows.to(device), stored.columns.to(device)] = states
        gathered.append(out.transpose(1, 2))
    return gathered[0], gathered[1]


def to_dynamic_cache(cache: PagedCache, num_layers: int) -> DynamicCache:
    """Return a DynamicCache with the K and V of ``cache``, zeros in padded columns.

    Args:
        cache: stays as it is.
        num_layers: layers that it stores; 0 if it is empty.
    """
    runtime = cache.runtime
    full: Any = DynamicLayer  # untyped in transformers
    dynamic = DynamicCache()
    dynamic.layer_class_to_replicate = None
    dynamic.layers = [
        full() if window is None else DynamicSlidingWindowLayer(sliding_window=window)
        for window in runtime.layout.windows[: num_layers or None]
    ]
    stored = [find_stored(cache, group) for group in range(len(runtime.manager.groups))]
    for layer in range(num_layers):
        tokens = stored[runtime.group_of_layer[layer]]
        states = gather(cache, layer, tokens, *runtime.storage.empty_states(layer))
        # Columns behind a window are zeros; the sliding layer drops them itself.
        padded = [torch.nn.functional.pad(s, (0, 0, tokens.first_column, 0)) for s in states]
        dynamic.update(padded[0], padded[1], layer)
    return dynamic
