"""What is checked before a kernel runs: it would read and write wherever it is told.

Sizes, strides, lengths and block ids each have their own error; they are checked once a step.
"""

from __future__ import annotations

import ctypes

import torch

from hf_paged.backends import native
from hf_paged.backends.base import LayerView
from hf_paged.backends.metadata import AttentionMetadata
from hf_paged.errors import InputMismatchError

__all__ = [
    "as_int32",
    "check_copies",
    "check_query",
    "check_rows",
    "check_sizes",
    "check_slots",
    "check_tables",
    "one_a_head",
    "supports",
]

# From hfp_check_rows, see csrc/abi.h.
_BAD_QUERY_LENGTH, _BAD_SEQUENCE_LENGTH, _BAD_BLOCK_ID = 2, 3, 4


def supports(*tensors: torch.Tensor) -> bool:
    """Whether the kernels take these together: one dtype that they know."""
    dtype = tensors[0].dtype
    for tensor in tensors:
        if tensor.dtype is not dtype:
            return False
    return dtype in native.DTYPES


def check_sizes(
    key: torch.Tensor, value: torch.Tensor, view: LayerView, metadata: AttentionMetadata
) -> None:
    """Refuse new tokens and caches that do not belong together."""
    if not supports(key, value, view.key_cache, view.value_cache):
        raise InputMismatchError(
            f"key is {key.dtype}, value {value.dtype}, their caches {view.key_cache.dtype} and "
            f"{view.value_cache.dtype}: expected the same in all, of "
            f"{', '.join(map(str, native.DTYPES))}."
        )
    if key.shape[:2] != value.shape[:2]:
        raise InputMismatchError(
            f"key is {tuple(key.shape)} and value {tuple(value.shape)}: expected as many tokens "
            "and heads in both."
        )
    if not all((*key.shape[1:], value.shape[2], metadata.block_size)):
        raise InputMismatchError(
            f"key is {tuple(key.shape)}, value {tuple(value.shape)}, block_size "
            f"{metadata.block_size}: expected no size of 0 but that of the tokens."
        )
    for name, cache, new in (
        ("key_cache", view.key_cache, key),
        ("value_cache", view.value_cache, value),
    ):
        expected = (metadata.null_block + 1, new.shape[1], metadata.block_size, new.shape[2])
        if tuple(cache.shape) != expected:
            raise InputMismatchError(
                f"{name} is {tuple(cache.shape)}: expected {expected}, [num_blocks + 1, H_kv, "
                "block_size, D], by the metadata and the new tokens."
            )
        if cache.stride(3) != 1:
            raise InputMismatchError(
                f"{name} has strides {cache.stride()}: expected the last one to be 1."
            )


def check_query(query: torch.Tensor, key: torch.Tensor, window: int | None) -> None:
    """Refuse queries that do not belong to the keys."""
    if query.dtype != key.dtype:
        raise InputMismatchError(f"query is {query.dtype}: expected {key.dtype}, as the keys.")
    num_tokens, num_heads, head_dim = query.shape
    is_multiple = num_heads and num_heads % key.shape[1] == 0
    if (num_tokens, head_dim) != (key.shape[0], key.shape[2]) or not is_multiple:
        raise InputMismatchError(
            f"query is {tuple(query.shape)} for keys {tuple(key.shape)}: expected as many "
            "tokens, the same head dim, and a multiple of the key heads."
        )
    if window is not None and window < 1:
        raise InputMismatchError(f"window is {window}: expected at least 1, or None.")


def check_tables(tables: torch.Tensor, seq_lens: torch.Tensor, cu_seqlens_q: torch.Tensor) -> None:
    """Refuse tables and lengths of different numbers of rows."""
    num_rows = seq_lens.shape[0]
    if tables.shape[0] != num_rows or cu_seqlens_q.shape[0] != num_rows + 1:
        raise InputMismatchError(
            f"block_tables is {tuple(tables.shape)}, seq_lens {tuple(seq_lens.shape)}, "
            f"cu_seqlens_q {tuple(cu_seqlens_q.shape)}: expected [B, W], [B] and [B + 1]."
        )


def check_rows(rows: native.Rows, window: int) -> None:
    """Refuse lengths and block ids that would lead a kernel out of the cache."""
    found = (ctypes.c_int64 * 4)()
    status = native.load_library().check_rows(ctypes.byref(rows), window, found)
    if status == _BAD_QUERY_LENGTH:
        raise InputMismatchError(
            f"cu_seqlens_q[{found[0]}] is {found[1]}: expected 0 first, then numbers that do not "
            f"fall, {found[2]} last (the tokens of query)."
        )
    if status == _BAD_SEQUENCE_LENGTH:
        raise InputMismatchError(
            f"seq_lens[{found[0]}] is {found[1]}: expected at least the row's new tokens, and its "
            f"stored ones within the {found[2]} slots of its block table."
        )
    if status == _BAD_BLOCK_ID:
        raise InputMismatchError(
            f"block_tables[{found[0]}, {found[3]}] is {found[1]}: expected 0 to {found[2] - 1}, "
            "the blocks of the cache."
        )


def check_slots(metadata: AttentionMetadata, num_tokens: int) -> torch.Tensor:
    """Return ``slot_mapping`` as the kernels read it; refuse slots beyond the last usable block."""
    slots = metadata.slot_mapping
    if slots.dtype != torch.int64 or slots.shape != (num_tokens,):
        raise InputMismatchError(
            f"slot_mapping is {slots.dtype} {tuple(slots.shape)} for {num_tokens} tokens: "
            "expected one int64 a token."
        )
    slots = slots.contiguous()
    found = (ctypes.c_int64 * 4)()
    num_slots = metadata.null_block * metadata.block_size
    library = native.load_library()
    if library.check_slots(slots.data_ptr(), slots.shape[0], num_slots, found):
        raise InputMismatchError(
            f"slot_mapping[{found[0]}] is {found[1]}: expected less than {found[2]}, the first "
            "slot of the null block, or a negative number for a token that is not stored."
        )
    return slots


def check_copies(
    cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor
) -> tuple[list[int], list[int]]:
    """Return the block ids of a copy; refuse ids and caches that would lead out of bounds."""
    num_blocks = cache.shape[0]
    if num_blocks == 0 or not cache[0].is_contiguous():
        raise InputMismatchError(
            f"cache has strides {cache.stride()} for shape {tuple(cache.shape)}: expected blocks, "
            "each of them contiguous."
        )
    if not (source.dtype == target.dtype == torch.int64 and source.ndim == 1) or (
        source.shape != target.shape
    ):
        raise InputMismatchError(
            f"source is {source.dtype} {tuple(source.shape)} and target {target.dtype} "
            f"{tuple(target.shape)}: expected as many int64 block ids in both."
        )
    read, written = source.tolist(), target.tolist()
    for name, ids in (("source", read), ("target", written)):
        if ids and not 0 <= min(ids) <= max(ids) < num_blocks:
            raise InputMismatchError(
                f"{name} holds block ids {min(ids)} to {max(ids)}: expected ids of the "
                f"{num_blocks} blocks of the cache."
            )
    return read, written


def one_a_head(name: str, per_head: torch.Tensor | None, num_heads: int) -> torch.Tensor | None:
    """Return sinks or slopes as the kernels read them, [H] float32."""
    if per_head is None:
        return None
    if per_head.shape != (num_heads,):
        raise InputMismatchError(
            f"{name} is {tuple(per_head.shape)}: expected one number for each of {num_heads} heads."
        )
    return per_head.to(torch.float32).contiguous()


def as_int32(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return lengths or block ids as the kernels read them."""
    if tensor.dtype != torch.int32 or tensor.device.type != "cpu":
        raise InputMismatchError(
            f"{name} is {tensor.dtype} on {tensor.device}: expected int32 on cpu."
        )
    return tensor.contiguous()
