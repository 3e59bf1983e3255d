"""Free, cached, used: one story a test, with exact block ids."""

from __future__ import annotations

import pytest

from hf_paged.core.block_pool import BlockPool
from hf_paged.core.prefix_index import BlockKey, PrefixIndex, PrefixNode

pytestmark = pytest.mark.core_suite


def make_pool(num_blocks: int) -> BlockPool:
    return BlockPool(num_blocks, PrefixIndex(num_groups=1))


def publish(
    pool: BlockPool, block_ids: list[int], *, version: str = "v", keep: bool = True
) -> None:
    """Let the blocks hold a chain of prefixes, the first one shallowest."""
    node: PrefixNode = pool.index.root(version, keep=keep)
    for position, block_id in enumerate(block_ids):
        node = pool.index.publish(node, BlockKey((block_id,), position))
        pool.set_num_filled(block_id, 1)
        pool.set_content(block_id, node, group=0)


def figures(pool: BlockPool) -> tuple[int, int, int]:
    pool.check_integrity()
    return pool.num_free, pool.num_cached, pool.num_used


def test_lowest_free_block_first() -> None:
    """A small load never touches the memory behind high ids."""
    pool = make_pool(6)
    assert pool.allocate(4) == [0, 1, 2, 3]
    assert pool.free([3, 0, 2]) == [3, 0, 2]
    assert pool.free_blocks() == [0, 2, 3, 4, 5]
    assert pool.allocate(3) == [0, 2, 3]
    assert figures(pool) == (2, 0, 4)


def test_block_is_free_after_its_last_reference() -> None:
    """Two references, two frees; nothing known is held, so the block is empty then."""
    pool = make_pool(2)
    (block,) = pool.allocate(1)
    pool.touch(block)
    assert pool.ref_count(block) == 2
    assert pool.free([block]) == []
    assert pool.free([block]) == [block]
    assert figures(pool) == (2, 0, 0)


def test_double_free_asserts() -> None:
    """A block is not freed more often than it was taken."""
    pool = make_pool(2)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="block 0 freed twice"):
        pool.free(blocks)


def test_double_free_of_a_cached_block_asserts() -> None:
    """A cached block has no reference to give back either."""
    pool = make_pool(2)
    blocks = pool.allocate(1)
    publish(pool, blocks)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="block 0 freed twice"):
        pool.free(blocks)


def test_more_than_available_asserts() -> None:
    """Whoever allocates looks at num_available first."""
    pool = make_pool(2)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="2 > 1 available"):
        pool.allocate(2)


def test_known_block_stays_cached() -> None:
    """Content outlives its last user; a touch brings the block back to use."""
    pool = make_pool(3)
    blocks = pool.allocate(2)
    publish(pool, blocks)
    assert pool.free([1, 0]) == []
    assert figures(pool) == (1, 2, 0)
    assert pool.is_cached(0)
    pool.touch(0)
    assert not pool.is_cached(0)
    assert figures(pool) == (1, 1, 1)


def test_eviction_is_least_recently_used_leaf_first() -> None:
    """The deepest block of the oldest prefix goes first; a touched prefix goes last."""
    pool = make_pool(5)
    old, new = pool.allocate(2), pool.allocate(3)
    publish(pool, old, version="old")
    publish(pool, new, version="new")
    pool.free(reversed(old))
    pool.free(reversed(new))
    pool.touch(0)
    pool.free([0])
    # LRU order: 1 (old leaf), 4, 3, 2 (new, leaf first), 0 (touched last)
    assert [pool.allocate(1) for _ in range(5)] == [[1], [4], [3], [2], [0]]
    assert pool.num_evictions == 5
    assert figures(pool) == (0, 0, 5)


def test_free_blocks_go_before_cached_ones() -> None:
    """Nothing is evicted while a block is free."""
    pool = make_pool(4)
    blocks = pool.allocate(2)
    publish(pool, blocks)
    pool.free(reversed(blocks))
    assert pool.allocate(3) == [2, 3, 1]
    assert pool.num_evictions == 1


def test_evicted_prefix_is_forgotten() -> None:
    """An evicted block leaves no trace in the index, root included."""
    pool = make_pool(1)
    blocks = pool.allocate(1)
    publish(pool, blocks)
    root = pool.index.root("v", keep=True)
    assert root.children
    pool.free(blocks)
    assert pool.allocate(1) == [0]
    assert pool.content(0) is None
    assert not root.children
    assert pool.index.root("v", keep=True) is not root


def test_content_is_set_once() -> None:
    """A block that holds a prefix is never renamed, nor a prefix stored twice."""
    pool = make_pool(2)
    pool.allocate(2)
    publish(pool, [0])
    content = pool.content(0)
    assert content is not None
    other = pool.index.publish(content[0], BlockKey((7,), 1))
    with pytest.raises(AssertionError):
        pool.set_content(0, other, group=0)
    with pytest.raises(AssertionError, match="already stored in block 0"):
        pool.set_content(1, content[0], group=0)


def test_content_of_an_unused_block_asserts() -> None:
    """Only a block that somebody wrote can hold something."""
    pool = make_pool(1)
    node = pool.index.publish(pool.index.root("v", keep=True), BlockKey((1,), 0))
    with pytest.raises(AssertionError):
        pool.set_content(0, node, group=0)


def test_unkept_content_is_emptied_at_once() -> None:
    """keep=False: shareable while used, gone with the last user."""
    pool = make_pool(2)
    blocks = pool.allocate(2)
    publish(pool, blocks, keep=False)
    assert pool.free([1, 0]) == [1, 0]
    assert figures(pool) == (2, 0, 0)


def test_clear_cached_leaves_used_blocks() -> None:
    """Cached blocks are emptied; used ones keep their content."""
    pool = make_pool(3)
    blocks = pool.allocate(3)
    publish(pool, blocks)
    pool.free([2, 1])
    assert pool.clear_cached() == [2, 1]
    assert pool.content(0) is not None
    assert figures(pool) == (2, 0, 1)
    assert pool.free_blocks() == [1, 2]


def test_live_slots_follow_the_use() -> None:
    """A slot counts once however many share it, and not while its block is cached."""
    pool = make_pool(2)
    pool.allocate(2)
    publish(pool, [0])
    pool.set_num_filled(1, 3)
    assert pool.num_live_slots == 4
    pool.touch(0)
    assert pool.num_live_slots == 4
    pool.free([0, 0])
    assert pool.num_live_slots == 3
    pool.touch(0)
    assert pool.num_live_slots == 4
    pool.set_num_filled(1, 1)
    assert pool.num_live_slots == 2
    pool.check_integrity()
