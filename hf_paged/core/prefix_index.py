"""Which blocks hold the K and V of which prefix: a trie, one level a block.

A path from a root spells a prefix, block by block:

    root(version) ──(tokens 0-3, position 0)── node ──(tokens 4-7, position 4)── node
                                                │ blocks per group: [12, None]

The key of a node carries its tokens and the position of the first one, its parent is the object
itself and the root carries the version under which K and V were computed. So a look-up compares
what it finds, token by token: equal hashes alone prove nothing and can do no harm.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple, cast

__all__ = ["BlockKey", "PrefixIndex", "PrefixNode"]


class BlockKey(NamedTuple):
    """What a full block holds: its tokens and the position of the first one.

    The positions of a block's tokens are consecutive; a sequence whose positions are not is
    never shared.
    """

    tokens: tuple[int, ...]
    first_position: int


class PrefixNode:
    """A prefix of whole blocks, and the block that stores its last one in each layer group.

    Attributes:
        key: the last block of the prefix; None at a root.
        depth: blocks in the prefix.
        blocks: block id for each layer group, None where that group does not store it.
        root: the empty prefix above it; it carries the version.
        num_sequences: sequences whose deepest full block this is, and running forwards of such.
    """

    __slots__ = ("blocks", "children", "depth", "key", "num_sequences", "parent", "root")

    def __init__(self, parent: PrefixNode | None, key: BlockKey | None, num_groups: int) -> None:
        self.parent = parent
        self.key = key
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.root: PrefixRoot = parent.root if parent is not None else cast("PrefixRoot", self)
        self.blocks: list[int | None] = [None] * num_groups
        self.children: dict[BlockKey, PrefixNode] = {}
        self.num_sequences = 0

    def store(self, group: int, block_id: int) -> None:
        """Name the block that holds this prefix's last block in ``group``; only once."""
        assert self.blocks[group] is None, f"prefix already stored in block {self.blocks[group]}"
        self.blocks[group] = block_id

    def forget(self, group: int) -> None:
        """Take back :meth:`store`: the block is about to hold something else."""
        assert self.blocks[group] is not None
        self.blocks[group] = None

    @property
    def is_idle(self) -> bool:
        """Whether nothing stores, extends or uses this prefix."""
        return (
            not self.children
            and not self.num_sequences
            and all(block is None for block in self.blocks)
        )


class PrefixRoot(PrefixNode):
    """The empty prefix of one version.

    Attributes:
        version: equal for two computations only if equal tokens give equal K and V.
        keep: whether blocks below it may stay cached after their last user.
    """

    __slots__ = ("keep", "version")

    def __init__(self, version: Hashable, keep: bool, num_groups: int) -> None:
        super().__init__(None, None, num_groups)
        self.version = version
        self.keep = keep


class PrefixIndex:
    """All prefixes that are stored now.

    Args:
        num_groups: layer groups of the model.
    """

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups
        self._roots: dict[Hashable, PrefixRoot] = {}

    def root(self, version: Hashable, *, keep: bool) -> PrefixRoot:
        """Return the empty prefix of ``version``, made if it is new."""
        root = self._roots.get(version)
        if root is None:
            root = self._roots[version] = PrefixRoot(version, keep, self._num_groups)
        return root

    def find(
        self, version: Hashable, token_ids: list[int], first_position: int, block_size: int
    ) -> list[PrefixNode]:
        """Return the known nodes along ``token_ids``, whole blocks only, the shallowest first."""
        node: PrefixNode | None = self._roots.get(version)
        path: list[PrefixNode] = []
        for start in range(0, len(token_ids) - block_size + 1, block_size):
            key = BlockKey(tuple(token_ids[start : start + block_size]), first_position + start)
            node = None if node is None else node.children.get(key)
            if node is None:
                break
            path.append(node)
        return path

    def new_node(self, parent: PrefixNode, key: BlockKey) -> PrefixNode:
        """Make a node that no look-up finds: what it names is not written yet."""
        return PrefixNode(parent, key, self._num_groups)

    def publish(self, parent: PrefixNode, key: BlockKey) -> PrefixNode:
        """Return the child of ``parent`` under ``key``, from now on found by look-ups."""
        child = parent.children.get(key)
        if child is None:
            child = parent.children[key] = self.new_node(parent, key)
        return child

    def prune(self, node: PrefixNode | None) -> None:
        """Remove ``node`` and its ancestors as far as nothing needs them."""
        while node is not None and node.is_idle:
            if isinstance(node, PrefixRoot):
                self._roots.pop(node.version, None)
                return
            parent = node.parent
            assert parent is not None and node.key is not None
            if parent.children.get(node.key) is node:
                del parent.children[node.key]
            node = parent
