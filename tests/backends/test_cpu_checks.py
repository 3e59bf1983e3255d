"""What does not fit together is refused before native code touches memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from backends.paged_batch import PagedBatch, random_rows
from hf_paged.backends import cpu_ops
from hf_paged.backends.base import LayerView
from hf_paged.backends.cpu import CpuBackend
from hf_paged.errors import InputMismatchError

pytestmark = pytest.mark.core_suite

LENS = [(9, 1), (5, 3), (0, 2)]
"""Three rows, 6 new tokens; blocks of 4, tables of 3 entries; 9 blocks and the null block."""

Mistake = Callable[[PagedBatch], Any]


def batch_of(lens: list[tuple[int, int]] = LENS, backend: Any = None) -> PagedBatch:
    return PagedBatch(random_rows(lens), backend or CpuBackend(), 4, poison=7.0)


Changes = Callable[[torch.Tensor], torch.Tensor]


def in_metadata(**fields: Changes) -> Mistake:
    return lambda batch: change(batch.metadata, fields)


def in_tokens(**fields: Changes) -> Mistake:
    return lambda batch: change(batch, fields)


def change(owner: Any, fields: dict[str, Changes]) -> None:
    for name, of in fields.items():
        setattr(owner, name, of(getattr(owner, name)))


def in_view(**fields: Changes) -> Mistake:
    def mistake(batch: PagedBatch) -> None:
        caches = {name: of(getattr(batch.view, name)) for name, of in fields.items()}
        batch.view = dataclasses.replace(batch.view, **caches)

    return mistake


def put(*index: int, value: int) -> Changes:
    return lambda tensor: tensor.index_put(
        tuple(map(torch.tensor, index)), torch.tensor(value, dtype=tensor.dtype)
    )


def last_dim_strided(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


TABLES, LENGTHS, BEGINS = "block_tables", "seq_lens", "cu_seqlens_q"
WRONG_INT = {
    f"{name} of int64": (
        in_metadata(**{name: torch.Tensor.long}),
        [f"{name} is torch.int64 on cpu", "expected int32 on cpu"],
    )
    for name in (TABLES, LENGTHS, BEGINS)
}
IN_ROWS: dict[str, tuple[Mistake, list[str]]] = WRONG_INT | {
    "a block beyond the cache": (
        in_metadata(block_tables=put(1, 0, value=99)),
        ["block_tables[1, 0] is 99", "expected 0 to 9"],
    ),
    "the first block beyond the cache": (
        in_metadata(block_tables=put(0, 2, value=10)),
        ["block_tables[0, 2] is 10", "expected 0 to 9"],
    ),
    "a negative block": (
        in_metadata(block_tables=put(1, 1, value=-1)),
        ["block_tables[1, 1] is -1", "expected 0 to 9"],
    ),
    "more tokens than the table holds": (
        in_metadata(seq_lens=put(0, value=13)),
        ["seq_lens[0] is 13", "the 12 slots of its block table"],
    ),
    "fewer tokens than new ones": (
        in_metadata(seq_lens=put(1, value=2)),
        ["seq_lens[1] is 2", "at least the row's new tokens"],
    ),
    "new tokens that fall": (
        in_metadata(cu_seqlens_q=put(1, value=5)),
        ["cu_seqlens_q[2] is 4", "numbers that do not fall"],
    ),
    "new tokens beyond the query": (
        in_metadata(cu_seqlens_q=put(3, value=7)),
        ["cu_seqlens_q[3] is 7", "6 last"],
    ),
    "new tokens that do not begin at 0": (
        in_metadata(cu_seqlens_q=put(0, value=1)),
        ["cu_seqlens_q[0] is 1", "expected 0 first"],
    ),
    "new tokens that no row has": (
        in_metadata(cu_seqlens_q=put(3, value=5)),
        ["cu_seqlens_q[3] is 5", "6"],
    ),
    "a table too few": (
        in_metadata(block_tables=lambda t: t[:2]),
        ["block_tables is (2, 3)", "seq_lens (3,)", "cu_seqlens_q (4,)", "[B, W], [B] and [B + 1]"],
    ),
    "a length too many": (
        in_metadata(seq_lens=lambda t: torch.cat([t, t[:1]])),
        ["block_tables is (3, 3)", "seq_lens (4,)", "cu_seqlens_q (4,)"],
    ),
    "a beginning too few": (
        in_metadata(cu_seqlens_q=lambda t: t[:-1]),
        ["cu_seqlens_q (3,)", "[B + 1]"],
    ),
}
IN_SHAPES: dict[str, tuple[Mistake, list[str]]] = {
    "queries of another number of tokens": (
        in_tokens(query=lambda t: t[:-1]),
        ["query is (5, 4, 8)", "keys (6, 2, 8)", "as many tokens"],
    ),
    "queries of another head dim": (
        in_tokens(query=lambda t: t[..., :7]),
        ["query is (6, 4, 7)", "keys (6, 2, 8)", "the same head dim"],
    ),
    "query heads that no key heads divide": (
        in_tokens(query=lambda t: t[:, :3]),
        ["query is (6, 3, 8)", "keys (6, 2, 8)", "a multiple of the key heads"],
    ),
}
IN_STATES: dict[str, tuple[Mistake, list[str]]] = {
    "values of fewer tokens": (
        in_tokens(value=lambda t: t[:-1]),
        ["key is (6, 2, 8)", "value (5, 2, 8)", "as many tokens and heads"],
    ),
    "values of fewer heads": (
        in_tokens(value=lambda t: t[:, :1]),
        ["key is (6, 2, 8)", "value (6, 1, 8)", "as many tokens and heads"],
    ),
    "a key cache of fewer blocks": (
        in_view(key_cache=lambda t: t[:-1]),
        ["key_cache is (9, 2, 4, 8)", "expected (10, 2, 4, 8)"],
    ),
    "a value cache of fewer blocks": (
        in_view(value_cache=lambda t: t[:1]),
        ["value_cache is (1, 2, 4, 8)", "expected (10, 2, 4, 8)"],
    ),
    "a key cache of another head dim": (
        in_view(key_cache=lambda t: t[..., :7]),
        ["key_cache is (10, 2, 4, 7)", "expected (10, 2, 4, 8)"],
    ),
    "a value cache of another head dim": (
        in_view(value_cache=lambda t: t[..., :7]),
        ["value_cache is (10, 2, 4, 7)", "expected (10, 2, 4, 8)"],
    ),
    "a cache of more heads": (
        in_view(key_cache=lambda t: t.repeat(1, 2, 1, 1)),
        ["key_cache is (10, 4, 4, 8)", "expected (10, 2, 4, 8)"],
    ),
    "a cache of another block size": (
        in_view(value_cache=lambda t: t[:, :, :3]),
        ["value_cache is (10, 2, 3, 8)", "expected (10, 2, 4, 8)"],
    ),
    "a key cache with gaps between elements": (
        in_view(key_cache=last_dim_strided),
        ["key_cache has strides (128, 64, 16, 2)", "the last one to be 1"],
    ),
    "a value cache with gaps between elements": (
        in_view(value_cache=last_dim_strided),
        ["value_cache has strides (128, 64, 16, 2)", "the last one to be 1"],
    ),
}
IN_SLOTS: dict[str, tuple[Mistake, list[str]]] = {
    "a slot of the null block": (
        in_metadata(slot_mapping=put(2, value=36)),
        ["slot_mapping[2] is 36", "less than 36", "null block"],
    ),
    "a slot beyond the cache": (
        in_metadata(slot_mapping=put(5, value=2**40)),
        [f"slot_mapping[5] is {2**40}", "less than 36"],
    ),
    "slots of int32": (
        in_metadata(slot_mapping=torch.Tensor.int),
        ["slot_mapping is torch.int32 (6,)", "6 tokens", "one int64 a token"],
    ),
    "a slot too few": (
        in_metadata(slot_mapping=lambda t: t[:-1]),
        ["slot_mapping is torch.int64 (5,)", "6 tokens", "one int64 a token"],
    ),
}


def named(mistakes: dict[str, tuple[Mistake, list[str]]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("mistake", "facts"), mistakes.values(), ids=[name.replace(" ", "-") for name in mistakes]
    )


def check_refusal(facts: list[str], call: Callable[[], Any]) -> None:
    with pytest.raises(InputMismatchError) as raised:
        call()
    for fact in facts:
        assert fact in str(raised.value)


def attend(batch: PagedBatch, **arguments: Any) -> torch.Tensor:
    tokens = (batch.query, batch.key, batch.value)
    return batch.backend.forward(*tokens, batch.view, batch.metadata, scale=0.3, **arguments)


def caches_of(view: LayerView) -> list[torch.Tensor]:
    return [view.key_cache.clone(), view.value_cache.clone()]


@named(IN_ROWS | IN_SHAPES | IN_STATES)
def test_forward_refuses(mistake: Mistake, facts: list[str]) -> None:
    batch, fresh = batch_of(), batch_of()
    expected = fresh.forward()
    batch.backend.write(batch.key, batch.value, batch.view, batch.metadata)
    right = dataclasses.replace(batch.metadata), batch.query, batch.key, batch.value, batch.view
    mistake(batch)
    check_refusal(facts, lambda: attend(batch))
    batch.metadata, batch.query, batch.key, batch.value, batch.view = right
    assert torch.equal(attend(batch), expected), "nothing of the refused call is left"


@named(IN_STATES | IN_SLOTS)
def test_write_refuses_and_writes_nothing(mistake: Mistake, facts: list[str]) -> None:
    batch = batch_of()
    mistake(batch)
    before = caches_of(batch.view)
    check_refusal(
        facts, lambda: batch.backend.write(batch.key, batch.value, batch.view, batch.metadata)
    )
    assert all(map(torch.equal, caches_of(batch.view), before))


@pytest.mark.parametrize("window", [0, -3])
def test_a_window_of_nothing_is_refused(window: int) -> None:
    check_refusal(
        [f"window is {window}", "at least 1, or None"], lambda: attend(batch_of(), window=window)
    )


@pytest.mark.parametrize("name", ["sinks", "alibi_slopes"])
@pytest.mark.parametrize("shape", [(3,), (5,), (), (4, 1), (1, 4)])
def test_not_one_number_a_head_is_refused(name: str, shape: tuple[int, ...]) -> None:
    facts = [f"{name} is {shape}", "one number for each of 4 heads"]
    check_refusal(facts, lambda: attend(batch_of(), **{name: torch.zeros(shape)}))


@named(IN_STATES)
def test_what_a_step_checked_for_one_layer_holds_for_no_other(
    mistake: Mistake, facts: list[str]
) -> None:
    """The plan of a step was found again for a value cache of one block, and read beyond it."""
    batch = batch_of()
    batch.forward()
    mistake(batch)
    check_refusal(facts, lambda: attend(batch))
    check_refusal(
        facts, lambda: batch.backend.write(batch.key, batch.value, batch.view, batch.metadata)
    )


def test_layers_of_one_step_may_have_caches_of_other_strides() -> None:
    """The plan of a step was found again for a cache of other strides, and gave garbage."""
    first, second = batch_of(), batch_of()
    expected = first.forward()
    second.metadata = first.metadata
    in_view(
        key_cache=lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        value_cache=lambda t: torch.stack([t, t], dim=1)[:, 1],
    )(second)
    assert torch.equal(second.forward(), expected)


@pytest.mark.parametrize("spoiled", range(5), ids=["query", "key", "value", "keys", "values"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_the_operators_refuse_more_than_one_dtype(spoiled: int, dtype: torch.dtype) -> None:
    """A cache of another dtype was read beyond its end."""
    batch = batch_of()
    tensors = [batch.query, batch.key, batch.value, batch.view.key_cache, batch.view.value_cache]
    tensors[spoiled] = tensors[spoiled].to(dtype)
    metadata = batch.metadata
    rows = (metadata.block_tables, metadata.seq_lens, metadata.cu_seqlens_q)
    check_refusal([str(dtype), "torch.float32"], lambda: cpu_ops.attention(*tensors, *rows, 0.3))
    if spoiled > 0:
        before = caches_of(LayerView(*tensors[3:]))
        check_refusal(
            [str(dtype), "torch.float32"],
            lambda: cpu_ops.write(*tensors[1:], metadata.slot_mapping),
        )
        assert all(map(torch.equal, tensors[3:], before))
