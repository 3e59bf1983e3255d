"""Finds flash-attn and gives its generations 2 and 3 one call convention.

Nothing of it is imported before a backend asks. An installed package comes first (``flash_attn``,
``flash_attn_interface``), then the same kernels from the Hugging Face hub (package ``kernels``).

Dimensions: B rows, q new tokens of each row, N new tokens of all rows end to end, K tokens of all
rows end to end, H query heads, H_kv key/value heads, D head dim, W entries of a block table.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from packaging.version import InvalidVersion, Version

from hf_paged.backends.limits import KernelLimits

__all__ = ["LIMITS", "FlashLibrary", "find_library"]

_DTYPES = (torch.bfloat16, torch.float16)

LIMITS = {
    2: KernelLimits(
        backend="flash_attn",
        dtypes=_DTYPES,
        block_size_multiple=256,
        max_head_dim=256,
        head_dim_multiple=8,  # others are padded, which copies the whole pool at every call
        needs_equal_head_dims=True,
        min_capability=(8, 0),
        sinks=False,
    ),
    3: KernelLimits(
        backend="flash_attn_3",
        dtypes=_DTYPES,
        block_size_multiple=16,  # the kernels take any; tiny blocks cost a look-up a token
        max_head_dim=256,
        head_dim_multiple=8,
        needs_equal_head_dims=True,  # unequal ones only in a few pairs of ranges
        capabilities=(9,),
        sinks=False,
        alibi=False,
    ),
}
"""What the kernels of each generation take."""

_OLDEST = Version("2.6")  # the first with softcap, and with block_table in both functions

_PACKAGES = {2: "flash_attn", 3: "flash_attn_interface"}
_HUB = {
    2: (("kernels-community/flash-attn2", 4),),
    3: (("kernels-community/flash-attn3", 1), ("kernels-community/vllm-flash-attn3", 1)),
}
"""Repositories on the hub with the version of their interface, the one to download first."""
_PARAMETERS = {
    2: {
        "flash_attn_with_kvcache": {"block_table", "cache_seqlens", "softcap", "alibi_slopes"},
        "flash_attn_varlen_func": {"block_table", "cu_seqlens_k", "softcap", "alibi_slopes"},
    },
    3: {
        "flash_attn_with_kvcache": {"page_table", "cache_seqlens", "cu_seqlens_q", "softcap"},
        "flash_attn_varlen_func": {"cu_seqlens_k", "softcap"},
    },
}
"""What tells the functions meant here from others of the same name."""


@dataclass(frozen=True)
class FlashLibrary:
    """The two functions that are used of flash-attn, called alike in both generations.

    All calls are causal and bottom-right aligned. A row of length 0 gives 0 (flash_fwd_kernel.h of
    v2.8.3, lines 94 and 537; hopper/flash_fwd_kernel_sm90.h, line 448).

    Attributes:
        version: 2 or 3.
        source: where it was found, for people.
        with_kvcache, varlen: the library's ``flash_attn_with_kvcache``, ``flash_attn_varlen_func``.
        num_multiprocessors: of the device.
    """

    version: int
    source: str
    with_kvcache: Callable[..., Any]
    varlen: Callable[..., Any]
    num_multiprocessors: int

    def uniform(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        scale: float,
        window: int,
        softcap: float,
        alibi_slopes: torch.Tensor | None,
        num_splits: int,
    ) -> torch.Tensor:
        """Attend rows with equally many new tokens, all of them stored.

        Args:
            query: [B, q, H, D].
            key_cache: [num_blocks, block_size, H_kv, D].
            value_cache: likewise.
            block_tables: [B, W] int32.
            seq_lens: [B] int32, the new tokens included.
            scale: factor on the scores.
            window: tokens that a query sees before itself; -1: all.
            softcap: 0: none.
            alibi_slopes: [H] fp32, generation 2 only.
            num_splits: parts of a row that are computed side by side; 0: the library chooses.

        Returns:
            [B, q, H, D].
        """
        table, slopes = self._names(block_tables, alibi_slopes)
        return _first(
            self.with_kvcache(
                query,
                key_cache,
                value_cache,
                cache_seqlens=seq_lens,
                softmax_scale=scale,
                causal=True,
                window_size=_window_size(window),
                softcap=softcap,
                num_splits=num_splits,
                **table,
                **slopes,
            )
        )

    def paged(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        *,
        max_query_len: int,
        max_seq_len: int,
        scale: float,
        softcap: float,
        alibi_slopes: torch.Tensor | None,
        num_splits: int,
    ) -> torch.Tensor:
        """Attend rows with any numbers of new tokens, all of them stored, without a window.

        Args:
            query: [N, H, D].
            key_cache: [num_blocks, block_size, H_kv, D].
            value_cache: likewise.
            block_tables: [B, W] int32.
            seq_lens: [B] int32, the new tokens included.
            cu_seqlens_q: [B + 1] int32, where the new tokens of each row begin.
            max_query_len: the most new tokens of a row.
            max_seq_len: the longest row.
            scale: factor on the scores.
            softcap: 0: none.
            alibi_slopes: [H] fp32, generation 2 only.
            num_splits: as in :meth:`uniform`, generation 3 only.

        Returns:
            [N, H, D].
        """
        table, slopes = self._names(block_tables, alibi_slopes)
        if self.version == 3:
            return _first(
                self.with_kvcache(
                    query,
                    key_cache,
                    value_cache,
                    cache_seqlens=seq_lens,
                    cu_seqlens_q=cu_seqlens_q,
                    max_seqlen_q=max_query_len,
                    softmax_scale=scale,
                    causal=True,
                    softcap=softcap,
                    num_splits=num_splits,
                    **table,
                )
            )
        # Beside a block table only the differences of these matter: they are the rows' lengths.
        cu_seqlens_k = torch.nn.functional.pad(seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
        return _first(
            self.varlen(
                query,
                key_cache,
                value_cache,
                cu_seqlens_q,
                cu_seqlens_k,
                max_query_len,
                max_seq_len,
                softmax_scale=scale,
                causal=True,
                softcap=softcap,
                **table,
                **slopes,
            )
        )

    def dense(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        *,
        max_query_len: int,
        max_seq_len: int,
        scale: float,
        window: int,
        softcap: float,
        alibi_slopes: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend rows whose K and V are given end to end instead of in blocks.

        Args:
            query: [N, H, D].
            key: [K, H_kv, D].
            value: likewise.
            cu_seqlens_q: [B + 1] int32, where the new tokens of each row begin.
            cu_seqlens_k: [B + 1] int32, where the tokens of each row begin.
            max_query_len: the most new tokens of a row.
            max_seq_len: the most tokens of a row.
            scale: factor on the scores.
            window: tokens that a query sees before itself; -1: all.
            softcap: 0: none.
            alibi_slopes: [H] fp32, generation 2 only.

        Returns:
            [N, H, D].
        """
        _, slopes = self._names(None, alibi_slopes)
        return _first(
            self.varlen(
                query,
                key,
                value,
                cu_seqlens_q,
                cu_seqlens_k,
                max_query_len,
                max_seq_len,
                softmax_scale=scale,
                causal=True,
                window_size=_window_size(window),
                softcap=softcap,
                **slopes,
            )
        )

    def _names(
        self, block_tables: torch.Tensor | None, alibi_slopes: torch.Tensor | None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what the generations call differently, or do not know, as keyword arguments."""
        if self.version == 3:
            return {"page_table": block_tables}, {}
        return {"block_table": block_tables}, {"alibi_slopes": alibi_slopes}


_loaded: dict[tuple[int, torch.device], FlashLibrary] = {}


def find_library(version: int, device: torch.device, *, may_download: bool) -> FlashLibrary | str:
    """Return flash-attn for ``device``, or why there is none.

    Args:
        version: 2 or 3.
        device: where it is to compute.
        may_download: get it from the hub if it is not on this machine.
    """
    found = _loaded.get((version, device))
    if found is not None:
        return found
    reason = _refuse_device(version, device)
    if reason is not None:
        return reason
    reasons = []
    for find in (_from_package, _from_hub):
        module = find(version, may_download)
        library = module if isinstance(module, str) else _wrap(version, device, *module)
        if not isinstance(library, str):
            _loaded[version, device] = library
            return library
        reasons.append(library)
    return "; ".join(reasons)


def _refuse_device(version: int, device: torch.device) -> str | None:
    if device.type != "cuda":
        return "it computes on a CUDA device only"
    if torch.version.hip is not None:
        return "this PyTorch is built for ROCm, its kernels are for CUDA"
    if not torch.cuda.is_available():
        return "PyTorch finds no CUDA device"
    return LIMITS[version].refuse_capability(torch.cuda.get_device_capability(device))


def _from_package(version: int, may_download: bool) -> tuple[ModuleType, str] | str:
    name = _PACKAGES[version]
    try:
        module = importlib.import_module(name)
    except Exception as error:  # a binary for another PyTorch fails in many ways
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            return f"package {name} is not installed"
        return f"package {name} does not import ({_describe(error)})"
    if version == 3:
        return module, name
    text = str(getattr(module, "__version__", ""))
    try:
        is_too_old = Version(text) < _OLDEST
    except InvalidVersion:  # flash-attn 4 alone makes an empty package of this name
        return f"package {name} tells no version, so it is not flash-attn 2"
    if is_too_old:
        return f"package {name} is version {text}, {_OLDEST} or newer is needed"
    return module, f"{name} {text}"


def _from_hub(version: int, may_download: bool) -> tuple[ModuleType, str] | str:
    try:
        kernels = importlib.import_module("kernels")
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "kernels":
            return "package kernels is not installed"
        return f"package kernels does not import ({_describe(error)})"
    reasons = []
    for repository, _ in _HUB[version]:
        for snapshot in _cached_snapshots(repository):
            try:
                # get_kernel() would ask the hub for something newer, and download it.
                return kernels.get_local_kernel(snapshot), repository
            except Exception as error:
                reasons.append(f"{repository} does not load from the cache ({_describe(error)})")
    repository, interface = _HUB[version][0]
    if may_download:
        try:
            return kernels.get_kernel(repository, version=interface), repository
        except Exception as error:
            reasons.append(f"{repository} does not load from the hub ({_describe(error)})")
    if reasons:
        return "; ".join(reasons)
    name = LIMITS[version].backend
    return f"{repository} is not downloaded yet, which backend={name!r} by name would do"


def _cached_snapshots(repository: str) -> list[Path]:
    """Return the folders of a hub repository that are on this machine, the newest first."""
    cache = os.environ.get("KERNELS_CACHE")
    if cache is None:
        cache = importlib.import_module("huggingface_hub.constants").HF_HUB_CACHE
    folder = "--".join(("kernels", *repository.split("/")))
    snapshots = Path(cache, folder, "snapshots").glob("*")
    return sorted(snapshots, key=lambda path: path.stat().st_mtime, reverse=True)


def _wrap(
    version: int, device: torch.device, module: ModuleType, source: str
) -> FlashLibrary | str:
    functions: dict[str, Callable[..., Any]] = {}
    for name, needed in _PARAMETERS[version].items():
        function = getattr(module, name, None)
        if not callable(function):
            return f"{source} has no {name}"
        functions[name] = function
        missing = needed - set(inspect.signature(function).parameters)
        if missing:
            return f"{name} of {source} has no {', '.join(sorted(missing))}"
    return FlashLibrary(
        version=version,
        source=source,
        with_kvcache=functions["flash_attn_with_kvcache"],
        varlen=functions["flash_attn_varlen_func"],
        num_multiprocessors=torch.cuda.get_device_properties(device).multi_processor_count,
    )


def _window_size(window: int) -> tuple[int, int]:
    return (-1, -1) if window < 0 else (window, 0)


def _first(result: Any) -> torch.Tensor:
    """Return the output alone: some builds return the sums of the softmax beside it."""
    out: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return out


def _describe(error: Exception) -> str:
    line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {line}"
