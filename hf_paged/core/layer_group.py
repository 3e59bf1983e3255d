"""Which layers share a block: a group of layers with the same attention window.

One pool of equal blocks serves every group, so memory moves freely between full and sliding
layers. For that every group has the same number of layers: Gemma 3 with 4 full and 22 sliding
layers becomes one full group of 4 and six sliding groups of 4 (the last one of 2). A model whose
layers are all alike is one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["LayerGroup", "group_layers"]


@dataclass(frozen=True)
class LayerGroup:
    """Layers whose K and V lie in the same blocks.

    Attributes:
        layers: their indices in the model, ascending.
        window: tokens that a query sees, itself included; None: all before it.
    """

    layers: tuple[int, ...]
    window: int | None

    def num_hidden_tokens(self, num_tokens: int) -> int:
        """Return how many leading tokens no query at index ``num_tokens`` or later can see."""
        return 0 if self.window is None else max(0, num_tokens - self.window + 1)


def group_layers(windows: Sequence[int | None]) -> tuple[LayerGroup, ...]:
    """Group layers by window into groups of equal size, full attention first.

    >>> group_layers([8, None, 8, None])
    (LayerGroup(layers=(1, 3), window=None), LayerGroup(layers=(0, 2), window=8))

    Args:
        windows: the window of each layer of the model, None for full attention.
    """
    layers_of: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        layers_of.setdefault(window, []).append(layer)
    size = min(len(layers) for layers in layers_of.values())
    return tuple(
        LayerGroup(tuple(layers[start : start + size]), window)
        for window, layers in sorted(layers_of.items(), key=lambda item: item[0] or 0)
        for start in range(0, len(layers), size)
    )
