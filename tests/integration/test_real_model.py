"""SmolLM2-135M-Instruct, a real Llama: the tokens of the unpatched model, fp32 and as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hf_paged
from real_model import load_smollm2

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

PROMPTS = [
    "The capital of Portugal is",
    "Write one sentence about rain.",
    "A list of prime numbers: 2, 3, 5, 7, 11, 13,",
    "Once upon a time there was a small computer that could only add. Every day it added",
]


@pytest.fixture(scope="module")
def smollm2() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield load_smollm2()
    torch.set_num_threads(threads)


@pytest.mark.core_suite
@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 4}, {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3}],
    ids=["greedy", "beams", "penalties"],
)
def test_tokens_equal_in_fp32(smollm2: Any, options: dict[str, Any]) -> None:
    model, tokenizer = smollm2
    inputs = tokenizer(PROMPTS, padding=True, padding_side="left", return_tensors="pt")
    options = {"max_new_tokens": 20, "do_sample": False} | options
    expected = model.generate(**inputs, **options)
    hf_paged.patch(model, kv_memory="256MiB", debug=True)
    try:
        assert torch.equal(model.generate(**inputs, **options), expected)
        stats = hf_paged.stats(model)
        assert stats.used_blocks == 0 < stats.peak_used_blocks
    finally:
        hf_paged.unpatch(model)


def test_bf16_is_no_further_from_fp32_than_the_unpatched_model(smollm2: Any) -> None:
    """Relative L2 of logits to the fp32 run over teacher-forced tokens, fed in ragged pieces."""
    model, tokenizer = smollm2
    text = "\n".join(PROMPTS * 26)
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :1040]
    assert ids.shape[1] >= 1000
    with torch.no_grad():
        exact = model(ids).logits
    half, _ = load_smollm2(dtype=torch.bfloat16)

    def distance(run: Any) -> float:
        cache = None
        logits = []
        with torch.no_grad():
            for start, end in ((0, 400), (400, 1000), *((i, i + 1) for i in range(1000, 1040))):
                cache, out = run(ids[:, start:end], cache)
                logits.append(out.float())
        got = torch.cat(logits, 1)
        return float((got - exact).norm() / exact.norm())

    name = "cache" if "cache" in half(ids[:, :2], use_cache=True) else "past_key_values"

    def unpatched(piece: torch.Tensor, cache: Any) -> Any:
        out = half(piece, **{name: cache}, use_cache=True)
        return out[name], out.logits

    reference = distance(unpatched)
    hf_paged.patch(half, kv_memory="128MiB")

    def patched(piece: torch.Tensor, cache: Any) -> Any:
        cache = cache or hf_paged.PagedCache(half)
        return cache, half(piece, **{name: cache}).logits

    ours = distance(patched)
    print(f"relative L2 to fp32: unpatched {reference:.4e}, patched {ours:.4e}")
    assert ours <= 1.05 * reference
