"""Draws memory_*.png and throughput.png of docs/figures/ from the JSON in benchmarks/results/.

    make figures        or        python benchmarks/figures.py [--out docs/figures]

The data come from:

    python benchmarks/memory/run.py --json benchmarks/results/memory_smollm2.json
    python benchmarks/memory/run.py --model tiny --variants patched --workloads one ten beams long \
        --block-size 1 4 8 16 32 64 128 --budget 0 --json benchmarks/results/memory_block_sizes.json
    OMP_WAIT_POLICY=passive python benchmarks/end_to_end/generate.py --dtype float32 --repeats 3 \
        --suite rows1,rows2,rows4,rows8,rows16,rows32 --json benchmarks/results/generate_rows.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

HERE = Path(__file__).resolve().parent
MIB = 2**20

# Okabe and Ito's colours, told apart with any eyes; the marks and hatches, in black and white too.
STYLES: dict[str, dict[str, str]] = {
    "dynamic": dict(label="DynamicCache (unpatched)", color="#7f7f7f", hatch="", marker="s"),
    "static": dict(label="StaticCache", color="#e69f00", hatch="///", marker="^"),
    "continuous": dict(label="generate_batch", color="#56b4e9", hatch="...", marker="D"),
    "patched": dict(label="hf_paged", color="#0072b2", hatch="", marker="o"),
}
LINES = {"one": "#0072b2", "ten": "#d55e00", "beams": "#009e73", "long": "#cc79a7"}
MARKERS = {"one": "o", "ten": "s", "beams": "^", "long": "D"}

plt.rcParams.update(
    {
        "figure.facecolor": "white",
        "savefig.facecolor": "white",
        "axes.facecolor": "white",
        "axes.edgecolor": "#444444",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.titlesize": 11,
        "axes.labelsize": 9.5,
        "font.size": 9,
        "legend.frameon": False,
        "hatch.linewidth": 0.6,
        "hatch.color": "white",
    }
)


def where(data: dict[str, Any]) -> str:
    """Return the line under a figure: model and machine."""
    machine = data["machine"]
    names = {"smollm2": "SmolLM2-135M", "tiny": "tiny random Llama"}
    return (
        f"{names[data['model']['name']]}, fp32; {machine['processor']}, "
        f"{machine['num_threads']} thread(s); torch {machine['torch']}, "
        f"transformers {machine['transformers']}, hf_paged {machine['hf-paged']}; {machine['date']}"
    )


def finish(figure: Figure, file: Path, footer: str) -> None:
    figure.text(0.012, 0.012, footer, fontsize=6.5, color="#555555", ha="left", va="bottom")
    figure.savefig(file, dpi=144, metadata={"Software": None})
    plt.close(figure)


def multiples(data: dict[str, Any], file: Path) -> None:
    """KV memory as a multiple of the ideal, for each workload and variant."""
    results = [result for result in data["results"] if result["variant"] in STYLES]
    workloads = list(dict.fromkeys(result["workload"] for result in results))
    found = {(result["workload"], result["variant"]): result for result in results}
    titles = {result["workload"]: result.get("title", result["workload"]) for result in results}
    figure, axes = plt.subplots(figsize=(8.2, 1.1 + 0.62 * len(workloads)), layout="constrained")
    figure.get_layout_engine().set(rect=(0, 0.035, 1, 0.965))
    height = 0.2
    for index, (variant, style) in enumerate(STYLES.items()):
        for row, workload in enumerate(workloads):
            y = row + (index - 1.5) * height
            result = found.get((workload, variant))
            status = "not measured" if result is None else result["status"]
            if status != "ok":
                text = "not supported" if status == "unsupported" else status
                axes.text(1.06, y, text, va="center", fontsize=7, color="#555555", style="italic")
                continue
            value = result["multiple"]
            axes.barh(
                y,
                value,
                height * 0.9,
                color=style["color"],
                hatch=style["hatch"],
            )
            is_ours = variant == "patched"
            axes.text(
                value + 0.06,
                y,
                f"{value:.2f}",
                va="center",
                fontsize=7.5,
                weight="bold" if is_ours else "normal",
            )
    axes.axvline(1, color="black", linewidth=1, linestyle=(0, (4, 3)), zorder=3)
    axes.set_yticks(range(len(workloads)), [titles[workload] for workload in workloads])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(workloads) - 0.45, -0.55)
    axes.set_xlim(0, 1.07 * max(result.get("multiple", 1) for result in results))
    axes.set_xlabel(
        "KV memory set aside, as a multiple of the distinct live tokens' (dashed: ideal)"
    )
    axes.set_title("What the KV cache takes")
    patches = [
        Patch(facecolor=style["color"], hatch=style["hatch"], label=style["label"])
        for style in STYLES.values()
    ]
    figure.legend(handles=patches, loc="outside upper center", ncols=4, fontsize=8.5)
    axes.grid(axis="x", color="#dddddd", linewidth=0.7)
    finish(figure, file, where(data))


def capacity(data: dict[str, Any], file: Path) -> None:
    """The largest batch in the budget."""
    batches = data["largest_batch"]
    variants = [variant for variant in STYLES if variant in batches]
    figure, axes = plt.subplots(figsize=(6.2, 2.7), layout="constrained")
    figure.get_layout_engine().set(rect=(0, 0.06, 1, 0.94))
    for row, variant in enumerate(variants):
        style = STYLES[variant]
        axes.barh(row, batches[variant], 0.7, color=style["color"], hatch=style["hatch"])
        axes.text(batches[variant], row, f" {batches[variant]}", va="center", weight="bold")
    axes.set_yticks(range(len(variants)), [STYLES[variant]["label"] for variant in variants])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(variants) - 0.5, -0.5)
    axes.set_xlim(0, max(batches.values()) * 1.1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("largest batch that finishes (rows of 100 to 300 tokens)")
    axes.set_title(f"Batch in {data['budget'] // MIB} MiB beyond the loaded model")
    axes.grid(axis="x", color="#dddddd", linewidth=0.7)
    finish(figure, file, where(data))


def peaks(data: dict[str, Any], file: Path) -> None:
    """Peak memory against batch size, and where each variant dies."""
    figure, axes = plt.subplots(figsize=(6.8, 4.1), layout="constrained")
    figure.get_layout_engine().set(rect=(0, 0.04, 1, 0.96))
    budget = data["budget"] / MIB
    for variant, style in STYLES.items():
        probes = [probe for probe in data["probes"] if probe["variant"] == variant]
        alive = sorted((p["num_rows"], p["peak_process"]) for p in probes if p["status"] == "ok")
        dead = [probe["num_rows"] for probe in probes if probe["status"] != "ok"]
        if not alive or not dead:
            continue
        rows = [row for row, _ in alive]
        used = [peak / MIB for _, peak in alive]
        axes.plot(
            rows,
            used,
            color=style["color"],
            marker=style["marker"],
            markersize=5,
            linewidth=1.8,
            label=style["label"],
        )
        axes.plot(
            [rows[-1], min(dead)],
            [used[-1], budget],
            color=style["color"],
            linewidth=1.2,
            linestyle=":",
        )
        axes.plot(
            min(dead),
            budget,
            marker="X",
            markersize=9,
            color=style["color"],
            markeredgecolor="black",
            markeredgewidth=0.7,
            linestyle="",
            zorder=4,
        )
    axes.axhline(budget, color="black", linewidth=1, linestyle=(0, (4, 3)))
    axes.annotate(
        f"budget, {budget:.0f} MiB of address space; X: the first batch that does not finish",
        (0, budget),
        xytext=(3, 7),
        textcoords="offset points",
        fontsize=8,
    )
    axes.set_xlim(left=0)
    axes.set_ylim(0, budget * 1.15)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("batch (rows of 100 to 300 tokens)")
    axes.set_ylabel("peak resident memory beyond the model (MiB)")
    axes.set_title("Peak memory of the process")
    axes.legend(loc="lower right", fontsize=8.5)
    axes.grid(color="#dddddd", linewidth=0.7)
    finish(figure, file, where(data))


def waste_by_block_size(data: dict[str, Any], file: Path) -> None:
    """What is not a distinct live token, against the block size."""
    figure, axes = plt.subplots(figsize=(6.8, 3.9), layout="constrained")
    figure.get_layout_engine().set(rect=(0, 0.04, 1, 0.96))
    for workload, color in LINES.items():
        results = [r for r in data["results"] if r["workload"] == workload and r["status"] == "ok"]
        if not results:
            continue
        sizes = [result["block_size"] for result in results]
        waste = [100 * (1 - 1 / result["multiple"]) for result in results]
        axes.plot(
            sizes,
            waste,
            color=color,
            marker=MARKERS[workload],
            markersize=5,
            linewidth=1.8,
            label=results[0]["title"],
        )
    axes.axvline(16, color="black", linewidth=1, linestyle=(0, (4, 3)))
    axes.annotate(
        "default", (16, axes.get_ylim()[1]), xytext=(4, -9), textcoords="offset points", fontsize=8
    )
    ticks = sorted({result["block_size"] for result in data["results"]})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("block size (tokens)")
    axes.set_ylabel("waste (% of the KV memory set aside)")
    axes.set_title("Waste against block size, hf_paged")
    axes.legend(loc="upper left", fontsize=8.5)
    axes.grid(color="#dddddd", linewidth=0.7)
    finish(figure, file, where(data))


def throughput(data: dict[str, Any], file: Path) -> None:
    """New tokens per second against the number of rows."""
    figure, axes = plt.subplots(figsize=(6.8, 3.9), layout="constrained")
    figure.get_layout_engine().set(rect=(0, 0.04, 1, 0.96))
    names = {"unpatched": "dynamic", "generate_batch": "continuous", "patched": "patched"}
    for variant, name in names.items():
        style = STYLES[name]
        found = [r for r in data["results"] if r["variant"] == variant and r["status"] == "ok"]
        axes.plot(
            [result["rows"] for result in found],
            [result["tokens_per_s"] for result in found],
            color=style["color"],
            marker=style["marker"],
            markersize=5,
            linewidth=1.8,
            label=style["label"],
        )
    ticks = sorted({result["rows"] for result in data["results"]})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("rows (prompts of 64 to 256 tokens, 32 new ones each)")
    axes.set_ylabel("new tokens per second, prompts included")
    axes.set_title("Throughput against concurrency")
    axes.legend(loc="upper left", fontsize=8.5)
    axes.grid(color="#dddddd", linewidth=0.7)
    finish(figure, file, where(data))


FIGURES: dict[str, tuple[str, Callable[[dict[str, Any], Path], None]]] = {
    "memory_multiples.png": ("memory_smollm2.json", multiples),
    "memory_capacity.png": ("memory_smollm2.json", capacity),
    "memory_peaks.png": ("memory_smollm2.json", peaks),
    "throughput.png": ("generate_rows.json", throughput),
    "memory_block_size.png": ("memory_block_sizes.json", waste_by_block_size),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs" / "figures")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, (source, draw) in FIGURES.items():
        if not (arguments.results / source).exists():
            print(f"{name}: no {source} in {arguments.results}, see the top of this file")
            continue
        draw(json.loads((arguments.results / source).read_text()), arguments.out / name)
        print(arguments.out / name)


if __name__ == "__main__":
    main()
