"""Room outside of the pool for the blocks of rows that give way to others.

On a CPU it is a temporary file, mapped into memory: what is stored there takes disk, not memory,
once the system needs the memory (TMPDIR says where; a tmpfs is memory). Beside an accelerator it is
pinned host memory.
"""

from __future__ import annotations

import heapq
import os
import tempfile
from collections.abc import Iterable
from typing import Any

import torch

from hf_paged.cache.copy_stream import CopyStream, copy_stream
from hf_paged.cache.storage import KVStorage

__all__ = ["BlockFile"]


class BlockFile:
    """Slots for blocks, taken and freed like blocks of the pool.

    Implements :class:`hf_paged.core.row_swap.BlockStore`; the pool's lock must be held. Beside an
    accelerator nobody waits for a copy but the forward that writes a block which is being copied
    out, or reads one that is being copied in.

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
        self._buffers: list[torch.Tensor] = []
        self._streams: dict[torch.device, CopyStream] = {}
        self._leaving: dict[int, list[tuple[torch.device, Any]]] = {}
        self.num_stored = self.num_loaded = 0

    def store(self, block_ids: list[int]) -> list[int] | None:
        """Copy blocks out; return their slots, or None if there is no room for all.

        The blocks may be freed at once: see :meth:`await_blocks`.
        """
        if len(block_ids) > len(self._free):
            return None
        pairs = self._pairs()
        slots = [heapq.heappop(self._free) for _ in block_ids]
        try:
            for buffer, tensor in pairs:
                event = self._copy(tensor, block_ids, buffer, slots)
                for block in block_ids:
                    self._leaving.setdefault(block, []).append((tensor.device, event))
        except BaseException:
            self.free(slots)
            raise
        self.num_stored += len(block_ids)
        return slots

    def load(self, slots: list[int], block_ids: list[int]) -> None:
        """Copy blocks in; what is stored stays."""
        for buffer, tensor in self._pairs():
            event = self._copy(buffer, slots, tensor, block_ids)
            self._streams[tensor.device].make_compute_wait(event)
        self.num_loaded += len(block_ids)

    def free(self, slots: list[int]) -> None:
        """Forget what is stored in ``slots``."""
        for slot in slots:
            heapq.heappush(self._free, slot)

    def await_blocks(self, block_ids: Iterable[int]) -> None:
        """Let what is computed from now on wait until these blocks have been copied out."""
        for block in self._leaving.keys() & set(block_ids):
            for device, event in self._leaving.pop(block):
                self._streams[device].make_compute_wait(event)

    def _copy(
        self, source: torch.Tensor, read: list[int], target: torch.Tensor, written: list[int]
    ) -> Any:
        """Queue a copy of blocks between the pool and a buffer; return its event."""
        device = source.device if source.device.type != "cpu" else target.device
        if device not in self._streams:
            self._streams[device] = copy_stream(device)

        def copies() -> None:
            for read_block, written_block in zip(read, written, strict=True):
                target[written_block].copy_(source[read_block], non_blocking=True)

        return self._streams[device].queue(copies)

    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return a buffer for each tensor of the pool, and the tensor."""
        tensors = self._storage.tensors()
        for index, tensor in enumerate(tensors):
            buffer = self._buffers[index] if index < len(self._buffers) else None
            if buffer is None or buffer.dtype != tensor.dtype or buffer[0].shape != tensor[0].shape:
                self._buffers[index : index + 1] = [self._make_buffer(tensor)]
        return list(zip(self._buffers, tensors, strict=False))

    def _make_buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        shape = torch.Size((self._num_slots, *tensor.shape[1:]))
        # Tensors made in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            if tensor.device.type != "cpu":
                return torch.empty(shape, dtype=tensor.dtype, pin_memory=True)
            with tempfile.NamedTemporaryFile(prefix="hf_paged") as file:
                # A file with holes would end the process where the disk is full, at a write.
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, shape.numel() * tensor.itemsize)
                # The mapping keeps the file alive after its name is gone.
                mapped = torch.from_file(
                    file.name, shared=True, size=shape.numel(), dtype=tensor.dtype
                )
            return mapped.view(shape)
