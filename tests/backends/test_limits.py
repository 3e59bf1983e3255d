"""Each refusal of what a kernel would take for granted, with what it says."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from backends.paged_batch import PagedBatch, random_rows
from hf_paged.backends.base import LayerView
from hf_paged.backends.flash_attn import FlashAttnBackend
from hf_paged.backends.limits import KernelLimits, check_step
from hf_paged.errors import ConfigurationError, InputMismatchError

pytestmark = pytest.mark.core_suite

LIMITS = KernelLimits(
    backend="mine",
    dtypes=(torch.bfloat16, torch.float16),
    block_size_multiple=16,
    max_head_dim=64,
    head_dim_multiple=8,
    needs_equal_head_dims=True,
    min_capability=(8, 0),
    softcap=False,
    sinks=False,
    alibi=False,
)
GENEROUS = dataclasses.replace(
    LIMITS, needs_equal_head_dims=False, softcap=True, sinks=True, alibi=True
)


# -- devices -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "capability", "reason"),
    [
        (dict(), (7, 5), "the device is sm75, the kernels need sm80 or newer"),
        (dict(), (8, 0), None),
        (dict(), (12, 1), None),
        (dict(min_capability=(8, 6)), (8, 0), "the device is sm80, the kernels need sm86 or newer"),
        (dict(min_capability=None), (1, 0), None),
        (dict(capabilities=(9,)), (9, 0), None),
        (dict(capabilities=(9,)), (8, 9), "the device is sm89, the kernels are built for sm9x"),
        (
            dict(capabilities=(9, 10)),
            (12, 0),
            "the device is sm120, the kernels are built for sm9x or sm10x",
        ),
        (
            dict(capabilities=(8, 9), min_capability=(8, 6)),
            (8, 0),
            "the device is sm80, the kernels need sm86 or newer",
        ),
    ],
)
def test_refuse_capability(
    options: dict[str, Any], capability: tuple[int, int], reason: str | None
) -> None:
    assert dataclasses.replace(LIMITS, **options).refuse_capability(capability) == reason


# -- models --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            dict(dtype=torch.float32),
            "backend='mine' computes in torch.bfloat16 or torch.float16, the model's K and V are "
            "torch.float32: load it with dtype=torch.bfloat16, or pass backend='torch'.",
        ),
        (
            dict(block_size=24),
            "block_size=24 does not suit backend 'mine': expected a multiple of 16; pass "
            "block_size='auto' or 16.",
        ),
        (
            dict(head_dim=72),
            "backend='mine' cannot run this model on cpu: its head dim is 72, the kernels take at "
            "most 64; pass backend='auto' or 'torch'.",
        ),
        (
            dict(head_dim=12),
            "backend='mine' cannot run this model on cpu: its head dim is 12, the kernels take "
            "multiples of 8; pass backend='auto' or 'torch'.",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_check_model(change: dict[str, Any], message: str) -> None:
    fine = dict(device=torch.device("cpu"), dtype=torch.float16, head_dim=64, block_size=32)
    LIMITS.check_model(**fine)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError) as raised:
        LIMITS.check_model(**fine | change)  # type: ignore[arg-type]
    assert str(raised.value) == message


# -- layers --------------------------------------------------------------------------------------


def layer(**shape: Any) -> dict[str, Any]:
    """Arguments of check_layer that are fine: 2 key heads of 8, 4 query heads, 6 tokens."""
    rows = random_rows([(3, 5), (20, 1)], **{"dtype": torch.float16} | shape)
    batch = PagedBatch(rows, FlashAttnBackend(), 16)
    return dict(
        query=batch.query,
        key=batch.key,
        value=batch.value,
        key_cache=batch.view.key_cache,
        value_cache=batch.view.value_cache,
        metadata=batch.metadata,
    )


def check_layer(limits: KernelLimits, arguments: dict[str, Any]) -> None:
    rest = dict(arguments)
    view = LayerView(rest.pop("key_cache"), rest.pop("value_cache"))
    limits.check_layer(**rest, view=view)


def refusal(limits: KernelLimits, arguments: dict[str, Any]) -> str:
    with pytest.raises(InputMismatchError) as raised:
        check_layer(limits, arguments)
    return str(raised.value)


def test_a_layer_that_fits_is_taken() -> None:
    check_layer(LIMITS, layer())
    check_layer(LIMITS, layer(num_kv_heads=3, group_size=1, head_dim=64, dtype=torch.bfloat16))
    check_layer(
        GENEROUS,
        layer(value_dim=16)
        | dict(window=1, softcap=2.0, sinks=torch.ones(4), alibi_slopes=torch.ones(4)),
    )


@pytest.mark.parametrize("name", ["query", "key", "value", "key_cache", "value_cache"])
def test_dtypes_of_a_layer_differ(name: str) -> None:
    arguments = layer()
    arguments[name] = arguments[name].bfloat16()
    dtypes = {n: arguments[n].dtype for n in ("query", "key", "value", "key_cache", "value_cache")}
    assert refusal(LIMITS, arguments) == (
        f"query is {dtypes['query']}, key {dtypes['key']}, value {dtypes['value']}, their caches "
        f"{dtypes['key_cache']} and {dtypes['value_cache']}: backend 'mine' expected the same in "
        "all, of torch.bfloat16 or torch.float16; under autocast give the model one dtype."
    )


def test_dtype_of_a_layer_that_the_kernels_lack() -> None:
    message = refusal(LIMITS, layer(dtype=torch.float32))
    assert message.startswith("query is torch.float32, key torch.float32, ")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("query", lambda t: t[:-1], "query is (5, 4, 8) for keys (6, 2, 8): expected as many "),
        ("query", lambda t: t[..., :4], "query is (6, 4, 4) for keys (6, 2, 8): expected as many "),
        ("query", lambda t: t[:, :3], "query is (6, 3, 8) for keys (6, 2, 8): expected as many "),
        ("query", lambda t: t[:, :0], "query is (6, 0, 8) for keys (6, 2, 8): expected as many "),
        ("value", lambda t: t[:-1], "key is (6, 2, 8) and value (5, 2, 8): expected as many "),
        ("value", lambda t: t[:, :1], "key is (6, 2, 8) and value (6, 1, 8): expected as many "),
        ("key_cache", lambda t: t[:-1], "key_cache is (4, 16, 2, 8) with strides (256, 16, 8, 1)"),
        ("value_cache", lambda t: t[:, 1:], "value_cache is (5, 15, 2, 8) with strides (256, 16,"),
        ("value_cache", lambda t: t[:, :, 1:], "value_cache is (5, 16, 1, 8) with strides"),
        ("key_cache", lambda t: t.transpose(2, 3), "key_cache is (5, 16, 8, 2) with strides"),
        (
            "key_cache",
            lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
            "key_cache is (5, 16, 2, 8) with strides (256, 16, 1, 2): expected (5, 16, 2, 8), "
            "[num_blocks + 1, block_size, H_kv, D], the last stride 1.",
        ),
    ],
)
def test_shapes_of_a_layer(
    name: str, change: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    arguments = layer()
    assert arguments["metadata"].null_block == 6
    arguments["metadata"].null_block = 4
    for cache in ("key_cache", "value_cache"):
        arguments[cache] = arguments[cache][:5]
    check_layer(LIMITS, arguments)
    arguments[name] = change(arguments[name])
    assert refusal(LIMITS, arguments).startswith(message)


def test_a_layer_without_key_heads() -> None:
    arguments = layer()
    for name in ("key", "value"):
        arguments[name] = arguments[name][:, :0]
    assert refusal(LIMITS, arguments).startswith("query is (6, 4, 8) for keys (6, 0, 8): expected")


@pytest.mark.parametrize(
    ("limits", "shape", "message"),
    [
        (
            LIMITS,
            dict(value_dim=16),
            "values have a head dim of 16, keys one of 8: backend 'mine' needs equal ones; pass "
            "backend='triton' or 'torch'.",
        ),
        (
            GENEROUS,
            dict(value_dim=72),
            "backend 'mine': its head dim is 72, the kernels take at most 64.",
        ),
        (
            GENEROUS,
            dict(value_dim=12),
            "backend 'mine': its head dim is 12, the kernels take multiples of 8.",
        ),
        (
            LIMITS,
            dict(head_dim=72),
            "backend 'mine': its head dim is 72, the kernels take at most 64.",
        ),
        (
            LIMITS,
            dict(head_dim=12),
            "backend 'mine': its head dim is 12, the kernels take multiples of 8.",
        ),
    ],
)
def test_head_dims_of_a_layer(limits: KernelLimits, shape: dict[str, int], message: str) -> None:
    assert refusal(limits, layer(**shape)) == message


@pytest.mark.parametrize("name", ["block_tables", "seq_lens", "cu_seqlens_q"])
def test_dtype_and_device_of_the_metadata(name: str) -> None:
    arguments = layer()
    original = getattr(arguments["metadata"], name)
    for other in (original.long(), original.to("meta")):
        setattr(arguments["metadata"], name, other)
        assert refusal(LIMITS, arguments) == (
            f"{name} is {other.dtype} on {other.device}: expected int32 on cpu, where the query is."
        )


def test_strides_of_the_block_tables() -> None:
    arguments = layer()
    tables = arguments["metadata"].block_tables
    assert tables.shape == (2, 2)
    arguments["metadata"].block_tables = tables.T.contiguous().T
    assert refusal(LIMITS, arguments) == (
        "block_tables has strides (1, 2): expected the last one to be 1."
    )


@pytest.mark.parametrize("window", [0, -1])
def test_window_of_a_layer(window: int) -> None:
    message = f"window is {window}: expected at least 1, or None."
    assert refusal(LIMITS, layer() | dict(window=window)) == message


@pytest.mark.parametrize(
    ("name", "given"),
    [("softcap", 2.0), ("sinks", torch.ones(4)), ("alibi_slopes", torch.ones(4))],
)
def test_what_the_kernels_of_a_layer_lack(name: str, given: Any) -> None:
    assert refusal(LIMITS, layer() | {name: given}) == (
        f"the model uses {name}, which backend 'mine' lacks; pass backend='triton' or 'torch'."
    )


@pytest.mark.parametrize("name", ["sinks", "alibi_slopes"])
@pytest.mark.parametrize("shape", [(2,), (4, 1), ()])
def test_numbers_of_a_layer_that_are_not_one_a_head(name: str, shape: tuple[int, ...]) -> None:
    assert refusal(GENEROUS, layer() | {name: torch.ones(shape)}) == (
        f"{name} is {shape}: expected one number for each of 4 heads."
    )


# -- steps ---------------------------------------------------------------------------------------


def step(**change: Any) -> dict[str, Any]:
    """Two rows in 10 blocks of 4: 5 tokens, 2 of them new, and 8, 1 of them new."""
    return (
        dict(
            block_tables=np.array([[7, 2, 10], [0, 9, 10]], np.int32),
            seq_lens=np.array([5, 8], np.int32),
            query_lens=np.array([2, 1], np.int32),
            slots=np.array([31, 8, 39], np.int64),
            block_size=4,
            null_block=10,
        )
        | change
    )


@pytest.mark.parametrize(
    "change",
    [
        dict(),
        dict(seq_lens=np.array([12, 12])),
        dict(query_lens=np.array([5, 0])),
        dict(slots=np.array([-1, -1, 0])),
        dict(slots=np.zeros(0, np.int64)),
        dict(
            block_tables=np.zeros((0, 0), np.int32),
            seq_lens=np.zeros(0, np.int32),
            query_lens=np.zeros(0, np.int32),
        ),
        dict(
            block_tables=np.zeros((1, 0), np.int32),
            seq_lens=np.zeros(1, np.int32),
            query_lens=np.zeros(1, np.int32),
        ),
    ],
)
def test_a_step_inside_the_pool_is_taken(change: dict[str, Any]) -> None:
    check_step(**step(**change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            dict(seq_lens=np.array([5, 13])),
            "seq_lens[1] is 13: expected at most the 12 slots of its block table (3 blocks of 4).",
        ),
        (
            dict(query_lens=np.array([6, 1])),
            "row 0 has 6 new tokens and 5 in all: expected the new ones to be among them.",
        ),
        (
            dict(query_lens=np.array([2, -1])),
            "row 1 has -1 new tokens and 8 in all: expected the new ones to be among them.",
        ),
        (
            dict(block_tables=np.array([[7, 2, 10], [0, 11, 10]])),
            "block_tables[1] holds 0 to 11: expected 0 to 10, the blocks of the pool.",
        ),
        (
            dict(block_tables=np.array([[7, -1, 10], [0, 9, 10]])),
            "block_tables[0] holds -1 to 10: expected 0 to 10, the blocks of the pool.",
        ),
        (
            dict(slots=np.array([31, 40, 39])),
            "slot_mapping[1] is 40: expected less than 40, the first slot of the null block, or a "
            "negative number for a token that is not stored.",
        ),
        (
            dict(slots=np.array([31, 8, 31])),
            "slot_mapping holds slot 31 twice: expected a slot of its own for each new token.",
        ),
    ],
)
def test_a_step_that_would_leave_the_pool_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputMismatchError, match=f"^{re.escape(message)}$"):
        check_step(**step(**change))
