"""The models of the tests say something: equal tokens would prove nothing of one that repeats."""

from __future__ import annotations

import pytest

from tiny_models import FAMILIES, build, ragged_batch

pytestmark = pytest.mark.core_suite


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_says_many_different_tokens(family: str) -> None:
    batch = ragged_batch((9, 3, 14))
    options = dict(max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
    rows = build(family).generate(**batch.inputs, **options)[:, batch.ids.shape[1] :]
    assert sum(len(set(row.tolist())) for row in rows) >= 15
