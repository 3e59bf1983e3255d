"""Which backend a name gives, and what backends keep between calls."""

from __future__ import annotations

import threading

import pytest
import torch

from backends.paged_batch import PagedBatch, random_rows
from hf_paged.backends import registry
from hf_paged.backends.registry import backend_names, create_backend
from hf_paged.backends.torch_gather import TorchGatherBackend
from hf_paged.backends.torch_reference import TorchReferenceBackend
from hf_paged.errors import ConfigurationError

pytestmark = pytest.mark.core_suite

CPU = torch.device("cpu")
DECODE = [(5, 1), (0, 1), (17, 1)]


def test_every_name_gives_a_new_backend_of_that_name() -> None:
    assert {"torch", "torch_reference"} <= set(backend_names())
    for name in backend_names():
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


@pytest.mark.parametrize("name", backend_names())
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


@pytest.mark.parametrize("name", backend_names())
def test_scratch_made_in_inference_mode_works_outside_and_the_reverse(name: str) -> None:
    rows = random_rows(DECODE)
    expected = PagedBatch(rows, create_backend(name, CPU), 4).forward()
    for first in (True, False):
        backend = create_backend(name, CPU)
        for is_inference in (first, not first, first):
            batch = PagedBatch(rows, backend, 4)
            with torch.inference_mode(is_inference):
                assert torch.equal(batch.forward(), expected)


@pytest.mark.parametrize("name", backend_names())
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


@pytest.mark.parametrize("name", backend_names())
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
