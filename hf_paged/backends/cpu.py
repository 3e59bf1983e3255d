"""Attention over blocks in native code that reads each byte of K and V once: the CPU's default."""

from __future__ import annotations

import torch

from hf_paged.backends import cpu_kernels, cpu_ops, native
from hf_paged.backends.base import AttentionBackend, LayerView
from hf_paged.backends.cpu_checks import supports
from hf_paged.backends.metadata import AttentionMetadata
from hf_paged.backends.torch_gather import TorchGatherBackend
from hf_paged.errors import InputMismatchError

__all__ = ["CpuBackend"]


class CpuBackend(AttentionBackend):
    """K and V apart as [num_blocks, H_kv, block_size, D], fp32 arithmetic on fp32, bf16 and fp16.

    What the kernels lack (float64, autocast to another dtype) runs on the code of the ``torch``
    backend, over the same blocks; so does what torch itself refuses, mixed dtypes.
    """

    name = "cpu"
    supports_batch_invariance = True

    def __init__(self, *, batch_invariant: bool = False) -> None:
        super().__init__(batch_invariant=batch_invariant)
        self._torch = TorchGatherBackend()

    @classmethod
    def unavailable_reason(cls, device: torch.device) -> str | None:
        """Needs a CPU and a compiled library that fits it."""
        if device.type != "cpu":
            return "it computes on a CPU only"
        return native.unavailable_reason()

    def cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> tuple[int, ...]:
        """Return HND: one contiguous row a block and head."""
        return self._torch.cache_shape(num_blocks, block_size, num_kv_heads, head_dim)

    def write(
        self, key: torch.Tensor, value: torch.Tensor, view: LayerView, metadata: AttentionMetadata
    ) -> None:
        """Store new tokens, one copy of D elements a token and head."""
        if not supports(key, value, view.key_cache, view.value_cache):
            self._torch.write(key, value, view, metadata)
        elif torch.compiler.is_compiling():
            cpu_ops.write(key, value, view.key_cache, view.value_cache, metadata.slot_mapping)
        else:
            cpu_kernels.write(key, value, view, metadata)

    def forward(
        self,
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
    ) -> torch.Tensor:
        """Attend all rows in one call, whatever their numbers of new tokens."""
        if not self._is_native(query, key, value, view):
            return self._forward_in_torch(
                query, key, value, view, metadata, scale, window, softcap, sinks, alibi_slopes
            )
        if torch.compiler.is_compiling():
            out: torch.Tensor = cpu_ops.attention(
                query,
                key,
                value,
                view.key_cache,
                view.value_cache,
                metadata.block_tables,
                metadata.seq_lens,
                metadata.cu_seqlens_q,
                scale,
                window,
                softcap,
                sinks,
                alibi_slopes,
                self.batch_invariant,
            )
            return out
        return cpu_kernels.attend(
            query,
            key,
            value,
            view,
            metadata,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
            batch_invariant=self.batch_invariant,
        )

    def gather(self, view: LayerView, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Index the caches by block and offset."""
        return self._torch.gather(view, slots)

    def copy_blocks(self, cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy whole blocks in all threads."""
        cpu_kernels.copy_blocks(cache, source, target)

    def release_scratch(self) -> None:
        """Give back the workspace of the calling thread and the gather buffers of all."""
        cpu_kernels.release_workspaces()
        self._torch.release_scratch()

    def _is_native(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, view: LayerView
    ) -> bool:
        if not supports(query, key, value, view.key_cache, view.value_cache):
            return False
        return not torch.is_autocast_enabled("cpu") or (
            torch.get_autocast_dtype("cpu") == query.dtype
        )

    def _forward_in_torch(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        view: LayerView,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
        alibi_slopes: torch.Tensor | None,
    ) -> torch.Tensor:
        if self.batch_invariant:
            raise InputMismatchError(
                f"batch_invariant=True needs fp32, bf16 or fp16 in query, key and cache alike and "
                f"no autocast to another dtype, got {query.dtype}, {key.dtype} and "
                f"{view.key_cache.dtype}: convert the model, or patch without it."
            )
        return self._torch.forward(
            query,
            key,
            value,
            view,
            metadata,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
        )
