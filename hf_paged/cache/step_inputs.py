"""What a forward was called with, and what that adds to each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hf_paged.core.allocation import NewTokens

if TYPE_CHECKING:
    from hf_paged.cache.paged_cache import PagedCache

__all__ = ["StepInputs", "new_tokens"]


@dataclass(frozen=True)
class StepInputs:
    """What a forward was called with.

    Attributes:
        input_ids: [B, T], or None if embeddings were given.
        num_rows: B.
        num_columns: T.
        attention_mask: [B, P + T] or None.
        position_ids: [B, T] or [1, T], or None if the model makes them up.
    """

    input_ids: torch.Tensor | None
    num_rows: int
    num_columns: int
    attention_mask: torch.Tensor | None
    position_ids: torch.Tensor | None


def new_tokens(
    cache: PagedCache, inputs: StepInputs, real: torch.Tensor, *, hides_past: bool
) -> list[NewTokens]:
    """Return what a forward adds to each row that has a real token, in row order.

    Args:
        cache: an initialised cache of ``inputs.num_rows`` rows.
        inputs: the call.
        real: [B, T] bool, which columns are real.
        hides_past: whether the mask hides stored tokens: K and V then depend on fewer tokens than
            the row holds.
    """
    sequences = cache.sequences
    lens: list[int] = real.sum(1).tolist()
    is_first = all(sequence.num_tokens == 0 for sequence in sequences)
    version, keep = None, False
    if inputs.input_ids is not None and not hides_past:
        version, keep = cache.runtime.version(
            is_first_forward=is_first, is_prompt=inputs.num_columns > 1
        )
    if version is None:
        return [NewTokens(s, n) for s, n in zip(sequences, lens, strict=True) if n]
    assert inputs.input_ids is not None
    has_gap = cache.gaps_behind_windows(real)
    positions, is_implicit = _positions(cache, inputs, real)
    if is_implicit:
        # The model makes up positions from the mask in its own way, but equal tokens in equal
        # columns get equal ones.
        version = (version, "columns")
    ids: list[list[int]] = inputs.input_ids.tolist()
    if inputs.num_columns == 1:
        return [
            NewTokens(s, 1, row, None if gap else row_positions[0], version, keep)
            for s, n, row, row_positions, gap in zip(
                sequences, lens, ids, positions, has_gap, strict=True
            )
            if n
        ]
    result = []
    for row, (sequence, num_new) in enumerate(zip(sequences, lens, strict=True)):
        if num_new == 0:
            continue
        at = torch.nonzero(real[row])[:, 0].tolist()
        row_positions = [positions[row][i] for i in at]
        first: int | None = row_positions[0]
        consecutive = list(range(row_positions[0], row_positions[0] + num_new))
        if has_gap[row] or row_positions != consecutive:
            first = None
        result.append(NewTokens(sequence, num_new, [ids[row][i] for i in at], first, version, keep))
    return result


def _positions(
    cache: PagedCache, inputs: StepInputs, real: torch.Tensor
) -> tuple[Sequence[Sequence[int]], bool]:
    """Return the positions [B][T], and whether they are columns because none were given."""
    given, num_past = inputs.position_ids, cache.columns.num_columns
    if given is not None and given.ndim <= 2:
        listed: list[list[int]] = given.reshape(-1, given.shape[-1]).tolist()
        return (listed * inputs.num_rows if len(listed) == 1 else listed), False
    columns = range(num_past, num_past + inputs.num_columns)
    is_implicit = given is not None or cache.columns.has_padding or not bool(real.all())
    return [columns] * inputs.num_rows, is_implicit
