"""Small random models on a device, prompts for them, and their tokens before and after patching."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from runner import Machine, expect
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, LlamaModel

import hf_paged

CACHE_NAME = (
    "cache" if "cache" in inspect.signature(LlamaModel.forward).parameters else "past_key_values"
)
"""By which a forward takes its cache, from one version of transformers to the other."""

VOCABULARY = 128
_BASE: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=1024,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_LESS: dict[str, Any] = dict(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)


def build(
    family: str, machine: Machine, dtype: torch.dtype = torch.float32, **overrides: Any
) -> Any:
    """Return a new model; weights have a deviation of 0.3, so that a wrong K changes tokens.

    Args:
        family: "llama", or "gemma2": layers with a window of 8 and a softcap between full ones.
        machine: where; a CPU gets two layers, a device six.
        dtype: of the weights, which are drawn in fp32.
        overrides: of the config.
    """
    if not machine.is_cuda:  # an interpreter runs a program for each key head
        overrides = _LESS | overrides
    overrides = _BASE | overrides
    config: Any
    if family == "gemma2":
        config = Gemma2Config(
            **overrides,
            sliding_window=8,
            tie_word_embeddings=False,  # tied, it would repeat one token whatever it attends to
            layer_types=["sliding_attention", "full_attention"]
            * (overrides["num_hidden_layers"] // 2),
        )
    else:
        config = LlamaConfig(**overrides)
    # sdpa would leave the softcap out.
    attention = "eager" if family == "gemma2" else "sdpa"
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=attention
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval().to(machine.device, dtype)


@dataclass(frozen=True)
class Prompts:
    """Left-padded prompts: ids [B, T], mask [B, T]."""

    ids: torch.Tensor
    mask: torch.Tensor

    @property
    def positions(self) -> torch.Tensor:
        return (self.mask.cumsum(1) - 1).clamp(min=0)

    def row(self, index: int) -> torch.Tensor:
        """Return [1, L], one row without its padding."""
        return self.ids[index][self.mask[index].bool()][None]


def prompts(machine: Machine, lengths: Sequence[int], seed: int = 7) -> Prompts:
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.zeros(len(lengths), width, dtype=torch.int64)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = torch.randint(3, VOCABULARY, (length,), generator=generator)
    return Prompts(ids.to(machine.device), (ids > 0).long().to(machine.device))


def generate(model: Any, batch: Prompts, **options: Any) -> Any:
    """Return [B, T + new] ids, greedy unless told otherwise; samples are seeded."""
    options = dict(max_new_tokens=8, do_sample=False, eos_token_id=None) | options
    torch.manual_seed(3)
    return model.generate(batch.ids, attention_mask=batch.mask, **options)


@contextmanager
def patched(model: Any, **options: Any) -> Iterator[Any]:
    """Patch, unpatch on the way out; then all blocks must have come back."""
    options = dict(backend="triton", num_blocks=128, cuda_graphs=False) | options
    hf_paged.patch(model, **options)
    try:
        yield model
        stats = hf_paged.stats(model)
        expect(stats.used_blocks == 0, f"{stats.used_blocks} blocks did not come back")
        expect(stats.backend == options["backend"], f"{stats.backend} computed")
    finally:
        hf_paged.unpatch(model)
