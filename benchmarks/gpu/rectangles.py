"""Forwards over a PagedCache: left padding, forks, and no wait between tokens and logits."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from runner import Check, Machine, expect
from small_models import CACHE_NAME, VOCABULARY, Prompts, build, patched, prompts

import hf_paged
from hf_paged.backends import upload
from hf_paged.backends.triton import TritonBackend
from hf_paged.cache.packed_batch import PackedBatch
from hf_paged.cache.runtime import runtime_of
from hf_paged.cache.step import reserve
from hf_paged.core.allocation import NewTokens

TOLERANCE = 1e-3
"""Relative L2 distance of fp32 logits; a token that sees a wrong one is at 0.1 and more."""


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the relative L2 distance; NaN counts as infinite."""
    found = float((one - other).float().norm() / other.float().norm())
    return found if found == found else float("inf")


def left_padding(machine: Machine) -> str:
    """What is in the padding changes no bit of real tokens, which are those of each row alone."""
    worst = 0.0
    for family in ("llama", "gemma2"):
        model = build(family, machine)
        batch = prompts(machine, (20, 3, 9))
        more = prompts(machine, (2, 2, 2), seed=8).ids
        with torch.no_grad():
            alone = [
                model(torch.cat([batch.row(row), more[row : row + 1]], dim=1)).logits[0]
                for row in range(3)
            ]
        found = []
        with patched(model), torch.no_grad():
            for padding in (0, 77):
                ids = torch.where(batch.mask.bool(), batch.ids, padding)
                found.append(_feed(model, Prompts(ids, batch.mask), more))
        for row, expected in enumerate(alone):
            real, again = (each[row, -len(expected) :] for each in found)
            expect(bool(real.isfinite().all()), f"{family}: row {row} is not finite")
            expect(torch.equal(real, again), f"{family}: the padding's ids change row {row}")
            error = distance(real, expected)
            expect(error <= TOLERANCE, f"{family}: row {row} is {error:.1e} from itself alone")
            worst = max(worst, error)
    return f"2 models, rows within {worst:.1e} of themselves alone; padding changes no bit"


def _feed(model: Any, batch: Prompts, more: torch.Tensor) -> torch.Tensor:
    """Return the logits of a rectangle and of two tokens a row after it, [B, T + 2, V]."""
    mask, logits = batch.mask, []
    with hf_paged.PagedCache(model) as cache:
        options: dict[str, Any] = {CACHE_NAME: cache}
        logits = [
            model(batch.ids, attention_mask=mask, position_ids=batch.positions, **options).logits
        ]
        for column in more.split(1, dim=1):
            mask = torch.cat([mask, torch.ones_like(column)], dim=1)
            positions = mask.sum(1, keepdim=True) - 1
            logits.append(
                model(column, attention_mask=mask, position_ids=positions, **options).logits
            )
        lengths = mask.sum(1).tolist()
        expect(cache.seq_lens == lengths, f"{cache.seq_lens} tokens are stored, not {lengths}")
    return torch.cat(logits, dim=1)


def forks(machine: Machine) -> str:
    """Branches share blocks until they write; each is the sequence that it stands for."""
    model = build("gemma2", machine)
    prompt = prompts(machine, (21,)).ids
    tokens = (5, 9, 77)
    with torch.no_grad():
        expected = [
            model(torch.cat([prompt, prompt.new_tensor([[token, 11]])], dim=1)).logits[0, -1]
            for token in tokens
        ]
    worst = 0.0
    with patched(model, debug=True), torch.no_grad(), hf_paged.PagedCache(model) as cache:
        model(prompt, **{CACHE_NAME: cache})
        used = hf_paged.stats(model).used_blocks
        branches = [cache.fork() for _ in tokens]
        expect(hf_paged.stats(model).used_blocks == used, "a fork takes blocks")
        for token, branch in zip(tokens, branches, strict=True):
            model(prompt.new_tensor([[token]]), **{CACHE_NAME: branch})
        for branch, right in zip(branches, expected, strict=True):
            logits = model(prompt.new_tensor([[11]]), **{CACHE_NAME: branch}).logits[0, -1]
            worst = max(worst, distance(logits, right))
        copies = hf_paged.stats(model).cow_copies
        for branch in branches:
            branch.release()
    expect(worst <= TOLERANCE, f"a branch is {worst:.1e} from its sequence computed at once")
    expect(copies > 0, "no block was copied on write")
    return f"{len(tokens)} branches within {worst:.1e}, {copies} blocks copied on write"


def no_host_sync(machine: Machine) -> str:
    """Prompts, decoding and a copy on write; on a CPU over tensors that have no values at all."""
    if machine.is_cuda:
        return _without_sync(machine, machine.device)
    meta = torch.device("meta")
    link = mock.Mock()
    with (
        mock.patch.object(upload, "_ring", lambda device: link if device == meta else None),
        mock.patch.object(TritonBackend, "unavailable_reason", return_value=None),
    ):
        found = _without_sync(Machine(meta), meta)
    expect(link.send.call_count > 0, "nothing was sent to the device")
    return f"{found}, {link.send.call_count} copies to the device"


def _without_sync(machine: Machine, device: torch.device) -> str:
    num_steps = 0
    for family in ("llama", "gemma2"):
        model = build(family, machine)
        with torch.no_grad(), patched(model):
            runtime = runtime_of(model)
            for is_watched in (False, True):  # kernels are compiled and memory is taken first
                sequences = [runtime.manager.new_sequence() for _ in range(3)]
                with machine.no_host_sync() if is_watched else nullcontext():
                    num_steps += _steps(model, device, sequences)
                for sequence in sequences:
                    runtime.manager.free(sequence)
    return f"{num_steps} forwards of 2 models"


def _steps(model: Any, device: torch.device, sequences: list[Any]) -> int:
    """Prompts, decoding, both; then decoding after a fork. Return the number of forwards."""
    steps = [[20, 3, 9], [1, 1, 1], [1, 5, 1], [1, 1, 1, 1], [1, 1, 1, 1]]
    for num_new in steps:
        if len(num_new) > len(sequences):  # its next token copies a block
            sequences.append(runtime_of(model).manager.fork(sequences[0]))
        _step(model, device, sequences, num_new)
    return len(steps)


def _step(model: Any, device: torch.device, sequences: list[Any], num_new: list[int]) -> None:
    runtime = runtime_of(model)
    rows = [
        NewTokens(sequence, number, [5] * number, sequence.num_tokens, None)
        for sequence, number in zip(sequences, num_new, strict=True)
    ]
    allocation = reserve(runtime, rows, hold_window=False, occasion="a check")
    positions = [at for row in allocation.rows for at in range(row.start, row.end)]
    batch = PackedBatch(runtime, allocation, [5] * len(positions), positions)
    assert runtime.packed_model is not None
    logits = runtime.packed_model.forward(batch, device)
    expect(logits.shape == (len(rows), VOCABULARY), f"logits are {tuple(logits.shape)}")


CHECKS = (
    Check("forward/left-padding", left_padding),
    Check("forward/forks", forks),
    Check("forward/no-host-sync", no_host_sync),
)
