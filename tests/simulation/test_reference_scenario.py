"""The story that README and CLI tell, to the slot."""

from __future__ import annotations

import pytest

from hf_paged.errors import ConfigurationError
from hf_paged.simulation.memory_strip import SlotState
from hf_paged.simulation.reference_report import reference_lines
from hf_paged.simulation.reference_scenario import (
    ReferenceResult,
    ReferenceScenario,
    run_reference,
)


@pytest.fixture(scope="module")
def result() -> ReferenceResult:
    return run_reference(ReferenceScenario.draw())


def test_the_requests(result: ReferenceResult) -> None:
    """Sixty lengths of a fixed seed; the budget fits the first forty and 32 slots more."""
    scenario = result.scenario
    assert len(scenario.lengths) == 60
    assert round(scenario.mean_tokens) == 228
    assert max(scenario.lengths) == 593
    assert scenario.num_slots == sum(scenario.lengths[:40]) + 32 == 8528


def test_static_holds_eight(result: ReferenceResult) -> None:
    """Eight reservations, a fifth of them used: the longest length is rarely anybody's."""
    static = result.static
    assert static.num_admitted == 8528 // 1024 == 8
    assert static.full.num_reserved_slots == 8192
    assert f"{1 - static.full.waste:.0%}" == "20%"


def test_contiguous_has_room_and_no_place(result: ReferenceResult) -> None:
    """4810 slots are free and 800 do not fit: no hole is longer than 359."""
    contiguous = result.outcomes[1]
    assert (contiguous.num_admitted, contiguous.num_freed) == (40, 20)
    assert contiguous.num_free_slots == 4810
    assert contiguous.checkerboard.largest_hole == 359
    assert not contiguous.latecomer_placed
    assert contiguous.end.strip == contiguous.checkerboard.strip
    assert contiguous.latecomer_segments() == []


def test_paged_places_the_latecomer_in_pieces(result: ReferenceResult) -> None:
    """The same holes, and 50 blocks of them hold the 800; a block a request is partly empty."""
    (paged,) = result.paged
    assert paged.num_admitted == 39
    assert paged.latecomer_placed and paged.num_latecomer_blocks == 50
    before = paged.checkerboard
    assert before.num_reserved_slots == 3760
    assert before.num_reserved_slots - before.num_live_slots == 101
    assert f"{before.waste:.1%}" == "2.7%"
    pieces = paged.latecomer_segments()
    assert len(pieces) > 1 and sum(piece.num_slots for piece in pieces) == 800
    assert f"{paged.num_admitted / result.static.num_admitted:.1f}" == "4.9"


def test_the_story_in_words(result: ReferenceResult) -> None:
    """Every figure stands in the text as it was measured."""
    first, static, contiguous, paged, ratio = reference_lines(result)
    assert "mean 228, longest 593, budget 8528" in first
    assert "8528 // 1024 reservations of 1024: holds 8 at 20% use" in static
    assert "40 admitted, 20 freed, 4810 slots free, largest hole 359: the 800 refused" in contiguous
    assert "39 admitted" in paged and "the 800 placed in 50 blocks" in paged
    assert "101 of 3760 slots wasted = 2.7%" in paged
    assert "39 / 8 = 4.9 x" in ratio


def test_every_strip_covers_the_budget(result: ReferenceResult) -> None:
    for outcome in result.outcomes:
        for stage in (outcome.full, outcome.checkerboard, outcome.end):
            ends = [part.start + part.num_slots for part in stage.strip]
            assert [part.start for part in stage.strip] == [0, *ends[:-1]]
            assert ends[-1] == 8528
            used = sum(p.num_slots for p in stage.strip if p.state is SlotState.USED)
            assert used == stage.num_live_slots


def test_smaller_blocks_waste_less() -> None:
    """A block of one slot wastes nothing, a bigger one on average half of itself a request."""
    result = run_reference(ReferenceScenario.draw(), [1, 16, 128])
    wastes = [outcome.checkerboard.waste for outcome in result.paged]
    assert wastes[0] == 0.0
    assert wastes == sorted(wastes)


def test_a_length_above_the_budget_is_refused_before_the_story() -> None:
    with pytest.raises(ConfigurationError, match=r"has \d+ tokens, more than the budget of 300"):
        ReferenceScenario.draw(num_slots=300)
