"""Attention over blocks in Triton: runs wherever torch brings Triton for a CUDA device."""

from __future__ import annotations

import importlib.util

import torch

from hf_paged.backends import block_ops, triton_ops
from hf_paged.backends.base import LayerView
from hf_paged.backends.kernel_backend import KernelBackend
from hf_paged.backends.limits import KernelLimits
from hf_paged.backends.metadata import AttentionMetadata

__all__ = ["LIMITS", "TritonBackend"]

LIMITS = KernelLimits(
    backend="triton",
    dtypes=(torch.bfloat16, torch.float16, torch.float32),
    block_size_multiple=16,
    max_head_dim=256,
    min_capability=(8, 0),
)


class TritonBackend(KernelBackend):
    """fp32 sums of fp32, bf16 and fp16.

    Rows with one new token are split over their keys where few rows would leave the device idle;
    with ``batch_invariant`` they never are.
    """

    name = "triton"
    block_size_multiple = LIMITS.block_size_multiple
    default_block_size = 16
    LIMITS = LIMITS

    @classmethod
    def unavailable_reason(cls, device: torch.device) -> str | None:
        """Needs Triton, and a CUDA device of compute capability 8.0 or Triton's interpreter."""
        interprets = device.type == "cpu" and block_ops.triton_interprets()
        if device.type != "cuda" and not interprets:
            return "it computes on CUDA devices (TRITON_INTERPRET=1 tries it on a CPU, slowly)"
        if importlib.util.find_spec("triton") is None:
            return "the package triton, which torch brings for CUDA on Linux, is not installed"
        if interprets:
            return None
        if torch.version.hip is not None:
            return "its kernels are made for CUDA, and this is a build for ROCm"
        if not torch.cuda.is_available():
            return "torch finds no CUDA device"
        return LIMITS.refuse_capability(torch.cuda.get_device_capability(device))

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
        """Attend rows with one new token and rows with more in a launch each."""
        LIMITS.check_layer(
            query,
            key,
            value,
            view,
            metadata,
            window=window,
            softcap=softcap,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
        )
        out: torch.Tensor = triton_ops.attention(
            query,
            key,
            value,
            view.key_cache,
            view.value_cache,
            metadata.block_tables,
            metadata.seq_lens,
            metadata.cu_seqlens_q,
            max(metadata.query_lens_list),
            1 in metadata.query_lens_list,
            1 if self.batch_invariant else None,
            scale,
            window,
            softcap,
            sinks,
            alibi_slopes,
        )
        return out
