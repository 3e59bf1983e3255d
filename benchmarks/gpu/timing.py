"""How fast: decoding against the copy bandwidth, prompts against SDPA, whole decoding steps.

Contenders take turns, so that a slow moment meets each of them; every figure is a median. On a CPU
the same code runs over a few tokens in an interpreter: that it runs is all that this shows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from runner import Check, Machine, expect
from transformers import AutoModelForCausalLM, LlamaConfig

import hf_paged
from hf_paged.backends.base import AttentionBackend, LayerView
from hf_paged.backends.metadata import AttentionMetadata
from hf_paged.backends.registry import create_backend

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
"""Of one layer of an 8B Llama."""
ROUNDS = 15
INTERPRETED = "; interpreted, so no figure means anything"

Contenders = dict[str, Callable[[], object]]


def measure(machine: Machine, contenders: Contenders, rounds: int = ROUNDS) -> dict[str, float]:
    """Return the median milliseconds of each."""
    taken: dict[str, list[Any]] = {name: [] for name in contenders}
    for function in contenders.values():
        function()
        function()
    machine.synchronize()
    for _ in range(rounds if machine.is_cuda else 2):
        for name, function in contenders.items():
            if machine.is_cuda:
                events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                events[0].record()
                function()
                events[1].record()
                taken[name].append(events)
            else:
                start = time.perf_counter()
                function()
                taken[name].append(1e3 * (time.perf_counter() - start))
    machine.synchronize()
    if machine.is_cuda:
        taken = {name: [a.elapsed_time(b) for a, b in pairs] for name, pairs in taken.items()}
    return {name: statistics.median(times) for name, times in taken.items()}


def captured(machine: Machine, function: Callable[[], torch.Tensor]) -> Callable[[], object]:
    """Return the replay of a CUDA graph, so that Python's part is not measured."""
    if not machine.is_cuda:
        return function
    function()
    machine.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


class Layer:
    """Rows of equal length in one layer, blocks in an order that only the tables know."""

    def __init__(
        self,
        machine: Machine,
        backend: AttentionBackend,
        num_rows: int,
        num_tokens: int,
        num_new: int = 1,
        block_size: int = 16,
    ) -> None:
        device, dtype = machine.device, torch.bfloat16
        heads = (NUM_HEADS, NUM_KV_HEADS) if machine.is_cuda else (4, 1)
        width = -(-num_tokens // block_size)
        num_blocks = num_rows * width

        def draw(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device).normal_()

        self.backend, self.scale = backend, HEAD_DIM**-0.5
        self.query = draw(num_rows * num_new, heads[0], HEAD_DIM)
        self.key, self.value = (draw(num_rows * num_new, heads[1], HEAD_DIM) for _ in range(2))
        shape = backend.cache_shape(num_blocks + 1, block_size, heads[1], HEAD_DIM)
        self.view = LayerView(draw(*shape), draw(*shape))
        tables = torch.randperm(num_blocks, device=device).view(num_rows, width)
        new = torch.arange(num_tokens - num_new, num_tokens, device=device)
        self.metadata = AttentionMetadata(
            block_size=block_size,
            null_block=num_blocks,
            block_tables=tables.int(),
            seq_lens=torch.full((num_rows,), num_tokens, dtype=torch.int32, device=device),
            cu_seqlens_q=torch.arange(num_rows + 1, dtype=torch.int32, device=device) * num_new,
            slot_mapping=(tables[:, new // block_size] * block_size + new % block_size).flatten(),
            seq_lens_list=[num_tokens] * num_rows,
            query_lens_list=[num_new] * num_rows,
        )
        self.kv_bytes = 2 * num_rows * num_tokens * heads[1] * HEAD_DIM * dtype.itemsize

    def attend(self) -> torch.Tensor:
        return self.backend.forward(
            self.query, self.key, self.value, self.view, self.metadata, scale=self.scale
        )

    def agrees(self, expected: torch.Tensor) -> None:
        error = float((self.attend().float() - expected.float()).norm() / expected.float().norm())
        expect(error <= 2e-2, f"contenders differ by {error:.1e}")


def like(layer: Layer, other: Layer) -> None:
    """Give ``other``, of another layout, the tokens of ``layer``."""
    other.query, other.key, other.value = layer.query, layer.key, layer.value
    other.metadata = layer.metadata
    for mine, theirs in (
        (layer.view.key_cache, other.view.key_cache),
        (layer.view.value_cache, other.view.value_cache),
    ):
        theirs.copy_(mine if mine.shape == theirs.shape else mine.transpose(1, 2))


def bandwidth(machine: Machine) -> float:
    """Return bytes a second of a copy, read and written ones together."""
    num_bytes = 2**30 if machine.is_cuda else 2**20
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=machine.device)
    target = torch.empty_like(source)
    milliseconds = measure(machine, {"copy": lambda: target.copy_(source)})["copy"]
    return 2 * num_bytes / milliseconds * 1e3


def has_room(machine: Machine, num_bytes: int) -> bool:
    """Whether twice that is free on the device."""
    if not machine.is_cuda:
        return True
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(machine.device)
    return free > 2 * num_bytes


def decode(machine: Machine) -> str:
    """One layer, one step. In the share of the copy bandwidth K and V are read once.

    K and V that fit the L2 cache (50 MB on Hopper) may come out of it: then it is above 100%.
    """
    speed = bandwidth(machine)
    machine.timings.append({"what": "copy", "bytes_per_s": speed})
    words = []
    rows, lengths = ((1, 16, 64), (1024, 8192, 32768)) if machine.is_cuda else ((2,), (40,))
    for num_rows in rows:
        for num_tokens in lengths:
            if not has_room(machine, 2 * num_rows * num_tokens * NUM_KV_HEADS * HEAD_DIM * 2):
                words.append(f"{num_rows} x {num_tokens}: no room")
                continue
            layer = Layer(machine, create_backend("triton", machine.device), num_rows, num_tokens)
            contenders: Contenders = {
                "triton": layer.attend,
                "triton in a graph": captured(machine, layer.attend),
            }
            # Gathering takes the memory of K and V again, perhaps a copy for each query head.
            if layer.kv_bytes <= 2**31 and has_room(machine, 3 * layer.kv_bytes):
                gathering = Layer(
                    machine, create_backend("torch", machine.device), num_rows, num_tokens
                )
                like(layer, gathering)
                gathering.agrees(layer.attend())
                contenders["torch"] = gathering.attend
            found = measure(machine, contenders)
            share = layer.kv_bytes / (found["triton in a graph"] / 1e3) / speed
            machine.timings.append(
                {
                    "what": "decode",
                    "rows": num_rows,
                    "tokens": num_tokens,
                    "kv_bytes": layer.kv_bytes,
                    "milliseconds": found,
                    "share_of_copy_bandwidth": share,
                }
            )
            faster = f", torch x {found['torch'] / found['triton']:.1f}" if "torch" in found else ""
            words.append(f"{num_rows} x {num_tokens}: {share:.0%}{faster}")
            contenders.clear()
    tail = "" if machine.is_cuda else INTERPRETED
    return f"of {speed / 1e9:.0f} GB/s: " + "; ".join(words) + tail


def prefill(machine: Machine) -> str:
    words = []
    for num_tokens in (2048, 8192) if machine.is_cuda else (40,):
        layer = Layer(
            machine, create_backend("triton", machine.device), 1, num_tokens, num_new=num_tokens
        )
        query, key, value = (
            each.transpose(0, 1).contiguous()[None]
            for each in (layer.query, layer.key, layer.value)
        )

        def sdpa(states: Sequence[torch.Tensor] = (query, key, value)) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(
                *states, is_causal=True, enable_gqa=True
            )

        layer.agrees(sdpa()[0].transpose(0, 1))
        found = measure(machine, {"triton": layer.attend, "sdpa": sdpa})
        machine.timings.append({"what": "prefill", "tokens": num_tokens, "milliseconds": found})
        words.append(
            f"{num_tokens}: {found['triton']:.2f} ms, {found['triton'] / found['sdpa']:.2f} x SDPA"
        )
    return "; ".join(words) + ("" if machine.is_cuda else INTERPRETED)


def block_sizes(machine: Machine) -> str:
    num_rows, num_tokens = (16, 8192) if machine.is_cuda else (2, 300)
    contenders: Contenders = {}
    layers = []  # a graph does not keep what it reads alive
    for block_size in (16, 256):
        backend = create_backend("triton", machine.device)
        layer = Layer(machine, backend, num_rows, num_tokens, block_size=block_size)
        expect(bool(layer.attend().isfinite().all()), f"block {block_size}: not finite")
        contenders[str(block_size)] = captured(machine, layer.attend)
        layers.append(layer)
    found = measure(machine, contenders)
    machine.timings.append({"what": "block sizes", "milliseconds": found})
    return (
        f"decoding {num_rows} x {num_tokens}: blocks of 16 take {found['16'] / found['256']:.2f} x"
        + (" the time of 256" if machine.is_cuda else " the time of 256" + INTERPRETED)
    )


def steps_per_second(machine: Machine) -> str:
    """Greedy decoding of 16 rows by a random Llama of the shape of SmolLM2-135M, in bf16."""
    if machine.is_cuda:
        num_rows, num_prompt, num_new = 16, 128, 64
        shape: dict[str, Any] = dict(
            hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9
        )
        shape |= dict(num_key_value_heads=3, vocab_size=49152, tie_word_embeddings=True)
    else:
        num_rows, num_prompt, num_new = 2, 9, 4
        shape = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1)
        shape |= dict(num_attention_heads=2, num_key_value_heads=1, vocab_size=64)
    config = LlamaConfig(**shape, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    kinds: dict[str, dict[str, Any] | None] = {
        "unpatched": None,
        "patched": dict(cuda_graphs=False),
    }
    if machine.is_cuda:
        kinds["patched, graphs"] = dict(cuda_graphs=True)
    models: dict[str, Any] = {}
    for name, options in kinds.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        models[name] = model.to(machine.device).eval()
        if options is not None:
            hf_paged.patch(model, backend="triton", num_blocks=1024, **options)
    ids = torch.randint(3, 64, (num_rows, num_prompt)).to(machine.device)
    mask = torch.ones_like(ids)

    def seconds(name: str, num_tokens: int) -> float:
        if kinds[name] is not None:
            hf_paged.clear_prefix_cache(models[name])
        machine.synchronize()
        start = time.perf_counter()
        rows = models[name].generate(
            ids, attention_mask=mask, max_new_tokens=num_tokens, do_sample=False, eos_token_id=None
        )
        machine.synchronize()
        expect(rows.shape[1] == num_prompt + num_tokens, f"{name}: {tuple(rows.shape)}")
        return time.perf_counter() - start

    taken: dict[str, list[float]] = {name: [] for name in kinds}
    for name in kinds:
        seconds(name, num_new + 1)  # kernels are compiled, graphs captured
    for _ in range(3 if machine.is_cuda else 1):
        for name in kinds:
            first = seconds(name, 1)
            taken[name].append(max(seconds(name, num_new + 1) - first, 1e-9))
    found = {name: num_new / statistics.median(times) for name, times in taken.items()}
    for name, options in kinds.items():
        if options is not None:
            hf_paged.unpatch(models[name])
    machine.timings.append({"what": "steps", "rows": num_rows, "steps_per_s": found})
    words = ", ".join(f"{name} {speed:.0f}" for name, speed in found.items())
    return f"{words} steps/s" + ("" if machine.is_cuda else INTERPRETED)


CHECKS = (
    Check("timing/decode", decode),
    Check("timing/prefill", prefill),
    Check("timing/block-sizes", block_sizes),
    Check("timing/steps", steps_per_second),
)
