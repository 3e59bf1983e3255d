"""One ``generate()`` call's rows, and how their next tokens are chosen: transformers' loop body.

Whatever is not row-wise sees what transformers would show it: ids [B, P + age] and scores [B, V] of
all rows in their order. If everything is row-wise, rows of one age are enough, so that a finished
row can leave and a waiting one enter late.

Dimensions: B rows, k of them at hand, P columns of the padded prompts, V vocabulary.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.stopping_criteria import MaxLengthCriteria, MaxTimeCriteria

from hf_paged.backends.upload import index_of
from hf_paged.core.row import Row
from hf_paged.generation.draws import Draws
from hf_paged.generation.row_wise import ROW_WISE_CRITERIA, first_not_row_wise, process_rows

__all__ = ["Place", "Request", "SampleArguments"]


@dataclass(frozen=True)
class SampleArguments:
    """What transformers' ``_sample`` is called with, prepared by its ``generate()``.

    Attributes:
        input_ids: [B, P], padded on the left.
        prompts: the real tokens of each row.
        first_positions: position of each row's first token.
        processors: a LogitsProcessorList.
        criteria: a StoppingCriteriaList.
        config: the GenerationConfig of the call.
        streamer: or None.
        must_fill_cache: the caller's own cache is to hold all rows in the end.
    """

    input_ids: torch.Tensor
    prompts: list[list[int]]
    first_positions: list[int]
    processors: Any
    criteria: Any
    config: Any
    streamer: Any = None
    must_fill_cache: bool = False


@dataclass(frozen=True)
class Place:
    """Where a row belongs: the ``payload`` of a :class:`Row`.

    Attributes:
        request: whose row it is.
        index: its number there.
    """

    request: Request
    index: int


class Request:
    """Rows that belong together, from their prompts to their last tokens.

    Args:
        arguments: of the call.
        generator: to draw from; None: torch's default one.

    Attributes:
        rows: in the order of the call; ``row.payload`` is its :class:`Place`.
        culprit: what must see all rows at one age, so that none may wait or give way; or None.
        must_fill_cache: the caller's own cache is to hold all rows in the end.
        keeps_finished: whether rows that have ended are computed on, because somebody sees what
            the unpatched model would have computed for them.
    """

    def __init__(
        self, arguments: SampleArguments, *, generator: torch.Generator | None = None
    ) -> None:
        self._processors = arguments.processors
        self._criteria = arguments.criteria
        self._streamer = arguments.streamer
        self._input_ids = arguments.input_ids
        config = arguments.config
        num_rows = arguments.input_ids.shape[0]
        device = arguments.input_ids.device
        self._do_sample: bool = config.do_sample
        returns_dict: bool = config.return_dict_in_generate
        self._scores: list[torch.Tensor] | None = None
        self._logits: list[torch.Tensor] | None = None
        if returns_dict and config.output_scores:
            self._scores = []
        if returns_dict and config.output_logits:
            self._logits = []
        self._has_declared_criterion = any(
            type(criterion) not in ROW_WISE_CRITERIA for criterion in self._criteria
        )
        self._has_eos = any(hasattr(criterion, "eos_token_id") for criterion in self._criteria)
        self._pad_token = 0
        if config._pad_token_tensor is not None:
            self._pad_token = int(config._pad_token_tensor)
        max_length = self._criteria.max_length
        self.rows = [
            Row(
                prompt[:],
                first_position,
                max_tokens=None
                if max_length is None
                else len(prompt) + max_length - arguments.input_ids.shape[1] - 1,
                payload=Place(self, index),
            )
            for index, (prompt, first_position) in enumerate(
                zip(arguments.prompts, arguments.first_positions, strict=True)
            )
        ]
        self.must_fill_cache = arguments.must_fill_cache
        self.culprit = self._find_culprit()
        self._must_keep_finished = (
            self.must_fill_cache
            or first_not_row_wise(self._processors, ()) is not None
            # Without an eos token a row that has ended goes on with real tokens.
            or not (self._has_eos or self._ends_by_length_alone)
            # A criterion that sees all rows may look at their scores.
            or (self.culprit is not None and self._scores is not None)
        )
        self.keeps_finished = self._must_keep_finished or returns_dict
        self._generated = torch.full((num_rows, 16), self._pad_token, device=device)
        self._unfinished = torch.ones(num_rows, dtype=torch.long, device=device)
        self._is_finished = [False] * num_rows
        self._draws = Draws(
            num_rows,
            device=device,
            is_replayable=num_rows > 1 and self.culprit is None,
            generator=generator,
        )
        self.num_ages = 0

    @property
    def lengths_are_known(self) -> bool:
        """Whether every row is sure to grow to its ``max_tokens``."""
        return not self._has_eos and self._ends_by_length_alone

    @property
    def _ends_by_length_alone(self) -> bool:
        return all(type(criterion) is MaxLengthCriteria for criterion in self._criteria)

    @property
    def is_finished(self) -> bool:
        """Whether every row has ended."""
        return all(self._is_finished)

    @property
    def num_padded_tokens(self) -> int:
        """Tokens that a rectangle would have computed so far, padding included."""
        num_rows, num_columns = self._input_ids.shape
        return num_rows * (num_columns + max(0, self.num_ages - 1))

    def has_ended(self, row: Row) -> bool:
        """Whether ``row`` has met its last token."""
        index: int = row.payload.index
        return self._is_finished[index]

    def finish_reason(self, row: Row) -> str:
        """Return "length" if ``row`` ended because it may not be longer, else "stop"."""
        max_length = self._criteria.max_length
        is_full = max_length is not None and (
            self._input_ids.shape[1] + row.num_generated >= max_length
        )
        is_eos = any(
            row.token_ids[-1] in torch.as_tensor(criterion.eos_token_id).reshape(-1).tolist()
            for criterion in self._criteria
            if hasattr(criterion, "eos_token_id")
        )
        return "length" if is_full and not is_eos else "stop"

    def stop_keeping_finished(self) -> bool:
        """Give up what rows that have ended would have computed; False if that must not be."""
        if self._must_keep_finished:
            return False
        self.keeps_finished = False
        return True

    def advance(self, rows: list[Row], logits: torch.Tensor) -> None:
        """Choose the next token of ``rows`` and append it; mark those that have ended.

        Args:
            rows: of one age, in the order of the request; if there is a culprit, all that have
                not left.
            logits: [k, V].
        """
        age = rows[0].num_generated
        indices = [row.payload.index for row in rows]
        num_rows, device = len(self.rows), self._input_ids.device
        at = index_of(indices, device)
        ids = self._ids(indices, age)
        next_logits = logits.to(copy=True, dtype=torch.float32, device=device)
        if len(rows) == num_rows:
            scores = self._processors(ids, next_logits)
        else:
            scores = process_rows(self._processors, ids, next_logits, indices, num_rows)
        self._record(self._scores, age, indices, scores)
        self._record(self._logits, age, indices, next_logits)
        if self._do_sample:
            tokens = self._draws.sample(torch.softmax(scores, dim=-1), indices, age)
        else:
            tokens = torch.argmax(scores, dim=-1)
        if self._has_eos:
            is_open = self._unfinished[at]
            tokens = tokens * is_open + self._pad_token * (1 - is_open)
        self._append(at, age, tokens)
        self.num_ages = max(self.num_ages, age + 1)
        # Rows that have left are padding, and whoever must see all rows sees that too.
        shown, shown_at = indices, at
        if self.culprit is not None:
            shown, shown_at = list(range(num_rows)), slice(num_rows)
        is_done = self._criteria(self._ids(shown, age + 1), self._scores_of(shown, age))
        self._unfinished[shown_at] &= ~is_done
        # A device is waited for once a token, here.
        values = torch.cat([tokens, self._unfinished[shown_at]]).tolist()
        for row, token in zip(rows, values, strict=False):
            row.token_ids.append(token)
        for index, still_open in zip(shown, values[len(rows) :], strict=True):
            self._is_finished[index] = not still_open
        if self._streamer is not None:
            self._streamer.put(self._generated[shown_at, age].cpu())
        if self._is_out_of_time():
            self._is_finished = [True] * num_rows

    def finish(self) -> None:
        """Say that no row will come any more; a streamer hears its end."""
        self._draws.finish()
        if self._streamer is not None:
            self._streamer.end()

    @property
    def sequences(self) -> torch.Tensor:
        """[B, P + ages] prompt and generated tokens, padded as transformers pads them."""
        return torch.cat([self._input_ids, self._generated[:, : self.num_ages]], dim=1)

    @property
    def scores(self) -> tuple[torch.Tensor, ...] | None:
        """Processed scores [B, V] of each age, if the call wants them."""
        return None if self._scores is None else tuple(self._scores)

    @property
    def logits(self) -> tuple[torch.Tensor, ...] | None:
        """Logits [B, V] of each age, if the call wants them."""
        return None if self._logits is None else tuple(self._logits)

    # -- inside ------------------------------------------------------------------------------

    def _find_culprit(self) -> object | None:
        if len(self.rows) == 1:
            return None
        culprit = first_not_row_wise(self._processors, self._criteria)
        if culprit is None and self.must_fill_cache:
            culprit = "the cache that was passed in and is to hold all rows"
        if culprit is None and self._streamer is not None:
            culprit = self._streamer
        if culprit is None and not self._has_eos and not self._ends_by_length_alone:
            culprit = next(c for c in self._criteria if type(c) is not MaxLengthCriteria)
        return culprit

    def _is_out_of_time(self) -> bool:
        return any(
            type(criterion) is MaxTimeCriteria
            and time.time() - criterion.initial_timestamp > criterion.max_time
            for criterion in self._criteria
        )

    def _scores_of(self, indices: list[int], age: int) -> tuple[torch.Tensor, ...] | None:
        if len(indices) == len(self.rows) or not self._has_declared_criterion:
            return self.scores  # transformers' own do not look
        if self._scores is None:
            return None
        at = index_of(indices, self._input_ids.device)
        return tuple(scores[at] for scores in self._scores[: age + 1])

    def _ids(self, indices: list[int], age: int) -> torch.Tensor:
        """Return prompt and generated tokens of some rows, [k, P + age]."""
        if len(indices) == len(self.rows):
            return torch.cat([self._input_ids, self._generated[:, :age]], dim=1)
        at = index_of(indices, self._input_ids.device)
        return torch.cat([self._input_ids[at], self._generated[at, :age]], dim=1)

    def _append(self, at: slice | torch.Tensor, age: int, tokens: torch.Tensor) -> None:
        if age == self._generated.shape[1]:
            padding = torch.full_like(self._generated, self._pad_token)
            self._generated = torch.cat([self._generated, padding], dim=1)
        self._generated[at, age] = tokens

    def _record(
        self, ages: list[torch.Tensor] | None, age: int, indices: list[int], values: torch.Tensor
    ) -> None:
        """Keep [k, V] of some rows in [B, V] of their age; 0 where a row is not computed."""
        if ages is None:
            return
        if age == len(ages) and len(indices) == len(self.rows):
            ages.append(values)
            return
        if age == len(ages):
            ages.append(values.new_zeros(len(self.rows), values.shape[1]))
        ages[age][index_of(indices, values.device)] = values
