"""Paged attention on a CPU against what the machine can do and what others do.

    python benchmarks/micro/attention.py --quick            two minutes, one summary line
    python benchmarks/micro/attention.py --json out.json    everything

Every figure is a median over rounds in which all contenders take turns, so that a noisy neighbour
meets each of them. Contenders:

    paged    the backend, over blocks in random physical order
    limit    a read of the same bytes of K and V by as many threads (decode)
    hf       transformers' DynamicCache.update() and sdpa attention, rows without padding (decode)
    sdpa     torch's causal scaled_dot_product_attention, K and V contiguous a head (prefill)
    torch    the "torch" backend: gathers, index_copy_ (extend, write, copy)

A ratio says how many times longer one takes than the other: paged over limit, paged over sdpa, hf
over paged, torch over paged.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from tqdm import tqdm
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_paged
from hf_paged.backends import native
from hf_paged.backends.base import AttentionBackend, LayerView
from hf_paged.backends.metadata import AttentionMetadata
from hf_paged.backends.registry import create_backend

BLOCK_SIZE = 16
BEYOND_CACHES = 48_000_000
"""Bytes of K and V above which memory, not the last-level cache, is the limit."""

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
BATCHES, CONTEXTS, PROMPTS = (1, 8, 32, 64), (128, 1024, 4096), (1024, 2048)
CPU = torch.device("cpu")

Contenders = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class Shape:
    """H, H_kv and D of a model."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int


SHAPES = (
    Shape("SmolLM2-135M", 9, 3, 64),
    Shape("Llama-1B", 32, 8, 64),
    Shape("OPT-125m", 12, 12, 64),
    Shape("Llama-7B", 32, 32, 128),
)


@dataclass(frozen=True)
class Case:
    """``batch`` rows of ``context`` tokens, of which the last ``num_new`` are new."""

    kind: str
    shape: Shape
    dtype: str
    batch: int
    context: int
    num_new: int

    @property
    def kv_bytes(self) -> int:
        per_token = 2 * self.shape.num_kv_heads * self.shape.head_dim * DTYPES[self.dtype].itemsize
        return self.batch * self.context * per_token

    def __str__(self) -> str:
        rows = f"{self.batch} x {self.context}"
        new = f" ({self.num_new} new)" if self.kind == "extend" else ""
        return f"{self.kind} {self.shape.name} {self.dtype} {rows}{new}"


class Layer:
    """One layer of a case: blocks in an order that only the block tables know."""

    def __init__(self, case: Case, backend: AttentionBackend) -> None:
        shape, num_new = case.shape, case.num_new
        width = -(-case.context // BLOCK_SIZE)
        num_blocks, num_tokens = case.batch * width, case.batch * num_new
        sizes = (BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
        dtype = DTYPES[case.dtype]
        self.backend = backend
        self.scale = shape.head_dim**-0.5
        self.query = filled((num_tokens, shape.num_heads, shape.head_dim), dtype)
        self.key = filled((num_tokens, shape.num_kv_heads, shape.head_dim), dtype)
        self.value = filled((num_tokens, shape.num_kv_heads, shape.head_dim), dtype)
        self.view = LayerView(
            filled(backend.cache_shape(num_blocks + 1, *sizes), dtype),
            filled(backend.cache_shape(num_blocks + 1, *sizes), dtype),
        )
        tables = torch.randperm(num_blocks).view(case.batch, width)
        new = torch.arange(case.context - num_new, case.context)
        self.metadata = AttentionMetadata(
            block_size=BLOCK_SIZE,
            null_block=num_blocks,
            block_tables=tables.int(),
            seq_lens=torch.full((case.batch,), case.context, dtype=torch.int32),
            cu_seqlens_q=torch.arange(case.batch + 1, dtype=torch.int32) * num_new,
            slot_mapping=(tables[:, new // BLOCK_SIZE] * BLOCK_SIZE + new % BLOCK_SIZE).flatten(),
            seq_lens_list=[case.context] * case.batch,
            query_lens_list=[num_new] * case.batch,
        )

    def attend(self) -> torch.Tensor:
        return self.backend.forward(
            self.query, self.key, self.value, self.view, self.metadata, scale=self.scale
        )

    def write(self) -> None:
        self.backend.write(self.key, self.value, self.view, self.metadata)

    def copy(self) -> None:
        """Copy one block a row, as a copy-on-write of every row does."""
        tables = self.metadata.block_tables[:, :2].long()
        self.backend.copy_blocks(self.view, tables[:, 0], tables[:, 1])


def filled(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return normal numbers that repeat: to draw gigabytes of them would take too long."""
    pattern = torch.randn(1 << 16).to(dtype)
    num_elements = math.prod(shape)
    return pattern.repeat(-(-num_elements // pattern.numel()))[:num_elements].view(*shape)


def contenders(case: Case, backend: AttentionBackend) -> Contenders:
    layer = Layer(case, backend)
    if case.kind == "decode":
        found: Contenders = {"paged": layer.attend, "hf": transformers_decode(case, layer)}
        if native.unavailable_reason() is None:
            found["limit"] = memory_read(case.kv_bytes)
        return found
    if case.kind == "prefill":
        return {"paged": layer.attend, "sdpa": contiguous_sdpa(case, layer)}
    gathering = Layer(case, create_backend("torch", CPU))
    if case.kind == "extend":
        return {"paged": layer.attend, "torch": gathering.attend}
    if case.kind == "write":
        return {"paged": layer.write, "torch": gathering.write}
    return {"paged": layer.copy, "torch": gathering.copy}


def transformers_decode(case: Case, layer: Layer) -> Callable[[], object]:
    """One step over a DynamicCache that stands: its update and the attention after it."""
    shape = (case.batch, case.shape.num_kv_heads, case.context - 1, case.shape.head_dim)
    past = [filled(shape, DTYPES[case.dtype]) for _ in range(2)]
    query, key, value = (new[:, :, None] for new in (layer.query, layer.key, layer.value))
    cache = DynamicCache()
    cache.update(key, value, 0)
    attention = ALL_ATTENTION_FUNCTIONS["sdpa"]
    module: Any = SimpleNamespace(
        num_key_value_groups=case.shape.num_heads // case.shape.num_kv_heads,
        is_causal=True,
        training=False,
    )

    def step() -> object:
        cache.layers[0].keys, cache.layers[0].values = past
        keys, values = cache.update(key, value, 0)
        return attention(module, query, keys, values, None, scaling=layer.scale)

    return step


def contiguous_sdpa(case: Case, layer: Layer) -> Callable[[], object]:
    """Without GQA: K and V hold a copy for each query head, made before the clock starts."""
    group_size = case.shape.num_heads // case.shape.num_kv_heads
    query, key, value = (
        new.repeat_interleave(times, 1)
        .view(case.batch, case.context, case.shape.num_heads, case.shape.head_dim)
        .transpose(1, 2)
        .contiguous()
        for new, times in ((layer.query, 1), (layer.key, group_size), (layer.value, group_size))
    )
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return lambda: sdpa(query, key, value, is_causal=True)


def memory_read(num_bytes: int) -> Callable[[], object]:
    library, memory = native.load_library(), filled((num_bytes // 4,), torch.float32)
    return lambda: library.read(memory.data_ptr(), memory.numel(), native.threads())


def measure(functions: Contenders, seconds: float) -> dict[str, float]:
    """Return the median seconds of each, over as many rounds as fit, 5 at least."""
    for function in functions.values():
        function()
    taken: dict[str, list[float]] = {name: [] for name in functions}
    end = time.perf_counter() + seconds
    while len(taken["paged"]) < 5 or (time.perf_counter() < end and len(taken["paged"]) < 101):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in taken.items()}


def all_cases() -> Iterator[Case]:
    for dtype in DTYPES:
        for shape in SHAPES:
            for batch in BATCHES:
                for context in CONTEXTS:
                    yield Case("decode", shape, dtype, batch, context, 1)
                yield Case("write", shape, dtype, batch, 1024, 1)
                yield Case("copy", shape, dtype, batch, 1024, 1)
            for length in PROMPTS:
                yield Case("prefill", shape, dtype, 1, length, length)
                yield Case("extend", shape, dtype, 1, length, 256)
            yield Case("write", shape, dtype, 1, 1024, 1024)


def quick_cases() -> Iterator[Case]:
    """What the summary line is made of, with as little K and V beyond the caches as will do."""
    for dtype in DTYPES:
        for shape in SHAPES:
            for batch in BATCHES:
                case = Case("decode", shape, dtype, batch, 1024, 1)
                if case.kv_bytes > BEYOND_CACHES:
                    yield case
                    break
            for length in PROMPTS:
                yield Case("prefill", shape, dtype, 1, length, length)


RATIOS = {
    "vs_limit": ("paged", "limit"),
    "vs_sdpa": ("paged", "sdpa"),
    "hf_vs_paged": ("hf", "paged"),
    "torch_vs_paged": ("torch", "paged"),
}


def ratios(seconds: dict[str, float]) -> dict[str, float]:
    return {
        name: seconds[one] / seconds[other]
        for name, (one, other) in RATIOS.items()
        if one in seconds and other in seconds
    }


def summary(results: Sequence[dict[str, Any]]) -> str:
    """Return geometric means; decoding counts where K and V are beyond the caches."""
    words = []
    for label, kind, ratio in (
        ("decode_vs_limit", "decode", "vs_limit"),
        ("hf_vs_paged", "decode", "hf_vs_paged"),
        ("prefill_vs_sdpa", "prefill", "vs_sdpa"),
    ):
        for dtype in DTYPES:
            found = [
                result["ratios"][ratio]
                for result in results
                if (result["kind"], result["dtype"]) == (kind, dtype)
                and (kind != "decode" or result["kv_bytes"] > BEYOND_CACHES)
                and ratio in result["ratios"]
            ]
            mean = f"{statistics.geometric_mean(found):.2f}" if found else "none"
            words.append(f"{label}_{dtype}={mean}")
    return " ".join(words)


def table(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield f"{'case':48s} {'MB of K, V':>10s} {'paged':>10s} " + " ".join(
        f"{name:>14s}" for name in RATIOS
    )
    for result in results:
        cells = (
            f"{result['ratios'][name]:14.2f}" if name in result["ratios"] else f"{'':14s}"
            for name in RATIOS
        )
        microseconds = 1e6 * result["seconds"]["paged"]
        yield (
            f"{result['case']:48s} {result['kv_bytes'] / 1e6:10.1f} {microseconds:7.0f} us "
            + " ".join(cells)
        )


def machine(backend: AttentionBackend) -> dict[str, Any]:
    cpuinfo = Path("/proc/cpuinfo")
    models = {
        line.partition(":")[2].strip()
        for line in (cpuinfo.read_text().splitlines() if cpuinfo.exists() else ())
        if line.startswith("model name")
    }
    is_native = backend.name == "cpu"
    return {
        "processor": ", ".join(sorted(models)) or platform.processor() or platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "isa": native.load_library().isa if is_native else None,
        "num_threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_paged": hf_paged.__version__,
        "backend": backend.name,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the summary's cases only")
    parser.add_argument("--kinds", nargs="+", help="decode, prefill, extend, write, copy")
    parser.add_argument("--backend", default="auto", help="the contender called paged")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each case")
    parser.add_argument("--max-kv-bytes", type=float, default=1.2e9, help="leave larger cases out")
    parser.add_argument("--json", type=Path, help="write every figure there")
    arguments = parser.parse_args()

    backend = create_backend(arguments.backend, CPU)
    cases = list(quick_cases() if arguments.quick else all_cases())
    chosen = [
        case
        for case in cases
        if case.kv_bytes <= arguments.max_kv_bytes
        and (not arguments.kinds or case.kind in arguments.kinds)
    ]
    results = []
    with torch.inference_mode(), tqdm(chosen, unit="case") as progress:
        for case in progress:
            progress.set_description(str(case))
            seconds = measure(contenders(case, backend), arguments.seconds)
            results.append(
                asdict(case)
                | dict(case=str(case), kv_bytes=case.kv_bytes, seconds=seconds)
                | dict(ratios=ratios(seconds))
            )
    where = machine(backend)
    print(", ".join(f"{name} {value}" for name, value in where.items() if value))
    print("\n".join(table(results)))
    if left_out := len(cases) - len(chosen):
        print(f"{left_out} cases left out (--kinds, --max-kv-bytes)")
    print(summary(results))
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": where, "results": results}, indent=1))


if __name__ == "__main__":
    main()
