"""What is generated: prompts of real text, and how they are continued.

No row ends by itself, so every contender makes the same number of tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from distinct_tokens import num_distinct_tokens
from workloads import Tokens, Workload, windows

Scale = Callable[[int], int]
"""Shrinks a number of rows, tokens or beams."""


def scale_by(factor: float) -> Scale:
    """Return a function that multiplies numbers above 1, to no less than 2."""
    return lambda number: number if number == 1 else max(2, round(number * factor))


def ragged(text: Tokens, scale: Scale) -> Workload:
    lengths = random.Random(0)
    prompts = windows(text, [scale(lengths.randint(16, 512)) for _ in range(scale(32))])
    tokens = [len(prompt) for prompt in prompts]
    title = f"{len(prompts)} prompts of {min(tokens)} to {max(tokens)}"
    return Workload("ragged", title, prompts, scale(64))


def shared(text: Tokens, scale: Scale) -> Workload:
    common = windows(text, [scale(512)])[0]
    own = windows(text, [scale(32)] * scale(32))
    title = f"{len(own)} prompts of {len(common)} in common and {len(own[0])} of their own"
    return Workload("shared", title, [common + tokens for tokens in own], scale(64))


def nsample(text: Tokens, scale: Scale) -> Workload:
    prompts = windows(text, [scale(512)])
    samples = scale(16)
    title = f"{samples} samples of a prompt of {len(prompts[0])}"
    return Workload("nsample", title, prompts, scale(64), num_samples=samples)


def long(text: Tokens, scale: Scale) -> Workload:
    prompts = windows(text, [scale(1024)] * scale(16))
    title = f"{len(prompts)} prompts of {len(prompts[0])}"
    return Workload("long", title, prompts, scale(64))


def single(text: Tokens, scale: Scale) -> Workload:
    prompts = windows(text, [scale(128)])
    return Workload("single", f"one prompt of {len(prompts[0])}", prompts, scale(64))


def beam(text: Tokens, scale: Scale) -> Workload:
    prompts = windows(text, [scale(256)] * scale(4))
    beams = scale(8)
    title = f"{len(prompts)} prompts of {len(prompts[0])}, {beams} beams each"
    return Workload("beam", title, prompts, scale(64), num_beams=beams)


def rows(count: int, text: Tokens, scale: Scale) -> Workload:
    lengths = random.Random(0)
    prompts = windows(text, [scale(lengths.randint(64, 256)) for _ in range(count)])
    return Workload(f"rows{count}", f"{count} prompts of 64 to 256", prompts, scale(32))


SUITES: dict[str, Callable[[Tokens, Scale], Workload]] = {
    build.__name__: build for build in (ragged, shared, nsample, long, single, beam)
}
CONCURRENCY: dict[str, Callable[[Tokens, Scale], Workload]] = {
    f"rows{count}": partial(rows, count) for count in (1, 2, 4, 8, 16, 32)
}
"""One kind of rows, more and more of them: for tokens/s against concurrency."""


def num_rows(work: Workload) -> int:
    """Return the rows that are decoded: prompts, samples or beams."""
    return len(work.prompts) * work.num_samples * work.num_beams


def num_new_tokens(work: Workload) -> int:
    """Return the new tokens of all rows that are returned; of beams, one a prompt is."""
    return len(work.prompts) * work.num_samples * work.max_new_tokens


def num_needed_tokens(work: Workload) -> int:
    """Return the tokens that must be computed: each distinct prompt token once, then every row.

    The last new token of a row is never computed.
    """
    return num_distinct_tokens(work.prompts) + num_rows(work) * (work.max_new_tokens - 1)
