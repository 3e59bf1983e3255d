"""Decoding as CUDA graphs: replays over changed tables against the same launches, bit for bit.

On a CPU a stand-in runs the captured function again, over the same static buffer: padding, static
addresses and the bookkeeping of a replay are checked there, a real capture is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from runner import Check, Machine, expect
from small_models import build, generate, patched, prompts

from hf_paged.backends.base import LayerView
from hf_paged.backends.triton import TritonBackend
from hf_paged.backends.upload import send, size_of
from hf_paged.cache.runtime import runtime_of
from hf_paged.cache.step_metadata import StepMetadata
from hf_paged.generation import device_graph
from hf_paged.integration import graphing

BLOCK_SIZE, NUM_ROWS = 16, 8


class Rerun:
    """Implements :class:`hf_paged.generation.device_graph.DeviceGraph` by running again."""

    def __init__(self, *_: object) -> None:
        self._function: Callable[[], torch.Tensor] | None = None
        self._out: torch.Tensor | None = None

    def capture(self, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        self._function, self._out = function, function()
        return self._out

    def replay(self) -> None:
        assert self._function is not None and self._out is not None
        with torch.no_grad():
            self._out.copy_(self._function())


@contextmanager
def graphs_possible(machine: Machine) -> Iterator[None]:
    """Let a CPU count as a device with graphs."""
    if machine.is_cuda:
        yield
        return
    with (
        mock.patch.object(device_graph, "make_graph", Rerun),
        mock.patch.object(graphing, "GRAPH_DEVICE_TYPES", frozenset({"cpu"})),
    ):
        yield


def replays(machine: Machine) -> str:
    """One layer: write and attend; rows come, go, grow and move between two replays."""
    width, num_kv_heads, head_dim = (64, 4, 128) if machine.is_cuda else (8, 1, 32)
    num_replays = 200 if machine.is_cuda else 4
    null_block = NUM_ROWS * width
    dtype, device, backend = torch.bfloat16, machine.device, TritonBackend()
    random = np.random.default_rng(0)
    sizes = (BLOCK_SIZE, num_kv_heads, head_dim)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape).to(device, dtype)

    pool = draw(null_block + 1, 2, *sizes)
    view = LayerView(pool[:, 0], pool[:, 1])
    query = draw(NUM_ROWS, 4 * num_kv_heads, head_dim)
    key, value = draw(NUM_ROWS, *sizes[1:]), draw(NUM_ROWS, *sizes[1:])

    def step(num_live: int) -> StepMetadata:
        """Return rows of random lengths in random blocks; others pad the batch."""
        lens = random.integers(1, width * BLOCK_SIZE + 1, NUM_ROWS).astype(np.int32)
        lens[num_live:] = 0
        tables = random.permutation(null_block).astype(np.int32).reshape(NUM_ROWS, width)
        last = np.maximum(lens - 1, 0)
        slots = tables[np.arange(NUM_ROWS), last // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE
        slots = np.where(lens > 0, slots + last % BLOCK_SIZE, -1)
        tables[num_live:] = null_block
        ones = np.ones(NUM_ROWS, np.int32)
        return StepMetadata(BLOCK_SIZE, null_block, lens, ones, [tables], [slots])

    steps = [step(int(random.integers(1, NUM_ROWS + 1))) for _ in range(num_replays)]
    first = step(3)
    buffer = torch.empty(size_of(first.arrays()), dtype=torch.uint8, device=device)
    tensors = send(first.arrays(), device, into=buffer)
    shown = step(NUM_ROWS)
    shown.seq_lens = np.full(NUM_ROWS, width * BLOCK_SIZE, np.int32)
    shown.place(device, tensors)
    captured = shown.of_group(0, device)

    def layer() -> torch.Tensor:
        backend.write(key, value, view, captured)
        return backend.forward(query, key, value, view, captured, scale=head_dim**-0.5)

    layer()  # kernels are compiled
    before = pool.clone()
    with graphs_possible(machine):
        graph = device_graph.make_graph(device, device_graph.make_pool(device))
    out = graph.capture(layer)
    found = out.new_empty(num_replays, *out.shape)
    pool.copy_(before)
    with machine.no_host_sync():
        for index, each in enumerate(steps):
            send(each.arrays(), device, into=buffer)
            graph.replay()
            found[index].copy_(out)
    pool_after = pool.clone()
    pool.copy_(before)
    for index, each in enumerate(steps):
        send(each.arrays(), device, into=buffer)
        expect(torch.equal(layer(), found[index]), f"replay {index} has other bits")
        is_padding = torch.from_numpy(each.seq_lens == 0).to(device)
        expect(not found[index][is_padding].any(), f"replay {index}: padding does not give 0")
        expect(bool(found[index].isfinite().all()), f"replay {index} is not finite")
    expect(torch.equal(pool, pool_after), "replays wrote something else into the pool")
    expect(not torch.equal(found[0], found[1]), "all replays gave the same: nothing is shown here")
    how = "equal bits, no host sync" if machine.is_cuda else "run again by a stand-in"
    return f"{num_replays} replays over changed tables, {how}"


def padding(machine: Machine) -> str:
    """Rows and columns that pad a step change no bit of the others, at a fixed number of splits."""
    from attention import small
    from paged_rows import PagedRows

    lens = [(40, 1), (15, 1), (16, 1)]
    backend = TritonBackend(batch_invariant=True)
    rows = PagedRows(lens, backend, machine.device, garbage=None, **small(machine))
    metadata = rows.metadata
    alone = StepMetadata(
        metadata.block_size,
        metadata.null_block,
        metadata.seq_lens.cpu().numpy(),
        np.ones(3, np.int32),
        [metadata.block_tables.cpu().numpy()],
        [metadata.slot_mapping.cpu().numpy()],
    )
    rows.write()
    expected = rows.attend()
    padded = alone.padded(4, 8)
    buffer = torch.empty(size_of(padded.arrays()), dtype=torch.uint8, device=machine.device)
    padded.place(machine.device, send(padded.arrays(), machine.device, into=buffer))
    rows.metadata = padded.of_group(0, machine.device)
    more = [torch.cat([each, each[:1]]) for each in (rows.query, rows.key, rows.value)]
    rows.query, rows.key, rows.value = more
    before = rows.pool.clone()
    rows.write()
    out = rows.attend()
    expect(torch.equal(out[:3], expected), "padding changes the bits of rows")
    expect(not out[3].any(), "a padded row does not give 0")
    expect(torch.equal(rows.pool.view(torch.uint8), before.view(torch.uint8)), "padding is stored")
    return "3 rows padded to 4, 3 columns to 8"


def model(machine: Machine) -> str:
    """The project's own graphs under generate()."""
    words = []
    for family in ("llama", "gemma2") if machine.is_cuda else ("gemma2",):
        batch = prompts(machine, (20, 3, 9))
        tiny = build(family, machine)
        num_new = 40 if machine.is_cuda else 6
        expected = generate(tiny, batch, max_new_tokens=num_new)
        with graphs_possible(machine), patched(tiny, cuda_graphs=True):
            for _ in range(2 if machine.is_cuda else 1):
                got = generate(tiny, batch, max_new_tokens=num_new)
                expect(torch.equal(got, expected), f"{family}: other tokens in replays")
            graphs: Any = runtime_of(tiny).packed_model._graphs  # type: ignore[union-attr]
            expect(graphs is not None, f"{family}: there are no graphs")
            expect(graphs.num_replayed > 0, f"{family}: nothing was replayed")
            words.append(f"{family}: {graphs.num_captured} graphs, {graphs.num_replayed} replays")
    return "; ".join(words)


CHECKS = (
    Check("graphs/replays", replays),
    Check("graphs/padding", padding),
    Check("graphs/model", model),
)
