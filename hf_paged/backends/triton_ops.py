"""``hf_paged::triton_attention``: paged attention in Triton, as an operator for torch.compile.

Importing this does not import Triton; the first call does. On a CPU it runs where Triton interprets
(``TRITON_INTERPRET=1``), and nowhere else.
"""

from __future__ import annotations

import functools

import torch

__all__ = ["attention", "choose_num_splits"]

MAX_SPLITS = 32
MIN_SPLIT_TOKENS = 256
INTERPRETED_MULTIPROCESSORS = 132

_library = torch.library.Library("hf_paged", "FRAGMENT")
_library.define(
    "triton_attention(Tensor query, Tensor key, Tensor value, Tensor key_cache, "
    "Tensor value_cache, Tensor block_tables, Tensor seq_lens, Tensor cu_seqlens_q, "
    "SymInt max_query_len, bool has_single_token_rows, int? num_splits, float scale, "
    "int? window=None, float? softcap=None, Tensor? sinks=None, Tensor? alibi_slopes=None) "
    "-> Tensor"
)

attention = torch.ops.hf_paged.triton_attention
"""See :func:`hf_paged.backends.triton_kernels.attend`; ``num_splits=None`` fills the device."""


def choose_num_splits(
    num_rows: int, num_kv_heads: int, table_tokens: int, num_multiprocessors: int
) -> int:
    """Return in how many parts, a power of two, the keys of a decoding row are attended to.

    About two programs a multiprocessor, none of them with fewer than 256 tokens of the longest
    possible row. Lengths play no part: a captured launch is replayed over others.

    >>> choose_num_splits(1, 8, 32768, 132), choose_num_splits(1, 8, 1024, 132)
    (32, 4)
    >>> choose_num_splits(64, 8, 32768, 132)
    1
    """
    wanted = 2 * num_multiprocessors // (num_rows * num_kv_heads)
    most = min(wanted, table_tokens // MIN_SPLIT_TOKENS, MAX_SPLITS)
    return 1 << max(1, most).bit_length() - 1


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_query_len: int,
    has_single_token_rows: bool,
    num_splits: int | None,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    from hf_paged.backends import triton_kernels

    if num_splits is None:
        num_rows, width = block_tables.shape
        num_splits = choose_num_splits(
            num_rows, key.shape[1], width * key_cache.shape[1], _multiprocessors(query.device)
        )
    return triton_kernels.attend(
        query,
        key,
        value,
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        cu_seqlens_q,
        max_query_len=max_query_len,
        has_single_token_rows=has_single_token_rows,
        num_splits=num_splits,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
    )


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _fake_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object
) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[1], value.shape[2])


for _device in ("CPU", "CUDA"):
    _library.impl("triton_attention", _attention, _device)
torch.library.register_fake("hf_paged::triton_attention", _fake_attention, lib=_library)
