"""A stream of requests over time: who waits, who steps back, who gets all its tokens."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_paged.simulation.allocator import Allocator
from hf_paged.simulation.contiguous_allocator import ContiguousAllocator
from hf_paged.simulation.length_distribution import LengthDistribution
from hf_paged.simulation.paged_allocator import PagedAllocator
from hf_paged.simulation.request import Request
from hf_paged.simulation.serving import allocators_for_serving, serve
from hf_paged.simulation.serving_result import Moment, ServingResult, Timeline
from hf_paged.simulation.sharing_allocator import SharingAllocator
from hf_paged.simulation.static_allocator import StaticAllocator
from hf_paged.simulation.workload import draw_requests


def drawn(num_requests: int = 60, **options: int) -> list[Request]:
    return draw_requests(
        num_requests,
        LengthDistribution.parse("normal:60:40:4:200", "prompts"),
        LengthDistribution.parse("uniform:1:40", "outputs"),
        rate=0.5,
        seed=7,
        **options,
    )


def test_one_request_alone() -> None:
    """Step 0 computes the prompt and gives the first token, three more steps give the others.

    The last token is never stored: 5 + 3 slots.
    """
    result = serve([Request(0, 0, 5, 4)], PagedAllocator(16, 4))
    assert (result.num_steps, result.num_output_tokens, result.num_finished) == (4, 4, 1)
    assert result.peak_live_slots == 8
    assert result.tokens_per_step == 1.0


def test_a_long_prompt_takes_several_steps() -> None:
    """Ten prompt tokens at four a step: the first token comes in the third."""
    result = serve([Request(0, 0, 10, 1)], PagedAllocator(16, 4), num_step_tokens=4)
    assert result.num_steps == 3


def test_first_come_first_served() -> None:
    """The second waits for the first although the third would fit beside it."""
    requests = [Request(0, 0, 8, 4), Request(1, 0, 12, 1), Request(2, 0, 1, 1)]
    result = serve(requests, PagedAllocator(16, 4), keep_timeline=True)
    assert [moment.num_waiting for moment in result.timeline] == [2, 2, 2, 2, 0]
    assert result.num_finished == 3


def test_whoever_came_last_steps_back_and_computes_again() -> None:
    """Two grow until the pool is dry; the second loses its tokens, and gets all of them later."""
    requests = [Request(0, 0, 4, 9), Request(1, 0, 4, 9)]
    result = serve(requests, PagedAllocator(16, 4))
    assert (result.num_preemptions, result.num_swaps) == (1, 0)
    assert result.num_recomputed_tokens == 8, "4 of the prompt, 4 of 5 generated"
    assert result.num_finished == 2
    assert result.num_output_tokens == 18


def test_swapping_copies_instead_of_computing() -> None:
    """The same shortage: eight tokens go out and come in again, none is computed twice."""
    requests = [Request(0, 0, 4, 9), Request(1, 0, 4, 9)]
    result = serve(requests, SharingAllocator(16, 4, swaps=True))
    assert (result.num_preemptions, result.num_recomputed_tokens) == (0, 0)
    assert (result.num_swaps, result.num_swapped_slots, result.peak_host_slots) == (1, 8, 8)
    assert result.num_finished == 2


def test_a_request_that_can_never_fit_is_refused() -> None:
    """It waits until the memory is empty, is refused then, and the next one runs."""
    requests = [Request(0, 0, 4, 3), Request(1, 0, 40, 1), Request(2, 0, 4, 1)]
    result = serve(requests, PagedAllocator(16, 4))
    assert (result.num_finished, result.num_refused, result.num_waiting) == (2, 1, 0)
    assert result.num_admitted == 2


def test_a_request_that_outgrows_the_memory_is_refused_in_the_end() -> None:
    """Alone in the pool and still too long: it does not step back for ever."""
    result = serve([Request(0, 0, 4, 100)], PagedAllocator(16, 4))
    assert (result.num_admitted, result.num_finished, result.num_refused) == (1, 0, 1)


def test_nothing_happens_until_someone_comes() -> None:
    """Idle steps count, and take no time to simulate."""
    result = serve([Request(0, 1e6, 4, 1)], PagedAllocator(16, 4))
    assert result.num_steps == 1_000_001
    assert result.use_of_budget < 1e-6


def test_a_limit_of_steps() -> None:
    """Those that are not done are counted; waiting for an arrival ends at the limit too."""
    requests = [Request(0, 0, 4, 20), Request(1, 500, 4, 1)]
    result = serve(requests, PagedAllocator(32, 4), max_steps=10)
    assert (result.num_steps, result.num_finished, result.num_waiting) == (10, 0, 2)
    result = serve(requests, PagedAllocator(32, 4), max_steps=100)
    assert (result.num_steps, result.num_finished, result.num_waiting) == (100, 1, 1)


def test_each_idea_serves_more_under_the_same_budget() -> None:
    """Static, contiguous, paged, and paged with sharing: each beats the one before."""
    requests = drawn(num_prefix_tokens=40, num_samples=2)
    static, contiguous, paged, sharing, forks, swap = (
        serve(requests, allocator) for allocator in allocators_for_serving(1200, 280, [8], 16)
    )
    rates = [r.tokens_per_step for r in (static, contiguous, paged, sharing)]
    assert rates == sorted(rates) and len(set(rates)) == 4
    assert paged.waste < static.waste
    assert forks.counters["num_cow_copies"] > 0
    assert swap.counters["num_evicted_blocks"] > 0
    assert swap.num_recomputed_tokens == 0


REQUESTS = st.lists(
    st.builds(
        lambda arrival, prompt, output, samples, prefix: Request(
            0, arrival, prompt, output, samples, 0 if prefix else None, min(prefix, prompt)
        ),
        st.integers(0, 30),
        st.integers(1, 25),
        st.integers(1, 12),
        st.integers(1, 2),
        st.sampled_from([0, 4, 6]),
    ),
    min_size=1,
    max_size=12,
)


@settings(deadline=None)
@given(REQUESTS, st.integers(0, 5), st.integers(1, 40))
def test_nobody_is_lost(drawn: list[Request], kind: int, num_step_tokens: int) -> None:
    """Every request is finished or refused, with all its tokens or not, and the memory is empty."""
    drawn.sort(key=lambda request: request.arrival)
    requests = [replace(request, number=number) for number, request in enumerate(drawn)]
    allocator = allocators_for_serving(48, 24, [4], 2)[kind]
    result = serve(requests, allocator, num_step_tokens=num_step_tokens)
    assert result.num_finished + result.num_refused == len(requests)
    assert result.num_waiting == 0
    if not result.num_refused:
        tokens = sum(request.num_output_tokens * request.num_samples for request in requests)
        assert result.num_output_tokens == tokens
    assert allocator.num_reserved_slots == 0
    assert result.peak_live_slots <= result.peak_reserved_slots <= 48


@pytest.mark.parametrize(
    "allocator",
    [StaticAllocator(1200, 280), ContiguousAllocator(1200, 16), PagedAllocator(1200, 8)],
    ids=lambda allocator: allocator.name,
)
def test_the_same_twice(allocator: Allocator) -> None:
    """Equal seeds, equal figures; an allocator that ran is empty and can run again."""
    first, second = serve(drawn(), allocator), serve(drawn(), allocator)
    own = set(first.counters)
    assert {k: v for k, v in first.figures().items() if k not in own} == {
        k: v for k, v in second.figures().items() if k not in own
    }


def test_a_timeline_stays_short() -> None:
    """However many steps there are, the moments kept are few, ascending and from the start."""
    timeline = Timeline()
    for step in range(5000):
        if timeline.wants(step):
            timeline.record(Moment(step, [], 0, 0))
    steps = [moment.step for moment in timeline.moments]
    assert steps[0] == 0 and steps == sorted(set(steps))
    assert 100 < len(steps) <= 320
    assert len({after - before for before, after in pairwise(steps)}) == 1


def test_figures_of_nothing() -> None:
    """No step, no memory: no division by zero."""
    empty = ServingResult("paged", 16, 64, num_requests=1)
    assert (empty.waste, empty.use_of_budget, empty.tokens_per_step) == (0.0, 0.0, 0.0)
