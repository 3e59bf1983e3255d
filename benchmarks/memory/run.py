"""What the KV cache of real generations takes: the process's memory, and the cache's own.

    python benchmarks/memory/run.py --quick
    python benchmarks/memory/run.py --json benchmarks/results/memory_smollm2.json

Each (workload, variant) runs in a process of its own. Variants:

    dynamic              the unpatched model
    static               generate(cache_implementation="static")
    continuous           transformers' generate_batch(), its pool sized for the workload
    continuous_default   the same with the pool that it chooses (not run by default)
    patched              hf_paged, the default pool

Figures:

    allocated   most bytes of K and V set aside at a time. dynamic, static: the tensors of the cache
                that generate() returns. continuous: its whole pool. patched: blocks in use.
    waste       the part of it that holds no token of a row (padding, room, the end of a block);
                patched: when it first was most, and the last block of each row had just begun
    x ideal     allocated, over the bytes of the distinct tokens of unfinished rows: tokens at
                which rows have the same prefix are counted once
    peak        most that the resident set of the process grew above the loaded, warm model
                (VmHWM): cache, activations and logits together. One malloc arena, what is above
                64 KiB mapped by itself, so that what is freed is gone.
    batch       rows of 100 to 300 tokens that still finish if the address space (RLIMIT_AS) may
                grow by the budget; prompts in chunks of 64 columns. By trying, not by formula.
                continuous and patched: a pool of the blocks that the batch needs, and at most 256
                new tokens in a forward.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jobs import Jobs
from largest_batch import find_largest_batch
from tqdm import tqdm

MIB = 2**20
WORKLOADS = [
    "one",
    "ten",
    "beams",
    "long",
    "samples",
    "system",
    "chat",
    "few_shot",
    "ragged_answers",
]
VARIANTS = ["dynamic", "static", "continuous", "patched", "continuous_default"]


def machine(num_threads: int) -> dict[str, Any]:
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    names = {line.partition(":")[2].strip() for line in cpuinfo if line.startswith("model name")}
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": ", ".join(sorted(names)) or platform.machine(),
        "memory": pages,
        "num_threads": num_threads,
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "hf-paged")},
        "date": time.strftime("%Y-%m-%d"),
    }


def mib(num_bytes: float | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / MIB:.1f}"


def table(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield (
        f"{'workload':40s} {'variant':18s} {'block':>5s} {'ideal':>8s} {'allocated':>9s} "
        f"{'waste':>6s} {'x ideal':>7s} {'peak':>8s} {'s':>6s}   (MiB)"
    )
    for result in results:
        head = f"{result.get('title', result['workload']):40s} {result['variant']:18s} "
        head += f"{result['block_size']:5d} "
        if result["status"] != "ok":
            yield head + f"{result['status']}: {result['error']}"
            continue
        waste = "" if result["waste"] is None else f"{result['waste']:.1%}"
        is_promised = (result["variant"], result["block_size"]) == ("patched", 16)
        most = result["most"] if is_promised else None
        promise = "" if most is None else f" at most {most:.2f}"
        promise += "" if most is None or result["multiple"] <= most else " MISSED"
        yield head + (
            f"{mib(result['ideal']):>8s} {mib(result['kv_allocated']):>9s} {waste:>6s} "
            f"{result['multiple']:7.2f} {mib(result['peak_process']):>8s} "
            f"{result['seconds']:6.1f} {promise}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer rows, no search of the batch")
    parser.add_argument("--model", choices=("smollm2", "tiny"), default="smollm2")
    parser.add_argument("--workloads", nargs="*", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=VARIANTS[:4])
    parser.add_argument("--block-size", nargs="+", type=int, default=[16], metavar="N")
    parser.add_argument("--budget", default="512MiB", help="for the largest batch; 0: no search")
    parser.add_argument("--first-batch", type=int, default=8, help="where that search begins")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=900, help="seconds for each process")
    parser.add_argument("--json", type=Path, help="write every figure there")
    parser.add_argument("--resume", action="store_true", help="keep what --json holds already")
    parser.add_argument("--log", type=Path, help="what the children print")
    arguments = parser.parse_args()
    is_searched = not arguments.quick and arguments.budget != "0"
    budget = 0
    if is_searched:
        from hf_paged.config import parse_kv_memory  # it takes torch along, seconds

        budget = parse_kv_memory(arguments.budget, num_free_bytes=0)

    # Only the patched variant and generate_batch have blocks.
    written = earlier(arguments.json) if arguments.resume else {}
    results: list[dict[str, Any]] = written.get("results", [])
    batches: dict[str, int] = written.get("largest_batch", {})
    probes: list[dict[str, Any]] = written.get("probes", [])
    known = {(result["workload"], result["variant"], result["block_size"]) for result in results}
    cases = [
        (workload, variant, block_size)
        for workload in arguments.workloads
        for block_size in arguments.block_size
        for variant in arguments.variants
        if block_size == arguments.block_size[0] or variant in ("patched", "continuous")
    ]
    cases = [case for case in cases if case not in known]
    searched = [v for v in arguments.variants if v not in (*batches, "continuous_default")]
    searched = searched if is_searched else []
    with tqdm(total=len(cases) + len(searched), unit="run") as progress:
        progress.set_description(f"load {arguments.model}")
        jobs = Jobs(arguments.model, arguments.threads, arguments.log)
        written |= {
            "machine": machine(arguments.threads),
            "model": {"name": arguments.model, "dtype": "float32"} | jobs.about,
            "quick": arguments.quick,
            "budget": budget or written.get("budget", 0),
            "results": results,
            "largest_batch": batches,
            "probes": probes,
        }
        common = {"quick": arguments.quick, "timeout": arguments.timeout}
        for workload, variant, block_size in cases:
            progress.set_description(f"{workload} {variant}")
            job = {"workload": workload, "variant": variant, "block_size": block_size}
            results.append(jobs.run(job | common))
            results.sort(key=place)
            write(arguments.json, written)
            progress.update()
        for variant in searched:
            job = {"variant": variant, "block_size": arguments.block_size[0], "budget": budget}
            batches[variant], tried = find_largest_batch(
                jobs,
                job | common,
                arguments.first_batch,
                lambda rows, name=variant: progress.set_description(f"{name}, batch of {rows}"),
            )
            probes += tried
            write(arguments.json, written)
            progress.update()
        progress.set_description("done")
        jobs.close()

    where = written["machine"]
    print(", ".join(f"{name} {value}" for name, value in where.items()))
    print("\n".join(table(results)))
    for variant, batch in batches.items():
        print(
            f"largest batch in {mib(written['budget'])} MiB beyond the model: {batch:4d} {variant}"
        )
    missed = [
        result["workload"]
        for result in results
        if result["variant"] == "patched"
        and result["block_size"] == 16
        and result["most"] is not None
        and (result["status"] != "ok" or result["multiple"] > result["most"])
    ]
    if missed:
        print(f"MISSED: {', '.join(missed)}")
    return 1 if missed else 0


def place(result: dict[str, Any]) -> tuple[int, int, int]:
    """Return where a result stands in the table."""
    names = WORKLOADS.index(result["workload"]), VARIANTS.index(result["variant"])
    return (names[0], result["block_size"], names[1])


def earlier(file: Path | None) -> dict[str, Any]:
    """Return what an earlier run wrote there, if anything."""
    return json.loads(file.read_text()) if file is not None and file.exists() else {}


def write(file: Path | None, written: dict[str, Any]) -> None:
    """Write what there is so far: a long run that is ended has not run for nothing."""
    if file is not None:
        file.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
