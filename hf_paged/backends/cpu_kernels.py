"""The compiled kernels as functions over tensors: checked first, then called.

What is equal in all layers of a step (strides, sizes, tables) is checked and written into the
argument structs once; a layer then sets its addresses and calls.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import torch

from hf_paged.backends import native
from hf_paged.backends.base import LayerView
from hf_paged.backends.cpu_checks import (
    as_int32,
    check_copies,
    check_query,
    check_rows,
    check_sizes,
    check_slots,
    check_tables,
    one_a_head,
)
from hf_paged.backends.metadata import AttentionMetadata

__all__ = ["attend", "copy_blocks", "release_workspaces", "write"]

_NO_WINDOW = 2**62
_workspaces = threading.local()


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    view: LayerView,
    metadata: AttentionMetadata,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Attend as :meth:`AttentionBackend.forward` says, for tensors that :func:`supports` takes.

    Args:
        query: [N, H, D].
        key: [N, H_kv, D].
        value: [N, H_kv, D_v].
        view: K and V as [num_blocks + 1, H_kv, block_size, D]; other strides will do.
        metadata: the plan of the call is kept in its ``derived``.
        scale: see :meth:`AttentionBackend.forward`.
        window: likewise.
        softcap: likewise.
        sinks: likewise.
        alibi_slopes: likewise.
        batch_invariant: cut each row by its own length alone.

    Raises:
        InputMismatchError: sizes, strides, lengths or block ids that do not fit together.
    """
    query, key, value = _with_dense_rows(query), _with_dense_rows(key), _with_dense_rows(value)
    cache = view.key_cache
    plan_key = (
        "attend",
        query.shape,
        query.stride(),
        key.shape,
        key.stride(),
        value.shape,
        value.stride(),
        cache.shape,
        cache.stride(),
        cache.dtype,
        view.value_cache.shape,
        view.value_cache.stride(),
        window,
        batch_invariant,
    )
    plan = metadata.derived.get(plan_key)
    if plan is None:
        plan = _AttentionPlan(query, key, value, view, metadata, window, batch_invariant)
        metadata.derived[plan_key] = plan
    num_heads = query.shape[1]
    out = query.new_empty(query.shape[0], num_heads, value.shape[2])
    sinks = one_a_head("sinks", sinks, num_heads)
    alibi_slopes = one_a_head("alibi_slopes", alibi_slopes, num_heads)
    plan.attend(query, key, value, view, out, scale, softcap, sinks, alibi_slopes)
    return out


def write(
    key: torch.Tensor, value: torch.Tensor, view: LayerView, metadata: AttentionMetadata
) -> None:
    """Store new tokens as :meth:`AttentionBackend.write` says.

    Raises:
        InputMismatchError: sizes, strides or slots that do not fit together.
    """
    key, value = _with_dense_rows(key), _with_dense_rows(value)
    cache = view.key_cache
    plan_key = (
        "write",
        key.shape,
        key.stride(),
        value.shape,
        value.stride(),
        cache.shape,
        cache.stride(),
        cache.dtype,
        view.value_cache.shape,
        view.value_cache.stride(),
    )
    plan = metadata.derived.get(plan_key)
    if plan is None:
        plan = metadata.derived[plan_key] = _WritePlan(key, value, view, metadata)
    plan.write(key, value, view)


def copy_blocks(cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy whole blocks inside ``cache``; every source is read before a target is written.

    Args:
        cache: [num_blocks, ...], each block contiguous.
        source: [n] int64.
        target: [n] int64, no id twice.

    Raises:
        InputMismatchError: ids beyond the cache, or a cache whose blocks are not contiguous.
    """
    read, written = check_copies(cache, source, target)
    if not read:
        return
    if not set(written).isdisjoint(read):
        cache.index_copy_(0, target, cache.index_select(0, source))
        return
    source, target = source.contiguous(), target.contiguous()
    native.load_library().copy_blocks(
        cache.data_ptr(),
        cache.stride(0) * cache.element_size(),
        cache[0].numel() * cache.element_size(),
        source.data_ptr(),
        target.data_ptr(),
        source.shape[0],
        native.threads(),
    )


def release_workspaces() -> None:
    """Give back the calling thread's workspace; those of other threads end with their threads."""
    _workspaces.__dict__.clear()


class _AttentionPlan:
    """Arguments of one attention call that hold for every layer with the same shapes."""

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        view: LayerView,
        metadata: AttentionMetadata,
        window: int | None,
        batch_invariant: bool,
    ) -> None:
        num_tokens, num_heads, head_dim = query.shape
        num_kv_heads = key.shape[1]
        check_sizes(key, value, view, metadata)
        check_query(query, key, window)
        tables, seq_lens, cu_seqlens_q = (
            as_int32(name, getattr(metadata, name))
            for name in ("block_tables", "seq_lens", "cu_seqlens_q")
        )
        num_rows = seq_lens.shape[0]
        check_tables(tables, seq_lens, cu_seqlens_q)
        # The addresses below are those of these tensors: they live as long as the plan.
        self._tensors = (tables, seq_lens, cu_seqlens_q)
        rows = native.Rows(
            tables.data_ptr(),
            seq_lens.data_ptr(),
            cu_seqlens_q.data_ptr(),
            num_rows,
            tables.stride(0),
            tables.shape[1],
            metadata.block_size,
            view.key_cache.shape[0],
            num_tokens,
        )
        check_rows(rows, _NO_WINDOW if window is None else window)
        arguments = self._arguments = native.Attention(rows=rows)
        self._query, self._key, self._value = arguments.query, arguments.key, arguments.value
        self._key_cache, self._value_cache = arguments.key_cache, arguments.value_cache
        for tokens, tensor in ((self._query, query), (self._key, key), (self._value, value)):
            _set_token_strides(tokens, tensor)
        _set_cache_strides(self._key_cache, view.key_cache)
        _set_cache_strides(self._value_cache, view.value_cache)
        arguments.num_heads, arguments.num_kv_heads = num_heads, num_kv_heads
        arguments.head_dim, arguments.value_dim = head_dim, value.shape[2]
        arguments.window = _NO_WINDOW if window is None else window
        arguments.dtype = native.DTYPES[query.dtype]
        arguments.batch_invariant = batch_invariant
        self._address = ctypes.addressof(arguments)
        self._attend = native.load_library().attend

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        view: LayerView,
        out: torch.Tensor,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
        alibi_slopes: torch.Tensor | None,
    ) -> None:
        arguments = self._arguments
        self._query.data = query.data_ptr()
        self._key.data = key.data_ptr()
        self._value.data = value.data_ptr()
        self._key_cache.data = view.key_cache.data_ptr()
        self._value_cache.data = view.value_cache.data_ptr()
        arguments.out = out.data_ptr()
        arguments.sinks = None if sinks is None else sinks.data_ptr()
        arguments.alibi_slopes = None if alibi_slopes is None else alibi_slopes.data_ptr()
        arguments.scale = scale
        arguments.softcap = softcap or 0.0
        if self._attend(self._address, _workspace().handle, native.threads()):
            raise MemoryError("no memory for the partial results of an attention call")


class _WritePlan:
    """Arguments of one write that hold for every layer with the same shapes."""

    def __init__(
        self, key: torch.Tensor, value: torch.Tensor, view: LayerView, metadata: AttentionMetadata
    ) -> None:
        check_sizes(key, value, view, metadata)
        slots = check_slots(metadata, num_tokens=key.shape[0])
        # The address below is that of this tensor: it lives as long as the plan.
        self._tensors = (slots,)
        arguments = self._arguments = native.Write(
            slot_mapping=slots.data_ptr(),
            num_tokens=key.shape[0],
            num_kv_heads=key.shape[1],
            block_size=metadata.block_size,
            key_bytes=key.shape[2] * key.element_size(),
            value_bytes=value.shape[2] * key.element_size(),
            element_size=key.element_size(),
        )
        self._key, self._value = arguments.key, arguments.value
        self._key_cache, self._value_cache = arguments.key_cache, arguments.value_cache
        _set_token_strides(self._key, key)
        _set_token_strides(self._value, value)
        _set_cache_strides(self._key_cache, view.key_cache)
        _set_cache_strides(self._value_cache, view.value_cache)
        self._address = ctypes.addressof(arguments)
        self._write = native.load_library().write_tokens

    def write(self, key: torch.Tensor, value: torch.Tensor, view: LayerView) -> None:
        self._key.data = key.data_ptr()
        self._value.data = value.data_ptr()
        self._key_cache.data = view.key_cache.data_ptr()
        self._value_cache.data = view.value_cache.data_ptr()
        self._write(self._address, native.threads())


def _workspace() -> native.Workspace:
    workspace: native.Workspace | None = getattr(_workspaces, "workspace", None)
    if workspace is None:
        workspace = _workspaces.workspace = native.Workspace(native.load_library())
    return workspace


def _with_dense_rows(tokens: torch.Tensor) -> torch.Tensor:
    """Return [N, heads, D] whose last dimension is contiguous."""
    return tokens if tokens.stride(2) == 1 else tokens.contiguous()


def _set_token_strides(tokens: Any, tensor: torch.Tensor) -> None:
    tokens.token_stride, tokens.head_stride = tensor.stride()[:2]


def _set_cache_strides(cache: Any, tensor: torch.Tensor) -> None:
    cache.block_stride, cache.head_stride, cache.token_stride = tensor.stride()[:3]
