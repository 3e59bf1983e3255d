"""Stores, copies and reads of whole tokens and blocks, as operators that torch.compile can see.

``hf_paged::paged_write`` and ``hf_paged::paged_copy_blocks`` run Triton kernels on CUDA and plain
torch on a CPU. Caches are NHD, [num_blocks, block_size, H_kv, D]: contiguous inside a block, at any
distance from block to block.

Dimensions: N new tokens, H_kv key/value heads, D head dim of keys, D_v of values.
"""

from __future__ import annotations

import os

import torch

from hf_paged.backends.base import LayerView

__all__ = ["copy_blocks", "gather", "triton_interprets", "write"]

_library = torch.library.Library("hf_paged", "FRAGMENT")
_library.define(
    "paged_write(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    "Tensor slot_mapping) -> ()"
)
_library.define("paged_copy_blocks(Tensor(a!) cache, Tensor source, Tensor target) -> ()")

write = torch.ops.hf_paged.paged_write
"""Store key [N, H_kv, D] and value [N, H_kv, D_v] in slots [N] int64; negative ones: nowhere."""
copy_blocks = torch.ops.hf_paged.paged_copy_blocks
"""Copy blocks inside cache [num_blocks, ...], from ids [n] int64 to ids [n]; none is both."""


def gather(view: LayerView, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K [n, H_kv, D] and V [n, H_kv, D_v] of the given slots ([n] int64)."""
    block_size = view.key_cache.shape[1]
    block, offset = slots // block_size, slots % block_size
    return view.key_cache[block, offset], view.value_cache[block, offset]


def triton_interprets() -> bool:
    """Whether Triton, once imported, runs kernels in Python, on CPU tensors too."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _write_on_cpu(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    if triton_interprets():
        _write_in_triton(key, value, key_cache, value_cache, slot_mapping)
        return
    stored = torch.nonzero(slot_mapping >= 0)[:, 0]
    slots, block_size = slot_mapping[stored], key_cache.shape[1]
    where = (slots // block_size, slots % block_size)
    key_cache.index_put_(where, key[stored])
    value_cache.index_put_(where, value[stored])


def _write_in_triton(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    from hf_paged.backends import triton_kernels

    triton_kernels.write(key, value, key_cache, value_cache, slot_mapping)


def _copy_blocks_on_cpu(cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    if triton_interprets():
        _copy_blocks_in_triton(cache, source, target)
        return
    cache.index_copy_(0, target, cache.index_select(0, source))


def _copy_blocks_in_triton(cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    from hf_paged.backends import triton_kernels

    triton_kernels.copy_blocks(cache, source, target)


def _fake_mutation(*_: object) -> None:
    return None


for _name, _on_cpu, _in_triton in (
    ("paged_write", _write_on_cpu, _write_in_triton),
    ("paged_copy_blocks", _copy_blocks_on_cpu, _copy_blocks_in_triton),
):
    _library.impl(_name, _on_cpu, "CPU")
    _library.impl(_name, _in_triton, "CUDA")
    torch.library.register_fake(f"hf_paged::{_name}", _fake_mutation, lib=_library)
