"""Compile what calls of many shapes would launch on one kind of device; print what each takes.

python compile_variants.py CAPABILITY, in a process where Triton does not interpret.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import torch

from backends.triton.ahead_of_time import Usage, compile_launch, launches_of
from hf_paged.backends import triton_kernels

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EVERYTHING = ("window", "softcap", "sinks", "alibi_slopes")

VARIANTS: list[dict[str, Any]] = [
    dict(dtype=BF16, head_dim=128, group=4, block_size=16, num_splits=8),
    dict(dtype=BF16, head_dim=256, group=8, block_size=256, options=EVERYTHING),
]
MORE_VARIANTS: list[dict[str, Any]] = [  # for one kind of device: each takes seconds
    dict(dtype=FP16, head_dim=64, group=1, block_size=64, options=EVERYTHING),
    dict(dtype=BF16, head_dim=80, value_dim=64, group=71, block_size=16, options=("window",)),
    dict(dtype=FP32, head_dim=128, group=4, block_size=16),
]


def compile_attention(
    capability: int,
    *,
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    block_size: int,
    value_dim: int | None = None,
    num_splits: int = 1,
    options: tuple[str, ...] = (),
) -> list[Usage]:
    num_kv_heads, value_dim = 8, value_dim or head_dim

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    num_heads = num_kv_heads * group
    every_option = dict(
        window=100, softcap=30.0, sinks=empty(num_heads), alibi_slopes=empty(num_heads)
    )
    launches = launches_of(
        triton_kernels.attend,
        empty(64, num_heads, head_dim),
        empty(64, num_kv_heads, head_dim),
        empty(64, num_kv_heads, value_dim),
        empty(100, block_size, num_kv_heads, head_dim),
        empty(100, block_size, num_kv_heads, value_dim),
        empty(4, 64, dtype=torch.int32),
        empty(4, dtype=torch.int32),
        empty(5, dtype=torch.int32),
        max_query_len=61,
        has_single_token_rows=True,
        num_splits=num_splits,
        scale=0.1,
        **{name: every_option[name] for name in options},
    )
    return [compile_launch(launch, capability) for launch in launches]


def compile_block_ops(capability: int) -> list[Usage]:
    new = torch.empty(64, 8, 128, dtype=BF16, device="meta")
    cache = torch.empty(100, 16, 8, 128, dtype=BF16, device="meta")
    ids = torch.empty(64, dtype=torch.int64, device="meta")
    launches = launches_of(triton_kernels.write, new, new, cache, cache, ids)
    launches += launches_of(triton_kernels.copy_blocks, cache, ids, ids)
    return [compile_launch(launch, capability) for launch in launches]


if __name__ == "__main__":
    device = int(sys.argv[1])
    found = [
        (variant, compile_attention(device, **variant))
        for variant in VARIANTS + (MORE_VARIANTS if device == 90 else [])
    ]
    found.append(({"block_ops": True}, compile_block_ops(device)))
    json.dump(
        [
            {"variant": {k: str(v) for k, v in variant.items()}, **dataclasses.asdict(usage)}
            for variant, usages in found
            for usage in usages
        ],
        sys.stdout,
    )
