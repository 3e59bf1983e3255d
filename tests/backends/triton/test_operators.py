"""The operators, interpreted: what torch.compile and dispatch modes may know of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from backends.paged_batch import PagedBatch, random_rows
from backends.triton.pools import make_batch
from hf_paged.backends import block_ops, triton_ops
from hf_paged.backends.triton import TritonBackend

MIXED = [(9, 1), (5, 3), (0, 20)]
ATTENTION: list[dict[str, Any]] = [
    dict(),
    dict(
        window=4,
        softcap=3.0,
        sinks=torch.linspace(-1, 1, 4),
        alibi_slopes=torch.linspace(0, 1, 4),
    ),
]


@pytest.fixture(autouse=True)
def forget_compiled_code() -> Any:
    yield
    torch.compiler.reset()


def attention_arguments(batch: PagedBatch, num_splits: int | None) -> tuple[Any, ...]:
    view, metadata = batch.view, batch.metadata
    tables = (metadata.block_tables, metadata.seq_lens, metadata.cu_seqlens_q)
    caches = (view.key_cache, view.value_cache)
    return batch.query, batch.key, batch.value, *caches, *tables, 20, True, num_splits, 0.3


@pytest.mark.parametrize("num_splits", [None, 2])
@pytest.mark.parametrize("attention", ATTENTION, ids=["plain", "everything"])
def test_attention_is_what_its_schema_and_its_fake_say(
    attention: dict[str, Any], num_splits: int | None
) -> None:
    batch = make_batch(random_rows(MIXED, value_dim=6), 16, poison=7.0)
    torch.library.opcheck(
        triton_ops.attention.default, attention_arguments(batch, num_splits), attention
    )


def test_write_mutates_the_caches_and_nothing_else() -> None:
    batch = make_batch(random_rows(MIXED, value_dim=6), 16, poison=7.0)
    caches = batch.view.key_cache, batch.view.value_cache
    torch.library.opcheck(
        block_ops.write.default, (batch.key, batch.value, *caches, batch.metadata.slot_mapping)
    )


def test_copy_blocks_mutates_the_cache_and_nothing_else() -> None:
    torch.library.opcheck(
        block_ops.copy_blocks.default,
        (torch.randn(8, 16, 2, 8), torch.tensor([0, 1]), torch.tensor([4, 5])),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_fake_has_the_shape_strides_and_dtype_of_the_real_output(dtype: torch.dtype) -> None:
    batch = make_batch(random_rows(MIXED, value_dim=6, dtype=dtype), 16)
    batch.query = batch.query.transpose(0, 1).contiguous().transpose(0, 1)
    arguments = attention_arguments(batch, 2)
    expected = triton_ops.attention(*arguments)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = triton_ops.attention(
            *(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments)
        )
    assert (fake.shape, fake.stride(), fake.dtype) == (
        expected.shape,
        expected.stride(),
        expected.dtype,
    )


@pytest.mark.parametrize("attention", ATTENTION, ids=["plain", "everything"])
def test_a_compiled_layer_gives_the_bits_of_an_eager_one_and_fills_the_same_slots(
    attention: dict[str, Any],
) -> None:
    backend = TritonBackend()

    def step(batch: PagedBatch) -> torch.Tensor:
        query, key, value = (2 * states for states in (batch.query, batch.key, batch.value))
        backend.write(key, value, batch.view, batch.metadata)
        arguments: dict[str, Any] = dict(scale=0.3) | attention
        return backend.forward(query, key, value, batch.view, batch.metadata, **arguments) + 1

    rows = random_rows(MIXED, value_dim=6)
    eager, compiled = (
        make_batch(rows, 16, window=attention.get("window"), poison=7.0) for _ in range(2)
    )
    expected = step(eager)
    out = torch.compile(step, fullgraph=True, backend="aot_eager")(compiled)
    assert torch.equal(out, expected)
    assert torch.equal(compiled.view.key_cache, eager.view.key_cache)
    assert torch.equal(compiled.view.value_cache, eager.view.value_cache)


def test_a_dispatch_mode_sees_every_call() -> None:
    class Recorder(TorchDispatchMode):
        names: list[str]

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.names.append(func.name())
            return func(*args, **kwargs or {})

    batch = make_batch(random_rows(MIXED), 16)
    recorder = Recorder()
    recorder.names = []
    with recorder:
        batch.forward()
        batch.backend.copy_blocks(batch.view.key_cache, torch.tensor([0]), torch.tensor([1]))
    assert {"hf_paged::paged_write", "hf_paged::triton_attention"} <= set(recorder.names)
    assert "hf_paged::paged_copy_blocks" in recorder.names
