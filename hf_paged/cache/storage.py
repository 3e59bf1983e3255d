"""The pool's tensors: made when first written, copied block by block, given back by the page.

A backend chooses between K and V of each layer apart, and block-major, where all that a device
holds of a block is one run of memory and a copy of it one copy:

    apart           K of layer 0 [block 0 | block 1 | ...]    V of layer 0 [...]    K of layer 1 ...
    block-major     [block 0: K0 V0 K1 V1 ... | block 1: K0 V0 K1 V1 ... | ...]

On a CPU each tensor is a private anonymous mapping. The system commits a page when it is first
written, so a pool that may grow to 12 GiB costs nothing until it does, and :meth:`KVStorage.trim`
can give back the pages of free blocks while the tensor stays where it is.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from hf_paged.backends.base import AttentionBackend, LayerView
from hf_paged.backends.upload import send
from hf_paged.cache.layout import KVLayout
from hf_paged.errors import UnsupportedModelError

__all__ = ["KVStorage"]


class KVStorage:
    """K and V of every block, one :class:`LayerView` a layer.

    A block belongs to one layer group at a time, so layer ``i`` of each group uses the same
    tensors.

    Args:
        backend: decides the layout.
        layout: what a token needs, as the config says.
        num_blocks: usable blocks; one more is made, the null block.
        block_size: tokens a block.
        layer_devices: where each layer is to store, as far as it is known; None: all on one device.
            A layer that shows up elsewhere gets tensors there.

    Attributes:
        generation: counts how often all tensors were dropped; what has their addresses is stale
            when it has changed.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        layout: KVLayout,
        num_blocks: int,
        block_size: int,
        layer_devices: Sequence[torch.device] | None = None,
    ) -> None:
        self._backend = backend
        self._layout = layout
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._lock = threading.Lock()
        self._lane = layout.lanes
        self._layer_devices = layer_devices
        self._views: dict[tuple[int, torch.device], LayerView] = {}
        self._tensors: list[torch.Tensor] = []
        self.generation = 0
        self._poisoned: set[int] = set()
        self._empty_states: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._mappings: list[tuple[mmap.mmap, int]] = []

    def view(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> LayerView:
        """Return the tensors of ``layer`` on the device of ``key``, made if they are new.

        Args:
            layer: index in the model.
            key: [..., H_kv, D], what the layer is about to store.
            value: [..., H_kv, D_v].

        Raises:
            UnsupportedModelError: the layer brings more than its config announced.
        """
        lane = (self._lane[layer], key.device)
        view = self._views.get(lane)
        if layer not in self._empty_states:
            self._empty_states[layer] = (_empty_state(key), _empty_state(value))
        if view is None:
            with self._lock:
                view = self._views.get(lane)
                if view is None:
                    self._check_announced(layer, key, value)
                    if self._backend.is_block_major:
                        self._views |= self._make_block_major(lane, key, value)
                    else:
                        self._views[lane] = LayerView(
                            self._make_cache(key), self._make_cache(value)
                        )
                    view = self._views[lane]
        return view

    def fits(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether the tensors of ``layer`` have the dtype and shape of what it stores now."""
        view = self._views.get((self._lane[layer], key.device))
        if view is None:
            return True
        return all(
            cache.dtype == new.dtype
            and cache.shape
            == self._backend.cache_shape(
                self._num_blocks + 1, self._block_size, new.shape[-2], new.shape[-1]
            )
            for cache, new in ((view.key_cache, key), (view.value_cache, value))
        )

    def empty_states(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K [0, H_kv, 0, D] and V of a layer that has stored something."""
        return self._empty_states[layer]

    def tensors(self) -> list[torch.Tensor]:
        """Return what exists by now, [num_blocks + 1, ...] each, in the order in which it was made.

        Together they hold K and V of all layers; a block is contiguous in each of them.
        """
        with self._lock:  # the first forward of another thread may be adding some
            return list(self._tensors)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, target) each, in every layer that has them."""
        if not copies:
            return
        pairs = np.array(copies, dtype=np.int64).T.copy()
        on_device: dict[torch.device, torch.Tensor] = {}
        for tensor in self.tensors():
            if tensor.device not in on_device:
                (on_device[tensor.device],) = send([pairs], tensor.device)
            self._backend.copy_blocks(tensor, *on_device[tensor.device])

    def poison(self, block_ids: Iterable[int]) -> None:
        """Fill blocks with NaN, in tensors that are made later too (debug mode).

        Whoever reads one without writing it first will show it.
        """
        ids = list(block_ids)
        with self._lock:
            self._poisoned.update(ids)
        for tensor in self.tensors():
            tensor[ids] = torch.nan

    def trim(self, free_blocks: Sequence[int]) -> None:
        """Give the whole pages of free blocks back to the system; they read as zeros afterwards.

        Args:
            free_blocks: ids, ascending.
        """
        for mapping, bytes_per_block in tuple(self._mappings):
            for first, last in _runs(free_blocks):
                # A page that a used block shares stays.
                begin = -(-first * bytes_per_block // mmap.PAGESIZE) * mmap.PAGESIZE
                end = (last + 1) * bytes_per_block // mmap.PAGESIZE * mmap.PAGESIZE
                if end > begin:
                    mapping.madvise(mmap.MADV_DONTNEED, begin, end - begin)
        self._backend.release_scratch()
        if any(tensor.device.type == "cuda" for tensor in self.tensors()):
            torch.cuda.empty_cache()

    def clear(self) -> None:
        """Drop all tensors; the next :meth:`view` makes new ones."""
        with self._lock:
            self.generation += 1
            self._views.clear()
            self._tensors.clear()
            self._empty_states.clear()
            self._mappings.clear()
        self._backend.release_scratch()

    def _check_announced(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        bytes_per_slot = sum(new.shape[-2:].numel() * new.itemsize for new in (key, value))
        if bytes_per_slot > self._layout.bytes_per_slot:
            raise UnsupportedModelError(
                f"layer {layer} stores {bytes_per_slot} bytes a token (keys "
                f"{tuple(key.shape[-2:])}, values {tuple(value.shape[-2:])}, {key.dtype}), but the "
                f"config announces {self._layout.bytes_per_slot} ({self._layout.num_kv_heads} "
                f"heads of {self._layout.head_dim}, {self._layout.dtype}). If the dtype changed "
                "after patching, unpatch and patch again; otherwise the architecture needs a "
                "ModelSpec."
            )

    def _block_shape(self, like: torch.Tensor) -> torch.Size:
        shape = self._backend.cache_shape(1, self._block_size, *like.shape[-2:])
        return torch.Size(shape[1:])

    def _make_cache(self, like: torch.Tensor) -> torch.Tensor:
        return self._make_tensor(self._block_shape(like), like)

    def _make_block_major(
        self, lane: tuple[int, torch.device], key: torch.Tensor, value: torch.Tensor
    ) -> dict[tuple[int, torch.device], LayerView]:
        """Return a view for ``lane`` and for all others that its device is known to hold."""
        device = key.device
        lanes = sorted(
            index
            for layer, index in enumerate(self._lane)
            if self._layer_devices is None or self._layer_devices[layer] == device
        )
        made = {index for index, where in self._views if where == device}
        lanes = [index for index in dict.fromkeys(lanes) if index not in made]
        if lane[0] not in lanes:
            lanes = [lane[0]]
        shapes = (self._block_shape(key), self._block_shape(value))
        sizes = [shape.numel() for shape in shapes]
        tensor = self._make_tensor(torch.Size([len(lanes) * sum(sizes)]), key)
        parts = tensor.split(sizes * len(lanes), dim=1)
        return {
            (index, device): LayerView(
                parts[2 * place].unflatten(1, shapes[0]),
                parts[2 * place + 1].unflatten(1, shapes[1]),
            )
            for place, index in enumerate(lanes)
        }

    def _make_tensor(self, block_shape: torch.Size, like: torch.Tensor) -> torch.Tensor:
        """Return zeros [num_blocks + 1, *block_shape], dtype and device those of ``like``."""
        num_blocks = self._num_blocks + 1
        shape = torch.Size((num_blocks, *block_shape))
        num_bytes = shape.numel() * like.itemsize
        # Tensors made in inference mode could not be written outside of it.
        with torch.inference_mode(False), torch.no_grad():
            if like.device.type == "cpu" and hasattr(mmap, "MAP_PRIVATE"):
                mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                tensor = torch.frombuffer(mapping, dtype=like.dtype).view(shape)
                if hasattr(mmap, "MADV_DONTNEED"):
                    self._mappings.append((mapping, num_bytes // num_blocks))
            else:
                tensor = torch.zeros(shape, dtype=like.dtype, device=like.device)
            if self._poisoned:
                tensor[sorted(self._poisoned)] = torch.nan
        self._tensors.append(tensor)
        return tensor


def _empty_state(like: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.empty(
            0, like.shape[-2], 0, like.shape[-1], dtype=like.dtype, device=like.device
        )


def _runs(ids: Sequence[int]) -> list[tuple[int, int]]:
    """Return (first, last) of each run of consecutive ids.

    >>> _runs([0, 1, 2, 5, 7, 8])
    [(0, 2), (5, 5), (7, 8)]
    """
    runs: list[tuple[int, int]] = []
    for block_id in ids:
        if runs and runs[-1][1] == block_id - 1:
            runs[-1] = (runs[-1][0], block_id)
        else:
            runs.append((block_id, block_id))
    return runs
