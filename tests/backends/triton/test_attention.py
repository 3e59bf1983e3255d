"""The Triton kernels, interpreted, against attention over plain tensors in float64.

pytorch#160861 (lengths around a block), flash-attention#772, vllm#15113 (32-bit offsets).
"""

from __future__ import annotations

import dataclasses
import mmap
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import interpreter_builder

from backends.dense_oracle import dense_attention, relative_error
from backends.paged_batch import PagedBatch, random_rows
from backends.triton.pools import GARBAGE, attend, check, make_batch
from hf_paged.backends.base import LayerView
from hf_paged.backends.metadata import AttentionMetadata
from hf_paged.backends.triton import TritonBackend

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
MIXED = [(0, 5), (40, 1), (0, 1), (17, 3), (15, 1), (70, 2), (31, 1)]
SINKS = torch.tensor([0.0, 4.0, -4.0, 1.0])
SLOPES = torch.tensor([0.0, 0.5, -0.1, 1.0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [16, 64, 256])
def test_lengths_around_a_block(block_size: int, dtype: torch.dtype) -> None:
    past = [block_size - 2, block_size - 1, block_size, block_size + 1]
    lens = [(0, 1), *((n, 1) for n in past), *((n, 2) for n in past), (0, 3)]
    check(lens, block_size=block_size, dtype=dtype, head_dim=64)


@pytest.mark.parametrize("block_size", [1, 48])
def test_blocks_of_any_other_size(block_size: int) -> None:
    check(MIXED, block_size=block_size, num_kv_heads=2)


@pytest.mark.parametrize("group_size", [1, 4, 6, 7, 8, 40])
def test_query_heads_of_one_key_head(group_size: int) -> None:
    check(MIXED[1:4], group_size=group_size, head_dim=32, num_kv_heads=2)


@pytest.mark.parametrize(
    ("head_dim", "value_dim"), [(32, 32), (80, 80), (128, 128), (256, 256), (64, 128), (24, 8)]
)
@pytest.mark.parametrize("dtype", DTYPES[::2], ids=str)
def test_head_dims_of_keys_and_values(head_dim: int, value_dim: int, dtype: torch.dtype) -> None:
    check(
        [(17, 3), (40, 1)],
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=dtype,
        num_splits=2,
        attention=dict(scale=head_dim**-0.5),
    )


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize(
    "attention",
    [
        dict(window=1),
        dict(window=7),
        dict(window=40),
        dict(window=1000),
        dict(softcap=0.5),
        dict(softcap=1000.0),
        dict(sinks=SINKS),
        dict(sinks=torch.full((4,), -torch.inf)),
        dict(alibi_slopes=SLOPES),
        dict(window=20, softcap=3.0, sinks=SINKS, alibi_slopes=SLOPES),
    ],
    ids=lambda attention: "-".join(attention),
)
def test_window_softcap_sinks_and_alibi(attention: dict[str, Any], num_splits: int) -> None:
    check(MIXED, group_size=4, attention=attention, num_splits=num_splits)


def test_sinks_and_slopes_in_the_dtype_of_the_model() -> None:
    attention = dict(sinks=SINKS.bfloat16(), alibi_slopes=SLOPES.bfloat16())
    check(MIXED[:3], group_size=4, dtype=torch.bfloat16, attention=attention)


@pytest.mark.parametrize("window", [None, 33, 2**40])
@pytest.mark.parametrize(("num_past", "group_size"), [(0, 3), (70, 1)])
def test_prompt_of_many_tiles(num_past: int, group_size: int, window: int | None) -> None:
    check([(num_past, 100)], group_size=group_size, attention=dict(window=window))


@pytest.mark.parametrize(
    ("dtype", "attention"),
    [
        (torch.float32, {}),
        (torch.float16, dict(window=300)),
        (torch.bfloat16, dict(sinks=SINKS[:2])),
    ],
    ids=str,
)
def test_any_number_of_splits_gives_the_same(dtype: torch.dtype, attention: dict[str, Any]) -> None:
    lens = [(500, 1), (255, 1), (3, 1)]
    for num_splits in (1, 2, 8):
        check(lens, num_splits=num_splits, dtype=dtype, attention=attention)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("block_size", [16, 64])
def test_no_entry_is_read_of_which_no_token_is_visible(
    block_size: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch(random_rows(MIXED, num_kv_heads=1), block_size, window=window)
    tables = batch.metadata.block_tables
    memory = torch.full((tables.shape[0] + 2, tables.shape[1] + 20), GARBAGE, dtype=torch.int32)
    batch.metadata.block_tables = memory[1:-1, 10:-10].copy_(tables)
    read: set[int] = set()
    load = interpreter_builder.create_masked_load

    def record(pointers: Any, mask: Any, *others: Any) -> Any:
        entries = (pointers.data[mask.data].astype("int64") - memory.data_ptr()) // 4
        read.update(entries[(entries >= 0) & (entries < memory.numel())].tolist())
        return load(pointers, mask, *others)

    monkeypatch.setattr(interpreter_builder, "create_masked_load", record)
    attend(batch, num_splits=2, window=window)
    assert read
    assert not (memory.flatten()[sorted(read)] == GARBAGE).any()


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["no sinks", "sinks"])
def test_rows_that_pad_a_captured_batch_give_zeros(
    sinks: torch.Tensor | None, num_splits: int
) -> None:
    rows = random_rows([(20, 1), (9, 1), (5, 1)], num_kv_heads=2)
    batch = make_batch(rows, 16)
    batch.metadata.seq_lens[1] = 0
    batch.metadata.block_tables[1] = GARBAGE
    batch.metadata.slot_mapping[1] = -1
    out = attend(batch, num_splits, sinks=sinks)
    assert not out[1].any()
    expected = dense_attention(rows[::2], scale=0.3, sinks=sinks)
    assert relative_error(out[::2], expected) < 3e-6


def test_a_prompt_of_length_zero_gives_zeros() -> None:
    batch = make_batch(random_rows([(0, 3)]), 16)
    batch.metadata.seq_lens[0] = 0
    assert not attend(batch).any()


@pytest.mark.parametrize(
    ("dtype", "num_splits", "window"),
    [(torch.float32, 1, None), (torch.float16, 4, 20), (torch.bfloat16, 1, 20)],
    ids=str,
)
def test_a_row_has_the_same_bits_alone_and_among_others(
    dtype: torch.dtype, num_splits: int, window: int | None
) -> None:
    rows = random_rows(MIXED, dtype=dtype)
    together, *alone = (
        attend(make_batch(some, 16, window=window), num_splits, window=window)
        for some in (rows, *([row] for row in rows))
    )
    assert torch.equal(together, torch.cat(alone))


def test_batch_invariance_fixes_the_number_of_splits() -> None:
    (row,) = random_rows([(1100, 1)], num_kv_heads=1)
    outs = {}
    for batch_invariant in (False, True):
        batch = PagedBatch([row], TritonBackend(batch_invariant=batch_invariant), 16)
        outs[batch_invariant] = batch.forward()
    assert torch.equal(outs[True], attend(make_batch([row], 16), num_splits=1))
    assert torch.equal(outs[False], attend(make_batch([row], 16), num_splits=4))
    assert not torch.equal(outs[True], outs[False])


@pytest.mark.parametrize("poison", [torch.nan, 1e30])
def test_contiguous_caches(poison: float) -> None:
    rows = random_rows(MIXED)
    batch = PagedBatch(rows, TritonBackend(), 16, poison=poison)
    assert relative_error(batch.forward(), dense_attention(rows, scale=0.3)) < 3e-6


@pytest.mark.parametrize("layout", ["heads first", "fused", "last stride 2"])
def test_strides_of_new_tokens(layout: str) -> None:
    def lay_out(states: torch.Tensor) -> torch.Tensor:
        if layout == "heads first":
            return states.transpose(0, 1).contiguous().transpose(0, 1)
        if layout == "fused":
            return torch.cat([torch.full_like(states, torch.nan), states], dim=2)[
                ..., states.shape[2] :
            ]
        return torch.stack([states, torch.full_like(states, torch.nan)], dim=3)[..., 0]

    rows = random_rows(MIXED, value_dim=16)
    batch = make_batch(rows, 16)
    batch.query, batch.key, batch.value = map(lay_out, (batch.query, batch.key, batch.value))
    assert relative_error(attend(batch), dense_attention(rows, scale=0.3)) < 3e-6


@pytest.mark.parametrize("head_dim", [64, 16], ids=["elements", "fewer"])
def test_offsets_beyond_2_to_the_31(head_dim: int) -> None:
    """8 GiB of address space, of which a few pages are used."""
    block_size, num_blocks = 16, 2**31 // (16 * head_dim) + 64
    num_bytes = (num_blocks + 1) * block_size * head_dim * 2 * 2
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    blocks = torch.frombuffer(mapping, dtype=torch.float16).view(num_blocks + 1, -1)
    key, value = (part.unflatten(1, (block_size, 1, head_dim)) for part in blocks.chunk(2, dim=1))
    view = LayerView(key, value)
    (row,) = random_rows([(0, 21)], num_kv_heads=1, head_dim=head_dim, dtype=torch.float16)
    ids = torch.tensor([num_blocks - 1, num_blocks - 5])
    slots = ((ids * block_size)[:, None] + torch.arange(block_size)).flatten()[:21]
    prompt = AttentionMetadata(
        block_size=block_size,
        null_block=num_blocks,
        block_tables=ids[None].int(),
        seq_lens=torch.tensor([21], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, 21], dtype=torch.int32),
        slot_mapping=slots,
        seq_lens_list=[21],
        query_lens_list=[21],
    )
    backend = TritonBackend()
    backend.write(row.key, row.value, view, prompt)
    stored_key, stored_value = backend.gather(view, slots)
    assert torch.equal(stored_key, row.key)
    assert torch.equal(stored_value, row.value)

    backend.copy_blocks(blocks, ids[:1], torch.tensor([num_blocks - 9]))
    assert torch.equal(blocks[num_blocks - 9], blocks[num_blocks - 1])
    assert blocks[num_blocks - 9].any()

    expected = dense_attention([row], scale=0.1)[-2:]
    for num_new in (1, 2):  # as a step of decoding, and over a past
        step = dataclasses.replace(
            prompt,
            cu_seqlens_q=torch.tensor([0, num_new], dtype=torch.int32),
            query_lens_list=[num_new],
            derived={},
        )
        new = slice(21 - num_new, 21)
        out = backend.forward(row.query[new], row.key[new], row.value[new], view, step, scale=0.1)
        assert relative_error(out, expected[-num_new:]) < 1e-3
