"""Layers of one window share blocks, in groups of equal size."""

from __future__ import annotations

import pytest

from hf_paged.core.layer_group import LayerGroup, group_layers

pytestmark = pytest.mark.core_suite


def test_equal_layers_are_one_group() -> None:
    """A Llama, and a Mistral whose every layer slides."""
    assert group_layers([None] * 3) == (LayerGroup((0, 1, 2), None),)
    assert group_layers([8, 8]) == (LayerGroup((0, 1), 8),)


def test_full_attention_comes_first() -> None:
    """Groups are ordered by window, layers inside ascend."""
    assert group_layers([8, None, 8, None]) == (LayerGroup((1, 3), None), LayerGroup((0, 2), 8))
    assert group_layers([16, 8]) == (LayerGroup((1,), 8), LayerGroup((0,), 16))


def test_gemma3_gets_groups_of_four() -> None:
    """26 layers, every sixth full: one full group and six sliding ones, the last one of 2."""
    groups = group_layers([None if i % 6 == 5 else 512 for i in range(26)])
    assert [(len(group.layers), group.window) for group in groups] == [
        (4, None),
        *[(4, 512)] * 5,
        (2, 512),
    ]
    assert groups[0].layers == (5, 11, 17, 23)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(26))


@pytest.mark.parametrize(
    ("window", "num_tokens", "hidden"),
    [(None, 100, 0), (1, 0, 0), (1, 1, 1), (1, 9, 9), (4, 3, 0), (4, 4, 1), (8, 20, 13)],
)
def test_hidden_tokens(window: int | None, num_tokens: int, hidden: int) -> None:
    """A query at index n sees itself and the window - 1 tokens before it."""
    assert LayerGroup((0,), window).num_hidden_tokens(num_tokens) == hidden
