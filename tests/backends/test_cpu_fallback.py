"""What the native kernels lack is computed in torch, or refused where bits were promised."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from backends.paged_batch import PagedBatch, Row, random_rows
from hf_paged.backends import cpu_kernels
from hf_paged.backends.cpu import CpuBackend
from hf_paged.backends.registry import create_backend
from hf_paged.errors import InputMismatchError

pytestmark = pytest.mark.core_suite

CPU = torch.device("cpu")
SHAPES = pytest.mark.parametrize(
    "lens", [[(5, 1), (0, 1), (17, 1)], [(0, 11), (5, 4), (16, 1)]], ids=["decode", "mixed"]
)


def cast(rows: list[Row], dtype: torch.dtype) -> list[Row]:
    return [
        dataclasses.replace(row, **{name: of.to(dtype) for name, of in vars(row).items()})
        for row in rows
    ]


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the torch path was expected")

    monkeypatch.setattr(cpu_kernels, "attend", refuse)


@SHAPES
@pytest.mark.parametrize(
    "attention",
    [
        dict(),
        dict(window=4, softcap=3.0),
        dict(sinks=torch.linspace(-1, 1, 4), alibi_slopes=torch.linspace(0, 1, 4)),
    ],
    ids=lambda attention: "-".join(attention) or "plain",
)
@pytest.mark.usefixtures("no_kernels")
def test_float64(lens: Any, attention: dict[str, Any]) -> None:
    rows = cast(random_rows(lens, value_dim=6), torch.float64)
    out, expected = (
        PagedBatch(rows, create_backend(name, CPU), 4, window=attention.get("window")).forward(
            **attention
        )
        for name in ("cpu", "torch_reference")
    )
    assert out.dtype == torch.float64
    # torch multiplies by a slope that it has rounded to fp32.
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)


@SHAPES
@pytest.mark.usefixtures("no_kernels")
def test_autocast_to_another_dtype(lens: Any) -> None:
    rows = random_rows(lens)
    with torch.autocast("cpu", torch.bfloat16):
        out, expected = (
            PagedBatch(rows, create_backend(name, CPU), 4).forward() for name in ("cpu", "torch")
        )
    assert torch.equal(out, expected)
    exact = PagedBatch(rows, create_backend("torch_reference", CPU), 4).forward()
    assert (out - exact).norm() < 1e-2 * exact.norm()


@SHAPES
@pytest.mark.usefixtures("no_kernels")
def test_autocast_of_values_but_not_of_rotated_keys(lens: Any) -> None:
    """Under autocast a projection gives bf16, and rotary embeddings turn Q and K back into fp32."""
    rows = [
        dataclasses.replace(row, value=row.value.bfloat16()) for row in random_rows(lens, seed=1)
    ]
    exact = PagedBatch(rows, create_backend("torch_reference", CPU), 4).forward()
    with torch.autocast("cpu", torch.bfloat16):
        out = PagedBatch(rows, create_backend("cpu", CPU), 4).forward()
    assert (out.float() - exact.float()).norm() < 1e-2 * exact.norm()


@SHAPES
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_autocast_to_the_dtype_that_is_there_changes_nothing(
    lens: Any, batch_invariant: bool
) -> None:
    rows = random_rows(lens, dtype=torch.bfloat16)
    backend = CpuBackend(batch_invariant=batch_invariant)
    expected = PagedBatch(rows, backend, 4).forward()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(PagedBatch(rows, backend, 4).forward(), expected)


@SHAPES
def test_batch_invariance_of_float64_is_refused(lens: Any) -> None:
    batch = PagedBatch(cast(random_rows(lens), torch.float64), CpuBackend(batch_invariant=True), 4)
    with pytest.raises(InputMismatchError) as raised:
        batch.forward()
    for fact in (
        "batch_invariant=True",
        "fp32, bf16 or fp16",
        "torch.float64",
        "convert the model",
    ):
        assert fact in str(raised.value)


@SHAPES
def test_batch_invariance_under_autocast_to_another_dtype_is_refused(lens: Any) -> None:
    batch = PagedBatch(random_rows(lens), CpuBackend(batch_invariant=True), 4)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(InputMismatchError, match="no autocast to another dtype"),
    ):
        batch.forward()


def test_blocks_of_float64_are_written_gathered_and_copied() -> None:
    (row,) = cast(random_rows([(5, 4)]), torch.float64)
    batch = PagedBatch([row], CpuBackend(), 4)
    batch.backend.write(batch.key, batch.value, batch.view, batch.metadata)
    slots = torch.tensor([batch.token_slots[0][token] for token in range(9)])
    key, value = batch.backend.gather(batch.view, slots)
    assert torch.equal(key, row.key)
    assert torch.equal(value, row.value)
    source = slots[:1] // 4
    target = torch.tensor([next(b for b in range(6) if b not in slots // 4)])
    batch.backend.copy_blocks(batch.view.key_cache, source, target)
    assert torch.equal(batch.view.key_cache[target], batch.view.key_cache[source])
