"""How many bytes of K and V a sequence takes, under the caches of transformers and paged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_paged.core.cache_manager import KVCacheManager
from hf_paged.core.layer_group import group_layers

__all__ = ["BlockPlan", "KVFootprint", "LayerFootprint"]


@dataclass(frozen=True)
class LayerFootprint:
    """What one layer stores.

    Attributes:
        bytes_per_token: of its K and V together.
        window: tokens that a query sees, itself included; None: all before it.
    """

    bytes_per_token: int
    window: int | None = None

    def num_visible_tokens(self, num_tokens: int) -> int:
        """Return how many of ``num_tokens`` the last query sees."""
        return num_tokens if self.window is None else min(num_tokens, self.window)


@dataclass(frozen=True)
class KVFootprint:
    """What a model stores, layer by layer.

    Attributes:
        layers: the layers that store K and V.
        num_layers: all layers of the model, those that store nothing included.
    """

    layers: tuple[LayerFootprint, ...]
    num_layers: int

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token that every layer still stores."""
        return sum(layer.bytes_per_token for layer in self.layers)

    @property
    def bytes_per_old_token(self) -> int:
        """Bytes of a token that has left every window."""
        return sum(layer.bytes_per_token for layer in self.layers if layer.window is None)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer that stores K and V."""
        return tuple(layer.window for layer in self.layers)

    @property
    def is_uniform(self) -> bool:
        """Whether all layers store equally much for a token, as equal blocks require."""
        return len({layer.bytes_per_token for layer in self.layers}) == 1

    def visible_bytes(self, num_tokens: int) -> int:
        """Return the bytes of the tokens that the query after ``num_tokens`` tokens needs.

        This is also what a row of a DynamicCache or StaticCache allocates that is ``num_tokens``
        columns long: their sliding layers keep a window.
        """
        return sum(
            layer.bytes_per_token * layer.num_visible_tokens(num_tokens) for layer in self.layers
        )


class BlockPlan:
    """A memory budget cut into blocks, as a patched model's pool does it.

    Args:
        footprint: a uniform one, see :attr:`KVFootprint.is_uniform`.
        block_size: tokens a block.
        num_bytes: of the pool, the null block included.
    """

    def __init__(self, footprint: KVFootprint, block_size: int, num_bytes: int) -> None:
        assert footprint.is_uniform
        self.footprint = footprint
        self.block_size = block_size
        groups = group_layers(footprint.windows)
        bytes_per_slot = footprint.layers[0].bytes_per_token * len(groups[0].layers)
        self.num_groups = len(groups)
        self.bytes_per_block = block_size * bytes_per_slot
        self.num_blocks = max(0, num_bytes // self.bytes_per_block - 1)
        self._manager = KVCacheManager(1, block_size, groups)

    def num_blocks_of(self, num_tokens: int) -> int:
        """Return the most blocks that a sequence of ``num_tokens`` holds in all layer groups."""
        return self._manager.num_blocks_at_most(num_tokens)

    def bytes_of(self, num_tokens: int) -> int:
        """Return the most bytes that a sequence of ``num_tokens`` holds."""
        return self.num_blocks_of(num_tokens) * self.bytes_per_block

    def wasted_bytes_of(self, num_tokens: int) -> int:
        """Return how many of :meth:`bytes_of` hold no token that a query needs."""
        return self.bytes_of(num_tokens) - self.footprint.visible_bytes(num_tokens)

    def num_sequences(self, lengths: Sequence[int]) -> int:
        """Return how many sequences fit together that take their lengths from the list in turn."""
        needs = [self.num_blocks_of(length) for length in lengths]
        num_rounds, left = divmod(self.num_blocks, sum(needs))
        count = num_rounds * len(needs)
        for need in needs:
            if need > left:
                break
            left -= need
            count += 1
        return count
