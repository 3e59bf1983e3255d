"""The pool's tensors: lazy, checked, copied, poisoned, and given back."""

from __future__ import annotations

import gc
import mmap
import sys
from typing import Any

import psutil
import pytest
import torch

from hf_paged.backends.base import LayerView
from hf_paged.backends.registry import create_backend
from hf_paged.backends.triton import TritonBackend
from hf_paged.cache.layout import KVLayout
from hf_paged.cache.storage import KVStorage
from hf_paged.errors import UnsupportedModelError

pytestmark = pytest.mark.core_suite

MIB = 2**20
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="measures resident pages")


def make_storage(
    num_blocks: int = 8,
    *,
    windows: tuple[int | None, ...] = (None, None),
    num_kv_heads: int = 2,
    head_dim: int = 8,
    block_size: int = 4,
    backend: str = "torch",
) -> KVStorage:
    layout = KVLayout(windows, num_kv_heads, head_dim, torch.float32)
    device = torch.device("cpu")
    return KVStorage(create_backend(backend, device), layout, num_blocks, block_size)


def states(
    num_kv_heads: int = 2, head_dim: int = 8, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    return torch.zeros(1, num_kv_heads, head_dim, dtype=dtype)


def caches(storage: KVStorage, layer: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    view = storage.view(layer, states(), states())
    return view.key_cache, view.value_cache


def rss() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


# -- made when first used, one a lane ----------------------------------------------------------


@pytest.mark.parametrize("backend", ["torch", "torch_reference"])
def test_a_view_holds_all_blocks_and_the_null_block_and_reads_as_zeros(backend: str) -> None:
    storage = make_storage(8, backend=backend)
    view = storage.view(0, states(head_dim=8), states(head_dim=6))
    shape = create_backend(backend, torch.device("cpu")).cache_shape
    assert view.key_cache.shape == shape(9, 4, 2, 8)
    assert view.value_cache.shape == shape(9, 4, 2, 6)
    assert not view.key_cache.any()
    assert not view.value_cache.any()


def test_layers_of_a_group_have_tensors_of_their_own_and_groups_share_them() -> None:
    storage = make_storage(windows=(8, None, 8, None))
    views = [storage.view(layer, states(), states()) for layer in range(4)]
    assert views[0] is views[1], "first layers of the two groups"
    assert views[2] is views[3], "second ones"
    assert views[0] is not views[2]
    assert storage.view(0, states(), states()) is views[0], "made once"


@needs_linux
def test_a_pool_costs_nothing_before_blocks_are_written() -> None:
    bytes_per_block = 16 * 4 * 64 * 4
    storage = make_storage(2**31 // bytes_per_block, num_kv_heads=4, head_dim=64, block_size=16)
    before = rss()
    view = storage.view(0, states(4, 64), states(4, 64))
    assert view.key_cache.nbytes > 2**31
    assert rss() - before < 8 * MIB
    view.key_cache[: 32 * MIB // bytes_per_block] = 1
    assert 30 * MIB < rss() - before < 40 * MIB


def test_empty_states_have_the_shape_and_dtype_of_the_layer() -> None:
    storage = make_storage()
    storage.view(1, states(2, 8, torch.bfloat16), states(2, 6, torch.bfloat16))
    key, value = storage.empty_states(1)
    assert (key.shape, value.shape) == ((0, 2, 0, 8), (0, 2, 0, 6))
    assert key.dtype == value.dtype == torch.bfloat16


# -- what does not fit -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "numbers"),
    [
        (states(2, 16), states(2, 8), ["192 bytes", "(2, 16)", "(2, 8)", "float32", "128"]),
        (states(4, 8), states(4, 8), ["256 bytes", "(4, 8)", "128"]),
        (
            states(2, 8, torch.float64),
            states(2, 8, torch.float64),
            ["256 bytes", "torch.float64", "announces 128 (2 heads of 8, torch.float32)"],
        ),
    ],
    ids=["head_dim", "heads", "dtype"],
)
def test_more_than_the_config_announced_is_refused_with_the_numbers(
    key: torch.Tensor, value: torch.Tensor, numbers: list[str]
) -> None:
    storage = make_storage()
    with pytest.raises(UnsupportedModelError) as raised:
        storage.view(1, key, value)
    for part in ["layer 1", *numbers, "unpatch and patch again"]:
        assert part in str(raised.value)
    assert caches(storage)[0].dtype == torch.float32, "a refusal leaves the storage usable"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (states(2, 8, torch.bfloat16), states(2, 8, torch.bfloat16)),
        (states(1, 8), states(1, 8)),
        (states(2, 4), states(2, 8)),
        (states(2, 8), states(2, 4)),
        (states(2, 8), states(2, 8, torch.bfloat16)),
    ],
)
def test_fits_compares_dtype_and_shape_with_what_is_there(
    key: torch.Tensor, value: torch.Tensor
) -> None:
    storage = make_storage()
    assert storage.fits(0, key, value), "nothing is there yet"
    caches(storage)
    assert storage.fits(0, states(), states())
    assert not storage.fits(0, key, value)
    storage.clear()
    assert storage.fits(0, key, value)


# -- blocks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["torch", "torch_reference", "block-major"])
def test_copy_blocks_in_every_layer(backend: str) -> None:
    storage = make_block_major(8) if backend == "block-major" else make_storage(8, backend=backend)
    everything = [cache for layer in (0, 1) for cache in caches(storage, layer)]
    for cache in everything:
        cache.normal_()
    before = [cache.clone() for cache in everything]
    storage.copy_blocks([])
    storage.copy_blocks([(4, 3), (7, 1), (5, 0)])
    for cache, old in zip(everything, before, strict=True):
        assert torch.equal(cache, old[[5, 7, 2, 4, 4, 5, 6, 7, 8]])


# -- block-major ---------------------------------------------------------------------------------


def make_block_major(
    num_blocks: int = 8,
    windows: tuple[int | None, ...] = (None, None),
    layer_devices: list[torch.device] | None = None,
) -> KVStorage:
    layout = KVLayout(windows, 2, 8, torch.float32)
    return KVStorage(TritonBackend(), layout, num_blocks, 4, layer_devices)


def test_a_block_is_one_run_of_memory_with_all_layers_in_it() -> None:
    storage = make_block_major()
    (tensor,) = (storage.view(1, states(2, 8), states(2, 6)), *storage.tensors())[1:]
    assert tensor.shape == (9, 2 * 4 * 2 * (8 + 6))
    views = [storage.view(layer, states(2, 8), states(2, 6)) for layer in (0, 1)]
    assert len(storage.tensors()) == 1, "the second layer was planned for"
    for view in views:
        assert view.key_cache.shape == (9, 4, 2, 8)
        assert view.value_cache.shape == (9, 4, 2, 6)
        assert view.key_cache.stride()[1:] == (16, 8, 1)
    starts = [
        (cache.data_ptr() - tensor.data_ptr()) // 4
        for view in views
        for cache in (view.key_cache, view.value_cache)
    ]
    assert starts == [0, 64, 112, 176]
    for number, view in enumerate(views):
        view.key_cache[3], view.value_cache[3] = 2 * number, 2 * number + 1
    runs = torch.unique_consecutive(tensor[3], return_counts=True)
    assert [run.tolist() for run in runs] == [[0, 1, 2, 3], [64, 48, 64, 48]]


def test_groups_share_the_lanes_of_a_block() -> None:
    storage = make_block_major(windows=(8, None, 8, None))
    views = [storage.view(layer, states(), states()) for layer in range(4)]
    assert views[0] is views[1] and views[2] is views[3]
    assert storage.tensors()[0].shape == (9, 2 * 2 * 4 * 2 * 8)


def test_each_device_holds_its_layers_alone() -> None:
    """A ``device_map`` over two devices; the second one is meta, which has shapes and no memory."""
    cpu, meta = torch.device("cpu"), torch.device("meta")
    storage = make_block_major(windows=(None,) * 3, layer_devices=[cpu, meta, meta])
    storage.view(0, states(), states())
    assert [t.shape for t in storage.tensors()] == [(9, 128)]
    storage.view(2, states().to(meta), states().to(meta))
    storage.view(1, states().to(meta), states().to(meta))
    assert [(t.device, t.shape) for t in storage.tensors()] == [(cpu, (9, 128)), (meta, (9, 256))]
    storage.view(1, states(), states())  # the layer was moved
    assert [(t.device, t.shape) for t in storage.tensors()][2:] == [(cpu, (9, 128))]


def test_poison_and_clear_reach_all_of_a_block() -> None:
    storage = make_block_major()
    storage.poison([2])
    key_cache, value_cache = caches(storage)
    storage.poison([5])
    (tensor,) = storage.tensors()
    assert tensor.isnan().all(1).nonzero()[:, 0].tolist() == [2, 5]
    assert not tensor[[0, 1, 3, 4, 6, 7, 8]].isnan().any()
    generation = storage.generation
    storage.clear()
    assert storage.tensors() == [] and storage.generation == generation + 1
    del key_cache, value_cache


def test_poison_fills_the_given_blocks_in_every_layer() -> None:
    storage = make_storage(8)
    everything = [cache for layer in (0, 1) for cache in caches(storage, layer)]
    storage.poison([])
    assert not any(cache.isnan().any() for cache in everything)
    storage.poison(iter([2, 5]))
    for cache in everything:
        is_poisoned = cache.flatten(1).isnan()
        assert is_poisoned.all(1).nonzero()[:, 0].tolist() == [2, 5]
        assert is_poisoned.any(1).nonzero()[:, 0].tolist() == [2, 5]


def test_blocks_poisoned_before_a_layer_has_tensors_are_poisoned_in_them() -> None:
    storage = make_storage(8)
    storage.poison([2, 5])
    for cache in caches(storage):
        is_poisoned = cache.flatten(1).isnan()
        assert is_poisoned.all(1).nonzero()[:, 0].tolist() == [2, 5]
        assert is_poisoned.any(1).nonzero()[:, 0].tolist() == [2, 5]


# -- given back --------------------------------------------------------------------------------


@needs_linux
def test_trim_gives_free_blocks_back_and_leaves_used_ones() -> None:
    num_blocks, bytes_per_block = 512, 16 * 8 * 128 * 4  # 64 KiB each
    storage = make_storage(num_blocks, num_kv_heads=8, head_dim=128, block_size=16)
    view = storage.view(0, states(8, 128), states(8, 128))
    for cache in (view.key_cache, view.value_cache):
        torch.arange(cache[:-1].numel(), out=cache[:-1].view(-1))
    used = [0, 100, 101, 300, 511]
    kept = view.key_cache[used].clone(), view.value_cache[used].clone()
    free = sorted(set(range(num_blocks)) - set(used))
    before = rss()
    storage.trim(free)
    given_back = before - rss()
    assert given_back > 0.95 * 2 * len(free) * bytes_per_block
    assert torch.equal(view.key_cache[used], kept[0])
    assert torch.equal(view.value_cache[used], kept[1])
    assert not view.key_cache[free].any()
    assert not view.value_cache[free].any()

    view.key_cache[free] = 5.0
    assert (view.key_cache[free] == 5.0).all(), "free blocks are used again"
    assert torch.equal(view.key_cache[used], kept[0])


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_trim_leaves_used_blocks_that_share_a_page_with_free_ones(block_size: int) -> None:
    num_blocks = 4 * mmap.PAGESIZE // (block_size * 2 * 8 * 4)
    generator = torch.Generator().manual_seed(block_size)
    for share in (0.02, 0.5, 0.98):
        storage = make_storage(num_blocks, block_size=block_size)
        view_caches = caches(storage)
        for cache in view_caches:
            cache.fill_(3.0)
        is_free = torch.rand(num_blocks + 1, generator=generator) < share
        is_free[-1] = False
        storage.trim(is_free.nonzero()[:, 0].tolist())
        for cache in view_caches:
            assert (cache[~is_free] == 3.0).all()
            assert ((cache[is_free] == 3.0) | (cache[is_free] == 0.0)).all()


def test_trim_of_nothing_and_before_anything_was_stored() -> None:
    storage = make_storage()
    storage.trim([])
    storage.trim([0, 1, 2])
    key_cache, _ = caches(storage)
    key_cache.fill_(1.0)
    storage.trim([])
    assert (key_cache == 1.0).all()


@needs_linux
def test_clear_gives_everything_back_and_the_next_view_begins_with_zeros() -> None:
    storage = make_storage(512, num_kv_heads=8, head_dim=128, block_size=16)
    view: LayerView | None = storage.view(0, states(8, 128), states(8, 128))
    assert view is not None
    view.key_cache.fill_(1.0)
    before = rss()
    del view
    storage.clear()
    assert before - rss() > 30 * MIB
    assert not storage.view(0, states(8, 128), states(8, 128)).key_cache.any()


@pytest.mark.parametrize("is_inference", [True, False])
def test_tensors_serve_in_and_out_of_inference_mode_whichever_made_them(
    is_inference: bool,
) -> None:
    storage = make_storage()
    storage.poison([1])

    def use() -> Any:
        for cache in caches(storage):
            cache[0] = 1.0
        storage.poison([1])
        storage.copy_blocks([(0, 2)])
        storage.trim([3])
        return [cache[2].clone() for cache in caches(storage)]

    for mode in (is_inference, not is_inference, is_inference):
        with torch.inference_mode(mode):
            assert all((block == 1.0).all() for block in use())
    assert not any(cache.is_inference() for cache in caches(storage))
    assert not any(state.is_inference() for state in storage.empty_states(0))
