"""Generate for an iterable of prompts on one pool, results as they finish.

The same engine as ``generate()``, fed one prompt after the other: a row that ends makes room for
the next prompt at once. Each prompt is a request of its own, prepared by the model's own
``generate()``, so all its arguments mean what they mean there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm
from transformers import GenerationConfig

from hf_paged.cache.runtime import PagedRuntime, runtime_of
from hf_paged.core.scheduler import Call
from hf_paged.errors import ConfigurationError, KVCacheFullError
from hf_paged.generation.engine import Engine
from hf_paged.generation.request import Request, SampleArguments
from hf_paged.generation.row_wise import first_not_row_wise

__all__ = ["COLLECTED", "RequestOutput", "generate_batch"]

COLLECTED: ContextVar[list[SampleArguments] | None] = ContextVar("collected", default=None)
"""Where ``generate()`` puts what it has prepared, instead of generating, while this is set."""

_MAX_ROWS = 256
"""Rows that run or wait at a time: more would give each result later and none sooner."""
_MAX_WAITING = 16
"""Rows that wait: enough to fill the pool in one forward, few enough to read prompts late."""
_REFUSED = (
    "streamer",
    "inputs",
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "cache",
    "past_key_values",
)


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


def generate_batch(
    model: torch.nn.Module,
    prompts: Iterable[Any],
    *,
    tokenizer: Any = None,
    generation_config: Any = None,
    progress: bool = True,
    **generate_kwargs: Any,
) -> Iterator[RequestOutput]:
    """Generate for each prompt; yield results as they finish, in no fixed order.

    However many prompts there are, they share the pool: what does not fit waits. Closing the
    iterator gives all blocks back. Calls of other threads wait until it is exhausted or closed.

    Samples are drawn for each prompt by a generator of its own, seeded from torch's default one
    and the prompt's number: under ``torch.manual_seed`` a prompt's samples do not depend on the
    pool or on what runs beside it.

    Args:
        model: a patched model, or a PEFT wrapper around one.
        prompts: consumed as there is room. Each is a list of ids, a tensor of ids [P] or [1, P], a
            string if there is a tokenizer, or a pair of any of these and a GenerationConfig.
        tokenizer: encodes strings and decodes results.
        generation_config: for prompts that bring none.
        progress: show a bar if stderr is a terminal.
        generate_kwargs: of ``generate()``, for every prompt. Beams, draft models and processors
            that are not row-wise run one prompt at a time.

    Yields:
        One :class:`RequestOutput` a prompt. A prompt that cannot be generated for carries its
        error; the others go on.

    Raises:
        ConfigurationError: the model is not patched, or an argument that has no meaning here.
    """
    runtime = runtime_of(model)
    for name in _REFUSED:
        if generate_kwargs.get(name) is not None:
            raise ConfigurationError(
                f"generate_batch() got {name}: expected prompts as its second argument, and no "
                "streamer or cache, since results come as they finish and share the pool."
            )
    options = generate_kwargs | {"return_dict_in_generate": False}
    preparation = _Preparation(model, tokenizer, generation_config, options)
    return _generate(runtime, preparation, prompts, progress=progress)


def _generate(
    runtime: PagedRuntime, preparation: _Preparation, prompts: Iterable[Any], *, progress: bool
) -> Iterator[RequestOutput]:
    total = len(prompts) if isinstance(prompts, Sized) else None
    source = enumerate(prompts)
    running: dict[Request, tuple[int, list[int]]] = {}
    call = runtime.scheduler.admit(runtime.num_blocks)
    try:
        with (
            _Progress(runtime, total, is_shown=progress) as bar,
            _opened(runtime, call, preparation.device) as engine,
        ):
            is_exhausted = False
            held: tuple[int, Any] | None = None  # has to run alone, once the others have ended
            while running or held or not is_exhausted:
                while not running if held else not is_exhausted and _has_room(engine, running):
                    call.thread_id = threading.get_ident()  # whoever asks for the next result
                    item, held = held or next(source, None), None
                    if item is None:
                        is_exhausted = True
                        break
                    prepared = preparation.prepare(*item, may_wait=bool(running))
                    if prepared is None:
                        held = item
                        break
                    if isinstance(prepared, RequestOutput):
                        yield bar.note(prepared)
                        continue
                    request, prompt_ids = prepared
                    try:
                        engine.add(request)
                    except KVCacheFullError as error:
                        yield bar.note(_failed(item[0], prompt_ids, error))
                        continue
                    running[request] = (item[0], prompt_ids)
                if running:
                    call.thread_id = threading.get_ident()
                    with _current_call(runtime, call), torch.no_grad():
                        ended = engine.step_isolated()
                    bar.show(engine)
                    for request, failure in ended:
                        index, prompt_ids = running.pop(request)
                        if failure is not None:
                            yield bar.note(_failed(index, prompt_ids, failure))
                        else:
                            yield bar.note(preparation.output(index, prompt_ids, request))
    finally:
        runtime.scheduler.finish(call)


def _has_room(engine: Engine, running: dict[Request, Any]) -> bool:
    num_rows = sum(len(request.rows) for request in running)
    return engine.num_waiting < _MAX_WAITING and num_rows < _MAX_ROWS


def _failed(index: int, prompt_ids: list[int], error: Exception) -> RequestOutput:
    return RequestOutput(index, prompt_ids, [], None, [], 0, error)


@contextmanager
def _current_call(runtime: PagedRuntime, call: Call) -> Iterator[None]:
    """Make ``call`` the running one: not across a yield, where the caller's own code runs."""
    token = runtime.current_call.set(call)
    try:
        yield
    finally:
        runtime.current_call.reset(token)


@contextmanager
def _opened(runtime: PagedRuntime, call: Call, device: torch.device) -> Iterator[Engine]:
    with _current_call(runtime, call):
        engine = Engine(runtime, device)
    with engine:
        yield engine


class _Preparation:
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
                result = self._model.generate(self._tensor(prompt_ids), **options)
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
            result = self._model.generate(self._tensor(prompt_ids), **options)
            return self._output_of_alone(index, prompt_ids, config, result)
        except Exception as error:
            if may_wait and isinstance(error, KVCacheFullError):
                torch.set_rng_state(random_state)
                return None
            return _failed(index, prompt_ids, error)

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

    def _tensor(self, prompt_ids: list[int]) -> torch.Tensor:
        return torch.tensor([prompt_ids], device=self.device)

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


class _Progress:
    """A bar of finished prompts with tokens a second, blocks in use and prefix hits."""

    def __init__(self, runtime: PagedRuntime, total: int | None, *, is_shown: bool) -> None:
        self._runtime = runtime
        self._bar = tqdm(total=total, unit="prompt", disable=None if is_shown else True)
        self._start = time.perf_counter()
        self._num_tokens = 0

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.close()

    def note(self, output: RequestOutput) -> RequestOutput:
        """Count a result and pass it on."""
        prompt = len(output.prompt_ids)
        self._num_tokens += sum(len(sequence) - prompt for sequence in output.sequences)
        self._bar.update()
        return output

    def show(self, engine: Engine) -> None:
        """Write the figures behind the bar."""
        if self._bar.disable:
            return
        pool = self._runtime.manager.pool
        seconds = time.perf_counter() - self._start
        self._bar.set_postfix_str(
            f"{(self._num_tokens + engine.num_running_tokens) / seconds:.0f} tok/s, "
            f"{pool.num_used}/{pool.num_blocks} blocks, {self._runtime.hit_rate:.0%} hits",
            refresh=False,
        )
