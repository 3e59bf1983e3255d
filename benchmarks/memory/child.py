"""Loads a model once, then forks a process for each job; see `jobs.py` for the other end.

A line of JSON comes in for a job, a line goes out for its result. The parent stays single-threaded,
so that a fork is a whole process; threads begin in the forked one, which ends with its job.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
import traceback
from dataclasses import asdict
from typing import Any

import models  # before variants: it makes the examples importable
import process_memory
import torch
import transformers
from variants import VARIANTS, Settings, Unsupported
from workloads import WORKLOADS, ragged_batch


def run(model: Any, text: list[int], job: dict[str, Any], num_threads: int) -> dict[str, Any]:
    """Do a job in this process and return what it took, or the error that it died of."""
    torch.set_num_threads(num_threads)
    warm_up = torch.tensor([text[:32]])
    model.generate(warm_up, max_new_tokens=2, do_sample=False, eos_token_id=-1, pad_token_id=0)
    if job["workload"] == "ragged_batch":
        work = ragged_batch(text, job["num_rows"])
    else:
        work = WORKLOADS[job["workload"]](text, job["quick"])
    result: dict[str, Any] = {"title": work.title, "most": work.most, "claimed": work.claimed}
    token_bytes = models.token_bytes(model)
    settings = Settings(job["block_size"], token_bytes, is_sized=bool(job.get("budget")))
    start = time.perf_counter()
    memory = process_memory.PeakMemory()
    try:
        with memory:
            if job.get("budget"):
                process_memory.limit_growth(job["budget"])
            taken = VARIANTS[job["variant"]](model, work, settings)
        result |= {"status": "ok", **asdict(taken)}
        result["ideal"] = taken.ideal_tokens * token_bytes
        result["multiple"] = taken.kv_allocated / result["ideal"]
        live = taken.kv_live
        result["waste"] = None if live is None else 1 - live / taken.kv_allocated
    except Unsupported as error:
        result |= {"status": "unsupported", "error": str(error)}
    except BaseException as error:
        if not job.get("budget"):
            traceback.print_exc()
        message = " ".join(f"{type(error).__name__}: {error}".split())
        result |= {"status": "failed", "error": message[:400]}
    result |= {"peak_process": memory.bytes, "seconds": time.perf_counter() - start}
    return result


def fork(model: Any, text: list[int], job: dict[str, Any], num_threads: int) -> dict[str, Any]:
    """Run a job in a process of its own; whatever becomes of that, return a result."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        with os.fdopen(write_end, "w") as pipe:
            pipe.write(json.dumps(run(model, text, job, num_threads)))
        os._exit(0)
    os.close(write_end)
    answer = b""
    end = time.monotonic() + job["timeout"]
    with os.fdopen(read_end, "rb", buffering=0) as pipe:
        while select.select([pipe], [], [], max(0.0, end - time.monotonic()))[0]:
            part = pipe.read(65536)
            if not part:
                break
            answer += part
        else:
            os.kill(pid, signal.SIGKILL)
            answer = b""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        result: dict[str, Any] = json.loads(answer)
    except ValueError:
        late = time.monotonic() >= end
        reason = f"no result after {job['timeout']} s" if late else f"exit code {code}"
        result = {"status": "died", "error": reason}
    return result


def main() -> None:
    name, num_threads = sys.argv[1], int(sys.argv[2])
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing that a library prints may come between the results
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    model, text = models.load(name)
    process_memory.give_back()
    about = {
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "token_bytes": models.token_bytes(model),
        "resident": process_memory.status("VmRSS"),
    }
    print(json.dumps(about), file=replies, flush=True)
    for line in sys.stdin:
        print(
            json.dumps(fork(model, text, json.loads(line), num_threads)), file=replies, flush=True
        )


if __name__ == "__main__":
    main()
