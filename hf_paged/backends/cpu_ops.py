"""The kernels as operators that torch.compile can see: a schema each, fakes, what they mutate.

``hf_paged::cpu_attention``, ``hf_paged::cpu_write``, ``hf_paged::cpu_copy_blocks``. Eager code
calls :mod:`hf_paged.backends.cpu_kernels` directly: the dispatcher would cost more than the rest of
a small call.
"""

from __future__ import annotations

import torch

from hf_paged.backends import cpu_kernels
from hf_paged.backends.base import LayerView
from hf_paged.backends.metadata import AttentionMetadata

__all__ = ["attention", "copy_blocks", "write"]

_library = torch.library.Library("hf_paged", "DEF")
_library.define(
    "cpu_attention(Tensor query, Tensor key, Tensor value, Tensor key_cache, Tensor value_cache, "
    "Tensor block_tables, Tensor seq_lens, Tensor cu_seqlens_q, float scale, int? window=None, "
    "float? softcap=None, Tensor? sinks=None, Tensor? alibi_slopes=None, "
    "bool batch_invariant=False) -> Tensor"
)
_library.define(
    "cpu_write(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    "Tensor slot_mapping) -> ()"
)
_library.define("cpu_copy_blocks(Tensor(a!) cache, Tensor source, Tensor target) -> ()")

attention = torch.ops.hf_paged.cpu_attention
write = torch.ops.hf_paged.cpu_write
copy_blocks = torch.ops.hf_paged.cpu_copy_blocks


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    metadata = _metadata(
        key_cache, block_tables=block_tables, seq_lens=seq_lens, cu_seqlens_q=cu_seqlens_q
    )
    return cpu_kernels.attend(
        query,
        key,
        value,
        LayerView(key_cache, value_cache),
        metadata,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        batch_invariant=batch_invariant,
    )


def _write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    metadata = _metadata(key_cache, slot_mapping=slot_mapping)
    cpu_kernels.write(key, value, LayerView(key_cache, value_cache), metadata)


def _metadata(
    cache: torch.Tensor,
    *,
    block_tables: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    slot_mapping: torch.Tensor | None = None,
) -> AttentionMetadata:
    """Return metadata of the given tensors; a kernel reads nothing else of it."""
    nothing = torch.empty(0, dtype=torch.int32)
    return AttentionMetadata(
        block_size=cache.shape[2],
        null_block=cache.shape[0] - 1,
        block_tables=nothing if block_tables is None else block_tables,
        seq_lens=nothing if seq_lens is None else seq_lens,
        cu_seqlens_q=nothing if cu_seqlens_q is None else cu_seqlens_q,
        slot_mapping=nothing if slot_mapping is None else slot_mapping,
        seq_lens_list=[],
        query_lens_list=[],
    )


def _fake_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object
) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[1], value.shape[2])


def _fake_mutation(*_: object) -> None:
    return None


for _name, _function, _fake in (
    ("cpu_attention", _attention, _fake_attention),
    ("cpu_write", _write, _fake_mutation),
    ("cpu_copy_blocks", cpu_kernels.copy_blocks, _fake_mutation),
):
    _library.impl(_name, _function, "CPU")
    torch.library.register_fake(f"hf_paged::{_name}", _fake, lib=_library)
