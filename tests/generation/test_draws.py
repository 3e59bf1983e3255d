"""Draws for rows that leave and come late, against a plain loop over the whole batch."""

from __future__ import annotations

import math
import random
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from hf_paged.generation.draws import Draws

pytestmark = pytest.mark.core_suite

CPU = torch.device("cpu")


def distributions(num_ages: int, num_rows: int, vocab: int, seed: int) -> torch.Tensor:
    """[ages, B, V] of probabilities, many of them zero, as top-k leaves them."""
    generator = torch.Generator().manual_seed(seed)
    scores = 2 * torch.randn(num_ages, num_rows, vocab, generator=generator)
    scores[..., 1:][
        torch.rand(num_ages, num_rows, vocab - 1, generator=generator) < 0.4
    ] = -math.inf
    return scores.softmax(-1)


def drawn_by_transformers(
    probs: torch.Tensor, generator: torch.Generator | None = None
) -> torch.Tensor:
    """[ages, B] tokens of one draw an age for all rows."""
    return torch.stack(
        [torch.multinomial(of_age, 1, generator=generator).squeeze(1) for of_age in probs]
    )


class Schedule:
    """Which rows are drawn together, step by step.

    Args:
        num_tokens: of each row; it leaves with its last one.
        chance: decides who comes when, who waits a step, and the order of rows in a group.
    """

    def __init__(self, num_tokens: list[int], chance: random.Random) -> None:
        self.groups: list[tuple[list[int], int]] = []
        self.num_replays = 0
        ages = dict.fromkeys(range(len(num_tokens)), 0)
        present = {chance.randrange(len(num_tokens))}
        num_drawn = 0
        while ages:
            present |= {row for row in ages if chance.random() < 0.2}
            moving = [row for row in ages if row in present and chance.random() < 0.8]
            chance.shuffle(moving)
            for age in sorted({ages[row] for row in moving}):
                rows = [row for row in moving if ages[row] == age]
                self.groups.append((rows, age))
                self.num_replays += age < num_drawn
                num_drawn = max(num_drawn, age + 1)
            for row in moving:
                ages[row] += 1
                if ages[row] == num_tokens[row]:
                    del ages[row]


def follow(schedule: Schedule, draws: Draws, probs: torch.Tensor, expected: torch.Tensor) -> None:
    """Draw for every group and compare with ``expected`` [ages, B]."""
    for rows, age in schedule.groups:
        tokens = draws.sample(probs[age, rows], rows, age)
        assert torch.equal(tokens, expected[age, rows]), (rows, age)
    draws.finish()


# -- what the module relies on -----------------------------------------------------------------


@pytest.mark.parametrize("vocab", [2, 3, 17, 128, 1000, 49152])
def test_a_shorter_batch_keeps_the_draws_of_its_rows_on_a_cpu(vocab: int) -> None:
    [probs] = distributions(1, 7, vocab, seed=vocab)
    for seed in range(5):
        whole = torch.multinomial(probs, 1, generator=torch.Generator().manual_seed(seed))
        for num in range(1, 7):
            generator = torch.Generator().manual_seed(seed)
            assert torch.equal(torch.multinomial(probs[:num], 1, generator=generator), whole[:num])


def test_the_probabilities_of_one_row_do_not_change_the_draw_of_another() -> None:
    [probs] = distributions(1, 4, 128, seed=0)
    torch.manual_seed(0)
    whole = torch.multinomial(probs, 1)
    probs[[0, 2]] = 1.0
    torch.manual_seed(0)
    assert torch.equal(torch.multinomial(probs, 1)[[1, 3]], whole[[1, 3]])


# -- against the plain loop --------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(
    num_tokens=st.lists(st.integers(1, 12), min_size=1, max_size=7),
    vocab=st.sampled_from([2, 17, 128, 1000]),
    seed=st.integers(0, 2**31),
    is_own=st.booleans(),
)
def test_rows_that_leave_and_come_late_get_the_tokens_of_the_plain_loop(
    num_tokens: list[int], vocab: int, seed: int, is_own: bool
) -> None:
    own = torch.Generator() if is_own else None
    generator = own or torch.default_generator
    probs = distributions(max(num_tokens), len(num_tokens), vocab, seed)
    generator.manual_seed(seed)
    expected = drawn_by_transformers(probs, own)
    end = generator.get_state()

    generator.manual_seed(seed)
    draws = Draws(len(num_tokens), device=CPU, is_replayable=True, generator=own)
    follow(Schedule(num_tokens, random.Random(seed)), draws, probs, expected)
    assert torch.equal(generator.get_state(), end)


def test_a_real_vocabulary() -> None:
    num_tokens = [5, 2, 4, 5]
    probs = distributions(5, 4, 49152, seed=0)
    torch.manual_seed(7)
    expected = drawn_by_transformers(probs)
    end = torch.get_rng_state()

    torch.manual_seed(7)
    schedule = Schedule(num_tokens, random.Random(3))
    assert schedule.num_replays > 3
    follow(schedule, Draws(4, device=CPU, is_replayable=True), probs, expected)
    assert torch.equal(torch.get_rng_state(), end)


def test_one_row_after_the_other() -> None:
    """The longest row goes first; each of the others replays from the beginning."""
    probs = distributions(6, 3, 128, seed=1)
    torch.manual_seed(0)
    expected = drawn_by_transformers(probs)

    torch.manual_seed(0)
    draws = Draws(3, device=CPU, is_replayable=True)
    for row in [1, 0, 2]:
        tokens = [draws.sample(probs[age, [row]], [row], age).item() for age in range(6)]
        assert tokens == expected[:, row].tolist()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.gpu
@pytest.mark.parametrize("is_own", [False, True])
def test_on_cuda(is_own: bool) -> None:
    device = torch.device("cuda", 0)
    own = torch.Generator(device) if is_own else None
    generator = own or torch.cuda.default_generators[0]
    probs = distributions(8, 5, 1000, seed=0).to(device)
    generator.manual_seed(7)
    expected = drawn_by_transformers(probs, own)
    end = generator.get_state()

    generator.manual_seed(7)
    schedule = Schedule([8, 3, 5, 8, 1], random.Random(1))
    assert schedule.num_replays > 3
    draws = Draws(5, device=device, is_replayable=True, generator=own)
    follow(schedule, draws, probs, expected)
    assert torch.equal(generator.get_state(), end)


# -- the generator -----------------------------------------------------------------------------


def test_a_replay_leaves_the_generator_where_it_was() -> None:
    probs = distributions(3, 4, 128, seed=2)
    draws = Draws(4, device=CPU, is_replayable=True)
    for age in range(3):
        draws.sample(probs[age, [0, 3]], [0, 3], age)
    frontier = torch.get_rng_state()
    draws.sample(probs[1, [2]], [2], 1)
    assert torch.equal(torch.get_rng_state(), frontier)


def test_random_numbers_of_others_between_two_ages_are_the_unpatched_run_s_too() -> None:
    """Dropout, say: what is taken between two first draws lies before the second."""
    probs = distributions(2, 2, 128, seed=3)
    torch.manual_seed(0)
    expected = [torch.multinomial(probs[0], 1)]
    torch.rand(5)
    expected.append(torch.multinomial(probs[1], 1))

    torch.manual_seed(0)
    draws = Draws(2, device=CPU, is_replayable=True)
    draws.sample(probs[0, [1]], [1], 0)
    torch.rand(5)
    draws.sample(probs[1, [1]], [1], 1)
    assert draws.sample(probs[0, [0]], [0], 0) == expected[0][0]
    assert draws.sample(probs[1, [0]], [0], 1) == expected[1][0]


def test_one_s_own_generator_leaves_the_default_one_alone() -> None:
    probs = distributions(1, 3, 128, seed=4)
    before = torch.get_rng_state()
    draws = Draws(3, device=CPU, is_replayable=True, generator=torch.Generator().manual_seed(0))
    draws.sample(probs[0, [1]], [1], 0)
    draws.sample(probs[0, [0]], [0], 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_probabilities_that_multinomial_refuses_leave_nothing_behind() -> None:
    probs = distributions(2, 3, 128, seed=5)
    torch.manual_seed(0)
    expected = drawn_by_transformers(probs)

    torch.manual_seed(0)
    draws = Draws(3, device=CPU, is_replayable=True)
    broken = torch.full((1, 128), math.nan)
    with pytest.raises(RuntimeError, match="nan"):
        draws.sample(broken, [1], 0)
    assert torch.equal(draws.sample(probs[0, [2]], [2], 0), expected[0, [2]])
    with pytest.raises(RuntimeError, match="nan"):
        draws.sample(broken, [1], 0)
    assert torch.equal(draws.sample(probs[1, [2, 0]], [2, 0], 1), expected[1, [2, 0]])


# -- what it costs -----------------------------------------------------------------------------


@pytest.fixture
def drawn_from(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What torch.multinomial was called with."""
    calls: list[torch.Tensor] = []
    multinomial = torch.multinomial

    def recorded(probs: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(probs)
        return multinomial(probs, *args, **kwargs)

    monkeypatch.setattr(torch, "multinomial", recorded)
    return calls


def test_the_whole_batch_in_order_is_not_copied(drawn_from: list[torch.Tensor]) -> None:
    [probs] = distributions(1, 3, 128, seed=6)
    draws = Draws(3, device=CPU, is_replayable=True)
    draws.sample(probs, [0, 1, 2], 0)
    assert drawn_from[0] is probs
    first_two = probs[:2]
    draws.sample(first_two, [0, 1], 0)
    assert drawn_from[1] is first_two


def test_rows_are_filled_into_one_buffer(drawn_from: list[torch.Tensor]) -> None:
    probs = distributions(2, 4, 128, seed=7)
    draws = Draws(4, device=CPU, is_replayable=True)
    draws.sample(probs[0, [2]], [2], 0)
    draws.sample(probs[1, [2, 0]], [2, 0], 1)
    draws.sample(probs[0, [1]], [1], 0)
    assert len({of_call.data_ptr() for of_call in drawn_from}) == 1
    assert [len(of_call) for of_call in drawn_from] == [4, 4, 2]


def test_without_replays_no_age_comes_again() -> None:
    probs = distributions(2, 3, 128, seed=8)
    torch.manual_seed(0)
    expected = drawn_by_transformers(probs)

    torch.manual_seed(0)
    draws = Draws(3, device=CPU, is_replayable=False)
    for age, rows in enumerate([[0, 1, 2], [2]]):
        assert torch.equal(draws.sample(probs[age, rows], rows, age), expected[age, rows])
    with pytest.raises(AssertionError, match="asked for again"):
        draws.sample(probs[0, [1]], [1], 0)


def test_ages_are_drawn_in_order() -> None:
    probs = distributions(1, 2, 128, seed=9)
    draws = Draws(2, device=CPU, is_replayable=True)
    with pytest.raises(AssertionError, match="age 1 is drawn before age 0"):
        draws.sample(probs[0], [0, 1], 1)


def test_after_the_end_no_age_comes_again() -> None:
    probs = distributions(1, 2, 128, seed=10)
    draws = Draws(2, device=CPU, is_replayable=True)
    draws.sample(probs[0, [0]], [0], 0)
    draws.finish()
    draws.finish()
    with pytest.raises(AssertionError, match="asked for again"):
        draws.sample(probs[0, [1]], [1], 0)
