"""Finds out whether a backend's decoding attention can be captured, before a model depends on it.

Libraries change: a host sync inside a kernel's wrapper breaks a capture, a length that the wrapper
reads once is wrong at the next step. Both show in a replay over other rows than those captured.
"""

from __future__ import annotations

import numpy as np
import torch

from hf_paged.backends.base import AttentionBackend, LayerView
from hf_paged.backends.metadata import AttentionMetadata
from hf_paged.backends.upload import send, size_of
from hf_paged.cache.layout import KVLayout
from hf_paged.cache.step_metadata import StepMetadata
from hf_paged.generation import device_graph

__all__ = ["probe_backend"]

_NUM_ROWS, _WIDTH = 4, 8
_TOLERANCE = 1e-6


def probe_backend(
    backend: AttentionBackend, layout: KVLayout, block_size: int, device: torch.device
) -> str | None:
    """Return why decoding steps of ``backend`` cannot run as graphs, or None if they can.

    Args:
        backend: writes and attends to a few blocks of its own.
        layout: of the model.
        block_size: tokens a block.
        device: of the model.
    """
    if not backend.supports_graphs:
        return f"backend {backend.name!r} reads lengths on the host"
    null_block = _NUM_ROWS * _WIDTH
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, layout.dtype)

    def cache() -> torch.Tensor:
        shape = (layout.num_kv_heads, layout.head_dim)
        return draw(*backend.cache_shape(null_block + 1, block_size, *shape))

    states = [draw(_NUM_ROWS, layout.num_kv_heads, layout.head_dim) for _ in range(3)]
    view = LayerView(cache(), cache())
    window = next((window for window in layout.windows if window is not None), None)

    def attend(metadata: AttentionMetadata) -> torch.Tensor:
        query, key, value = states
        backend.write(key, value, view, metadata)
        return backend.forward(query, key, value, view, metadata, scale=0.1, window=window)

    arrays = _rows([block_size, 1, 2, 0], block_size).arrays()
    buffer = torch.empty(size_of(arrays), dtype=torch.uint8, device=device)
    shown = _rows([_WIDTH * block_size] * _NUM_ROWS, block_size)
    shown.place(device, send(arrays, device, into=buffer))
    captured = shown.of_group(0, device)
    try:
        attend(captured)
        graph = device_graph.make_graph(device, device_graph.make_pool(device))
        out = graph.capture(lambda: attend(captured))
        rows = _rows([_WIDTH * block_size, block_size + 1, 0, 3], block_size)
        send(rows.arrays(), device, into=buffer)
        graph.replay()
        expected = attend(rows.of_group(0, device))
        distance = float((out - expected).float().norm() / expected.float().norm())
    except Exception as error:  # whatever the library or the device raises
        return f"{type(error).__name__}: {str(error).strip() or 'no message'}"
    if not distance <= _TOLERANCE:
        return f"a replay over other rows differs from the step itself (relative L2 {distance:.1e})"
    return None


def _rows(seq_lens: list[int], block_size: int) -> StepMetadata:
    """Return a decoding step of rows with blocks of their own; those of length 0 are padding."""
    lens = np.array(seq_lens, np.int32)
    tables = np.arange(_NUM_ROWS * _WIDTH, dtype=np.int32).reshape(_NUM_ROWS, _WIDTH)
    last = np.maximum(lens - 1, 0)
    slots = tables[np.arange(_NUM_ROWS), last // block_size].astype(np.int64) * block_size
    slots = np.where(lens > 0, slots + last % block_size, -1)
    ones = np.ones(_NUM_ROWS, np.int32)
    return StepMetadata(block_size, _NUM_ROWS * _WIDTH, lens, ones, [tables], [slots])
