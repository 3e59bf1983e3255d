"""A step on an accelerator waits for it nowhere between its tokens and its logits.

The device is "meta": its tensors have shapes and no values, so whoever looks at a value raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import hf_paged
from hf_paged.backends import upload
from hf_paged.backends.triton import TritonBackend
from hf_paged.cache.packed_batch import PackedBatch
from hf_paged.cache.runtime import runtime_of
from hf_paged.cache.step import reserve
from hf_paged.core.allocation import NewTokens
from tiny_models import build

META = torch.device("meta")
FAMILIES = ("llama", "mistral", "qwen3", "gemma2", "gemma3", "phi3", "gpt2", "opt")


class Link:
    """Counts copies to the device; nothing arrives there."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def send(self, arrays: Any, target: torch.Tensor) -> None:
        assert target.device == META
        self.sent.append(len(arrays))


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Link:
    link = Link()
    monkeypatch.setattr(upload, "_ring", lambda device: link if device == META else None)
    monkeypatch.setattr(TritonBackend, "unavailable_reason", classmethod(lambda cls, device: None))
    return link


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, link: Link) -> Iterator[Any]:
    with torch.no_grad():
        model = build(request.param).to(META)
        arguments: dict[str, Any] = dict(backend="triton", num_blocks=64, cuda_graphs=False)
        yield hf_paged.patch(model, **arguments)
        hf_paged.unpatch(model)


def step(model: Any, sequences: list[Any], num_new: list[int]) -> torch.Tensor:
    runtime = runtime_of(model)
    rows = [
        NewTokens(s, n, [5] * n, s.num_tokens, "v") for s, n in zip(sequences, num_new, strict=True)
    ]
    allocation = reserve(runtime, rows, hold_window=False, occasion="a test")
    positions = [p for row in allocation.rows for p in range(row.start, row.end)]
    batch = PackedBatch(runtime, allocation, [5] * len(positions), positions)
    return runtime.packed_model.forward(batch, META)


def test_prompts_and_decoding_wait_for_nothing(model: Any, link: Link) -> None:
    manager = runtime_of(model).manager
    sequences = [manager.new_sequence() for _ in range(3)]
    assert step(model, sequences, [20, 3, 9]).shape == (3, 128)
    assert step(model, sequences, [1, 1, 1]).device == META
    sequences.append(manager.fork(sequences[0]))  # its next token copies a block
    assert step(model, sequences, [1, 1, 1, 1]).shape == (4, 128)
    assert manager.num_cow_copies == len(manager.groups)
    num_groups = len(manager.groups)
    tokens, metadata, copies = 3, 2 + 2 * num_groups, 1
    assert link.sent == [tokens, metadata] * 2 + [copies, tokens, metadata], "two copies a step"
    for sequence in sequences:
        manager.free(sequence)


@pytest.mark.parametrize(
    "look", [torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.nonzero, bool]
)
def test_the_device_notices_a_look(look: Any) -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        look(torch.ones(1, device=META))
