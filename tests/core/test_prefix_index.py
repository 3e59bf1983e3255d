"""The trie of prefixes: what a look-up may find, and when a prefix is gone."""

from __future__ import annotations

import pytest

from hf_paged.core.prefix_index import BlockKey, PrefixIndex, PrefixNode

pytestmark = pytest.mark.core_suite


def make_chain(index: PrefixIndex, *keys: BlockKey, version: str = "v") -> list[PrefixNode]:
    nodes: list[PrefixNode] = [index.root(version, keep=True)]
    for key in keys:
        nodes.append(index.publish(nodes[-1], key))
    return nodes


def test_one_root_a_version() -> None:
    """A version keeps its root and its decision to keep."""
    index = PrefixIndex(num_groups=1)
    root = index.root("a", keep=False)
    assert index.root("a", keep=False) is root
    assert index.root("b", keep=True) is not root
    assert (root.version, root.keep, root.depth, root.root) == ("a", False, 0, root)


def test_published_key_is_found() -> None:
    """Equal tokens at equal positions under an equal parent are the same prefix."""
    index = PrefixIndex(num_groups=2)
    root, first = make_chain(index, BlockKey((1, 2), 0))
    assert root.children[BlockKey((1, 2), 0)] is first
    assert index.publish(root, BlockKey((1, 2), 0)) is first
    assert first.depth == 1
    assert first.blocks == [None, None]


@pytest.mark.parametrize("key", [BlockKey((1, 3), 0), BlockKey((1, 2), 1), BlockKey((1, 2, 3), 0)])
def test_other_key_is_not_found(key: BlockKey) -> None:
    """Tokens and position are both part of the identity."""
    root, _ = make_chain(PrefixIndex(num_groups=1), BlockKey((1, 2), 0))
    assert key not in root.children


def test_equal_hashes_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all hashes equal a look-up still compares the tokens."""
    monkeypatch.setattr(BlockKey, "__hash__", lambda self: 1)
    root, _ = make_chain(PrefixIndex(num_groups=1), BlockKey((1, 2), 0))
    assert BlockKey((1, 2), 0) in root.children
    assert BlockKey((3, 4), 0) not in root.children


def test_new_node_is_not_found() -> None:
    """What is not written yet has a name, but no look-up finds it."""
    index = PrefixIndex(num_groups=1)
    root = index.root("v", keep=True)
    node = index.new_node(root, BlockKey((1,), 0))
    assert node.parent is root
    assert not root.children


def test_store_once_and_forget() -> None:
    """A prefix is stored in one block a group."""
    _, node = make_chain(PrefixIndex(num_groups=2), BlockKey((1,), 0))
    node.store(1, 9)
    assert node.blocks == [None, 9]
    with pytest.raises(AssertionError, match="already stored in block 9"):
        node.store(1, 3)
    node.forget(1)
    with pytest.raises(AssertionError):
        node.forget(1)
    assert node.is_idle


def test_prune_goes_up_as_far_as_idle() -> None:
    """A leaf takes its idle ancestors along, up to one that is stored."""
    index = PrefixIndex(num_groups=1)
    root, first, second, third = make_chain(index, *(BlockKey((i,), i) for i in range(3)))
    first.store(0, 4)
    index.prune(second)
    assert second.children, "a prefix that is extended stays"
    index.prune(third)
    assert not first.children
    assert root.children == {first.key: first}
    first.forget(0)
    index.prune(first)
    assert index.root("v", keep=True) is not root


def test_prune_stops_at_a_sequence() -> None:
    """A sequence whose deepest full block this is keeps the prefix."""
    index = PrefixIndex(num_groups=1)
    root, first = make_chain(index, BlockKey((0,), 0))
    first.num_sequences = 1
    index.prune(first)
    assert root.children == {first.key: first}
    index.prune(None)


def test_prune_leaves_a_namesake() -> None:
    """A node that was never published does not take the published one away."""
    index = PrefixIndex(num_groups=1)
    root, first = make_chain(index, BlockKey((0,), 0))
    first.store(0, 1)
    index.prune(index.new_node(root, BlockKey((0,), 0)))
    assert root.children == {first.key: first}
