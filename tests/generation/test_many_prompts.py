"""generate() for many more rows than the pool holds: finishes, with the same tokens, in bounds."""

from __future__ import annotations

import functools
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import hf_paged
from reference import patched
from tiny_models import Batch, build, ragged_batch

ROW_COUNTS = (1, 2, 3, 17, 100, 500)
NEW_TOKENS = 4
EOS = [2, 55, 65]

ALLOWANCE = 24 * 2**20
"""What a process may take besides the pool: activations of one forward, ids of all rows, heap."""

BOUNDED = """
import json, random, sys
import torch, transformers
import hf_paged
sys.path += sys.argv[1:3]
from process_memory import PeakMemory
from tiny_models import build

transformers.logging.set_verbosity_error()
torch.set_num_threads(1)
rng = random.Random(3)
lengths = [512] + [rng.randint(16, 512) for _ in range(499)]
ids, mask = torch.zeros(500, 512, dtype=torch.long), torch.zeros(500, 512, dtype=torch.long)
for row, length in enumerate(lengths):
    ids[row, -length:] = torch.tensor([rng.randrange(3, 128) for _ in range(length)])
    mask[row, -length:] = 1
model = build("llama", max_position_embeddings=1024)
options = dict(max_new_tokens=4, pad_token_id=0, eos_token_id=[2, 55, 65])
checked = [0, 1, 250, 498, 499]
alone = [
    model.generate(ids[row : row + 1, -lengths[row] :], **options)[0, lengths[row] :].tolist()
    for row in checked
]
num_blocks = 8 * -(-(512 + 4) // 16)
hf_paged.patch(model, num_blocks=num_blocks, max_batch_tokens=512)
model.generate(ids[:2, -16:], **options)  # what is loaded at first use
hf_paged.trim(model)
hf_paged.reset_stats(model)
with PeakMemory() as memory:
    result = model.generate(ids, attention_mask=mask, **options)[:, 512:]
stats = hf_paged.stats(model)
print(json.dumps({
    "equal": [
        result[row, : len(tokens)].tolist() == tokens
        for row, tokens in zip(checked, alone, strict=True)
    ],
    "rows": len(result),
    "limit": num_blocks * stats.bytes_per_block,
    "capacity": stats.capacity_bytes,
    "kv_peak": stats.peak_used_bytes,
    "used": stats.used_blocks,
    "process_peak": memory.bytes,
    "rectangle": 500 * (512 + 3) * stats.bytes_per_block // 16,
}))
"""

_model = functools.cache(build)


def generate(model: PreTrainedModel, batch: Batch, **options: Any) -> torch.Tensor:
    options = {
        "max_new_tokens": NEW_TOKENS,
        "pad_token_id": 0,
        "eos_token_id": [2, 55, 65],
    } | options
    torch.manual_seed(3)
    return model.generate(**batch.inputs, **options)


def batch_of(num_rows: int) -> Batch:
    rng = random.Random(num_rows)
    return ragged_batch(tuple(rng.randint(1, 12) for _ in range(num_rows)), seed=num_rows)


@pytest.mark.core_suite
@pytest.mark.parametrize("num_rows", ROW_COUNTS)
def test_any_number_of_rows(num_rows: int) -> None:
    """The pool holds some 10 rows of up to 16 tokens; sampled rows are as many, at 100."""
    model, batch = _model("llama"), batch_of(num_rows)
    options: dict[str, Any] = {"do_sample": num_rows == 100}
    expected = generate(model, batch, **options)
    with patched(model, num_blocks=40, debug=num_rows < 500):
        assert torch.equal(generate(model, batch, **options), expected)
        stats = hf_paged.stats(model)
        assert stats.peak_used_blocks <= 40
        assert stats.computed_tokens >= num_rows


@pytest.mark.parametrize("family", ["gemma3", "opt"])
def test_many_rows_of_other_families(family: str) -> None:
    model, batch = _model(family), batch_of(60)
    expected = generate(model, batch)
    with patched(model, num_blocks=40):
        assert torch.equal(generate(model, batch), expected)


@pytest.mark.core_suite
def test_as_results_of_one_prompt_each(num_rows: int = 100) -> None:
    model, batch = _model("llama"), batch_of(num_rows)
    expected = generate(model, batch)
    prompts = [batch.row(index).ids[0] for index in range(num_rows)]
    options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "eos_token_id": EOS}
    with patched(model, num_blocks=40):
        outputs = list(hf_paged.generate_batch(model, iter(prompts), **options, pad_token_id=0))
    assert len({output.index for output in outputs}) == num_rows
    for output in outputs:
        new = output.sequences[0][len(output.prompt_ids) :]
        padded = new + [0] * (expected.shape[1] - batch.ids.shape[1] - len(new))
        assert padded == expected[output.index, batch.ids.shape[1] :].tolist()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_500_prompts_through_a_pool_for_8() -> None:
    """16 to 512 tokens each; the pool keeps its limit, and so does the process."""
    root = Path(__file__).parent.parent.parent
    command = [sys.executable, "-c", BOUNDED, str(root / "benchmarks" / "memory")]
    environment = os.environ | {"MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
    environment |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(
        [*command, str(root / "tests")],
        env=environment,
        cwd=root,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["rows"] == 500 and all(figures["equal"])
    assert figures["used"] == 0
    assert 0 < figures["kv_peak"] <= figures["limit"]
    assert figures["process_peak"] <= figures["capacity"] + ALLOWANCE, figures
    assert figures["process_peak"] < figures["rectangle"], figures
