"""The Triton kernels' attention against float64, the same bits again, the same bits alone.

Kernels are compiled anew for each dtype, block size, group, head dim and kind of attention, for one
to two seconds each: an axis is varied while the others stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from paged_rows import TOLERANCE, PagedRows, relative_error
from runner import Check, Machine, expect

from hf_paged.backends import triton_ops
from hf_paged.backends.base import AttentionBackend
from hf_paged.backends.metadata import AttentionMetadata
from hf_paged.backends.triton import TritonBackend

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
PADDING = (-1, 1)


def around(block_size: int) -> list[tuple[int, int]]:
    """Return rows of 0, 1 and about a block of tokens, decoding and prompts."""
    past = (block_size - 2, block_size - 1, block_size)
    return [PADDING, (0, 1), *((n, 1) for n in past), (0, 5), *((n, 3) for n in past[:2])]


def ragged(machine: Machine) -> list[tuple[int, int]]:
    """Return rows of several tiles of keys, decoding and prompts."""
    if machine.is_cuda:
        return [(700, 1), (0, 300), PADDING, (513, 40), (17, 1), (0, 1), (130, 129), (2047, 1)]
    return [(70, 1), (0, 20), PADDING, (33, 10), (17, 1), (0, 1)]


def compare(
    machine: Machine,
    lens: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    *,
    backend: AttentionBackend | None = None,
    attention: dict[str, Any] | None = None,
    **shape: Any,
) -> float:
    """Write, attend, return the error as a part of what is tolerated; raise if it is more."""
    attention = attention or {}
    if not machine.is_cuda:
        shape = {"num_kv_heads": 1} | shape
    rows = PagedRows(
        lens,
        backend or TritonBackend(),
        machine.device,
        dtype,
        window=attention.get("window"),
        **shape,
    )
    rows.write()
    out = rows.attend(**attention)
    expected = rows.expected(**attention)
    expect(out.dtype == dtype and out.shape == expected.shape, f"{out.dtype} {tuple(out.shape)}")
    part = relative_error(out, expected) / TOLERANCE[dtype]
    what = ", ".join(f"{name} {value}" for name, value in shape.items())
    if attention:
        what += ", with " + ", ".join(attention)
    expect(part <= 1, f"{dtype} {what}: relative L2 error {part * TOLERANCE[dtype]:.1e}")
    for row, query in enumerate(rows.metadata.cu_seqlens_q[:-1].tolist()):
        is_padding = rows.lens[row][1] == 0
        expect(not is_padding or not out[query].any(), "a row of length 0 does not give 0")
    return part


def figure(parts: Iterable[float]) -> str:
    parts = list(parts)
    return f"{len(parts)} cases, the worst at {max(parts):.0%} of the tolerance"


def dtypes_and_block_sizes(machine: Machine) -> str:
    cases = [(BF16, 16), (BF16, 64), (BF16, 256), (FP16, 16), (FP16, 256), (FP32, 16), (FP32, 64)]
    return figure(
        compare(machine, around(block_size), dtype, block_size=block_size)
        for dtype, block_size in cases
    )


def groups(machine: Machine) -> str:
    num_kv_heads = 4 if machine.is_cuda else 2
    return figure(
        compare(machine, ragged(machine), BF16, num_kv_heads=num_kv_heads, group=group)
        for group in (1, 4, 7, 8)
    )


def head_dims(machine: Machine) -> str:
    cases = [(BF16, 64), (BF16, 80), (BF16, 128), (BF16, 256), (FP32, 80), (FP32, 256)]
    return figure(
        compare(machine, ragged(machine), dtype, head_dim=head_dim) for dtype, head_dim in cases
    )


def sinks_and_slopes(machine: Machine, num_heads: int) -> dict[str, torch.Tensor]:
    return {
        "sinks": torch.linspace(-4, 4, num_heads).to(machine.device),
        "alibi_slopes": torch.linspace(0, 0.5, num_heads).to(machine.device),
    }


def window(machine: Machine) -> str:
    windows = (1, 7, 40, 100, 100_000)
    return figure(
        compare(machine, ragged(machine), BF16, attention={"window": each}) for each in windows
    )


def softcap(machine: Machine) -> str:
    return figure(
        compare(machine, ragged(machine), dtype, attention={"softcap": each})
        for dtype, each in ((BF16, 0.5), (BF16, 50.0), (FP32, 3.0))
    )


def sinks_alibi_and_all(machine: Machine) -> str:
    more = sinks_and_slopes(machine, 16 if machine.is_cuda else 4)
    cases = [{name: tensor} for name, tensor in more.items()]
    cases += [more | {"window": 40, "softcap": 3.0}]
    return figure(compare(machine, ragged(machine), BF16, attention=each) for each in cases)


def splits(machine: Machine) -> str:
    """Any number of parts, more than there are tiles as well; a window and sinks over them."""
    lens = [(1500 if machine.is_cuda else 300, 1), (255, 1), (256, 1), (3, 1), (0, 1), PADDING]
    rows = PagedRows(lens, TritonBackend(), machine.device, BF16, **small(machine))
    rows.write()
    sinks = sinks_and_slopes(machine, rows.query.shape[1])["sinks"]
    parts = []
    for num_splits in (1, 2, 8, 32) if machine.is_cuda else (1, 4):
        for attention in ({}, {"window": 200, "sinks": sinks}):
            out = with_splits(rows, num_splits, **attention)
            error = relative_error(out, rows.expected(**attention))
            expect(error <= TOLERANCE[BF16], f"{num_splits} splits: relative L2 error {error:.1e}")
            parts.append(error / TOLERANCE[BF16])
    return figure(parts)


def strides(machine: Machine) -> str:
    """Query, K and V as slices of one fused projection, and as models transpose them."""
    parts = []
    for is_fused in (True, False):
        rows = PagedRows(
            [(40, 1), (17, 3)], TritonBackend(), machine.device, FP32, **small(machine)
        )
        if is_fused:
            fused = torch.cat([rows.query, rows.key, rows.value], dim=1)
            fused = torch.stack([fused, torch.full_like(fused, torch.nan)], dim=1)
            sizes = [rows.query.shape[1], rows.key.shape[1], rows.key.shape[1]]
            rows.query, rows.key, rows.value = fused[:, 0].split(sizes, dim=1)
        else:
            rows.query, rows.key, rows.value = (
                each.transpose(0, 1).contiguous().transpose(0, 1)
                for each in (rows.query, rows.key, rows.value)
            )
        rows.write()
        error = relative_error(rows.attend(), rows.expected())
        expect(error <= TOLERANCE[FP32], f"relative L2 error {error:.1e}")
        parts.append(error / TOLERANCE[FP32])
    return figure(parts)


def repeatability(machine: Machine) -> str:
    """Equal calls give equal bits."""
    times = 20 if machine.is_cuda else 2
    for dtype in (BF16, FP32):
        rows = PagedRows(ragged(machine), TritonBackend(), machine.device, dtype, **small(machine))
        rows.write()
        first = rows.attend()
        for _ in range(times):
            expect(torch.equal(rows.attend(), first), f"{dtype}: other bits at another call")
    return f"{times} calls, equal bits in bf16 and fp32"


def batch_invariance(machine: Machine) -> str:
    """A row alone gives the bits that it gives among others."""
    lens = [length for length in ragged(machine) if length != PADDING]
    lens.append((600, 1))  # would be split, if it were not for the others
    backend = TritonBackend(batch_invariant=True)
    for dtype in (BF16, FP32):
        rows = PagedRows(lens, backend, machine.device, dtype, **small(machine))
        rows.write()
        together = rows.attend()
        starts = rows.metadata.cu_seqlens_q.tolist()
        for row in range(len(lens)):
            expect(
                torch.equal(attend_alone(rows, row), together[starts[row] : starts[row + 1]]),
                f"{dtype}: row {row} of {lens[row]} tokens has other bits alone",
            )
    return f"{len(lens)} rows, equal bits alone and together, in bf16 and fp32"


def controls(machine: Machine) -> str:
    """What is wrong is noticed: a wrong block, a length off by one, a NaN that is read."""
    found = []
    for fault in ("block", "length", "poison"):
        rows = PagedRows(
            [(40, 1), (35, 1)], TritonBackend(), machine.device, FP32, **small(machine)
        )
        rows.write()
        metadata = rows.metadata
        if fault == "block":
            metadata.block_tables[0, 0] = metadata.block_tables[1, 0]
        elif fault == "length":
            metadata.seq_lens[0] -= 1
        else:
            slot = int(metadata.slot_mapping[0])
            rows.view.value_cache[slot // 16, slot % 16] = torch.nan
        error = relative_error(rows.attend(), rows.expected())
        expect(error > 10 * TOLERANCE[FP32], f"a wrong {fault} goes unnoticed ({error:.1e})")
        found.append(f"{fault} {error:.1e}")
    return "errors of planted faults: " + ", ".join(found)


def small(machine: Machine) -> dict[str, Any]:
    """Fewer heads, where an interpreter runs the programs one by one."""
    return {} if machine.is_cuda else {"num_kv_heads": 2, "group": 2}


def with_splits(rows: PagedRows, num_splits: int, **attention: Any) -> torch.Tensor:
    """Attend through the operator, with a number of splits of the caller's."""
    metadata, view = rows.metadata, rows.view
    return triton_ops.attention(
        rows.query,
        rows.key,
        rows.value,
        view.key_cache,
        view.value_cache,
        metadata.block_tables,
        metadata.seq_lens,
        metadata.cu_seqlens_q,
        max(metadata.query_lens_list),
        1 in metadata.query_lens_list,
        num_splits,
        rows.scale,
        **attention,
    )


def attend_alone(rows: PagedRows, row: int) -> torch.Tensor:
    """Attend one row of a batch over the same pool, with a table of its own length."""
    metadata = rows.metadata
    begin, end = metadata.cu_seqlens_q[row : row + 2].tolist()
    num_entries = -(-metadata.seq_lens_list[row] // metadata.block_size)
    lone = AttentionMetadata(
        metadata.block_size,
        metadata.null_block,
        metadata.block_tables[row : row + 1, :num_entries].contiguous(),
        metadata.seq_lens[row : row + 1],
        metadata.cu_seqlens_q[row : row + 2] - begin,
        metadata.slot_mapping[begin:end],
        metadata.seq_lens_list[row : row + 1],
        metadata.query_lens_list[row : row + 1],
    )
    new = (each[begin:end] for each in (rows.query, rows.key, rows.value))
    return rows.backend.forward(*new, rows.view, lone, scale=rows.scale)


CHECKS = (
    Check("attention/dtypes-block-sizes", dtypes_and_block_sizes),
    Check("attention/groups", groups),
    Check("attention/head-dims", head_dims),
    Check("attention/window", window),
    Check("attention/softcap", softcap),
    Check("attention/sinks-alibi-all", sinks_alibi_and_all),
    Check("attention/splits", splits),
    Check("attention/strides", strides),
    Check("attention/repeatability", repeatability),
    Check("attention/batch-invariance", batch_invariance),
    Check("attention/controls", controls),
)
