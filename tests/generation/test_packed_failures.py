"""Whatever raises, wherever, in whatever step: the pool is whole and the next call right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria

import hf_paged
from reference import patched, seeded
from tiny_models import build, ragged_batch

OPTIONS: dict[str, Any] = dict(max_new_tokens=6, do_sample=True, pad_token_id=0)


class Boom(Exception):
    pass


class Fuse:
    """Raises when it is lit for the n-th time; counts otherwise."""

    def __init__(self, error: type[BaseException], number: int | None) -> None:
        self.error, self.number, self.count = error, number, 0

    def light(self) -> None:
        self.count += 1
        if self.count - 1 == self.number:
            raise self.error


@hf_paged.row_wise
class FusedProcessor(LogitsProcessor):
    def __init__(self, fuse: Fuse) -> None:
        self.fuse = fuse

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.fuse.light()
        return scores


@hf_paged.row_wise
class FusedCriterion(StoppingCriteria):
    def __init__(self, fuse: Fuse) -> None:
        self.fuse = fuse

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.fuse.light()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class FusedStreamer:
    def __init__(self, fuse: Fuse) -> None:
        self.fuse = fuse

    def put(self, value: torch.Tensor) -> None:
        self.fuse.light()

    def end(self) -> None:
        self.fuse.light()


def in_layer(model: torch.nn.Module, fuse: Fuse) -> dict[str, Any]:
    model.model.layers[2].register_forward_pre_hook(lambda *args: fuse.light())
    return {}


def in_head(model: torch.nn.Module, fuse: Fuse) -> dict[str, Any]:
    """After the step was committed, before the forward returns."""
    model.lm_head.register_forward_pre_hook(lambda *args: fuse.light())
    return {}


def in_entry(model: torch.nn.Module, fuse: Fuse) -> dict[str, Any]:
    """After blocks were reserved, before the layers' module begins the step."""
    model.register_forward_pre_hook(lambda *args: fuse.light())
    return {}


PLACES: dict[str, Callable[[torch.nn.Module, Fuse], dict[str, Any]]] = {
    "entry": in_entry,
    "layer": in_layer,
    "head": in_head,
    "processor": lambda model, fuse: {"logits_processor": [FusedProcessor(fuse)]},
    "criterion": lambda model, fuse: {"stopping_criteria": [FusedCriterion(fuse)]},
    "streamer": lambda model, fuse: {"streamer": FusedStreamer(fuse)},
}


@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
@pytest.mark.parametrize("place", PLACES)
def test_every_step(place: str, error: type[BaseException]) -> None:
    """In a pool so small that rows wait; a streamer keeps rows together and needs a larger one."""
    lengths = (9, 3, 14, 1)
    model, batch = build("llama"), ragged_batch(lengths)
    num_blocks = 40 if place == "streamer" else 7
    expected = seeded(lambda: model.generate(**batch.inputs, **OPTIONS))
    with patched(model, num_blocks=num_blocks, packed_hooks=True, max_batch_tokens=8):
        number = 0
        while True:
            fuse = Fuse(error, number)
            options = OPTIONS | PLACES[place](model, fuse)
            try:
                torch.manual_seed(3)
                got = model.generate(**batch.inputs, **options)
            except error:
                stats = hf_paged.stats(model)
                assert (stats.used_blocks, stats.running, stats.waiting) == (0, 0, 0)
                number += 1
            else:
                break
            finally:
                for module in model.modules():
                    module._forward_pre_hooks.clear()
        assert torch.equal(got, expected), "with a fuse that did not blow"
        assert number == fuse.count > 6
        again = seeded(lambda: model.generate(**batch.inputs, **OPTIONS))
        assert torch.equal(again, expected)


@pytest.mark.parametrize("number", range(6))
def test_beams(number: int) -> None:
    model, batch = build("llama"), ragged_batch((9, 3))
    options: dict[str, Any] = dict(max_new_tokens=4, num_beams=3)
    expected = model.generate(**batch.inputs, **options)
    fuse = Fuse(Boom, number)
    with patched(model, packed_hooks=True, max_batch_tokens=4):
        hook = model.model.layers[1].register_forward_pre_hook(lambda *args: fuse.light())
        with pytest.raises(Boom):
            model.generate(**batch.inputs, **options)
        hook.remove()
        assert hf_paged.stats(model).used_blocks == 0
        assert torch.equal(model.generate(**batch.inputs, **options), expected)
