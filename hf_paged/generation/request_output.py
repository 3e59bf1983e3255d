"""What ``generate_batch`` yields."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RequestOutput"]


@dataclass(frozen=True)
class RequestOutput:
    """What became of one prompt.

    Attributes:
        index: its number among the prompts.
        prompt_ids: its tokens.
        sequences: prompt and generated tokens of each return sequence, without padding.
        texts: the generated part decoded, if a tokenizer was given.
        finish_reasons: "stop" (an eos token or a stopping criterion) or "length", one a sequence.
        num_cached_tokens: tokens of the prompt that need not be computed for its first sequence.
        error: why there are no sequences, or None.
    """

    index: int
    prompt_ids: list[int]
    sequences: list[list[int]]
    texts: list[str] | None
    finish_reasons: list[str]
    num_cached_tokens: int
    error: Exception | None = None

    @classmethod
    def failed(cls, index: int, prompt_ids: list[int], error: Exception) -> RequestOutput:
        """Return what becomes of a prompt that ends in an error."""
        return cls(index, prompt_ids, [], None, [], 0, error)
