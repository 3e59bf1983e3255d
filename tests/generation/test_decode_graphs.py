"""Decoding steps as graphs: the tokens of the model's own code, whatever changes meanwhile."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import LlamaMLP

import hf_paged
from generation.recorded_graph import CaptureError, RecordedGraph
from graph_backend import DenseDecodeBackend
from hf_paged.backends import registry
from hf_paged.cache.runtime import runtime_of
from hf_paged.errors import ConfigurationError, UnsupportedModelError
from hf_paged.generation import device_graph
from hf_paged.integration import graphing
from reference import patched
from tiny_models import FAMILIES, build, ragged_batch

pytestmark = pytest.mark.core_suite

LENGTHS = (9, 3, 14)


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[RecordedGraph]:
    """Have a CPU and its stand-in count as a device with graphs; return the graphs made."""
    made: list[RecordedGraph] = []

    def make_graph(*_: Any) -> RecordedGraph:
        made.append(RecordedGraph())
        return made[-1]

    monkeypatch.setattr(device_graph, "make_graph", make_graph)
    monkeypatch.setattr(graphing, "GRAPH_DEVICE_TYPES", {"cpu"})
    monkeypatch.setitem(registry._BACKENDS, DenseDecodeBackend.name, DenseDecodeBackend)
    return made


@pytest.fixture
def model() -> Iterator[Any]:
    with patched(build("llama"), backend="dense_decode", block_size=4, debug=True) as model:
        yield model


def of(model: Any) -> Any:
    return runtime_of(model).packed_model._graphs


def generate(model: Any, lengths: tuple[int, ...] = LENGTHS, **arguments: Any) -> list[list[int]]:
    batch = ragged_batch(lengths)
    options = dict(max_new_tokens=12, do_sample=False, eos_token_id=None) | arguments
    return model.generate(batch.ids, attention_mask=batch.mask, **options).tolist()


def in_its_own_code(family: str = "llama", **arguments: Any) -> list[list[int]]:
    return generate(build(family), **arguments)


# -- the same tokens -----------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_replays_choose_the_tokens_of_the_models_own_code(family: str) -> None:
    with patched(build(family), backend="dense_decode", block_size=4, debug=True) as model:
        assert generate(model) == in_its_own_code(family)
        assert of(model).num_replayed >= 8
        assert generate(model, (5,)) == in_its_own_code(family, lengths=(5,))


@pytest.mark.parametrize(
    "arguments",
    [
        dict(do_sample=True, top_k=20),
        dict(eos_token_id=[5, 9, 17, 40, 77], pad_token_id=0),
        dict(repetition_penalty=1.3, output_scores=True, return_dict_in_generate=False),
        dict(num_return_sequences=3, do_sample=True),
    ],
    ids=["sampling", "rows end early", "a processor", "samples of one prompt"],
)
def test_other_ways_to_choose(model: Any, arguments: dict[str, Any]) -> None:
    torch.manual_seed(3)
    expected = in_its_own_code(**arguments)
    torch.manual_seed(3)
    assert generate(model, **arguments) == expected
    assert of(model).num_replayed


def test_scores_of_a_step_survive_the_next_replay(model: Any) -> None:
    batch = ragged_batch(LENGTHS)
    arguments: dict[str, Any] = dict(
        attention_mask=batch.mask,
        max_new_tokens=10,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        eos_token_id=None,
    )
    expected = build("llama").generate(batch.ids, **arguments).logits
    found = model.generate(batch.ids, **arguments).logits
    assert of(model).num_replayed
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_rows_that_wait_and_give_way() -> None:
    """Row numbers, blocks and lengths change from step to step in a pool for three rows."""
    prompts = [list(range(3, 3 + 2 + i % 9)) for i in range(12)]
    plain = build("llama")
    expected = [
        plain.generate(torch.tensor([p]), max_new_tokens=10, do_sample=False)[0].tolist()
        for p in prompts
    ]
    arguments: dict[str, Any] = dict(backend="dense_decode", block_size=4, num_blocks=14)
    with patched(build("llama"), debug=True, **arguments) as model:
        found = {
            out.index: out.sequences[0]
            for out in hf_paged.generate_batch(
                model, prompts, max_new_tokens=10, do_sample=False, progress=False
            )
        }
        assert of(model).num_replayed > 20
    assert [found[index] for index in range(12)] == expected


def test_compiled_steps_are_captured_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_paged.generation import compiled_graph

    monkeypatch.setattr(compiled_graph, "_inductor", lambda module, inputs, *, freeze: module)
    arguments: dict[str, Any] = dict(backend="dense_decode", block_size=4, compile=True)
    with patched(build("llama"), **arguments) as model:
        assert generate(model) == in_its_own_code()
        assert of(model).num_replayed >= 8


def test_threads_share_graphs(model: Any) -> None:
    lengths = [(9, 3, 14), (4, 4, 4), (20, 2, 11), (7, 7, 8)]
    expected = [in_its_own_code(lengths=each) for each in lengths]
    found: dict[int, Any] = {}

    def run(index: int) -> None:
        for _ in range(3):
            found[index] = generate(model, lengths[index])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(4)] == expected


# -- which graphs are made -------------------------------------------------------------------


def test_a_graph_a_number_of_rows_and_a_width_at_their_second_step(
    model: Any, graphs: list[RecordedGraph]
) -> None:
    del graphs[:]  # the backend's probe
    generate(model, (9, 3, 14))  # 14 to 25 tokens: up to 8 blocks of 4
    assert [graph.num_replays for graph in graphs] == [10], "11 steps, the first ran as it is"
    generate(model, (9, 3, 14, 2))
    assert len(graphs) == 1, "three rows were padded to four"
    generate(model, (9, 3))
    assert len(graphs) == 2
    generate(model, (9, 30), max_new_tokens=8)  # 30 to 37 tokens: 8 blocks, then up to 16
    assert len(graphs) == 3
    assert of(model).num_captured == 3


def test_a_length_that_comes_once_is_not_captured(model: Any) -> None:
    generate(model, max_new_tokens=2)
    assert of(model).num_captured == 0


# -- what changes between two replays ------------------------------------------------------------


def test_weights_changed_in_place_are_seen(model: Any) -> None:
    before = generate(model)
    captured = of(model).num_captured
    changed = build("llama")
    for each in (model, changed):
        with torch.no_grad():
            each.model.layers[1].mlp.up_proj.weight.neg_()
    expected = generate(changed)
    assert expected != before
    assert generate(model) == expected
    assert of(model).num_captured == captured


def test_replaced_weights_are_captured_anew(model: Any) -> None:
    before = generate(model)
    changed = build("llama")
    for each in (model, changed):
        projection = each.model.layers[1].mlp.up_proj
        projection.weight = torch.nn.Parameter(-projection.weight.detach())
    expected = generate(changed)
    assert expected != before
    assert generate(model) == expected


def test_a_pool_that_was_dropped_is_captured_anew(model: Any) -> None:
    generate(model)
    first = of(model).num_captured
    runtime = runtime_of(model)
    runtime.clear_prefix_cache()
    runtime.storage.clear()
    assert generate(model) == in_its_own_code()
    assert of(model).num_captured > first


def test_a_module_with_other_settings_is_captured_anew(model: Any) -> None:
    generate(model)
    changed = build("llama")
    for each in (model, changed):
        for layer in each.model.layers:
            layer.self_attn.scaling *= 2
    assert generate(model) == generate(changed)


# -- what cannot be captured ---------------------------------------------------------------------


class LooksAtLengths(DenseDecodeBackend):
    """Waits for the device at every call."""

    name = "looks"

    def forward(self, query: Any, key: Any, value: Any, view: Any, metadata: Any, **kw: Any) -> Any:
        metadata.seq_lens.max().item()
        return super().forward(query, key, value, view, metadata, **kw)


class BakesLengths(DenseDecodeBackend):
    """Reads lengths on the host before a capture, and keeps them."""

    name = "bakes"

    def forward(self, query: Any, key: Any, value: Any, view: Any, metadata: Any, **kw: Any) -> Any:
        if "longest" not in metadata.derived:
            metadata.derived["longest"] = int(metadata.seq_lens.max())
        lens = metadata.seq_lens
        metadata.seq_lens = lens.clamp(max=metadata.derived["longest"])
        try:
            return super().forward(query, key, value, view, metadata, **kw)
        finally:
            metadata.seq_lens = lens


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        (LooksAtLengths, "waits for the device"),
        (BakesLengths, "differs from the step itself"),
    ],
)
def test_a_backend_that_cannot_be_captured_is_found_out_when_patching(
    backend: Any, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(registry._BACKENDS, backend.name, backend)
    caplog.set_level(logging.INFO, "hf_paged")
    with patched(build("llama"), backend=backend.name, block_size=4) as model:
        assert reason in caplog.text
        assert of(model) is None
        assert generate(model) == in_its_own_code()
    with pytest.raises(ConfigurationError, match=f"cuda_graphs=True.*{reason}"):
        hf_paged.patch(build("llama"), backend=backend.name, block_size=4, cuda_graphs=True)


def test_a_backend_without_graphs(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigurationError, match="'torch' reads lengths on the host"):
        hf_paged.patch(build("llama"), backend="torch", cuda_graphs=True)


def test_graphs_need_a_device_that_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphing, "GRAPH_DEVICE_TYPES", frozenset({"cuda"}))
    with patched(build("llama")) as model:
        assert of(model) is None
    model = build("llama")
    kind = type(model)
    with pytest.raises(ConfigurationError, match="the model is on cpu, not on a CUDA device"):
        hf_paged.patch(model, cuda_graphs=True)
    assert type(model) is kind, "nothing was patched"


def look(module: Any) -> None:
    """Make ``module`` read a value on the host at each forward, as some mixtures of experts do."""

    class Looking(LlamaMLP):
        def forward(self, x: Any) -> Any:
            x.sum().item()
            return super().forward(x)

    Looking.forward.__module__ = LlamaMLP.__module__  # as if transformers had written it
    module.__class__ = Looking


def test_a_model_that_cannot_be_captured_runs_as_it_is_and_says_so_once(
    model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    look(model.model.layers[2].mlp)
    assert generate(model) == in_its_own_code()
    assert generate(model) == in_its_own_code()
    assert of(model).num_replayed == 0
    (warning,) = [r for r in caplog.records if "without CUDA graphs" in r.message]
    assert warning.levelno == logging.WARNING
    assert "item() waits for the device" in warning.message


def test_a_model_that_must_be_captured_and_cannot_raises_and_leaves_the_pool_whole() -> None:
    arguments: dict[str, Any] = dict(backend="dense_decode", block_size=4, debug=True)
    with patched(build("llama"), cuda_graphs=True, **arguments) as model:
        look(model.model.layers[2].mlp)
        with pytest.raises(UnsupportedModelError, match=r"cuda_graphs=True.*waits for the device"):
            generate(model)
        assert hf_paged.stats(model).used_blocks == 0


@pytest.mark.parametrize("cuda_graphs", ["auto", True])
def test_code_of_the_users_own_runs_at_every_step_unless_graphs_are_asked_for(
    cuda_graphs: Any,
) -> None:
    calls: list[int] = []

    class Counting(LlamaMLP):
        def forward(self, x: Any) -> Any:
            calls.append(x.shape[0])
            return super().forward(x)

    arguments: dict[str, Any] = dict(backend="dense_decode", block_size=4)
    with patched(build("llama"), cuda_graphs=cuda_graphs, **arguments) as model:
        model.model.layers[0].mlp.__class__ = Counting
        assert generate(model) == in_its_own_code()
        assert (of(model).num_replayed == 0) == (cuda_graphs == "auto")
    if cuda_graphs == "auto":
        assert len(calls) == 12


def test_hooks_see_every_step() -> None:
    seen: list[Any] = []
    arguments: dict[str, Any] = dict(backend="dense_decode", block_size=4, packed_hooks=True)
    with patched(build("llama"), **arguments) as model:
        model.model.layers[0].register_forward_hook(lambda *a: seen.append(1) and None)
        assert generate(model) == in_its_own_code()
        assert of(model).num_replayed == 0
    assert len(seen) == 12


def test_hooks_and_graphs_that_must_be_contradict_each_other() -> None:
    arguments: dict[str, Any] = dict(backend="dense_decode", block_size=4, packed_hooks=True)
    with patched(build("llama"), cuda_graphs=True, **arguments) as model:
        model.model.layers[0].register_forward_hook(lambda *a: None)
        with pytest.raises(ConfigurationError, match=r"cuda_graphs=True.*carries hooks"):
            generate(model)
        assert hf_paged.stats(model).used_blocks == 0


def test_offloaded_weights_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    model.lm_head.to("meta")
    with pytest.raises(ConfigurationError, match="the model is on cpu and meta, not on one"):
        hf_paged.patch(model, backend="dense_decode", block_size=4, cuda_graphs=True)


def test_a_mode_that_watches_operations_sees_every_step(model: Any) -> None:
    class Watching(TorchDispatchMode):
        num_products = 0

        def __torch_dispatch__(
            self, op: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.num_products += op is torch.ops.aten.mm.default
            return op(*args, **(kwargs or {}))

    generate(model)
    replayed = of(model).num_replayed
    with Watching() as watching:
        generate(model, max_new_tokens=6)
    assert of(model).num_replayed == replayed
    assert watching.num_products >= 6 * 4 * 7


def test_what_was_captured_ends_with_the_patch() -> None:
    with patched(build("llama"), backend="dense_decode", block_size=4) as model:
        generate(model)
        graphs = weakref.ref(of(model))
    gc.collect()
    assert graphs() is None


def test_false_makes_no_graphs(graphs: list[RecordedGraph]) -> None:
    arguments: dict[str, Any] = dict(backend="dense_decode", block_size=4, cuda_graphs=False)
    with patched(build("llama"), **arguments) as model:
        assert generate(model) == in_its_own_code()
    assert not graphs


# -- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_replay_that_fails_leaves_the_pool_whole(
    model: Any, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = generate(model)
    replay = RecordedGraph.replay

    def failing(self: Any) -> None:
        raise error("the device is lost")

    monkeypatch.setattr(RecordedGraph, "replay", failing)
    with pytest.raises(error, match="lost"):
        generate(model)
    assert hf_paged.stats(model).used_blocks == 0
    monkeypatch.setattr(RecordedGraph, "replay", replay)
    assert generate(model) == expected


def test_the_stand_in_forbids_what_a_graph_cannot_do() -> None:
    """Baked numbers stay, host reads raise, memory that was given back is noticed."""
    weight, factor = torch.ones(3), [2.0]
    graph = RecordedGraph()
    out = graph.capture(lambda: weight * factor[0])
    weight.fill_(5)
    factor[0] = 3.0
    graph.replay()
    assert out.tolist() == [10, 10, 10]
    for look_at in (
        lambda: weight.sum().item(),
        lambda: weight.tolist(),
        lambda: bool(weight.all()),
        lambda: weight.nonzero(),
    ):
        with pytest.raises(CaptureError):
            RecordedGraph().capture(look_at)
    gone = torch.ones(2)
    graph = RecordedGraph()
    graph.capture(lambda: gone + 1)
    gone = torch.zeros(2)
    with pytest.raises(CaptureError, match="given back"):
        graph.replay()
