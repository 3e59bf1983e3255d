"""From a prompt of ``generate_batch`` to a request, and from a request to its output."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
from transformers import GenerationConfig

from hf_paged.errors import ConfigurationError, KVCacheFullError
from hf_paged.generation.request import Request, SampleArguments
from hf_paged.generation.request_output import RequestOutput
from hf_paged.generation.row_wise import first_not_row_wise

__all__ = ["COLLECTED", "Preparation"]

COLLECTED: ContextVar[list[SampleArguments] | None] = ContextVar("collected", default=None)
"""Where ``generate()`` puts what it has prepared, instead of generating, while this is set."""


class Preparation:
    """Turns a prompt into a request, by the model's own ``generate()``.

    Args:
        model: patched.
        tokenizer: or None.
        generation_config: or None.
        options: of ``generate()``.
    """

    def __init__(
        self, model: Any, tokenizer: Any, generation_config: Any, options: dict[str, Any]
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._generation_config = generation_config
        self._options = options
        self._seed: int | None = None
        self.device: torch.device = model.device

    def prepare(
        self, index: int, item: Any, *, may_wait: bool
    ) -> tuple[Request, list[int]] | RequestOutput | None:
        """Return a request and its prompt; or the output, if it had to run alone or has failed.

        Args:
            index: of the prompt.
            item: the prompt as it came.
            may_wait: others are running: return None if it has to run alone and cannot beside them.
        """
        prompt_ids: list[int] = []
        random_state = torch.get_rng_state()
        try:
            prompt, config = self._generation_config_of(item)
            prompt_ids = self._ids(prompt)
            options = dict(self._options)
            if config is not None:
                options["generation_config"] = config
            if self._resolved("stop_strings", config) is not None:
                options["tokenizer"] = self._tokenizer
            collected: list[SampleArguments] = []
            token = COLLECTED.set(collected)
            try:
                result = self._generate(prompt_ids, options)
            finally:
                COLLECTED.reset(token)
            if not collected:
                return self._output_of_alone(index, prompt_ids, config, result)
            arguments = collected[0]
            if first_not_row_wise(arguments.processors, arguments.criteria) is None:
                request = Request(arguments, generator=self._generator(index, arguments))
                if request.culprit is None:
                    return request, prompt_ids
            # Something holds a state, which prompts beside each other would mix up, or must see
            # all rows of the prompt at one age.
            if may_wait:
                return None
            result = self._generate(prompt_ids, options)
            return self._output_of_alone(index, prompt_ids, config, result)
        except Exception as error:
            if may_wait and isinstance(error, KVCacheFullError):
                torch.set_rng_state(random_state)
                return None
            return RequestOutput.failed(index, prompt_ids, error)

    def output(self, index: int, prompt_ids: list[int], request: Request) -> RequestOutput:
        """Return what came of a request that has ended."""
        sequences = [row.token_ids for row in request.rows]
        return RequestOutput(
            index,
            prompt_ids,
            sequences,
            self._decode(prompt_ids, sequences),
            [request.finish_reason(row) for row in request.rows],
            request.rows[0].num_cached_tokens,
        )

    def _generation_config_of(self, item: Any) -> tuple[Any, Any]:
        if isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], GenerationConfig):
            return item
        return item, self._generation_config

    def _ids(self, prompt: Any) -> list[int]:
        given = type(prompt).__name__
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise ConfigurationError(
                    "a prompt is a string: expected a tokenizer= to encode it, or a list of ids."
                )
            prompt = self._tokenizer(prompt)["input_ids"]
        if isinstance(prompt, torch.Tensor):
            prompt = prompt.reshape(-1).tolist() if prompt.shape[:-1] in ((), (1,)) else None
        if not isinstance(prompt, (list, tuple)) or not all(type(i) is int for i in prompt):
            raise ConfigurationError(
                "a prompt must be a string, a list of ids, a tensor of ids [P] or [1, P], or a "
                f"pair of one of these and a GenerationConfig; got a {given}."
            )
        if not prompt:
            raise ConfigurationError("a prompt is empty: expected at least one token.")
        vocab_size = self._model.get_input_embeddings().weight.shape[0]
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            # In a forward it would take the prompts beside it along.
            raise ConfigurationError(
                f"a prompt has ids from {min(prompt)} to {max(prompt)}: expected 0 to "
                f"{vocab_size - 1}, the vocabulary of the model; check that the tokenizer is its "
                "own."
            )
        return list(prompt)

    def _generate(self, prompt_ids: list[int], options: dict[str, Any]) -> Any:
        ids = torch.tensor([prompt_ids], device=self.device)
        # Without a mask transformers would take leading pad ids for padding.
        return self._model.generate(ids, attention_mask=torch.ones_like(ids), **options)

    def _generator(self, index: int, arguments: SampleArguments) -> torch.Generator | None:
        if not arguments.config.do_sample:
            return None
        if self._seed is None:
            self._seed = int(torch.randint(2**62, (1,)))
        return torch.Generator(self.device).manual_seed(self._seed + index)

    def _output_of_alone(
        self, index: int, prompt_ids: list[int], config: Any, result: Any
    ) -> RequestOutput:
        eos = self._resolved("eos_token_id", config)
        eos_ids = set(torch.tensor([] if eos is None else eos).reshape(-1).tolist())
        max_new_tokens = self._resolved("max_new_tokens", config)
        sequences, reasons = [], []
        for row in result.tolist():
            generated = row[len(prompt_ids) :]
            end = next((i + 1 for i, token in enumerate(generated) if token in eos_ids), None)
            sequences.append(row if end is None else row[: len(prompt_ids) + end])
            is_full = max_new_tokens is None or len(generated) >= max_new_tokens
            reasons.append("length" if end is None and is_full else "stop")
        return RequestOutput(
            index, prompt_ids, sequences, self._decode(prompt_ids, sequences), reasons, 0
        )

    def _resolved(self, name: str, config: Any) -> Any:
        """Return what holds for a prompt, as ``generate()`` fills in a config."""
        value = None if config is None else getattr(config, name)
        if value is None:
            value = getattr(self._model.generation_config, name)
        return self._options.get(name, value)

    def _decode(self, prompt_ids: list[int], sequences: list[list[int]]) -> list[str] | None:
        if self._tokenizer is None:
            return None
        generated = [sequence[len(prompt_ids) :] for sequence in sequences]
        texts: list[str] = self._tokenizer.batch_decode(generated, skip_special_tokens=True)
        return texts
