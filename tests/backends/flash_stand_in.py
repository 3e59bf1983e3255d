"""Stand-ins for flash-attn 2 and 3 on a CPU: their signatures, their checks, their results.

What the libraries check is checked with a citation; what they take on trust and would read out of
bounds is checked too. Only entries of a block table that hold a visible token are looked at.

    FA2  csrc/flash_attn/flash_api.cpp and flash_attn/flash_attn_interface.py of tag v2.8.3
         (060c9188beec3a8b62b33a3bfa6d5d2d44975fab)
    FA3  hopper/flash_api.cpp and hopper/flash_attn_interface.py of commit
         0251105a2fb19d2957484b7f023cd8c115286ced

Arguments that the backend has no use for must have their defaults.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from hf_paged.backends import flash_library
from hf_paged.backends.flash_library import FlashLibrary

NUM_MULTIPROCESSORS = 132  # of an H100


class RefusedError(RuntimeError):
    """The library would have raised, or have read out of bounds."""


@dataclass
class Call:
    """One call of a library function: its name and all of its arguments, defaults included."""

    function: str
    arguments: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        return self.arguments[name]


@dataclass
class Calls:
    """What was called so far, in order."""

    calls: list[Call] = field(default_factory=list)

    @property
    def functions(self) -> list[str]:
        return [call.function for call in self.calls]

    def pop(self) -> Call:
        (call,) = self.calls
        self.calls.clear()
        return call


def install(monkeypatch: pytest.MonkeyPatch, *, version: int) -> Calls:
    """Have :func:`flash_library.find_library` find a stand-in, on a CPU as well."""
    calls = Calls()
    library = stand_in(version, calls)
    find = flash_library.find_library

    def find_stand_in(
        wanted: int, device: torch.device, *, may_download: bool
    ) -> FlashLibrary | str:
        return library if wanted == version else find(wanted, device, may_download=may_download)

    monkeypatch.setattr(flash_library, "find_library", find_stand_in)
    return calls


def stand_in(version: int, calls: Calls) -> FlashLibrary:
    functions = {
        2: (fa2_with_kvcache, fa2_varlen),
        3: (fa3_with_kvcache, fa3_varlen),
    }[version]
    with_kvcache, varlen = (_recorded(function, calls) for function in functions)
    return FlashLibrary(
        version=version,
        source="stand-in",
        with_kvcache=with_kvcache,
        varlen=varlen,
        num_multiprocessors=NUM_MULTIPROCESSORS,
    )


def _recorded(function: Any, calls: Calls) -> Any:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        calls.calls.append(Call(function.__name__, dict(bound.arguments)))
        for name, parameter in signature.parameters.items():
            if name not in _USED and bound.arguments[name] != parameter.default:
                raise AssertionError(f"{name} of {function.__name__} has no stand-in")
        return function(*args, **kwargs)

    return call


_USED = {
    *("q", "k", "v", "k_cache", "v_cache", "block_table", "page_table", "cache_seqlens"),
    *("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "causal"),
    *("window_size", "softcap", "alibi_slopes", "num_splits"),
}


# -- flash-attn 2 --------------------------------------------------------------------------------


def fa2_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: None = None,
    v: None = None,
    rotary_cos: None = None,
    rotary_sin: None = None,
    cache_seqlens: torch.Tensor | None = None,
    cache_batch_idx: None = None,
    cache_leftpad: None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> torch.Tensor:
    """flash_attn_interface.py 1464 to 1606, mha_fwd_kvcache of flash_api.cpp from 1204 on."""
    assert k is None and v is None, "the backend writes by itself"
    # The interface makes one of an int, with as many entries as the pool has blocks (1577 to 1580).
    check(isinstance(cache_seqlens, torch.Tensor), "cache_seqlens is no tensor")
    assert cache_seqlens is not None and block_table is not None, "the backend is paged"
    check_dtypes_and_strides(q, k_cache, v_cache)  # 1232 to 1242
    check_table(q, block_table)  # 1249 to 1251
    check_seqlens("seqlens_k", cache_seqlens, q)  # 1388 to 1390
    batch_size, seqlen_q, num_heads, head_size = q.shape
    block_size, num_heads_k = k_cache.shape[1:3]
    check(block_size % 256 == 0, "Paged KV cache block size must be divisible by 256")  # 1264
    check(batch_size > 0, "batch size must be positive")  # 1268
    check(head_size <= 256, "only supports head dimension at most 256")  # 1269
    # 1300 to 1303 pad others: a copy of the whole pool, which no caller of ours may cause.
    check(head_size % 8 == 0, "head dim no multiple of 8")
    check(num_heads % num_heads_k == 0, "heads of K do not divide those of Q")  # 1270
    check_shape("kcache", k_cache, (k_cache.shape[0], block_size, num_heads_k, head_size))  # 1294
    check_shape("vcache", v_cache, (k_cache.shape[0], block_size, num_heads_k, head_size))  # 1295
    check_shape("block_table", block_table, (batch_size, block_table.shape[1]))  # 1296
    check_shape("seqlens_k", cache_seqlens, (batch_size,))  # 1391
    check_fa2_slopes(alibi_slopes, q, batch_size, num_heads)
    check(num_splits <= 128, "num_splits > 128 not supported")  # 325
    lengths = cache_seqlens.tolist()
    keys, values = paged_rows(k_cache, v_cache, block_table, lengths, seqlen_q, window_size)
    capacity = block_table.shape[1] * block_size  # 1265
    left, right = fa2_window(window_size, seqlen_q, capacity, causal, alibi_slopes)
    out = torch.empty_like(q)  # 1319
    for row in range(batch_size):
        out[row] = attend(
            q[row], keys[row], values[row], softmax_scale, left, right, softcap, alibi_slopes
        )
    return out


def fa2_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """flash_attn_interface.py 1370 to 1461, mha_varlen_fwd of flash_api.cpp from 514 on."""
    check_dtypes_and_strides(q, k, v)  # 544 to 552, 565 to 567
    check_seqlens("cu_seqlens_q", cu_seqlens_q, q)  # 549, 553, 568
    check_seqlens("cu_seqlens_k", cu_seqlens_k, q)  # 550, 554, 569
    batch_size, (total_q, num_heads, head_size) = cu_seqlens_q.numel() - 1, q.shape
    check(batch_size > 0, "batch size must be positive")  # 603
    check(head_size <= 256, "only supports head dimension at most 256")  # 604
    check(head_size % 8 == 0, "head_size must be a multiple of 8")  # 605, padded before that
    num_heads_k = k.shape[-2]
    check(num_heads % num_heads_k == 0, "heads of K do not divide those of Q")  # 606
    check_shape("cu_seqlens_q", cu_seqlens_q, (batch_size + 1,))  # 622
    check_shape("cu_seqlens_k", cu_seqlens_k, (batch_size + 1,))  # 623
    check_fa2_slopes(alibi_slopes, q, batch_size, num_heads)
    q_lens = differences("cu_seqlens_q", cu_seqlens_q, total_q, max_seqlen_q)
    is_swapped = max_seqlen_q == 1 and num_heads > num_heads_k and tuple(window_size) == (-1, -1)
    if is_swapped and alibi_slopes is None:  # 592 to 595 reshape Q to [batch_size, ...]
        check(total_q == batch_size, "max_seqlen_q is 1, but some row has no query")
    if block_table is None:
        total_k = k.shape[0]
        check_shape("k", k, (total_k, num_heads_k, head_size))  # 614
        check_shape("v", v, (total_k, num_heads_k, head_size))  # 615
        k_lens = differences("cu_seqlens_k", cu_seqlens_k, total_k, max_seqlen_k)
        keys, values = k.float().split(k_lens), v.float().split(k_lens)
    else:
        check_table(q, block_table)  # 560 to 562
        check(k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256")  # 583
        pool = (k.shape[0], k.shape[1], num_heads_k, head_size)
        check_shape("k", k, pool)  # 617
        check_shape("v", v, pool)  # 618
        check_shape("block_table", block_table, (batch_size, block_table.shape[1]))  # 619
        k_lens = differences("cu_seqlens_k", cu_seqlens_k, None, max_seqlen_k)
        assert tuple(window_size) == (-1, -1), "the backend gathers where a window hides something"
        keys, values = paged_rows(k, v, block_table, k_lens, max_seqlen_q, window_size)
    left, right = fa2_window(window_size, max_seqlen_q, max_seqlen_k, causal, alibi_slopes)
    out = torch.empty_like(q)  # 643
    for row, query in enumerate(q.split(q_lens)):
        out.split(q_lens)[row].copy_(
            attend(query, keys[row], values[row], softmax_scale, left, right, softcap, alibi_slopes)
        )
    return out


def fa2_window(
    window_size: tuple[int, int],
    seqlen_q: int,
    seqlen_k: int,
    causal: bool,
    alibi_slopes: torch.Tensor | None,
) -> tuple[int, int]:
    """Return how many keys left and right of its own a query sees; -1: all."""
    left, right = window_size
    if seqlen_q == 1 and alibi_slopes is None:  # 585, 1273
        causal = False
    if causal:  # 586, 1274
        right = 0
    return (-1 if left >= seqlen_k else left), (-1 if right >= seqlen_k else right)  # 608, 1286


def check_fa2_slopes(
    slopes: torch.Tensor | None, q: torch.Tensor, batch_size: int, num_heads: int
) -> None:
    if slopes is None:
        return
    check(slopes.dtype == torch.float32, "ALiBi slopes must have dtype fp32")  # 338
    check(slopes.device == q.device, "ALiBi slopes are elsewhere")  # 339
    check(slopes.stride(-1) == 1, "ALiBi slopes must be contiguous")  # 340
    shapes = ((num_heads,), (batch_size, num_heads))
    check(tuple(slopes.shape) in shapes, f"ALiBi slopes have shape {tuple(slopes.shape)}")  # 341


# -- flash-attn 3 --------------------------------------------------------------------------------


def fa3_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: None = None,
    v: None = None,
    qv: None = None,
    rotary_cos: None = None,
    rotary_sin: None = None,
    cache_seqlens: torch.Tensor | None = None,
    cache_batch_idx: None = None,
    cache_leftpad: None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: None = None,
    q_descale: None = None,
    k_descale: None = None,
    v_descale: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: None = None,
    num_splits: int = 0,
    pack_gqa: None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """flash_attn_interface.py 942 to 1103, mha_fwd of flash_api.cpp from 673 on.

    Returns what it was not asked for beside the output, as some builds do.
    """
    assert k is None and v is None, "the backend writes by itself"
    assert isinstance(cache_seqlens, torch.Tensor) and page_table is not None
    check_dtypes_and_strides(q, k_cache, v_cache)  # 714 to 728
    check_table(q, page_table)  # 734 to 736
    check_seqlens("seqused_k", cache_seqlens, q)  # 836 to 838
    num_pages, page_size, num_heads_k, head_size = k_cache.shape
    total_q, num_heads = q.shape[0], q.shape[-2]
    if cu_seqlens_q is None:
        batch_size, seqlen_q = q.shape[:2]
        q_lens = [seqlen_q] * batch_size
        check_shape("q", q, (batch_size, seqlen_q, num_heads, head_size))  # 808
    else:
        check_seqlens("cu_seqlens_q", cu_seqlens_q, q)  # 743 to 744
        check(max_seqlen_q is not None, "max_seqlen_q must be provided")  # 745
        assert max_seqlen_q is not None
        batch_size, seqlen_q = cu_seqlens_q.shape[0] - 1, max_seqlen_q
        q_lens = differences("cu_seqlens_q", cu_seqlens_q, total_q, max_seqlen_q)
        check_shape("q", q, (total_q, num_heads, head_size))  # 810
    check_shape("seqused_k", cache_seqlens, (batch_size,))  # 838
    check_fa3_heads(num_heads, num_heads_k, head_size, v_cache.shape[-1])
    check_shape("k", k_cache, (num_pages, page_size, num_heads_k, head_size))  # 823
    check_shape("v", v_cache, (num_pages, page_size, num_heads_k, v_cache.shape[-1]))  # 824
    check_shape("page_table", page_table, (batch_size, page_table.shape[1]))  # 777, 825
    # Tracing wants a number (flash_attn_interface.py 240), and 0 may allocate for 128 parts.
    check(1 <= num_splits <= 256, f"num_splits is {num_splits}")  # 1095
    lengths = cache_seqlens.tolist()
    keys, values = paged_rows(k_cache, v_cache, page_table, lengths, seqlen_q, window_size)
    capacity = page_table.shape[1] * page_size  # 768
    left, right = fa3_window(window_size, seqlen_q, capacity, causal)
    out = q.new_empty(*q.shape[:-1], v_cache.shape[-1])  # 873
    flat_q, flat_out = q.reshape(-1, num_heads, head_size), out.view(-1, num_heads, out.shape[-1])
    for row, query in enumerate(flat_q.split(q_lens)):
        flat_out.split(q_lens)[row].copy_(
            attend(query, keys[row], values[row], softmax_scale, left, right, softcap, None)
        )
    return out, q.new_empty(0)


def fa3_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: None = None,
    seqused_k: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: None = None,
    q_descale: None = None,
    k_descale: None = None,
    v_descale: None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> torch.Tensor:
    """flash_attn_interface.py 890 to 935, mha_fwd of flash_api.cpp from 673 on."""
    check_dtypes_and_strides(q, k, v)  # 714 to 728
    check_seqlens("cu_seqlens_q", cu_seqlens_q, q)  # 743 to 744
    check_seqlens("cu_seqlens_k", cu_seqlens_k, q)  # 751 to 752
    batch_size, (total_q, num_heads, head_size) = cu_seqlens_q.shape[0] - 1, q.shape
    total_k, num_heads_k = k.shape[:2]
    check_fa3_heads(num_heads, num_heads_k, head_size, v.shape[-1])
    check_shape("k", k, (total_k, num_heads_k, head_size))  # 818
    check_shape("v", v, (total_k, num_heads_k, v.shape[-1]))  # 819
    check_shape("cu_seqlens_k", cu_seqlens_k, (batch_size + 1,))  # 777, 820
    q_lens = differences("cu_seqlens_q", cu_seqlens_q, total_q, max_seqlen_q)
    k_lens = differences("cu_seqlens_k", cu_seqlens_k, total_k, max_seqlen_k)
    left, right = fa3_window(window_size, max_seqlen_q, max_seqlen_k, causal)
    keys, values = k.float().split(k_lens), v.float().split(k_lens)
    rows = [
        attend(query, keys[row], values[row], softmax_scale, left, right, softcap, None)
        for row, query in enumerate(q.split(q_lens))
    ]
    return torch.cat(rows).to(q.dtype)


def check_fa3_heads(num_heads: int, num_heads_k: int, head_size: int, head_size_v: int) -> None:
    check(head_size <= 256, "only supports head dimension at most 256")  # 780
    check(num_heads % num_heads_k == 0, "heads of K do not divide those of Q")  # 781
    check(
        head_size_v == head_size
        or (128 < head_size <= 192 and 96 < head_size_v <= 128)
        or (head_size <= 64 and head_size_v <= 512),
        f"head dims {head_size} and {head_size_v}",
    )  # 783 to 786
    check(head_size % 8 == 0, "head_size should be a multiple of 8")  # 855
    check(head_size_v % 8 == 0, "head_size_v should be a multiple of 8")  # 856


def fa3_window(
    window_size: tuple[int, int], seqlen_q: int, seqlen_k: int, causal: bool
) -> tuple[int, int]:
    """Return how many keys left and right of its own a query sees; -1: all."""
    left, right = window_size
    if left >= seqlen_k - 1:  # 796
        left = -1
    if right >= seqlen_q - 1:  # 797
        right = -1
    if causal:  # 799 to 805; of a single query causal hides nothing
        right = 0
    return left, right


# -- both ----------------------------------------------------------------------------------------


def check(condition: bool, message: str) -> None:
    if not condition:
        raise RefusedError(message)


def check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    check(tuple(tensor.shape) == shape, f"{name} is {tuple(tensor.shape)}, not {shape}")


def check_dtypes_and_strides(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    check(q.dtype in (torch.float16, torch.bfloat16), f"q is {q.dtype}")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check(tensor.dtype == q.dtype, f"{name} is {tensor.dtype}, not {q.dtype}")
        check(tensor.device == q.device, f"{name} is on {tensor.device}")
        check(tensor.stride(-1) == 1, f"the last stride of {name} is {tensor.stride(-1)}")
        # Unchecked: loads of 16 bytes fault elsewhere (flash_fwd_kernel.h copies uint128_t).
        check(tensor.storage_offset() % 8 == 0, f"{name} begins at {tensor.storage_offset()}")
        check(
            not any(stride % 8 for stride in tensor.stride()[:-1]),
            f"{name} has strides {tensor.stride()}",
        )


def check_table(q: torch.Tensor, table: torch.Tensor) -> None:
    check(table.device == q.device, f"block_table is on {table.device}")
    check(table.dtype == torch.int32, f"block_table is {table.dtype}")
    check(table.stride(-1) == 1, f"block_table has strides {table.stride()}")


def check_seqlens(name: str, lengths: torch.Tensor, q: torch.Tensor) -> None:
    check(lengths.dtype == torch.int32, f"{name} is {lengths.dtype}")
    check(lengths.device == q.device, f"{name} is on {lengths.device}")
    check(lengths.is_contiguous(), f"{name} has strides {lengths.stride()}")


def differences(name: str, ends: torch.Tensor, total: int | None, longest: int) -> list[int]:
    """Return the lengths of rows; nothing of this is checked by the libraries."""
    lengths: list[int] = ends.diff().tolist()
    check(ends[0] == 0 and min(lengths) >= 0, f"{name} is {ends.tolist()}")
    if total is not None:
        check(ends[-1] == total, f"{name} ends at {ends[-1]} of {total}")
    # Tiles are launched up to max_seqlen_q, and a window beyond max_seqlen_k is dropped.
    check(max(lengths) <= longest, f"{name} holds a row of {max(lengths)}, {longest} announced")
    return lengths


def paged_rows(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    lengths: list[int],
    max_seqlen_q: int,
    window_size: tuple[int, int],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return K and V of each row in fp32, zeros before what the window of its first query begins.

    Nothing of this is checked by the libraries.
    """
    num_blocks, block_size = k_cache.shape[:2]
    keys, values = [], []
    for row, length in enumerate(lengths):
        check(0 <= length <= table.shape[1] * block_size, f"row {row} has {length} tokens")
        first = 0 if window_size[0] < 0 else max(0, length - max_seqlen_q - window_size[0])
        entries = table[row, first // block_size : -(-length // block_size)].tolist()
        check(all(0 <= block < num_blocks for block in entries), f"row {row} has blocks {entries}")
        for cache, rows in ((k_cache, keys), (v_cache, values)):
            begin = first // block_size * block_size
            live = cache[entries].flatten(0, 1)[first - begin : length - begin].float()
            hidden = live.new_zeros(min(first, length), *live.shape[1:])
            rows.append(torch.cat([hidden, live]))
    return keys, values


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None,
    left: int,
    right: int,
    softcap: float,
    slopes: torch.Tensor | None,
) -> torch.Tensor:
    """Return [n, H, D_v] in fp32 of one row: q [n, H, D], k [L, H_kv, D], v [L, H_kv, D_v].

    mask.h 129 to 210: bottom-right aligned; the slope joins after the softcap.
    """
    num_new, _, head_dim = q.shape
    length, group_size = k.shape[0], q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q.float(), k.repeat_interleave(group_size, dim=1))
    scores *= head_dim**-0.5 if scale is None else scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    own = torch.arange(length - num_new, length)[:, None]
    key = torch.arange(length)
    if slopes is not None:
        scores = scores - slopes[:, None, None] * (own - key).abs()
    hidden = torch.zeros(num_new, length, dtype=torch.bool)
    if left >= 0:
        hidden |= key < own - left
    if right >= 0:
        hidden |= key > own + right
    weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=2)
    weights = weights.nan_to_num(0.0) if hidden.all(dim=1).any() else weights  # all hidden: 0
    return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group_size, dim=1))
