"""Tokens per second of whole generations: unpatched, patched, and transformers' generate_batch.

    python benchmarks/end_to_end/generate.py --scale 0.1
    python benchmarks/end_to_end/generate.py --dtype bfloat16 --json out.json

The contenders take turns in one process, so that a noisy neighbour meets each of them. All do equal
work: greedy (nsample samples, seeded), no end-of-sequence token, and the prefixes that a patched
model keeps are cleared before each run. Each has a copy of the model to itself, and ran the suite
once before the clock starts. generate_batch makes and ends its manager in each run, as it does for
a user.

    ragged   32 prompts of 16 to 512 tokens             long     16 prompts of 1024
    shared   32 prompts of 512 in common and 32 own     single   one prompt of 128
    nsample  16 samples of one prompt of 512            beam     4 prompts of 256, 8 beams each

each continued by 64 tokens. Only if named: rows1, rows2, rows4, ... rows32, so many prompts of 64
to 256 tokens, each continued by 32, for tokens/s against concurrency.

Figures, medians over the repeats:

    tokens/s     new tokens of all returned rows, over the time of the whole call
    first token  until every row has its first token: the time of a call of its own with
                 max_new_tokens=1, since a streamer or a criterion would change the path taken
    ms a step    the rest of the time, over the steps after the first token
    computed     tokens that went through the model, padding included, counted in the warm-up
    needed       distinct prompt tokens (in prefixes), and each later token of every decoded row
    KV peak      patched: blocks in use. unpatched: the rectangle of its cache. generate_batch: not
                 known
    floor        the time of the linear layers alone over as many tokens as patched computed, no
                 more than 2048 at a time; logits for the last token of each row only
    rows equal   rows with the tokens of unpatched: in fp32 patched must have all, while in bf16
                 another order of sums may tip a choice, and everything after it

Beside busy neighbours set OMP_WAIT_POLICY=passive: a thread that spins at a barrier, while the one
that it waits for has no core, costs up to 30 times the work. Load and policy are written down.

Ends with 1 if a variant failed, or if a row of patched differs in fp32.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "memory"))

import models
import torch
import transformers
from comparison import Comparison
from contenders import NAMES, make
from report import tables
from rich.console import Console
from run import machine
from suites import CONCURRENCY, SUITES, scale_by
from tqdm import tqdm

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load(name: str, dtype: torch.dtype) -> tuple[Any, list[int]]:
    """Return (model that never ends a row, tokens of a text).

    Buffers stay as they are: in bf16 the frequencies of RoPE would be others.
    """
    model, text = models.load(name)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    return model, text


def compile_layers(model: Any) -> None:
    """Compile what has nothing to do with the cache: MLPs and norms, one graph for all layers.

    A whole layer would be cut at its cache, and compiled again for each index of a layer.
    """
    for layer in model.base_model.layers:
        for module in (layer.mlp, layer.input_layernorm, layer.post_attention_layernorm):
            module.compile(dynamic=True)


def comma_separated(choices: Any) -> Any:
    """Return an argparse type: names out of ``choices``, in the order of the command line."""

    def names(text: str) -> list[str]:
        given = text.split(",")
        if unknown := [name for name in given if name not in choices]:
            raise argparse.ArgumentTypeError(f"{unknown}: choose from {','.join(choices)}")
        return given

    return names


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=("smollm2", "tiny"), default="smollm2")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--suite", type=comma_separated(SUITES | CONCURRENCY), default=list(SUITES))
    parser.add_argument("--variants", type=comma_separated(NAMES), default=list(NAMES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="of rows, tokens and beams")
    parser.add_argument("--kv-memory", help="of hf_paged.patch")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile MLPs and norms, of all"
    )
    parser.add_argument("--profile", action="store_true", help="where the time of patched goes")
    parser.add_argument("--json", type=Path, help="write every figure there")
    arguments = parser.parse_args()
    if arguments.compile and arguments.profile:
        parser.error("--profile cannot time what is compiled: leave --compile out")
    if arguments.repeats < 1 or arguments.scale <= 0:
        parser.error("--repeats and --scale must be above 0")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model, text = load(arguments.model, DTYPES[arguments.dtype])
    names = sorted(arguments.variants, key=NAMES.index)
    contenders = {name: make(name, copy.deepcopy(model), arguments.kv_memory) for name in names}
    if arguments.compile:
        for contender in contenders.values():
            compile_layers(contender.model)
    token_bytes = models.token_bytes(model)
    builders = SUITES | CONCURRENCY
    data: dict[str, Any] = {
        "machine": machine(arguments.threads)
        | {
            "capability": torch.backends.cpu.get_cpu_capability(),
            "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "default"),
            "load": os.getloadavg()[0],
        },
        "model": {
            "name": arguments.model,
            "dtype": arguments.dtype,
            "num_parameters": model.num_parameters(),
            "token_bytes": token_bytes,
        },
        "arguments": {key: value for key, value in vars(arguments).items() if key != "json"},
        "suites": [],
        "results": [],
    }
    del model
    with tqdm(unit="run") as progress:
        comparisons = [
            Comparison(builders[name](text, scale_by(arguments.scale)), contenders, token_bytes)
            for name in arguments.suite
        ]
        progress.total = sum(one.num_runs(arguments.repeats) for one in comparisons)
        for comparison in comparisons:
            comparison.run(arguments.repeats, progress, is_profiled=arguments.profile)
            data["suites"].append(comparison.about())
            data["results"] += comparison.results()
            if arguments.json is not None:  # what there is so far
                arguments.json.write_text(json.dumps(data, indent=1) + "\n")

    console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)
    console.print(", ".join(f"{key} {value}" for key, value in data["machine"].items()))
    options = (f"{key} {value}" for key, value in data["arguments"].items())
    console.print(", ".join(options), end="\n\n")
    for table in tables(data):
        console.print(table)
    return 1 if any(is_wrong(result, arguments.dtype) for result in data["results"]) else 0


def is_wrong(result: dict[str, Any], dtype: str) -> bool:
    """Whether a contender failed, or the patched model gave other tokens in fp32."""
    if result["status"] != "ok":
        return bool(result["status"] == "failed")
    is_exact = result["variant"] == "patched" and dtype == "float32"
    return is_exact and result["rows_equal"] not in (None, result["rows"])


if __name__ == "__main__":
    raise SystemExit(main())
