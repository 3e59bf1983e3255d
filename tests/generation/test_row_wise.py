"""Row-wise processors and criteria: the same bits for a row, whoever else is there."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers.generation import logits_process, stopping_criteria
from transformers.generation.logits_process import (
    ClassifierFreeGuidanceLogitsProcessor,
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
    WatermarkLogitsProcessor,
)
from transformers.generation.stopping_criteria import (
    ConfidenceCriteria,
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StopStringCriteria,
)

from hf_paged.errors import ConfigurationError
from hf_paged.generation.row_wise import (
    ROW_WISE_CRITERIA,
    ROW_WISE_PROCESSORS,
    first_not_row_wise,
    is_row_wise_criterion,
    is_row_wise_processor,
    process_rows,
    row_wise,
)
from tiny_tokenizer import build_tokenizer

pytestmark = pytest.mark.core_suite

NUM_ROWS = 5
MAX_LENGTH = 7

PROCESSORS: dict[type, list[Callable[[int], Any]]] = {
    MinLengthLogitsProcessor: [lambda vocab: MinLengthLogitsProcessor(4, [2, 3])],
    MinNewTokensLengthLogitsProcessor: [lambda vocab: MinNewTokensLengthLogitsProcessor(2, 3, 2)],
    ForcedBOSTokenLogitsProcessor: [lambda vocab: ForcedBOSTokenLogitsProcessor(1)],
    ForcedEOSTokenLogitsProcessor: [lambda vocab: ForcedEOSTokenLogitsProcessor(6, [2, 5])],
    ExponentialDecayLengthPenalty: [lambda vocab: ExponentialDecayLengthPenalty((1, 1.3), 2, 2)],
    SuppressTokensAtBeginLogitsProcessor: [
        lambda vocab: SuppressTokensAtBeginLogitsProcessor([4, 5], 4)
    ],
    TemperatureLogitsWarper: [lambda vocab: TemperatureLogitsWarper(0.7)],
    InfNanRemoveLogitsProcessor: [lambda vocab: InfNanRemoveLogitsProcessor()],
    SuppressTokensLogitsProcessor: [lambda vocab: SuppressTokensLogitsProcessor([3, vocab - 1])],
    RepetitionPenaltyLogitsProcessor: [
        lambda vocab: RepetitionPenaltyLogitsProcessor(1.3),
        lambda vocab: RepetitionPenaltyLogitsProcessor(1.3, prompt_ignore_length=2),
    ],
    NoRepeatNGramLogitsProcessor: [
        lambda vocab: NoRepeatNGramLogitsProcessor(1),
        lambda vocab: NoRepeatNGramLogitsProcessor(2),
    ],
    SequenceBiasLogitsProcessor: [
        lambda vocab: SequenceBiasLogitsProcessor(
            {(7,): 0.3, (3, 7): -1.7, (4, 7): 0.1, (3, 4, 7): 2.2, (5, 6): 1.1}
        )
    ],
    NoBadWordsLogitsProcessor: [
        lambda vocab: NoBadWordsLogitsProcessor([[7], [3, 4], [4, 5, 6], [2]], eos_token_id=2)
    ],
    TopKLogitsWarper: [lambda vocab: TopKLogitsWarper(50)],
    TopPLogitsWarper: [
        lambda vocab: TopPLogitsWarper(0.8),
        lambda vocab: TopPLogitsWarper(0.1, min_tokens_to_keep=3),
    ],
    MinPLogitsWarper: [lambda vocab: MinPLogitsWarper(0.05, min_tokens_to_keep=2)],
    EpsilonLogitsWarper: [lambda vocab: EpsilonLogitsWarper(1 / vocab)],
    LogitNormalization: [lambda vocab: LogitNormalization()],
    TopHLogitsWarper: [lambda vocab: TopHLogitsWarper(0.4)],
    TypicalLogitsWarper: [lambda vocab: TypicalLogitsWarper(0.8)],
    EtaLogitsWarper: [lambda vocab: EtaLogitsWarper(1 / vocab)],
    WatermarkLogitsProcessor: [
        lambda vocab: WatermarkLogitsProcessor(vocab, "cpu"),
        lambda vocab: WatermarkLogitsProcessor(
            vocab, "cpu", seeding_scheme="selfhash", context_width=3
        ),
    ],
}
"""For each row-wise class: makers of processors that do something, given V."""

CRITERIA: dict[type, list[Callable[[], Any]]] = {
    MaxLengthCriteria: [lambda: MaxLengthCriteria(4)],
    EosTokenCriteria: [lambda: EosTokenCriteria([3, 5])],
    StopStringCriteria: [lambda: StopStringCriteria(build_tokenizer(), ["w4w5", "w6"])],
    MaxTimeCriteria: [lambda: MaxTimeCriteria(1e6), lambda: MaxTimeCriteria(-1.0)],
}

REFUSED_PROCESSORS: dict[type, Callable[[], Any]] = {
    PrefixConstrainedLogitsProcessor: lambda: PrefixConstrainedLogitsProcessor(
        lambda row, ids: [row], 1
    ),
    EncoderRepetitionPenaltyLogitsProcessor: lambda: EncoderRepetitionPenaltyLogitsProcessor(
        1.2, torch.tensor([[3], [4]])
    ),
    EncoderNoRepeatNGramLogitsProcessor: lambda: EncoderNoRepeatNGramLogitsProcessor(
        2, torch.tensor([[3, 4], [4, 5]])
    ),
    ClassifierFreeGuidanceLogitsProcessor: lambda: ClassifierFreeGuidanceLogitsProcessor(1.5),
    UnbatchedClassifierFreeGuidanceLogitsProcessor: lambda: (
        UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, model=None)
    ),
    SynthIDTextWatermarkLogitsProcessor: lambda: SynthIDTextWatermarkLogitsProcessor(
        3, [1, 2, 3], 64, 0, 16, torch.device("cpu")
    ),
}

FOR_AUDIO = {
    "AlternatingCodebooksLogitsProcessor",
    "BarkEosPrioritizerLogitsProcessor",
    "DiaClassifierFreeGuidanceLogitsProcessor",
    "DiaEOSChannelFilterLogitsProcessor",
    "DiaEOSDelayPatternLogitsProcessor",
    "WhisperNoSpeechDetection",
    "WhisperTimeStampLogitsProcessor",
}

SOME_ROWS = [
    list(rows)
    for num in range(1, NUM_ROWS + 1)
    for rows in itertools.permutations(range(NUM_ROWS), num)
]


@pytest.fixture
def two_threads() -> Iterator[None]:
    """A sum over a single long row is split among threads, if there are several."""
    num_before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(num_before)


def made_by(makers: dict[type, list[Callable[..., Any]]]) -> list[Any]:
    return [
        pytest.param(maker, id=f"{cls.__name__}-{number}")
        for cls, of_class in makers.items()
        for number, maker in enumerate(of_class)
    ]


def ids_of_few_words(seed: int) -> torch.Tensor:
    """[B, MAX_LENGTH] of six different tokens, so that n-grams and stop strings recur."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 8, (NUM_ROWS, MAX_LENGTH), generator=generator)


def scores_of_all_kinds(vocab: int, seed: int) -> torch.Tensor:
    """[B, V]: smooth, with holes, with ties, with one token left, nearly certain."""
    generator = torch.Generator().manual_seed(seed)
    scores = 3 * torch.randn(NUM_ROWS, vocab, generator=generator)
    scores[1, torch.rand(vocab, generator=generator) < 0.3] = -math.inf
    scores[2].round_()
    scores[3, 1:] = -math.inf
    scores[4, 9] = 40.0
    return scores


def have_the_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    # 5.17 turns -inf into NaN under an exponential decay, and NaN differs from itself.
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


# -- the tables --------------------------------------------------------------------------------


def test_every_class_of_the_tables_has_a_case_here() -> None:
    assert set(PROCESSORS) == ROW_WISE_PROCESSORS
    assert set(CRITERIA) == ROW_WISE_CRITERIA


def test_every_class_of_transformers_was_decided_on() -> None:
    def subclasses(module: Any, base: type) -> set[str]:
        classes = {cls for cls in vars(module).values() if inspect.isclass(cls)}
        return {cls.__name__ for cls in classes if issubclass(cls, base) and cls is not base}

    decided = {cls.__name__ for cls in [*PROCESSORS, *REFUSED_PROCESSORS]} | FOR_AUDIO
    assert subclasses(logits_process, LogitsProcessor) == decided
    decided = {cls.__name__ for cls in [*CRITERIA, ConfidenceCriteria]}
    assert subclasses(stopping_criteria, StoppingCriteria) == decided


def test_a_class_that_this_version_lacks_is_no_error() -> None:
    from hf_paged.generation.row_wise import _classes

    assert _classes(logits_process, "TopKLogitsWarper", "Gone") == {TopKLogitsWarper}


# -- processors --------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [128, 131])
@pytest.mark.parametrize("make", made_by(PROCESSORS))
def test_a_row_is_processed_the_same_with_any_others_and_after_any_calls(
    make: Callable[[int], Any], vocab: int
) -> None:
    ids = ids_of_few_words(seed=vocab)
    lengths = range(1, MAX_LENGTH + 1)
    scores = {length: scores_of_all_kinds(vocab, seed=length) for length in lengths}
    whole = {length: make(vocab)(ids[:, :length], scores[length].clone()) for length in lengths}
    assert any(not torch.equal(whole[length], scores[length]) for length in lengths)

    processor = make(vocab)
    assert is_row_wise_processor(processor)
    calls = list(itertools.product(lengths, SOME_ROWS))
    for length, rows in random.Random(vocab).sample(calls, 150):
        some = processor(ids[rows, :length], scores[length][rows])
        assert have_the_same_bits(some, whole[length][rows]), (length, rows)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("make", made_by(PROCESSORS))
def test_a_row_is_processed_the_same_over_a_real_vocabulary(make: Callable[[int], Any]) -> None:
    vocab, length = 49152, 5
    ids, scores = ids_of_few_words(seed=0)[:, :length], scores_of_all_kinds(vocab, seed=0)
    whole = make(vocab)(ids, scores.clone())
    processor = make(vocab)
    for rows in [[0], [3, 1], [4, 2, 0], [1, 0, 3, 4], [2]]:
        some = process_rows([processor], ids[rows], scores[rows], rows, NUM_ROWS)
        assert have_the_same_bits(some, whole[rows]), rows


@pytest.mark.parametrize("make", made_by(PROCESSORS))
def test_no_row_wise_processor_takes_random_numbers_from_a_run(make: Callable[[int], Any]) -> None:
    before = torch.get_rng_state()
    make(128)(ids_of_few_words(seed=1), scores_of_all_kinds(128, seed=1))
    assert torch.equal(torch.get_rng_state(), before)


# -- process_rows ------------------------------------------------------------------------------


class Entropy(LogitsProcessor):
    """What eta and typical sampling compute on the way to their threshold."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores - torch.distributions.Categorical(logits=scores).entropy()[:, None]


@pytest.mark.usefixtures("two_threads")
def test_a_row_that_is_left_alone_keeps_the_bits_it_had_among_others() -> None:
    """A sum over one row of 49,152 scores was split among threads and came out different."""
    torch.manual_seed(0)
    ids, scores = torch.ones(16, 1, dtype=torch.long), torch.randn(16, 49152)
    whole = Entropy()(ids, scores)
    for row in range(16):
        alone = process_rows([Entropy()], ids[[row]], scores[[row]], [row], 16)
        assert torch.equal(alone, whole[[row]])


@pytest.mark.usefixtures("two_threads")
def test_a_batch_of_one_row_is_processed_as_transformers_does_it() -> None:
    ids, scores = torch.ones(1, 1, dtype=torch.long), torch.randn(1, 49152)
    assert torch.equal(process_rows([Entropy()], ids, scores, [0], 1), Entropy()(ids, scores))


def test_a_repetition_penalty_ignores_the_padding_of_the_rows_it_sees() -> None:
    """From 5.24 on generate() gives it a length for each row of the batch."""
    try:
        penalty = RepetitionPenaltyLogitsProcessor(1.3, torch.tensor([3, 0, 5, 1, 6]))
    except ValueError:
        pytest.skip("this version of transformers takes one length for all rows")
    padding = penalty.prompt_ignore_length
    ids, scores = ids_of_few_words(seed=2), scores_of_all_kinds(128, seed=2)
    whole = torch.cat(
        [
            RepetitionPenaltyLogitsProcessor(1.3, prompt_ignore_length=num)(
                ids[[row]], scores[[row]]
            )
            for row, num in enumerate(padding.tolist())
        ]
    )
    for rows in SOME_ROWS:
        some = process_rows([penalty], ids[rows], scores[rows], rows, NUM_ROWS)
        assert torch.equal(some, whole[rows]), rows
    assert penalty.prompt_ignore_length is padding


def test_processors_are_applied_in_their_order() -> None:
    ids, scores = ids_of_few_words(seed=3), scores_of_all_kinds(128, seed=3)
    processors = [TemperatureLogitsWarper(0.5), TopPLogitsWarper(0.7), LogitNormalization()]
    whole = LogitsProcessorList(processors)(ids, scores.clone())
    assert torch.equal(
        process_rows(processors, ids[[4, 1]], scores[[4, 1]], [4, 1], NUM_ROWS), whole[[4, 1]]
    )
    assert torch.equal(process_rows([], ids[[2]], scores[[2]], [2], NUM_ROWS), scores[[2]])


# -- criteria ----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", made_by(CRITERIA))
def test_a_row_is_stopped_the_same_with_any_others_and_after_any_calls(
    make: Callable[[], Any],
) -> None:
    ids = ids_of_few_words(seed=4)
    criterion = make()
    assert is_row_wise_criterion(criterion)
    lengths = range(1, MAX_LENGTH + 1)
    whole = {length: make()(ids[:, :length], None) for length in lengths}
    for length, rows in random.Random(0).sample(list(itertools.product(lengths, SOME_ROWS)), 300):
        assert torch.equal(criterion(ids[rows, :length], None), whole[length][rows])


@pytest.mark.parametrize("cls", [MaxLengthCriteria, EosTokenCriteria, StopStringCriteria])
def test_the_criteria_here_stop_some_rows_and_others_not(cls: type) -> None:
    [make] = CRITERIA[cls]
    ids = ids_of_few_words(seed=4)
    stopped = torch.cat([make()(ids[:, :length], None) for length in range(1, MAX_LENGTH + 1)])
    assert set(stopped.tolist()) == {True, False}


# -- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make", [pytest.param(make, id=cls.__name__) for cls, make in REFUSED_PROCESSORS.items()]
)
def test_a_processor_that_needs_the_whole_batch_is_refused(make: Callable[[], Any]) -> None:
    assert not is_row_wise_processor(make())


@pytest.mark.parametrize("name", sorted(FOR_AUDIO))
def test_a_processor_of_audio_models_is_refused(name: str) -> None:
    cls = getattr(logits_process, name)
    assert not is_row_wise_processor(cls.__new__(cls))


def test_confidence_is_refused() -> None:
    assert not is_row_wise_criterion(ConfidenceCriteria(0.4))


def test_a_subclass_is_refused() -> None:
    class Mine(TopKLogitsWarper):
        pass

    class MineToo(EosTokenCriteria):
        pass

    assert not is_row_wise_processor(Mine(5))
    assert not is_row_wise_criterion(MineToo(2))


def test_a_processor_is_no_criterion() -> None:
    assert not is_row_wise_criterion(TopKLogitsWarper(5))
    assert not is_row_wise_processor(EosTokenCriteria(2))


def test_the_first_that_is_refused_is_found() -> None:
    fine, confidence = TopKLogitsWarper(5), ConfidenceCriteria(0.4)
    eos, guidance = EosTokenCriteria(2), ClassifierFreeGuidanceLogitsProcessor(1.5)
    assert first_not_row_wise([], []) is None
    assert first_not_row_wise([fine], [eos]) is None
    assert first_not_row_wise([fine], [eos, confidence]) is confidence
    assert first_not_row_wise([fine, guidance], [confidence]) is guidance


# -- row_wise ----------------------------------------------------------------------------------


class NoOddTokens(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, 1::2] = -math.inf
        return scores


def test_a_declared_class_is_row_wise() -> None:
    @row_wise
    class Declared(NoOddTokens):
        pass

    assert is_row_wise_processor(Declared())
    assert is_row_wise_criterion(Declared())
    assert not is_row_wise_processor(NoOddTokens())


def test_a_subclass_of_a_declared_class_has_to_be_declared_again() -> None:
    @row_wise
    class Declared(NoOddTokens):
        pass

    class Overridden(Declared):
        pass

    assert not is_row_wise_processor(Overridden())
    row_wise(Overridden)
    assert is_row_wise_processor(Overridden())


def test_a_declared_instance_speaks_for_itself_and_its_copies() -> None:
    processor = NoOddTokens()
    assert row_wise(processor) is processor
    assert is_row_wise_processor(processor)
    assert is_row_wise_processor(copy.deepcopy(processor))
    assert not is_row_wise_processor(NoOddTokens())


def test_a_function_can_be_declared() -> None:
    @row_wise
    def never(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(len(input_ids), dtype=torch.bool)

    assert is_row_wise_criterion(never)
    assert is_row_wise_criterion(row_wise(functools.partial(never)))


@pytest.mark.parametrize("what", [3, None, "TopK", [NoOddTokens()], int, object])
def test_what_cannot_be_called_cannot_be_declared(what: Any) -> None:
    with pytest.raises(ConfigurationError, match="cannot be called"):
        row_wise(what)


def test_what_takes_no_attribute_is_declared_by_its_class() -> None:
    class Slotted:
        __slots__ = ()

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores

    with pytest.raises(ConfigurationError, match="Declare its class Slotted"):
        row_wise(Slotted())
    row_wise(Slotted)
    assert is_row_wise_processor(Slotted())
    with pytest.raises(ConfigurationError, match="Subclass it"):
        row_wise(functools.partial)
