"""The ways to generate, each with a model of its own."""

from __future__ import annotations

import gc
import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from suites import num_rows
from transformers import ContinuousBatchingConfig, GenerationConfig
from workloads import Workload

import hf_paged

TOP_K = 50
"""Of samples; transformers' default, but generate_batch has another."""

PAGE_SIZE, MAX_BATCH_TOKENS = 16, 256
"""Of generate_batch."""


class Unsupported(Exception):
    """The contender cannot run the suite."""


class Contender(ABC):
    """A way to generate.

    Args:
        model: its own; without an end-of-sequence token.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    def forget(self) -> None:
        """Drop what an earlier run left behind, so that the next one does all the work."""
        gc.collect()

    @abstractmethod
    def generate(self, work: Workload, num_new: int) -> torch.Tensor:
        """Return the new tokens of every row, [rows, num_new]."""

    @abstractmethod
    def kv_peak_bytes(self, work: Workload, token_bytes: int) -> int | None:
        """Return the most K and V that the last run held; None: not known.

        Args:
            work: what ran.
            token_bytes: K and V of one token in all layers.
        """


class Unpatched(Contender):
    """transformers' ``generate()`` with its DynamicCache."""

    def generate(self, work: Workload, num_new: int) -> torch.Tensor:
        columns = max(map(len, work.prompts))
        ids = torch.tensor([[0] * (columns - len(prompt)) + prompt for prompt in work.prompts])
        mask = torch.tensor([[0] * (columns - len(p)) + [1] * len(p) for p in work.prompts])
        options: dict[str, Any] = {}
        if work.num_beams > 1:
            options["num_beams"] = work.num_beams
        if work.num_samples > 1:
            options |= dict(num_return_sequences=work.num_samples, do_sample=True, top_k=TOP_K)
        torch.manual_seed(0)
        rows = self.model.generate(ids, attention_mask=mask, max_new_tokens=num_new, **options)
        return rows[:, columns:]

    def kv_peak_bytes(self, work: Workload, token_bytes: int) -> int | None:
        """A rectangle; what was concatenated last, without the copy that it was made from."""
        columns = max(map(len, work.prompts)) + work.max_new_tokens - 1
        return num_rows(work) * columns * token_bytes


class Patched(Unpatched):
    """The same after ``hf_paged.patch``."""

    def __init__(self, model: Any, kv_memory: str | None) -> None:
        super().__init__(hf_paged.patch(model, kv_memory=kv_memory))

    def forget(self) -> None:
        super().forget()
        hf_paged.clear_prefix_cache(self.model)
        hf_paged.reset_stats(self.model)

    def kv_peak_bytes(self, work: Workload, token_bytes: int) -> int | None:
        return hf_paged.stats(self.model).peak_used_bytes


class GenerateBatch(Contender):
    """transformers' ``generate_batch()``, its pool sized for the suite.

    Left to itself it takes 90% of the memory that is free.
    """

    def generate(self, work: Workload, num_new: int) -> torch.Tensor:
        if work.num_beams > 1:
            raise Unsupported("no beam search")
        is_sampled = work.num_samples > 1
        prompts = [prompt for prompt in work.prompts for _ in range(work.num_samples)]
        pages = sum(math.ceil((len(prompt) + num_new) / PAGE_SIZE) for prompt in prompts)
        outputs = self.model.generate_batch(
            prompts,
            generation_config=GenerationConfig(
                max_new_tokens=num_new,
                do_sample=is_sampled,
                top_k=TOP_K if is_sampled else None,
                eos_token_id=-1,
                pad_token_id=0,
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE_SIZE, num_blocks=pages, max_batch_tokens=MAX_BATCH_TOKENS, seed=0
            ),
        )
        rows = [output.generated_tokens for output in outputs.values()]
        if len(rows) < len(prompts) or any(len(row) != num_new for row in rows):
            errors = {output.error for output in outputs.values() if output.error}
            raise RuntimeError(f"{len(rows)} of {len(prompts)} requests returned: {errors}")
        return torch.tensor(rows)

    def kv_peak_bytes(self, work: Workload, token_bytes: int) -> int | None:
        return None


def make(name: str, model: Any, kv_memory: str | None) -> Contender:
    """Return a contender by its name on the command line; ``model`` becomes its own."""
    if name == "patched":
        return Patched(model, kv_memory)
    return {"unpatched": Unpatched, "generate_batch": GenerateBatch}[name](model)


NAMES = ("unpatched", "patched", "generate_batch")
