"""What the backends for accelerators have in common: NHD blocks, limits, stores and copies."""

from __future__ import annotations

from typing import ClassVar

import torch

from hf_paged.backends import block_ops
from hf_paged.backends.base import AttentionBackend, LayerView
from hf_paged.backends.limits import KernelLimits
from hf_paged.backends.metadata import AttentionMetadata

__all__ = ["KernelBackend"]


class KernelBackend(AttentionBackend):
    """K and V of a layer as [num_blocks, block_size, H_kv, D], read in place by some kernels."""

    supports_batch_invariance = True
    is_block_major = True
    supports_graphs = True
    LIMITS: ClassVar[KernelLimits]
    """What the kernels take; ``forward`` must ask :meth:`KernelLimits.check_layer`."""

    def check_model(
        self,
        *,
        device: torch.device,
        dtype: torch.dtype,
        head_dim: int,
        block_size: int,
        uses_sinks: bool = False,
    ) -> None:
        """Refuse what :attr:`LIMITS` excludes."""
        self.LIMITS.check_model(
            device=device,
            dtype=dtype,
            head_dim=head_dim,
            block_size=block_size,
            uses_sinks=uses_sinks,
        )

    def cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> tuple[int, ...]:
        """Return NHD: the tokens of a block one after the other."""
        return (num_blocks, block_size, num_kv_heads, head_dim)

    def write(
        self, key: torch.Tensor, value: torch.Tensor, view: LayerView, metadata: AttentionMetadata
    ) -> None:
        """Store new tokens in one launch."""
        block_ops.write(key, value, view.key_cache, view.value_cache, metadata.slot_mapping)

    def gather(self, view: LayerView, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Index the caches by block and offset."""
        return block_ops.gather(view, slots)

    def copy_blocks(self, cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy whole blocks of everything that a device holds in one launch."""
        block_ops.copy_blocks(cache, source, target)
