"""Packed forwards through a compiler: the same tokens as in the model's own code."""

from __future__ import annotations

import copy
import gc
import logging
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch

import hf_paged
from hf_paged.cache.packed_batch import PackedBatch
from hf_paged.cache.runtime import runtime_of
from hf_paged.cache.step import reserve
from hf_paged.core.allocation import NewTokens
from hf_paged.generation import compiled_graph
from hf_paged.generation.compiled import CompiledForward
from reference import patched
from tiny_models import CONFIGS, FAMILIES, build, ragged_batch

WITH_INDUCTOR = ("gpt2", "gemma2")
"""Families that a normal run compiles: without windows and rotary positions, and with both."""

BATCHES = ((9, 3, 14), (9,))
"""Prompt lengths; a single row needs the graph of one token as well."""


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Run recorded pieces as they are, which takes no compiler; return those handed over."""
    handed_over: list[Any] = []

    def run_as_it_is(module: Any, inputs: Any, *, freeze: bool) -> Any:
        handed_over.append(module)
        return module

    monkeypatch.setattr(compiled_graph, "_inductor", run_as_it_is)
    return handed_over


def compiled_forward(model: Any, mode: Any = True) -> CompiledForward:
    runtime = runtime_of(model)
    base = model.get_decoder()
    forward = CompiledForward(model, base, runtime.packed_model.forward_eagerly, runtime, mode)
    forward.check(runtime.computation.fingerprint())
    return forward


def two_layers(family: str, seed: int = 1) -> Any:
    layer_types = getattr(CONFIGS[family], "layer_types", None)
    fewer = {} if layer_types is None else {"layer_types": layer_types[:2]}
    return build(family, seed, num_hidden_layers=2, **fewer)


class Rows:
    """Sequences that a greedy loop feeds, packed."""

    def __init__(self, model: Any, forward: Any, lengths: tuple[int, ...]) -> None:
        self.runtime, self.forward = runtime_of(model), forward
        batch = ragged_batch(lengths)
        self.prompts = [batch.row(row).ids[0].tolist() for row in range(len(lengths))]
        self.sequences = [self.runtime.manager.new_sequence() for _ in lengths]

    def feed(self, tokens: list[list[int]], wanted: list[int] | None = None) -> torch.Tensor:
        new = [
            NewTokens(sequence, len(ids), ids, sequence.num_tokens, "version")
            for sequence, ids in zip(self.sequences, tokens, strict=True)
        ]
        allocation = reserve(self.runtime, new, hold_window=False, occasion="a test")
        positions = [p for row in allocation.rows for p in range(row.start, row.end)]
        self.batch = PackedBatch(self.runtime, allocation, [*chain(*tokens)], positions, wanted)
        return self.forward(self.batch, *self.batch.send(torch.device("cpu")))

    def greedy(self, num_tokens: int = 6) -> tuple[list[list[int]], torch.Tensor]:
        """Return the ids chosen and the logits of every step; give the blocks back."""
        tokens, chosen, seen = self.prompts, [], []
        for _ in range(num_tokens):
            seen.append(self.feed(tokens))
            chosen.append(seen[-1].argmax(-1).tolist())
            tokens = [[token] for token in chosen[-1]]
        self.free()
        return chosen, torch.stack(seen)

    def free(self) -> None:
        for sequence in self.sequences:
            self.runtime.manager.free(sequence)
        self.runtime.clear_prefix_cache()


def assert_same_tokens(
    model: Any, forward: CompiledForward, batches: tuple[tuple[int, ...], ...] = BATCHES[:1]
) -> None:
    for lengths in batches:
        expected, logits = Rows(
            model, runtime_of(model).packed_model.forward_eagerly, lengths
        ).greedy()
        chosen, compiled_logits = Rows(model, forward, lengths).greedy()
        assert chosen == expected
        torch.testing.assert_close(compiled_logits, logits, atol=1e-3, rtol=1e-4)
    assert forward.eager_reason is None


@pytest.mark.parametrize("family", FAMILIES)
def test_a_recorded_forward_chooses_the_tokens_of_the_models_own_code(
    family: str, pieces: list[Any]
) -> None:
    with patched(build(family)) as model:
        assert_same_tokens(model, compiled_forward(model), BATCHES)
    assert len(pieces) <= 4 + 3  # those of equal layers are one


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=() if f in WITH_INDUCTOR else pytest.mark.slow) for f in FAMILIES],
)
def test_a_compiled_forward_chooses_the_tokens_of_the_models_own_code(family: str) -> None:
    with patched(two_layers(family)) as model:
        assert_same_tokens(model, compiled_forward(model))


@pytest.mark.slow
@pytest.mark.parametrize("mode", [True, "freeze"])
@pytest.mark.parametrize("family", WITH_INDUCTOR)
def test_a_compiled_forward_serves_one_row_and_frozen_weights(family: str, mode: Any) -> None:
    with patched(build(family)) as model:
        assert_same_tokens(model, compiled_forward(model, mode), BATCHES)


def test_changes_of_weights_are_seen_at_once_and_replaced_ones_at_the_next_check(
    pieces: list[Any],
) -> None:
    with patched(two_layers("llama"), prefix_caching=False) as model:
        forward = compiled_forward(model)
        assert_same_tokens(model, forward)
        num_pieces = len(pieces)
        for parameter in model.parameters():
            parameter.mul_(1.1)
        assert_same_tokens(model, forward)
        model.load_state_dict(two_layers("llama", seed=2).state_dict())
        assert_same_tokens(model, forward)
        model.load_state_dict(two_layers("llama", seed=3).state_dict(), assign=True)
        forward.check(None)
        assert_same_tokens(model, forward)
        model.model.layers[1].mlp = copy.deepcopy(model.model.layers[0].mlp)
        forward.check(None)
        assert_same_tokens(model, forward)
        assert len(pieces) == num_pieces


@pytest.mark.parametrize("part", ["model.embed_tokens", "lm_head"])
def test_frozen_weights_are_dropped_when_any_of_them_changes(part: str, pieces: list[Any]) -> None:
    with patched(two_layers("llama")) as model:
        forward = compiled_forward(model, "freeze")
        assert_same_tokens(model, forward)
        num_pieces = len(pieces)
        forward.check(runtime_of(model).computation.fingerprint())
        assert_same_tokens(model, forward)
        assert len(pieces) == num_pieces
        model.get_submodule(part).weight.mul_(1.5)
        forward.check(runtime_of(model).computation.fingerprint())
        assert_same_tokens(model, forward)
        assert len(pieces) == 2 * num_pieces


def test_a_changed_setting_is_recorded_anew(pieces: list[Any]) -> None:
    with patched(two_layers("llama")) as model:
        forward = compiled_forward(model)
        assert_same_tokens(model, forward)
        for layer in model.model.layers:
            layer.self_attn.scaling *= 2
        forward.check(None)
        assert_same_tokens(model, forward)


@pytest.mark.parametrize("wanted", [[], [0], [5, 1], [2, 2, 7]], ids=str)
def test_any_tokens_logits_may_be_wanted(wanted: list[int], pieces: list[Any]) -> None:
    with patched(build("gpt2")) as model:
        every = Rows(model, runtime_of(model).packed_model.forward_eagerly, (8,))
        expected = every.feed(every.prompts, list(range(8)))[wanted]
        rows = Rows(model, compiled_forward(model), (8,))
        torch.testing.assert_close(rows.feed(rows.prompts, wanted), expected)
        every.free()
        rows.free()


def test_a_failing_forward_is_rolled_back(
    pieces: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with patched(two_layers("llama")) as model:
        rows = Rows(model, compiled_forward(model), (9, 3))
        first = rows.feed(rows.prompts)
        used = hf_paged.stats(model).used_blocks
        with monkeypatch.context() as patch:
            patch.setattr(rows.runtime.backend, "forward", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                rows.feed([[5] * 9, [6] * 9])
        assert rows.batch.is_settled
        assert hf_paged.stats(model).used_blocks == used
        assert [sequence.num_tokens for sequence in rows.sequences] == [9, 3]
        assert len(rows.feed([[token] for token in first.argmax(-1).tolist()])) == 2
        rows.free()


def test_hooks_and_autocast_run_the_models_own_code_and_say_so_once(
    pieces: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    with patched(two_layers("llama")) as model:
        handle = model.model.layers[0].register_forward_hook(lambda *_: None)
        forward = compiled_forward(model)
        forward.check(None)
        Rows(model, forward, (9, 3)).greedy(3)
        assert not pieces and "hooks" in str(forward.eager_reason)
        handle.remove()
        forward.check(None)
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                rows = Rows(model, forward, (9, 3))
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(rows.runtime.backend, "batch_invariant", False)
                    rows.greedy(2)
        assert not pieces
        assert_same_tokens(model, forward)
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 2 and "hooks" in warnings[0] and "autocast" in warnings[1]


def test_a_model_is_not_kept_alive(pieces: list[Any]) -> None:
    model = hf_paged.patch(build("gpt2"), num_blocks=50)
    runtime_of(model).compiled_forward = compiled_forward(model)  # where it will be kept
    Rows(model, runtime_of(model).compiled_forward, (9, 3)).greedy(2)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


_WITHOUT_COMPILER = """
import logging, sys
import torch
logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
from generation.test_compile import Rows, compiled_forward
from hf_paged.cache.runtime import runtime_of
from reference import patched
from tiny_models import build
with torch.no_grad(), patched(build("gpt2")) as model:
    forward = compiled_forward(model)
    expected, _ = Rows(model, runtime_of(model).packed_model.forward_eagerly, (9, 3)).greedy(3)
    for _ in range(2):
        forward.check(None)
        assert Rows(model, forward, (9, 3)).greedy(3)[0] == expected
    assert forward.eager_reason
"""


def test_without_a_compiler_the_models_own_code_runs_after_one_warning(tmp_path: Any) -> None:
    tests = os.path.dirname(os.path.dirname(__file__))
    environment = os.environ | {
        "CXX": "/nonexistent",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": tests,
    }
    result = subprocess.run(
        [sys.executable, "-c", _WITHOUT_COMPILER],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    warnings = [line for line in result.stderr.splitlines() if line.startswith("hf_paged:")]
    assert len(warnings) == 1 and "eagerly" in warnings[0], result.stderr
