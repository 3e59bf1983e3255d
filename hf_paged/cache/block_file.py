"""Room outside of the pool for the blocks of rows that give way to others.

On a CPU it is a temporary file, mapped into memory: what is stored there takes disk, not memory,
once the system needs the memory (TMPDIR says where; a tmpfs is memory). Beside an accelerator it is
pinned host memory.
"""

from __future__ import annotations

import heapq
import os
import tempfile

import torch

from hf_paged.cache.storage import KVStorage

__all__ = ["BlockFile"]


class BlockFile:
    """Slots for blocks, taken and freed like blocks of the pool.

    Implements :class:`hf_paged.core.row_swap.BlockStore`; the pool's lock must be held.

    Args:
        storage: of the pool.
        num_slots: blocks that it holds at most.

    Attributes:
        num_stored: blocks copied out so far.
        num_loaded: blocks copied in so far.
    """

    def __init__(self, storage: KVStorage, num_slots: int) -> None:
        self._storage = storage
        self._free = list(range(num_slots))
        self._num_slots = num_slots
        self._buffers: dict[tuple[int, torch.device, int], torch.Tensor] = {}
        self.num_stored = self.num_loaded = 0

    def store(self, block_ids: list[int]) -> list[int] | None:
        """Copy blocks out; return their slots, or None if there is no room for all."""
        if len(block_ids) > len(self._free):
            return None
        pairs = self._pairs()
        slots = [heapq.heappop(self._free) for _ in block_ids]
        try:
            for buffer, cache in pairs:
                blocks = cache[torch.tensor(block_ids, dtype=torch.int64, device=cache.device)]
                buffer[torch.tensor(slots, dtype=torch.int64)] = blocks.to(buffer.device)
        except BaseException:
            self.free(slots)
            raise
        self.num_stored += len(block_ids)
        return slots

    def load(self, slots: list[int], block_ids: list[int]) -> None:
        """Copy blocks in; what is stored stays."""
        for buffer, cache in self._pairs():
            blocks = buffer[torch.tensor(slots, dtype=torch.int64)]
            at = torch.tensor(block_ids, dtype=torch.int64, device=cache.device)
            cache[at] = blocks.to(cache.device)
        self.num_loaded += len(block_ids)

    def free(self, slots: list[int]) -> None:
        """Forget what is stored in ``slots``."""
        for slot in slots:
            heapq.heappush(self._free, slot)

    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the buffer of each cache tensor of the pool, and the tensor."""
        pairs = []
        for lane, view in self._storage.views().items():
            for part, cache in enumerate((view.key_cache, view.value_cache)):
                buffer = self._buffers.get((*lane, part))
                if (
                    buffer is None
                    or buffer.dtype != cache.dtype
                    or buffer[0].shape != cache[0].shape
                ):
                    buffer = self._buffers[(*lane, part)] = self._make_buffer(cache)
                pairs.append((buffer, cache))
        return pairs

    def _make_buffer(self, cache: torch.Tensor) -> torch.Tensor:
        shape = torch.Size((self._num_slots, *cache.shape[1:]))
        # Tensors made in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            if cache.device.type != "cpu":
                return torch.empty(shape, dtype=cache.dtype, pin_memory=True)
            with tempfile.NamedTemporaryFile(prefix="hf_paged") as file:
                # A file with holes would end the process where the disk is full, at a write.
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, shape.numel() * cache.itemsize)
                # The mapping keeps the file alive after its name is gone.
                mapped = torch.from_file(
                    file.name, shared=True, size=shape.numel(), dtype=cache.dtype
                )
            return mapped.view(shape)
