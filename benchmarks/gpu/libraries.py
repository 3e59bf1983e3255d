"""Other people's kernels: flash-attn 2 and 3 as backends, xformers as a second opinion."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from attention import around, compare, figure
from generating import PRECISION, forced_logits
from paged_rows import PagedRows, relative_error
from rectangles import distance
from runner import Check, Machine, Skip, expect
from small_models import build, generate, patched, prompts

import hf_paged
from hf_paged.backends.registry import available_backends, create_backend
from hf_paged.backends.triton import TritonBackend


def need(machine: Machine, name: str) -> None:
    """Skip the check unless the backend is here."""
    reason = available_backends(machine.device)[name]
    if reason is not None:
        raise Skip(reason)


def flash_attention(machine: Machine, name: str) -> str:
    """Dead entries of tables name the null block, as in a step; free slots are NaN."""
    need(machine, name)
    backend: Any = create_backend(name, machine.device)
    size = backend.default_block_size
    decoding = [(0, 1), (size - 2, 1), (size - 1, 1), (size, 1), (3 * size + 7, 1)]
    mixed = [each for each in around(size) if each != (-1, 1)] + [(0, 300), (600, 40)]
    cases: list[dict[str, Any]] = [{}, {"window": 100}, {"softcap": 3.0}]
    if backend.LIMITS.alibi:
        cases.append({"alibi_slopes": torch.linspace(0, 0.5, 16, device=machine.device)})
    return figure(
        compare(
            machine,
            lens,
            dtype,
            backend=backend,
            attention=attention,
            block_size=size,
            head_dim=head_dim,
            garbage=None,
        )
        for dtype, head_dim in ((torch.bfloat16, 128), (torch.float16, 64))
        for lens in (decoding, mixed, [(0, 40), (0, 300)])
        for attention in cases
    )


def flash_generate(machine: Machine, name: str) -> str:
    """bf16: logits along given tokens; then prefixes, and more rows than the pool holds."""
    need(machine, name)
    batch = prompts(machine, (300, 20, 280))
    single, half = build("llama", machine), build("llama", machine, torch.bfloat16)
    tokens = generate(single, batch, max_new_tokens=24)
    exact = forced_logits(single, batch, tokens)
    own = distance(forced_logits(half, batch, tokens), exact)
    for graphs in (False, "auto"):
        options = dict(backend=name, num_blocks=64, cuda_graphs=graphs)
        with patched(half, **options):
            error = distance(forced_logits(half, batch, tokens), exact)
            expect(error <= PRECISION * own, f"{error:.1e} from fp32, unpatched {own:.1e}")
            first = generate(half, batch, max_new_tokens=24)
            hf_paged.reset_stats(half)
            second = generate(half, batch, max_new_tokens=24)
            hits = hf_paged.stats(half).prefix_hit_tokens
        expect(hits > 0, "no stored prefix was found")
        equal = float((first == second).float().mean())
    return f"{error / own:.2f} x the unpatched distance to fp32; {equal:.0%} equal over prefixes"


def xformers_oracle(machine: Machine) -> str:
    """Decoding over blocks of 64 by xformers' split-k kernel, over the same pool."""
    if importlib.util.find_spec("xformers") is None:
        raise Skip("xformers is not installed")
    try:
        from xformers.ops import fmha
        from xformers.ops.fmha.attn_bias import (
            BlockDiagonalCausalWithOffsetPaddedKeysMask,
            PagedBlockDiagonalCausalWithOffsetPaddedKeysMask,
        )
    except ImportError as error:
        raise Skip(f"this xformers has another interface: {error}") from error
    block_size = 64
    lens = [(700, 1), (63, 1), (64, 1), (130, 1)]
    rows = PagedRows(
        lens, TritonBackend(), machine.device, torch.bfloat16, block_size=block_size, garbage=None
    )
    rows.write()
    metadata = rows.metadata
    try:
        bias = BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
            q_seqlen=[1] * len(lens),
            kv_padding=metadata.block_tables.shape[1] * block_size,
            kv_seqlen=metadata.seq_lens_list,
        )
        bias.k_seqinfo.to(machine.device)
        bias.q_seqinfo.to(machine.device)
        paged = bias.make_paged(
            block_tables=metadata.block_tables,
            page_size=block_size,
            paged_type=PagedBlockDiagonalCausalWithOffsetPaddedKeysMask,
        )
        num_kv_heads, head_dim = rows.key.shape[1:]
        # Free slots are NaN, which nobody but this project promises not to read.
        caches = [
            cache.nan_to_num(0).reshape(1, -1, num_kv_heads, 1, head_dim)
            for cache in (rows.view.key_cache, rows.view.value_cache)
        ]
        group = rows.query.shape[1] // num_kv_heads
        keys, values = (cache.expand(-1, -1, -1, group, -1) for cache in caches)
        other = fmha.memory_efficient_attention_forward(
            rows.query.view(1, len(lens), num_kv_heads, group, head_dim),
            keys,
            values,
            attn_bias=paged,
            scale=rows.scale,
            op=fmha.triton_splitk.FwOp,
        ).view(rows.query.shape)
    except (AttributeError, TypeError, ValueError, NotImplementedError) as error:
        raise Skip(f"this xformers has another interface: {error}") from error
    error = relative_error(rows.attend(), other)
    expect(error <= 1e-2, f"relative L2 distance {error:.1e}")
    return f"{len(lens)} rows within {error:.1e}"


CHECKS = (
    *(
        Check(f"{name}/{what}", lambda machine, run=run, name=name: run(machine, name))
        for name in ("flash_attn_3", "flash_attn")
        for what, run in (("float64", flash_attention), ("generate", flash_generate))
    ),
    Check("xformers/decode", xformers_oracle, needs_cuda=True),
)
