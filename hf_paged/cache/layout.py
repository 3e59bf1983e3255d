"""What a model stores for a token: read from its config once, checked against its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hf_paged.core.layer_group import LayerGroup, group_layers

__all__ = ["KVLayout"]


@dataclass(frozen=True)
class KVLayout:
    """Shape of the KV cache of a model.

    Attributes:
        windows: attention window of each layer, None for full attention.
        num_kv_heads: H_kv of every layer.
        head_dim: D of every layer.
        dtype: of K and V.
        uses_sinks: whether attention has sinks, which some backends lack.
    """

    windows: tuple[int | None, ...]
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    uses_sinks: bool = False

    @property
    def num_layers(self) -> int:
        """Layers that store K and V."""
        return len(self.windows)

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """Layers that share blocks; see :func:`~hf_paged.core.layer_group.group_layers`."""
        return group_layers(self.windows)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of K and V of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes of one block: ``block_size`` tokens in each layer of a group."""
        return block_size * self.bytes_per_slot * len(self.groups[0].layers)

    @property
    def lanes(self) -> tuple[int, ...]:
        """Place of each layer in its group; layers in one lane use the same tensors."""
        lane = {layer: place for group in self.groups for place, layer in enumerate(group.layers)}
        return tuple(lane[layer] for layer in range(self.num_layers))

    def bytes_on_devices(
        self, block_size: int, layer_devices: Sequence[torch.device]
    ) -> dict[torch.device, int]:
        """Bytes of one block on each device, given where the layers are."""
        lanes: dict[torch.device, set[int]] = {}
        for lane, device in zip(self.lanes, layer_devices, strict=True):
            lanes.setdefault(device, set()).add(lane)
        return {
            device: block_size * self.bytes_per_slot * len(held) for device, held in lanes.items()
        }
