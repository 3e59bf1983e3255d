"""Prompts for generate_batch(), and what a model generates for each of them alone."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable
from typing import Any

import torch

from hf_paged import RequestOutput, generate_batch
from tiny_models import build

EOS = [23, 55, 65, 96, 100]
"""Frequent tokens, so that some rows end early."""
OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "pad_token_id": 0, "eos_token_id": EOS}
TINY = {"num_blocks": 14}
"""Two to four of the prompts at a time."""


def random_prompts(count: int, *, longest: int = 16, seed: int = 5) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(4, 128) for _ in range(rng.randint(1, longest))] for _ in range(count)]


PROMPTS = random_prompts(12)
model_of = functools.cache(build)


def alone(model: Any, prompt: list[int], **options: Any) -> list[list[int]]:
    """Generate for one prompt with the model as it is; rows end with their eos token."""
    options = OPTIONS | options
    rows = model.generate(torch.tensor([prompt]), **options).tolist()
    ends = [
        next((i + 1 for i in range(len(prompt), len(r)) if r[i] in options["eos_token_id"]), None)
        for r in rows
    ]
    return [row[:end] for row, end in zip(rows, ends, strict=True)]


@functools.cache
def expected(family: str) -> list[list[list[int]]]:
    return [alone(model_of(family), prompt) for prompt in PROMPTS]


def run(model: Any, prompts: Iterable[Any], **options: Any) -> list[RequestOutput]:
    """Return all results in the order of their prompts."""
    outputs = list(generate_batch(model, prompts, **OPTIONS | options))
    ordered = sorted(outputs, key=lambda output: output.index)
    assert [output.index for output in ordered] == list(range(len(outputs)))
    return ordered


def found(outputs: Iterable[RequestOutput]) -> list[list[list[int]]]:
    return [output.sequences for output in outputs]
