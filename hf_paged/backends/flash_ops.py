"""Calls of flash-attn as operators that torch.compile, dispatch modes and recorders can see.

``hf_paged::flash_uniform``, ``hf_paged::flash_paged``, ``hf_paged::flash_dense``: the calls of
:class:`~hf_paged.backends.flash_library.FlashLibrary`, of generation ``version``.
"""

from __future__ import annotations

import torch

from hf_paged.backends import flash_library
from hf_paged.backends.flash_library import LIMITS, FlashLibrary
from hf_paged.errors import InputMismatchError

__all__ = ["dense", "find", "paged", "uniform"]

_library = torch.library.Library("hf_paged", "FRAGMENT")
_library.define(
    "flash_uniform(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_tables, "
    "Tensor seq_lens, int version, float scale, int window, float softcap, "
    "Tensor? alibi_slopes, int num_splits) -> Tensor"
)
_library.define(
    "flash_paged(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_tables, "
    "Tensor seq_lens, Tensor cu_seqlens_q, SymInt max_query_len, SymInt max_seq_len, int version, "
    "float scale, float softcap, Tensor? alibi_slopes, int num_splits) -> Tensor"
)
_library.define(
    "flash_dense(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, "
    "Tensor cu_seqlens_k, SymInt max_query_len, SymInt max_seq_len, int version, float scale, "
    "int window, float softcap, Tensor? alibi_slopes) -> Tensor"
)

uniform = torch.ops.hf_paged.flash_uniform
paged = torch.ops.hf_paged.flash_paged
dense = torch.ops.hf_paged.flash_dense


def find(version: int, device: torch.device) -> FlashLibrary:
    """Return the library that serves ``device``.

    Raises:
        InputMismatchError: there is none.
    """
    library = flash_library.find_library(version, device, may_download=False)
    if isinstance(library, str):
        raise InputMismatchError(
            f"a layer on {device} attends through backend {LIMITS[version].backend!r}, which "
            f"cannot run there: {library}. Move the model, or pass backend='torch'."
        )
    return library


def _loadable(states: torch.Tensor) -> torch.Tensor:
    """Return the same values where the kernels can load 16 bytes at a time."""
    *outer, inner = states.stride()
    if inner == 1 and states.storage_offset() % 8 == 0 and not any(s % 8 for s in outer):
        return states
    return states.clone(memory_format=torch.contiguous_format)


def _uniform(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    version: int,
    scale: float,
    window: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    num_splits: int,
) -> torch.Tensor:
    num_rows = seq_lens.shape[0]
    out = find(version, query.device).uniform(
        _loadable(query).view(num_rows, query.shape[0] // num_rows, *query.shape[1:]),
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        scale=scale,
        window=window,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        num_splits=num_splits,
    )
    return out.contiguous().view(query.shape)


def _paged(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
    version: int,
    scale: float,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    num_splits: int,
) -> torch.Tensor:
    out = find(version, query.device).paged(
        _loadable(query),
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        cu_seqlens_q,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        scale=scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        num_splits=num_splits,
    )
    return out.contiguous()


def _dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
    version: int,
    scale: float,
    window: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
) -> torch.Tensor:
    out = find(version, query.device).dense(
        _loadable(query),
        _loadable(key),
        _loadable(value),
        cu_seqlens_q,
        cu_seqlens_k,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        scale=scale,
        window=window,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
    )
    return out.contiguous()


def _fake(query: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return query.new_empty(query.shape)


for _name, _function in (
    ("flash_uniform", _uniform),
    ("flash_paged", _paged),
    ("flash_dense", _dense),
):
    # On a CPU there is no flash-attn; the error says so.
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _function, _key)
    torch.library.register_fake(f"hf_paged::{_name}", _fake, lib=_library)
