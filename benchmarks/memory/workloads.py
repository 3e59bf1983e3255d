"""What is generated: prompts, and how they are continued.

No row ends by itself, so lengths are exact: a row's tokens are its prompt and `max_new_tokens`
(or its entry of `answer_lengths`) new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Tokens = list[int]


@dataclass(frozen=True)
class Workload:
    """One call of `generate()`, or a few.

    Attributes:
        name: as on the command line.
        title: as in the table.
        prompts: token ids of each row.
        max_new_tokens: for each row.
        num_beams: above 1: beam search.
        num_samples: above 1: so many samples of each prompt.
        turns: what the user says in later turns of each row's conversation, a list of rows a turn.
        answer_lengths: rows end after so many new tokens; None: all after `max_new_tokens`.
        prefill_chunk_size: of `generate()`; None: prompts are computed in one piece.
        most: the multiple of the ideal that the patched model must not exceed; None: not promised.
        claimed: (paged, old way), multiples that a walk-through on the web claims.
    """

    name: str
    title: str
    prompts: list[Tokens]
    max_new_tokens: int
    num_beams: int = 1
    num_samples: int = 1
    turns: list[list[Tokens]] = field(default_factory=list)
    answer_lengths: list[int] | None = None
    prefill_chunk_size: int | None = None
    most: float | None = None
    claimed: tuple[float, float] | None = None


def spread(first: int, last: int, count: int) -> list[int]:
    """Return `count` lengths from `first` to `last`, evenly spaced, in a mixed order."""
    step = (last - first) / max(1, count - 1)
    lengths = [round(first + step * index) for index in range(count)]
    return [lengths[index * 7 % count] for index in range(count)] if count % 7 else lengths


def windows(text: Tokens, lengths: Sequence[int]) -> list[Tokens]:
    """Cut prompts of those lengths out of a repetition of `text`; each begins elsewhere."""
    prompts = []
    for row, length in enumerate(lengths):
        start = row * 101 % len(text)
        repeated = text[start:] + text * (length // len(text) + 1)
        prompts.append(repeated[:length])
    return prompts


def one(text: Tokens, quick: bool) -> Workload:
    return Workload(
        "one", "one sequence, 512 + 64", windows(text, [512]), 64, most=1.05, claimed=(0.98, 1.0)
    )


def ten(text: Tokens, quick: bool) -> Workload:
    lengths = [length - 32 for length in spread(100, 300, 10)]
    return Workload(
        "ten", "ten of 100 to 300", windows(text, lengths), 32, most=1.10, claimed=(1.05, 3.2)
    )


def beams(text: Tokens, quick: bool) -> Workload:
    return Workload(
        "beams",
        "4 beams, 500 + 100",
        windows(text, [500]),
        100,
        num_beams=4,
        most=1.20,
        claimed=(1.2, 4.0),
    )


def long(text: Tokens, quick: bool) -> Workload:
    lengths = [2000 - 8] + [length - 8 for length in spread(50, 150, 20)]
    return Workload(
        "long",
        "one of 2,000, twenty of 50 to 150",
        windows(text, lengths),
        8,
        most=1.10,
        claimed=(1.02, 1.8),
    )


def samples(text: Tokens, quick: bool) -> Workload:
    number = 8 if quick else 16
    return Workload(
        "samples",
        f"{number} samples of one prompt, 200 + 48",
        windows(text, [200]),
        48,
        num_samples=number,
    )


def system(text: Tokens, quick: bool) -> Workload:
    rows = 8 if quick else 16
    questions = windows(text, spread(10, 60, rows))
    shared = windows(text, [250])[0]
    return Workload(
        "system",
        f"{rows} rows after a system prompt of 250",
        [shared + question for question in questions],
        24,
    )


def chat(text: Tokens, quick: bool) -> Workload:
    shared = windows(text, [120])[0]
    rows = 2 if quick else 4
    said = [windows(text[turn * 17 :] + text, spread(15, 45, rows)) for turn in range(3)]
    return Workload(
        "chat",
        f"{rows} chats of 3 turns, one system prompt",
        [shared + first for first in said[0]],
        24,
        turns=said[1:],
    )


def few_shot(text: Tokens, quick: bool) -> Workload:
    rows = 20 if quick else 100
    shots = windows(text, [150])[0]
    return Workload(
        "few_shot",
        f"5 shots, {rows} questions",
        [shots + question for question in windows(text, spread(12, 30, rows))],
        4,
    )


def ragged_answers(text: Tokens, quick: bool) -> Workload:
    return Workload(
        "ragged_answers",
        "8 answers of 8 to 96 to prompts of 64",
        windows(text, [64] * 8),
        96,
        answer_lengths=spread(8, 96, 8),
    )


WORKLOADS: dict[str, Callable[[Tokens, bool], Workload]] = {
    build.__name__: build
    for build in (one, ten, beams, long, samples, system, chat, few_shot, ragged_answers)
}
REQUIRED = ("one", "ten", "beams", "long")


def ragged_batch(text: Tokens, num_rows: int) -> Workload:
    """Rows of 100 to 300 tokens, for the search of the largest batch."""
    totals = spread(100, 300, 10)
    lengths = [totals[row % 10] - 8 for row in range(num_rows)]
    return Workload(
        "ragged_batch",
        f"{num_rows} rows of 100 to 300",
        windows(text, lengths),
        8,
        prefill_chunk_size=64,
    )
