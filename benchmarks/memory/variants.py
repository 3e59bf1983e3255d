"""The ways to keep K and V, each running a workload and saying what its cache took."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from distinct_tokens import num_distinct_tokens
from transformers import ContinuousBatchingConfig, GenerationConfig, StaticCache
from transformers.generation.continuous_batching import cache as continuous_cache
from workloads import Tokens, Workload

import hf_paged
from real_model import CACHE_NAME

MAX_BATCH_TOKENS = 256
"""New tokens of a forward of generate_batch."""


@dataclass(frozen=True)
class Settings:
    """What the variants are told besides the workload.

    Attributes:
        block_size: of those that have blocks.
        token_bytes: K and V of one token in all layers.
        is_sized: the pool of `hf_paged` is as large as the workload needs (`num_blocks_for`), and
            not half of what is free.
    """

    block_size: int
    token_bytes: int
    is_sized: bool = False


@dataclass
class Taken:
    """What a run took.

    Attributes:
        kv_allocated: most bytes of K and V set aside at a time.
        kv_live: of these, what belongs to tokens and not to padding or nothing; None: not known.
        ideal_tokens: most distinct tokens of unfinished rows that were stored at a time.
    """

    kv_allocated: int
    kv_live: float | None
    ideal_tokens: int


class Unsupported(Exception):
    """The variant cannot run the workload."""


class Recorder:
    """Looks at the tokens of every step; the logits processor and stopping criterion of a call."""

    def __init__(self, prompts: list[Tokens], copies: int, answers: list[int] | None) -> None:
        self._columns = max(map(len, prompts))
        self._padding = [self._columns - len(p) for p in prompts for _ in range(copies)]
        self._answers = answers
        self.others: list[Tokens] = []  # rows that earlier calls still hold
        self.ideal_tokens = 0
        self.num_tokens = 0  # of all rows, equal prefixes counted for each

    def rows(self, input_ids: torch.Tensor) -> list[Any]:
        return [
            row[padding:] for row, padding in zip(input_ids.numpy(), self._padding, strict=True)
        ]

    def process(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        rows = self.rows(input_ids)
        new = input_ids.shape[1] - self._columns
        if self._answers:
            rows = [row for row, length in zip(rows, self._answers, strict=True) if new < length]
        self.num_tokens = max(self.num_tokens, sum(map(len, rows)))
        self.ideal_tokens = max(self.ideal_tokens, num_distinct_tokens([*rows, *self.others]))
        return scores

    def process_later(self, sequences: torch.Tensor) -> None:
        """Look at the tokens of every step when all are there."""
        for num_columns in range(self._columns, sequences.shape[1]):
            self.process(sequences[:, :num_columns], sequences)

    def stop(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        new = input_ids.shape[1] - self._columns
        return torch.tensor([new >= length for length in self._answers or ()])


def call(
    model: Any,
    work: Workload,
    prompts: list[Tokens],
    recorder: Recorder,
    *,
    watches: bool = True,
    **options: Any,
) -> Any:
    """Call `generate()` for left-padded prompts.

    Args:
        watches: look at every step and ask for the cache; else only for the tokens, as most do.
    """
    columns = max(map(len, prompts))
    ids = torch.tensor([[0] * (columns - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (columns - len(p)) + [1] * len(p) for p in prompts])
    if work.answer_lengths:
        options["stopping_criteria"] = [recorder.stop]
    if work.prefill_chunk_size:
        options["prefill_chunk_size"] = work.prefill_chunk_size
    if watches:
        options |= {"logits_processor": [recorder.process], "return_dict_in_generate": True}
    torch.manual_seed(0)
    return model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=work.max_new_tokens,
        num_beams=work.num_beams,
        num_return_sequences=work.num_samples,
        do_sample=work.num_samples > 1,
        eos_token_id=-1,
        pad_token_id=0,
        **options,
    )


def cache_bytes(cache: Any) -> int:
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def generate(
    model: Any, work: Workload, new_cache: Callable[[int], Any], **options: Any
) -> tuple[list[Any], Recorder]:
    """Run a workload through `generate()`; return its caches, still holding, and the recorder.

    Args:
        model: patched or not.
        work: what to run.
        new_cache: given the tokens of a whole conversation, what to pass to its first turn.
        options: of `generate()`.
    """
    if not work.turns:
        recorder = Recorder(work.prompts, work.num_beams * work.num_samples, work.answer_lengths)
        return [call(model, work, work.prompts, recorder, **options)[CACHE_NAME]], recorder

    # Conversations: turn by turn, one row a call; every cache is kept until the end.
    turns = [work.prompts, *work.turns]
    num_turns, count = len(turns), len(work.prompts)
    caches: list[Any] = [None] * count
    talks: list[Tokens] = [[] for _ in range(count)]
    total = Recorder(work.prompts[:1], 1, None)
    stored = [0] * count
    for turn in turns:
        for row, said in enumerate(turn):
            if caches[row] is None:
                length = sum(len(turns[t][row]) for t in range(num_turns))
                caches[row] = new_cache(length + num_turns * work.max_new_tokens)
            talks[row] = talks[row] + said
            recorder = Recorder([talks[row]], 1, None)
            recorder.others = [talk[:-1] for other, talk in enumerate(talks) if other != row]
            given = {} if caches[row] is None else {CACHE_NAME: caches[row]}
            output = call(model, work, [talks[row]], recorder, **given)
            talks[row], caches[row] = output.sequences[0].tolist(), output[CACHE_NAME]
            stored[row] = recorder.num_tokens
            total.ideal_tokens = max(total.ideal_tokens, recorder.ideal_tokens)
            total.num_tokens = sum(stored)
    return caches, total


def dynamic(model: Any, work: Workload, settings: Settings) -> Taken:
    caches, recorder = generate(model, work, lambda _: None)
    allocated = sum(map(cache_bytes, caches))
    return Taken(allocated, recorder.num_tokens * settings.token_bytes, recorder.ideal_tokens)


def static(model: Any, work: Workload, settings: Settings) -> Taken:
    if work.turns:
        caches, recorder = generate(
            model, work, lambda length: StaticCache(config=model.config, max_cache_len=length)
        )
    else:
        caches, recorder = generate(model, work, lambda _: None, cache_implementation="static")
    allocated = sum(map(cache_bytes, caches))
    return Taken(allocated, recorder.num_tokens * settings.token_bytes, recorder.ideal_tokens)


def num_blocks_for(work: Workload, block_size: int) -> int:
    """Return the blocks of all rows at their ends, if none are shared."""
    turns = [work.prompts, *work.turns]
    lengths = [
        sum(len(turn[row]) + work.max_new_tokens for turn in turns)
        for row in range(len(work.prompts))
    ]
    copies = work.num_samples * work.num_beams
    return copies * sum(math.ceil(length / block_size) for length in lengths)


def patched(model: Any, work: Workload, settings: Settings) -> Taken:
    """By default the pool may take half of what is free.

    Sized for a budget, prompts are computed in pieces as small as generate_batch's: what a forward
    needs besides K and V grows with its tokens.
    """
    sized: dict[str, Any] = {}
    if settings.is_sized:
        sized["num_blocks"] = num_blocks_for(work, settings.block_size)
        sized["max_batch_tokens"] = MAX_BATCH_TOKENS
    hf_paged.patch(model, block_size=settings.block_size, **sized)
    caches: list[Any] = []
    if work.turns or work.num_beams > 1:  # the tokens of beams that were given up are not returned
        caches, recorder = generate(model, work, lambda _: None)
    else:
        recorder = Recorder(work.prompts, work.num_samples, work.answer_lengths)
        sequences = call(model, work, work.prompts, recorder, watches=False)
        recorder.process_later(sequences)
    stats = hf_paged.stats(model)
    for cache in caches:
        cache.release()
    live = stats.peak_used_bytes * stats.utilization_at_peak
    return Taken(stats.peak_used_bytes, live, recorder.ideal_tokens)


@contextmanager
def watched_pools() -> Iterator[list[int]]:
    """Collect the bytes of the pools that `generate_batch` makes."""
    pools: list[int] = []
    cls = continuous_cache.PagedAttentionCache
    original = cls.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        pools.append(self.cache_tensor.nbytes)

    cls.__init__ = init
    try:
        yield pools
    finally:
        cls.__init__ = original


def continuous(model: Any, work: Workload, settings: Settings, *, is_sized: bool = True) -> Taken:
    """`generate_batch`, its pool as large as all requests together need without sharing.

    Not sized, it takes 90% of the memory that is free.
    """
    if work.num_beams > 1:
        raise Unsupported("generate_batch has no beam search")
    if work.answer_lengths:
        raise Unsupported("generate_batch has one max_new_tokens for all requests")
    generation = GenerationConfig(
        max_new_tokens=work.max_new_tokens,
        do_sample=work.num_samples > 1,
        num_return_sequences=work.num_samples,
        eos_token_id=-1,
        pad_token_id=0,
    )
    turns = [work.prompts, *work.turns]
    num_blocks = num_blocks_for(work, settings.block_size)
    config = ContinuousBatchingConfig(
        page_size=settings.block_size, num_blocks=num_blocks, max_batch_tokens=MAX_BATCH_TOKENS
    )
    talks: list[Tokens] = [[] for _ in work.prompts]
    rows: list[Tokens] = []
    with watched_pools() as pools:
        for turn in turns:
            talks = [talk + said for talk, said in zip(talks, turn, strict=True)]
            results = model.generate_batch(
                talks,
                generation_config=generation,
                continuous_batching_config=config if is_sized else None,
            )
            outputs = list(results.values())
            expected = len(talks) * work.num_samples
            errors = [output.error for output in outputs if output.error]
            if len(outputs) < expected or errors:
                raise RuntimeError(f"{len(outputs)} of {expected} requests returned: {errors}")
            rows = [[*o.prompt_ids, *o.generated_tokens] for o in outputs]
            if work.turns:  # they come in the order in which they end
                rows = [next(row for row in rows if row[: len(talk)] == talk) for talk in talks]
            if any(len(o.generated_tokens) < work.max_new_tokens for o in outputs):
                raise RuntimeError("a request ended early")
            talks = rows if work.turns else talks
    stored = [row[:-1] for row in rows]
    ideal = num_distinct_tokens(stored)
    is_unshared = ideal == sum(map(len, stored))
    return Taken(max(pools), float(ideal * settings.token_bytes) if is_unshared else None, ideal)


def continuous_default(model: Any, work: Workload, settings: Settings) -> Taken:
    return continuous(model, work, settings, is_sized=False)


VARIANTS: dict[str, Callable[[Any, Workload, Settings], Taken]] = {
    "dynamic": dynamic,
    "static": static,
    "continuous": continuous,
    "patched": patched,
    "continuous_default": continuous_default,
}
DEFAULT_VARIANTS = ("dynamic", "static", "continuous", "patched")
