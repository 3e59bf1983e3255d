"""Every backend under a whole model; the equality matrix runs on the default one."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import hf_paged
from hf_paged.backends import native
from hf_paged.backends.registry import available_backends
from hf_paged.errors import ConfigurationError
from reference import patched, seeded
from tiny_models import FAMILIES, build, ragged_batch

pytestmark = pytest.mark.core_suite

LEFT_PADDED = ragged_batch((20, 3, 9))
STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": dict(max_new_tokens=12),
    "beams": dict(max_new_tokens=12, num_beams=3),
    "sampling": dict(max_new_tokens=12, do_sample=True, num_return_sequences=2),
    "chunked_prefill": dict(max_new_tokens=12, prefill_chunk_size=5),
}
BACKENDS = [
    name
    for name, reason in available_backends(torch.device("cpu")).items()
    if name != "cpu" and reason is None
]


@functools.cache
def expected(family: str, strategy: str) -> torch.Tensor:
    return generate(build(family), strategy)


def generate(model: torch.nn.Module, strategy: str) -> torch.Tensor:
    return seeded(lambda: model.generate(**LEFT_PADDED.inputs, **STRATEGIES[strategy]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_other_backends_give_the_tokens_too(family: str, strategy: str, backend: str) -> None:
    with patched(build(family), backend=backend) as model:
        assert torch.equal(generate(model, strategy), expected(family, strategy))
        assert hf_paged.stats(model).backend == backend


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("isa", native.supported_isas())
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_each_instruction_set_gives_the_tokens(
    family: str, isa: str, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isa not in native.built_isas():
        pytest.skip(f"not built here: {isa}")
    monkeypatch.setenv(native.ISA_VARIABLE, isa)
    with patched(build(family)) as model:
        assert torch.equal(generate(model, strategy), expected(family, strategy))


def test_the_native_backend_is_the_default_where_it_was_built() -> None:
    with patched(build("llama")) as model:
        is_built = native.unavailable_reason() is None
        assert hf_paged.stats(model).backend == ("cpu" if is_built else "torch")


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_float64_runs_in_torch_over_the_same_pool(family: str) -> None:
    model = build(family).double()
    unpatched = generate(model, "greedy")
    with patched(model):
        assert torch.equal(generate(model, "greedy"), unpatched)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_batch_invariant_gives_the_tokens(family: str, strategy: str) -> None:
    with patched(build(family), batch_invariant=True) as model:
        assert torch.equal(generate(model, strategy), expected(family, strategy))


@pytest.mark.parametrize("backend", BACKENDS)
def test_batch_invariant_is_refused_where_nothing_can_promise_it(backend: str) -> None:
    model = build("llama")
    with pytest.raises(ConfigurationError, match=f"batch_invariant=True .* '{backend}'"):
        hf_paged.patch(model, backend=backend, batch_invariant=True)
    with pytest.raises(ConfigurationError, match="not patched"):
        hf_paged.stats(model)
