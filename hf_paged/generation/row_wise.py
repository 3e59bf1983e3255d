"""Which logits processors and stopping criteria may see some rows of a batch without the others.

transformers shows them the whole batch at every step. A runner whose rows leave and enter at
different times can only show those rows that have the same age (number of generated tokens) just
now. That is the same to a *row-wise* object: what it returns for a row depends on nothing but that
row's ids and scores, bit for bit, and it remembers nothing of earlier calls.

transformers' own classes were read one by one (5.17 and 5.24). A class that is not named here is
refused, and so is every subclass, which may do anything. Among those left out:

    PrefixConstrained                          hands the row's index to the user's function
    EncoderRepetition, EncoderNoRepeatNGram    hold ids of every row
    ClassifierFreeGuidance, Dia's              pair up rows of one batch
    UnbatchedClassifierFreeGuidance            holds a KV cache of all rows
    SynthIDTextWatermark                       holds a history of every row, moved on by every call
    ConfidenceCriteria                         looks at row 0 of scores that may not be there
    Whisper's, Bark's, AlternatingCodebooks    are for audio models, which never come here
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, TypeVar

import torch
from transformers.generation import logits_process, stopping_criteria
from transformers.generation.logits_process import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
)

from hf_paged.errors import ConfigurationError

__all__ = [
    "ROW_WISE_CRITERIA",
    "ROW_WISE_PROCESSORS",
    "first_not_row_wise",
    "is_row_wise_criterion",
    "is_row_wise_processor",
    "process_rows",
    "row_wise",
]

DeclaredT = TypeVar("DeclaredT", bound=Callable[..., Any])

_DECLARED = "_hf_paged_row_wise"


def _classes(module: ModuleType, *names: str) -> frozenset[type]:
    """Return those of the named classes that this version of transformers has."""
    return frozenset(getattr(module, name) for name in names if hasattr(module, name))


ROW_WISE_PROCESSORS = _classes(
    logits_process,
    # What they do to a row follows from its length and from constants; the length is the age.
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "ExponentialDecayLengthPenalty",
    "SuppressTokensAtBeginLogitsProcessor",
    # Arithmetic on single scores.
    "TemperatureLogitsWarper",
    "InfNanRemoveLogitsProcessor",
    "SuppressTokensLogitsProcessor",
    # Along the ids of a row. RepetitionPenalty may hold a length for each row: see process_rows.
    # SequenceBias builds tables at its first call, from the width and the device of the scores.
    "RepetitionPenaltyLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    # Along the scores of a row: softmax, sort, topk, cumsum, which take one row at a time.
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "MinPLogitsWarper",
    "EpsilonLogitsWarper",
    "LogitNormalization",
    # They add up an entropy as well, whose bits depend on not being alone: see process_rows.
    "TopHLogitsWarper",
    "TypicalLogitsWarper",
    "EtaLogitsWarper",
    # Its generator is its own, and seeded anew from the row's ids before every use.
    "WatermarkLogitsProcessor",
)
"""The logits processors of transformers that are row-wise, given :func:`process_rows`."""

ROW_WISE_CRITERIA = _classes(
    stopping_criteria,
    "MaxLengthCriteria",
    "EosTokenCriteria",
    "StopStringCriteria",  # integers only, from the last ids of a row
    # A clock that was started when it was made. No row has a part in what it says, and no two runs
    # of the whole batch would agree on it either.
    "MaxTimeCriteria",
)
"""The stopping criteria of transformers that are row-wise."""


def row_wise(obj: DeclaredT) -> DeclaredT:
    """Declare that a logits processor or stopping criterion of one's own is row-wise.

        @hf_paged.row_wise
        class NoDigits(LogitsProcessor): ...

    Its result for a row must depend on nothing but that row's ids and scores, and it must not count
    calls or remember rows. Nothing checks that.

    Args:
        obj: a class whose instances can be called, or one such instance (or function). A class
            speaks for itself only: a subclass has to be declared again, since it may override.

    Returns:
        ``obj``.

    Raises:
        ConfigurationError: ``obj`` cannot be called, or takes no attribute.
    """
    is_class = isinstance(obj, type)
    # Every class can be called, namely to make an instance.
    maker: type = obj if isinstance(obj, type) else type(obj)
    if not any("__call__" in vars(base) for base in maker.__mro__):
        raise ConfigurationError(
            "row_wise() takes a logits processor or a stopping criterion, a class or an instance, "
            f"which is called with (input_ids, scores); {obj!r} cannot be called"
            f"{' once it is made' if is_class else ''}. Give it a __call__."
        )
    try:
        setattr(obj, _DECLARED, True)
    except (AttributeError, TypeError) as error:
        remedy = "Subclass it" if is_class else f"Declare its class {maker.__name__}"
        raise ConfigurationError(
            f"row_wise() marks what it gets with an attribute, and {obj!r} takes none. {remedy}."
        ) from error
    return obj


def is_row_wise_processor(processor: object) -> bool:
    """Return whether a logits processor may see some rows of a batch without the others."""
    return type(processor) in ROW_WISE_PROCESSORS or _is_declared(processor)


def is_row_wise_criterion(criterion: object) -> bool:
    """Return whether a stopping criterion may see some rows of a batch without the others."""
    return type(criterion) in ROW_WISE_CRITERIA or _is_declared(criterion)


def first_not_row_wise(processors: Iterable[object], criteria: Iterable[object]) -> object | None:
    """Return the first that needs the whole batch, processors first; None: there is none."""
    for processor in processors:
        if not is_row_wise_processor(processor):
            return processor
    for criterion in criteria:
        if not is_row_wise_criterion(criterion):
            return criterion
    return None


def process_rows(
    processors: Iterable[Callable[..., Any]],
    input_ids: torch.Tensor,
    scores: torch.Tensor,
    rows: list[int],
    num_rows: int,
) -> torch.Tensor:
    """Process some rows of a batch and get the bits that these rows have in the whole batch.

    Args:
        processors: row-wise ones, applied in order.
        input_ids: [k, P + age] int64, the ids of the k rows so far.
        scores: [k, V]; may be written to.
        rows: the k indices of these rows in the batch, in any order.
        num_rows: rows in the batch.

    Returns:
        [k, V], the processed scores.
    """
    # torch splits a sum among threads if it is the only one, and adds up in another order then:
    # on a CPU above 32,768 scores. A row that was not alone in its batch must not become so.
    is_left_alone = len(rows) == 1 < num_rows
    if is_left_alone:
        rows = rows * 2
        input_ids, scores = input_ids.repeat(2, 1), scores.repeat(2, 1)
    chosen: Any = LogitsProcessorList(_of_rows(processor, rows) for processor in processors)
    processed: torch.Tensor = chosen(input_ids, scores)
    return processed[:1] if is_left_alone else processed


def _is_declared(obj: object) -> bool:
    return _DECLARED in vars(type(obj)) or _DECLARED in getattr(obj, "__dict__", ())


def _of_rows(processor: Callable[..., Any], rows: list[int]) -> Callable[..., Any]:
    """Return the processor for these rows: itself, unless it holds something for each row."""
    if type(processor) is not RepetitionPenaltyLogitsProcessor:
        return processor
    # From 5.24 on generate() passes the padding on the left of each row, to leave it unpunished.
    lengths = processor.prompt_ignore_length
    if not isinstance(lengths, torch.Tensor):
        return processor
    of_rows = copy.copy(processor)
    of_rows.prompt_ignore_length = lengths[rows]
    return of_rows
