"""Generate for an iterable of prompts on one pool, results as they finish.

The same engine as ``generate()``, fed one prompt after the other: a row that ends makes room for
the next prompt at once. Each prompt is a request of its own, prepared by the model's own
``generate()``, so all its arguments mean what they mean there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable, Iterable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from tqdm import tqdm

from hf_paged.cache.runtime import PagedRuntime, runtime_of
from hf_paged.core.interrupts import interruptible, uninterrupted
from hf_paged.core.scheduler import Call
from hf_paged.errors import ConfigurationError, KVCacheFullError
from hf_paged.generation.batch_engine import BatchEngine
from hf_paged.generation.preparation import Preparation
from hf_paged.generation.request import Request
from hf_paged.generation.request_output import RequestOutput

__all__ = ["generate_batch"]


_MAX_ROWS = 256
"""Rows that run or wait at a time: more would give each result later and none sooner."""
_MAX_WAITING = 16
"""Rows that wait: enough to fill the pool in one forward, few enough to read prompts late."""
_REFUSED = (
    "streamer",
    "return_dict_in_generate",
    "output_scores",
    "output_logits",
    "output_attentions",
    "output_hidden_states",
    "inputs",
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "cache",
    "past_key_values",
)


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
    Weights and adapters must stay as they are until then: blocks are shared among all prompts.

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
        if generate_kwargs.get(name) not in (None, False):
            raise ConfigurationError(
                f"generate_batch() got {name}: expected prompts as its second argument, no "
                "streamer and no cache, since results come as they finish and share the pool, and "
                "no outputs besides the tokens."
            )
    if isinstance(prompts, str):
        raise ConfigurationError(
            "prompts is a string: expected an iterable of prompts; pass [prompt] for one."
        )
    options = generate_kwargs | {"return_dict_in_generate": False}
    preparation = Preparation(model, tokenizer, generation_config, options)
    # The scope of whoever asked for the batch, not of whoever takes a result.
    scope = runtime.scope.get()
    return _generate(runtime, scope, preparation, prompts, progress=progress)


def _generate(
    runtime: PagedRuntime,
    scope: Hashable,
    preparation: Preparation,
    prompts: Iterable[Any],
    *,
    progress: bool,
) -> Iterator[RequestOutput]:
    total = len(prompts) if isinstance(prompts, Sized) else None
    source = enumerate(prompts)
    running: dict[Request, tuple[int, list[int]]] = {}
    call: Call | None = None
    try:
        with uninterrupted():  # a call that nobody ends would keep the pool for ever
            call = runtime.scheduler.admit(runtime.num_blocks)
        with _set(runtime.current_call, call), _set(runtime.scope, scope):
            engine = BatchEngine(runtime, preparation.device)
        with engine, _Progress(runtime, total, is_shown=progress) as bar:
            is_exhausted = False
            held: tuple[int, Any] | None = None  # has to run alone, once the others have ended
            while running or held or not is_exhausted:
                while not running if held else not is_exhausted and _has_room(engine, running):
                    call.thread_id = threading.get_ident()  # whoever asks for the next result
                    item, held = held or next(source, None), None
                    if item is None:
                        is_exhausted = True
                        break
                    with _set(runtime.scope, scope):
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
                        yield bar.note(RequestOutput.failed(item[0], prompt_ids, error))
                        continue
                    running[request] = (item[0], prompt_ids)
                if running:
                    call.thread_id = threading.get_ident()
                    ended = _step(runtime, call, engine)
                    bar.show(engine)
                    for request, failure in ended:
                        index, prompt_ids = running.pop(request)
                        if failure is not None:
                            yield bar.note(RequestOutput.failed(index, prompt_ids, failure))
                        else:
                            yield bar.note(preparation.output(index, prompt_ids, request))
    finally:
        if call is not None:
            runtime.scheduler.finish(call)


def _has_room(engine: BatchEngine, running: dict[Request, Any]) -> bool:
    num_rows = sum(len(request.rows) for request in running)
    return engine.num_waiting < _MAX_WAITING and num_rows < _MAX_ROWS


@contextmanager
def _set(variable: ContextVar[Any], value: object) -> Iterator[None]:
    """Set a variable for a while: never across a yield, where the caller's own code runs."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def _step(
    runtime: PagedRuntime, call: Call, engine: BatchEngine
) -> list[tuple[Request, Exception | None]]:
    """Run a step of ``call`` without gradients; an interrupt leaves both settings as they were."""
    with uninterrupted():
        is_grad_enabled = torch.is_grad_enabled()
        token = runtime.current_call.set(call)
        torch.set_grad_enabled(False)
        try:
            with interruptible():
                return engine.step_isolated()
        finally:
            torch.set_grad_enabled(is_grad_enabled)
            runtime.current_call.reset(token)


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

    def show(self, engine: BatchEngine) -> None:
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
