"""How many rows one `generate()` finishes in a fixed address space, unpatched and patched.

The limit (RLIMIT_AS) is the size of the process with the model loaded and warmed up, plus a budget.
Found by bisection: the smallest batch b for which the unpatched model fails to allocate. Then the
patched model, its pool half of the budget, generates for 4 b rows in one call, and the tokens are
compared with those of the unpatched model without a limit.

    python benchmarks/memory/address_space.py [--budget 48MiB] [--json out.json]

The model is a small random Llama, prompts have 16 to 512 tokens. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from process_memory import ENVIRONMENT, give_back, limit_growth, status

ENVIRONMENT = ENVIRONMENT | {"OMP_NUM_THREADS": "1"}
FACTOR = 4
NEW_TOKENS = 24
REFERENCE_ROWS = 8
MAX_BATCH_TOKENS = 512
MEMORY_ERROR = re.compile(r"can't allocate memory|Cannot allocate memory|bad_alloc|MemoryError")
"""What allocators say: torch's, the kernel's through Python, C++'s, Python's."""


@dataclass(frozen=True)
class Job:
    """One batch in a process of its own.

    Attributes:
        num_rows: of the batch, in one call.
        budget: bytes by which the address space may grow; None: no limit.
        is_patched: with a pool of half of the budget.
    """

    num_rows: int
    budget: int | None
    is_patched: bool = False


def load() -> Any:
    """Return a random Llama with 4 KiB of K and V a token."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        initializer_range=0.2,
        pad_token_id=0,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def prompts(num_rows: int) -> list[list[int]]:
    """Return prompts of 16 to 512 tokens, the longest first; a longer list begins alike."""
    rng = random.Random(0)
    lengths = [512] + [rng.randint(16, 512) for _ in range(num_rows - 1)]
    return [[rng.randrange(3, 1024) for _ in range(length)] for length in lengths]


def generate(model: Any, rows: list[list[int]]) -> list[list[int]]:
    """Generate greedily for left-padded rows in one call; return the new tokens."""
    import torch

    columns = max(map(len, rows))
    ids = torch.tensor([[0] * (columns - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (columns - len(row)) + [1] * len(row) for row in rows])
    result = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW_TOKENS)
    tokens: list[list[int]] = result[:, columns:].tolist()
    return tokens


def work(model: Any, job: Job) -> dict[str, Any]:
    """Do a job in this process."""
    import hf_paged

    rows = prompts(job.num_rows)
    if job.budget is None:
        parts = [rows[i : i + REFERENCE_ROWS] for i in range(0, len(rows), REFERENCE_ROWS)]
        return {"tokens": [row for part in parts for row in generate(model, part)]}
    before = status("VmSize")
    limit_growth(job.budget)
    result: dict[str, Any] = {}
    if job.is_patched:
        hf_paged.patch(model, kv_memory=job.budget // 2, max_batch_tokens=MAX_BATCH_TOKENS)
    result["tokens"] = generate(model, rows)
    if job.is_patched:
        result["kv_peak"] = hf_paged.stats(model).peak_used_bytes
    return result | {"grown": status("VmPeak") - before}


def run(model: Any, job: Job) -> dict[str, Any]:
    """Fork, do the job there, and return its result; {"failed": why} if memory ran out."""
    result = _fork(model, job)
    failed = result.get("failed")
    if failed is not None and not MEMORY_ERROR.search(failed):
        # It does not say so itself: then it must have been the limit that made the difference.
        if job.budget is None or "failed" in _fork(model, Job(job.num_rows, None)):
            raise SystemExit(f"{job} failed for want of something else than memory: {failed}")
        result["failed"] = f"finishes without a limit, and with it: {failed}"
    return result


def _fork(model: Any, job: Job) -> dict[str, Any]:
    give_back()
    read_end, write_end = os.pipe()
    with tempfile.TemporaryFile() as errors:
        pid = os.fork()
        if pid == 0:
            os.close(read_end)
            os.dup2(errors.fileno(), 2)
            _answer(model, job, write_end)
        os.close(write_end)
        with os.fdopen(read_end, "rb") as pipe:
            answer = pipe.read()
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        errors.seek(0)
        said = errors.read().decode(errors="replace")
    if code == 0:
        result: dict[str, Any] = json.loads(answer)
        return result
    how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
    return {"failed": f"{how}: {said.strip()[-400:]}"}


def _answer(model: Any, job: Job, write_end: int) -> None:
    """Work, write the result, and end the forked process."""
    import torch

    code = 1
    try:
        with torch.no_grad():
            answer = json.dumps(work(model, job)).encode()
        with os.fdopen(write_end, "wb") as pipe:
            pipe.write(answer)
        code = 0
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}".encode())
    os._exit(code)


def find_failing_batch(model: Any, budget: int) -> tuple[int, str]:
    """Return the smallest batch that the unpatched model cannot do, and what it died of."""
    good, bad, why = 0, 8, ""
    while not (why := _probe(model, bad, budget)):
        good, bad = bad, bad * 2
        if bad > 4096:
            raise SystemExit("the budget is too large: no batch of up to 4,096 rows fails")
    while bad - good > 1:
        middle = (good + bad) // 2
        if reason := _probe(model, middle, budget):
            bad, why = middle, reason
        else:
            good = middle
    return bad, why


def _probe(model: Any, num_rows: int, budget: int) -> str:
    start = time.perf_counter()
    why: str = run(model, Job(num_rows, budget)).get("failed", "")
    print(
        f"  unpatched, {num_rows:4} rows: {'fails' if why else 'finishes'}"
        f" ({time.perf_counter() - start:.1f} s)",
        flush=True,
    )
    return why


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--budget", default="48MiB", help="growth of the address space (48MiB)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | ENVIRONMENT)

    import torch
    import transformers

    import hf_paged
    from hf_paged.config import parse_kv_memory

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    model = load()
    budget = parse_kv_memory(arguments.budget, num_free_bytes=0)
    # Libraries that are loaded at first use belong to the process, not to the batch.
    warm_up = prompts(2)
    generate(model, warm_up)
    hf_paged.patch(model, kv_memory="8MiB")
    generate(model, warm_up)
    hf_paged.unpatch(model)

    print(f"an address space that may grow by {arguments.budget}")
    failing, why = find_failing_batch(model, budget)
    job = Job(FACTOR * failing, budget, is_patched=True)
    start = time.perf_counter()
    done = run(model, job)
    seconds = time.perf_counter() - start
    expected = run(model, Job(job.num_rows, None))
    if "failed" in expected:
        raise SystemExit(f"the run without a limit failed: {expected['failed']}")
    finished = 0 if "failed" in done else job.num_rows
    equal = sum(a == b for a, b in zip(done.get("tokens", ()), expected["tokens"], strict=False))
    print(f"unpatched: fails to allocate at {failing} rows ({why.splitlines()[-1][:150]})")
    print(f"patched: {job.num_rows} rows in {seconds:.1f} s, {equal} with the tokens of no limit")
    if not finished:
        print(f"patched failed: {done['failed']}")
    figures = {
        "budget": budget,
        "failing_batch": failing,
        "failed_with": why,
        "finished": finished,
        "equal_rows": equal,
        "kv_peak": done.get("kv_peak"),
        "grown": done.get("grown"),
        "job": asdict(job),
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    if equal < job.num_rows:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
