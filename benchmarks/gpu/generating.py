"""generate() of a patched model against the same call of the unpatched one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from rectangles import TOLERANCE, distance
from runner import Check, Machine, Skip, expect
from small_models import CACHE_NAME, Prompts, build, generate, patched, prompts

import hf_paged
from hf_paged.backends.triton import TritonBackend
from hf_paged.cache.runtime import runtime_of

LENGTHS = (20, 3, 9)
PRECISION = 1.25
"""How many times as far from fp32 as the unpatched model's the logits of bf16 may be."""
TIE = 1e-5
"""Logits that are no further apart, in deviations of all, fp32 cannot tell apart."""


def num_new(machine: Machine) -> int:
    return 40 if machine.is_cuda else 6


def same_tokens(
    machine: Machine,
    family: str,
    options: dict[str, Any] | None = None,
    *,
    lengths: Iterable[int] = LENGTHS,
    config: dict[str, Any] | None = None,
    **patching: Any,
) -> hf_paged.KVCacheStats:
    """Generate unpatched and patched; return the statistics of the patched run."""
    model, batch = build(family, machine, **config or {}), prompts(machine, tuple(lengths))
    options = {"max_new_tokens": num_new(machine)} | (options or {})
    expected = generate(model, batch, **options)
    num_ids = len(expected[:, batch.ids.shape[1] :].unique())
    expect(num_ids > 5, f"{family} repeats {num_ids} tokens: nothing is shown here")
    with patched(model, **patching):
        got = generate(model, batch, **options)
        stats = hf_paged.stats(model)
    is_greedy = not options.get("do_sample") and options.get("num_beams", 1) == 1
    for row in range(len(expected)):
        if torch.equal(got[row], expected[row]):
            continue
        what = f"{family}: row {row} of {len(got)} has other tokens"
        expect(is_greedy, what)
        gap = gap_of_choices(model, batch, expected[row], got[row], row)
        expect(gap <= TIE, f"{what}; where they part, the logits are {gap:.1e} apart")
    return stats


def gap_of_choices(
    model: Any, batch: Prompts, expected: torch.Tensor, got: torch.Tensor, row: int
) -> float:
    """Return how far the logits of the first two different tokens are apart, in deviations."""
    column = int(torch.nonzero(expected != got)[0])
    padding = int((batch.mask[row] == 0).sum())
    with torch.no_grad():
        logits = model(expected[None, padding:column], use_cache=False).logits[0, -1].double()
    return float((logits[expected[column]] - logits[got[column]]).abs() / logits.std())


def greedy(machine: Machine) -> str:
    words = []
    for family in ("llama", "gemma2"):
        stats = same_tokens(machine, family, debug=True)
        words.append(f"{family} {stats.computed_tokens} tokens computed")
    return "the tokens of DynamicCache; " + ", ".join(words)


def logits(machine: Machine) -> str:
    """fp32 logits along the unpatched model's tokens: they tell more than the largest of each."""
    words = []
    for family in ("llama", "gemma2"):
        model, batch = build(family, machine), prompts(machine, (40, 3, 25))
        tokens = generate(model, batch, max_new_tokens=num_new(machine))
        expected = forced_logits(model, batch, tokens)
        with patched(model, max_batch_tokens=30):
            error = distance(forced_logits(model, batch, tokens), expected)
        expect(error <= TOLERANCE, f"{family}: {error:.1e} from the unpatched model's")
        words.append(f"{family} within {error:.1e}")
    return ", ".join(words)


def bf16(machine: Machine) -> str:
    """Logits along the unpatched model's tokens are about as far from fp32's as its own."""
    words = []
    for family in ("llama", "gemma2"):
        batch = prompts(machine, LENGTHS)
        single = build(family, machine)
        half = build(family, machine, torch.bfloat16)
        tokens = generate(single, batch, max_new_tokens=num_new(machine))
        exact = forced_logits(single, batch, tokens)
        own = distance(forced_logits(half, batch, tokens), exact)
        with patched(half):
            paged = forced_logits(half, batch, tokens)
        error = distance(paged, exact)
        expect(error <= PRECISION * own, f"{family}: {error:.1e} from fp32, unpatched {own:.1e}")
        words.append(f"{family} {error / own:.2f} x the unpatched distance to fp32 ({own:.1e})")
    return ", ".join(words)


def forced_logits(model: Any, batch: Prompts, tokens: torch.Tensor) -> torch.Tensor:
    """Return logits along ``tokens``, [B, new, V]."""
    columns = iter(tokens[:, batch.ids.shape[1] :].unbind(1))

    def force(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, -1e4).scatter(1, next(columns)[:, None], 0.0)

    result = generate(
        model,
        batch,
        max_new_tokens=tokens.shape[1] - batch.ids.shape[1],
        logits_processor=[force],
        return_dict_in_generate=True,
        output_logits=True,
    )
    expect(torch.equal(result.sequences, tokens), "tokens were not the forced ones")
    logits = torch.stack(result.logits, dim=1).float()
    setattr(result, CACHE_NAME, None)
    return logits


def prefix_hit(machine: Machine) -> str:
    model, batch = build("llama", machine), prompts(machine, (40, 35))
    expected = generate(model, batch)
    with patched(model):
        first = generate(model, batch)
        hf_paged.reset_stats(model)
        second = generate(model, batch)
        hits = hf_paged.stats(model).prefix_hit_tokens
    expect(torch.equal(first, expected), "other tokens at first")
    expect(torch.equal(second, expected), "other tokens over stored prefixes")
    expect(hits >= 64, f"{hits} prompt tokens were found")
    return f"{hits} of 75 prompt tokens found"


def chunks(machine: Machine) -> str:
    for family in ("llama", "gemma2"):
        same_tokens(machine, family, lengths=(40, 3, 25), max_batch_tokens=7, debug=True)
    return "prompts of 40, 3 and 25 tokens, 7 a forward"


def preemption(machine: Machine) -> str:
    stats = scarce(machine)
    expect(stats.preemptions > 0, "no row gave way")
    return f"{stats.preemptions} times a row gave way in {stats.num_blocks} blocks"


def swap(machine: Machine) -> str:
    stats = scarce(machine, swap_memory="8MiB", prefix_caching=False)
    expect(stats.swapped_in_blocks > 0, "no block came back")
    return f"{stats.swapped_out_blocks} blocks out, {stats.swapped_in_blocks} in"


def scarce(machine: Machine, **patching: Any) -> hf_paged.KVCacheStats:
    """Rows enter if they can grow by 64 tokens, and grow by more: some must give way."""
    is_cuda = machine.is_cuda
    return same_tokens(
        machine,
        "llama",
        {"max_new_tokens": 90 if is_cuda else 80},
        lengths=(30, 17, 29) * 4 if is_cuda else (8, 6),
        num_blocks=26 if is_cuda else 11,
        config={} if is_cuda else {"num_hidden_layers": 1},
        **patching,
    )


def sampling(machine: Machine) -> str:
    options = dict(do_sample=True, top_k=20, num_return_sequences=2)
    same_tokens(machine, "llama", options)
    return "2 seeded samples of 3 prompts"


def beams(machine: Machine) -> str:
    stats = same_tokens(machine, "llama", {"num_beams": 3})
    return f"3 beams of 3 prompts, {stats.cow_copies} blocks copied on write"


def compiled(machine: Machine) -> str:
    """patch(compile=True); with graphs too on a device."""
    num_layers = 2 if machine.is_cuda else 1
    model, batch = build("llama", machine, num_hidden_layers=num_layers), prompts(machine, LENGTHS)
    expected = generate(model, batch)
    with patched(model, compile=True, cuda_graphs=machine.is_cuda):
        got = generate(model, batch)
        forward: Any = runtime_of(model).packed_model._compiled  # type: ignore[union-attr]
        reason = forward.eager_reason
    if reason is not None and not machine.is_cuda:
        raise Skip(f"nothing can be compiled here: {reason.splitlines()[0]}")
    expect(reason is None, f"ran eagerly: {reason}")
    expect(torch.equal(got, expected), "other tokens")
    return "the tokens of eager code"


def stream(machine: Machine) -> str:
    """generate_batch: rows come and go in a small pool."""
    model = build("llama", machine)
    ids = [prompts(machine, (length,), seed=length).ids for length in range(5, 40, 6)]
    expected = [generate(model, Prompts(each, torch.ones_like(each)))[0].tolist() for each in ids]
    with patched(model, num_blocks=8):
        outputs = hf_paged.generate_batch(
            model,
            [each[0].tolist() for each in ids],
            max_new_tokens=8,
            do_sample=False,
            eos_token_id=None,
            progress=False,
        )
        found = {output.index: [int(t) for t in output.sequences[0]] for output in outputs}
    wrong = [index for index, right in enumerate(expected) if found[index] != right]
    expect(not wrong, f"prompts {wrong} have other tokens")
    return f"{len(ids)} prompts through 8 blocks"


def controls(machine: Machine) -> str:
    """A backend that stores nothing gives other tokens, and that is noticed."""
    from unittest import mock

    run: Callable[[], Any] = lambda: same_tokens(machine, "llama")  # noqa: E731
    with mock.patch.object(TritonBackend, "write", lambda *_: None):
        try:
            run()
        except Exception as error:
            return f"noticed: {error}"
    expect(False, "K and V were not stored, and the tokens were the same")
    raise AssertionError


CHECKS = (
    Check("generate/greedy", greedy),
    Check("generate/logits", logits),
    Check("generate/bf16", bf16),
    Check("generate/prefix-hit", prefix_hit),
    Check("generate/chunks", chunks),
    Check("generate/preemption", preemption),
    Check("generate/swap", swap),
    Check("generate/sampling", sampling),
    Check("generate/beams", beams),
    Check("generate/stream", stream),
    Check("generate/controls", controls),
    Check("generate/compiled", compiled),
)
