"""The native kernels as operators: what torch.compile may know of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from backends.paged_batch import PagedBatch, random_rows
from hf_paged.backends import cpu_ops
from hf_paged.backends.base import LayerView
from hf_paged.backends.cpu import CpuBackend
from hf_paged.backends.metadata import AttentionMetadata

pytestmark = pytest.mark.core_suite

LENS = {"decode": [(9, 1), (5, 1)], "mixed": [(9, 1), (5, 3), (0, 20)]}
SHAPES = pytest.mark.parametrize("lens", LENS.values(), ids=LENS)
ATTENTION: list[dict[str, Any]] = [
    dict(),
    dict(window=4, softcap=3.0),
    dict(sinks=torch.linspace(-1, 1, 4), alibi_slopes=torch.linspace(0, 1, 4)),
]


@pytest.fixture(autouse=True)
def forget_compiled_code() -> Any:
    yield
    torch.compiler.reset()


def attention_arguments(batch: PagedBatch) -> tuple[Any, ...]:
    view, metadata = batch.view, batch.metadata
    tables = (metadata.block_tables, metadata.seq_lens, metadata.cu_seqlens_q)
    return batch.query, batch.key, batch.value, view.key_cache, view.value_cache, *tables, 0.3


@pytest.mark.parametrize("attention", ATTENTION, ids=lambda attention: "-".join(attention) or "all")
def test_attention_is_what_its_schema_and_its_fake_say(attention: dict[str, Any]) -> None:
    batch = PagedBatch(random_rows(LENS["mixed"], value_dim=6), CpuBackend(), 4, poison=7.0)
    torch.library.opcheck(
        cpu_ops.attention.default,
        attention_arguments(batch),
        attention | dict(batch_invariant=not attention),
    )


def test_write_mutates_the_caches_and_nothing_else() -> None:
    batch = PagedBatch(random_rows(LENS["mixed"], value_dim=6), CpuBackend(), 4, poison=7.0)
    caches = batch.view.key_cache, batch.view.value_cache
    torch.library.opcheck(
        cpu_ops.write.default, (batch.key, batch.value, *caches, batch.metadata.slot_mapping)
    )


@pytest.mark.parametrize("target", [[4, 5], [1, 0]], ids=["apart", "exchange"])
def test_copy_blocks_mutates_the_cache_and_nothing_else(target: list[int]) -> None:
    torch.library.opcheck(
        cpu_ops.copy_blocks.default,
        (torch.randn(8, 2, 4, 8), torch.tensor([0, 1]), torch.tensor(target)),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_fake_has_the_shape_strides_and_dtype_of_the_real_output(dtype: torch.dtype) -> None:
    batch = PagedBatch(random_rows(LENS["mixed"], value_dim=6, dtype=dtype), CpuBackend(), 4)
    batch.query = batch.query.transpose(0, 1).contiguous().transpose(0, 1)
    expected = batch.forward()
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = [
            mode.from_tensor(a) if isinstance(a, torch.Tensor) else a
            for a in attention_arguments(batch)
        ]
        fake = cpu_ops.attention(*fakes)
    assert (fake.shape, fake.stride(), fake.dtype) == (
        expected.shape,
        expected.stride(),
        expected.dtype,
    )


def step(
    backend: CpuBackend,
    tokens: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    view: LayerView,
    metadata: AttentionMetadata,
    **attention: Any,
) -> torch.Tensor:
    """What a layer does, with something before and after for a compiler to fuse."""
    query, key, value = (2 * states for states in tokens)
    backend.write(key, value, view, metadata)
    return backend.forward(query, key, value, view, metadata, scale=0.3, **attention) + 1


@SHAPES
@pytest.mark.parametrize("attention", ATTENTION, ids=lambda attention: "-".join(attention) or "all")
def test_a_compiled_layer_gives_the_bits_of_an_eager_one_and_fills_the_same_slots(
    lens: Any, attention: dict[str, Any]
) -> None:
    backend = CpuBackend(batch_invariant=not attention)
    compiled_step = torch.compile(step, fullgraph=True, backend="aot_eager")
    for seed in (0, 1):  # the second call runs what the first one compiled
        rows = random_rows(lens, value_dim=6, seed=seed)
        eager, compiled = (
            PagedBatch(rows, backend, 4, window=attention.get("window"), poison=7.0)
            for _ in range(2)
        )
        expected, out = (
            run(
                backend,
                (batch.query, batch.key, batch.value),
                batch.view,
                batch.metadata,
                **attention,
            )
            for run, batch in ((step, eager), (compiled_step, compiled))
        )
        assert torch.equal(out, expected)
        assert torch.equal(compiled.view.key_cache, eager.view.key_cache)
        assert torch.equal(compiled.view.value_cache, eager.view.value_cache)


def test_one_graph_serves_all_lengths() -> None:
    backend = CpuBackend()
    compiled_step = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for num_past in (3, 9, 30):
        rows = random_rows([(num_past, 1), (5, 3)])
        eager, compiled = (PagedBatch(rows, backend, 4, poison=7.0) for _ in range(2))
        expected, out = (
            run(backend, (batch.query, batch.key, batch.value), batch.view, batch.metadata)
            for run, batch in ((step, eager), (compiled_step, compiled))
        )
        assert torch.equal(out, expected)
