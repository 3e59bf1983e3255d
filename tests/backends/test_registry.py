"""Which backend a name gives, and what backends keep between calls."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch

import hf_paged
from backends.paged_batch import PagedBatch, random_rows
from hf_paged.backends import registry
from hf_paged.backends.registry import available_backends, backend_names, create_backend
from hf_paged.backends.torch_gather import TorchGatherBackend
from hf_paged.backends.torch_reference import TorchReferenceBackend
from hf_paged.errors import ConfigurationError

pytestmark = pytest.mark.core_suite

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
BACKENDS = [name for name, reason in available_backends(CPU).items() if reason is None]
DECODE = [(5, 1), (0, 1), (17, 1)]


def test_every_name_gives_a_new_backend_of_that_name() -> None:
    assert {"torch", "torch_reference"} <= set(BACKENDS)
    for name in BACKENDS:
        first, second = create_backend(name, CPU), create_backend(name, CPU)
        assert first.name == name
        assert first is not second


def test_auto_is_a_usable_backend_and_never_the_oracle() -> None:
    assert create_backend("auto", CPU).name in set(backend_names()) - {"torch_reference"}


@pytest.mark.parametrize("name", ["flash", "Torch", "", "torch "])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        create_backend(name, CPU)
    assert f"backend={name!r}" in str(raised.value)
    for known in ("auto", *backend_names()):
        assert repr(known) in str(raised.value)


def unavailable(cls: type, device: torch.device) -> str:
    return f"it needs a quantum computer, not {device.type}"


@pytest.mark.parametrize("name", BACKENDS)
def test_a_named_backend_never_falls_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cls = type(create_backend(name, CPU))
    monkeypatch.setattr(cls, "unavailable_reason", classmethod(unavailable))
    with pytest.raises(ConfigurationError) as raised:
        create_backend(name, CPU)
    message = str(raised.value)
    assert f"backend={name!r} cannot run on cpu" in message
    assert "it needs a quantum computer, not cpu" in message
    assert "backend='auto'" in message


def test_auto_passes_over_what_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unavailable(TorchReferenceBackend):
        name = "unavailable"
        unavailable_reason = classmethod(unavailable)  # type: ignore[assignment]

    monkeypatch.setitem(registry._BACKENDS, "unavailable", Unavailable)
    monkeypatch.setattr(registry, "_AUTO_ORDER", {"cpu": ("unavailable", "torch")})
    assert create_backend("auto", CPU).name == "torch"


def test_available_backends_of_this_machine() -> None:
    reasons = hf_paged.available_backends()
    assert reasons == available_backends("cpu") == available_backends(CPU)
    assert tuple(reasons) == backend_names()
    assert reasons["torch"] is reasons["torch_reference"] is None
    for name in ("flash_attn", "flash_attn_3", "triton"):
        assert "CUDA device" in str(reasons[name])


CUDA_ORDER = ["flash_attn_3", "flash_attn", "triton", "torch"]


@pytest.mark.parametrize("able", CUDA_ORDER)
def test_auto_on_cuda_says_once_what_it_took_and_why_not_the_others(
    able: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def reason(cls: type, device: torch.device) -> str | None:
        return None if cls.name == able else f"no {cls.name} here"  # type: ignore[attr-defined]

    for name in CUDA_ORDER:
        monkeypatch.setattr(registry._BACKENDS[name], "unavailable_reason", classmethod(reason))
    registry._say_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="hf_paged"):
        assert [create_backend("auto", CUDA).name for _ in range(3)] == [able] * 3
    (record,) = caplog.records
    assert record.levelno == (logging.WARNING if able == "torch" else logging.INFO)
    message = record.getMessage()
    assert repr(able) in message
    skipped = CUDA_ORDER[: CUDA_ORDER.index(able)]
    for name in CUDA_ORDER:
        says_why = f"{name!r} is not available on cuda: no {name} here" in message
        assert says_why is (name in skipped)
    registry._say_once.cache_clear()


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (dict(), "flash_attn_3"),
        (dict(dtype=torch.bfloat16), "flash_attn_3"),
        (dict(block_size=16), "flash_attn_3"),
        (dict(block_size=256), "flash_attn_3"),
        (dict(block_size=256, batch_invariant=True), "flash_attn"),
        (dict(dtype=torch.float32), "triton"),
        (dict(uses_sinks=True), "triton"),
        (dict(dtype=torch.float64), "torch"),
        (dict(head_dim=512), "torch"),
        (dict(block_size=4), "torch"),
    ],
)
def test_auto_passes_over_what_cannot_run_the_model(
    model: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in CUDA_ORDER:
        monkeypatch.setattr(
            registry._BACKENDS[name], "unavailable_reason", classmethod(lambda cls, device: None)
        )
    needs = dict(dtype=torch.float16, head_dim=128, block_size=None) | model
    batch_invariant: bool = needs.pop("batch_invariant", False)

    def check(backend: Any) -> None:
        size = needs["block_size"] or backend.default_block_size
        backend.check_model(device=CUDA, **needs | {"block_size": size})

    chosen = create_backend("auto", CUDA, batch_invariant=batch_invariant, check=check)
    assert chosen.name == expected


def test_the_preferred_backends_come_first() -> None:
    assert backend_names() == ("cpu", *CUDA_ORDER, "torch_reference")


@pytest.mark.parametrize("name", BACKENDS)
def test_scratch_made_in_inference_mode_works_outside_and_the_reverse(name: str) -> None:
    rows = random_rows(DECODE)
    expected = PagedBatch(rows, create_backend(name, CPU), 4).forward()
    for first in (True, False):
        backend = create_backend(name, CPU)
        for is_inference in (first, not first, first):
            batch = PagedBatch(rows, backend, 4)
            with torch.inference_mode(is_inference):
                assert torch.equal(batch.forward(), expected)


@pytest.mark.parametrize("name", BACKENDS)
def test_scratch_of_an_earlier_batch_is_never_seen(name: str) -> None:
    backend = create_backend(name, CPU)
    sizes = [[(2, 1)], [(30, 1)] * 6, [(5, 1), (9, 1)], [(30, 1)] * 9, [(0, 1)]]
    for seed, lens in enumerate(sizes):
        for dtype in (torch.float32, torch.bfloat16):
            rows = random_rows(lens, dtype=dtype, head_dim=8 + 8 * (seed % 2), seed=seed)
            fresh = PagedBatch(rows, create_backend(name, CPU), 4).forward()
            assert torch.equal(PagedBatch(rows, backend, 4).forward(), fresh)
        if seed == 3:
            backend.release_scratch()


def test_an_output_is_not_overwritten_by_the_next_call() -> None:
    backend = TorchGatherBackend()
    out = PagedBatch(random_rows(DECODE, seed=0), backend, 4).forward()
    kept = out.clone()
    PagedBatch(random_rows(DECODE, seed=1), backend, 4).forward()
    assert torch.equal(out, kept)


@pytest.mark.parametrize("name", BACKENDS)
def test_threads_decode_different_batches_at_once(name: str) -> None:
    backend = create_backend(name, CPU)
    batches = [
        PagedBatch(random_rows([(40, 1)] * num_rows, seed=num_rows), backend, 4)
        for num_rows in (1, 7, 3, 12)
    ]
    expected = [batch.forward() for batch in batches]
    start, results = threading.Barrier(len(batches)), [True] * len(batches)

    def decode(index: int) -> None:
        start.wait()
        for _ in range(30):
            results[index] &= torch.equal(batches[index].forward(), expected[index])

    threads = [threading.Thread(target=decode, args=(index,)) for index in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * len(batches)
