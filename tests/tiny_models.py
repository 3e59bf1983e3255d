"""Tiny seeded random models of every supported family, and batches to feed them.

Weights are drawn with a standard deviation of 0.3, so that attention is far from uniform and a
wrong K or V changes the tokens. Sliding windows are 8 of some 20 tokens, so they bind.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

_BASE: dict[str, Any] = dict(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_SPECIAL: dict[str, Any] = dict(vocab_size=128, pad_token_id=0, bos_token_id=1, eos_token_id=2)
_UNTIED: dict[str, Any] = dict(tie_word_embeddings=False)
"""Where tied embeddings would repeat the last token, whatever attention brings."""
_SLIDING = ["sliding_attention", "full_attention"] * 2

CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**_BASE),
    "opt": OPTConfig(
        **_SPECIAL,
        **_UNTIED,
        hidden_size=32,
        ffn_dim=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=256,
        word_embed_proj_dim=32,
    ),
    "mistral": MistralConfig(**_BASE, sliding_window=8),
    "qwen2": Qwen2Config(
        **_BASE,
        use_sliding_window=True,
        sliding_window=8,
        layer_types=_SLIDING,
        max_window_layers=2,
    ),
    "qwen3": Qwen3Config(**_BASE, head_dim=16),
    "gemma2": Gemma2Config(**_BASE, **_UNTIED, head_dim=8, sliding_window=8, layer_types=_SLIDING),
    "gemma3": Gemma3TextConfig(
        **_BASE, **_UNTIED, head_dim=8, sliding_window=8, layer_types=_SLIDING
    ),
    "phi3": Phi3Config(**_BASE, sliding_window=8),
    "gpt2": GPT2Config(**_SPECIAL, n_embd=32, n_layer=3, n_head=4, n_positions=256, n_inner=64),
}
FAMILIES = tuple(CONFIGS)


def build(family: str, seed: int = 1, **overrides: Any) -> PreTrainedModel:
    """Return a new model in eval mode; equal arguments give equal weights.

    Args:
        family: a key of CONFIGS.
        seed: of the weights.
        overrides: config attributes; ``attn_implementation`` as well.
    """
    config = copy.deepcopy(CONFIGS[family])
    attn_implementation = overrides.pop("attn_implementation", None)
    for name, value in overrides.items():
        setattr(config, name, value)
    return from_config(config, seed, attn_implementation)


def from_config(config: Any, seed: int = 1, attn_implementation: Any = None) -> PreTrainedModel:
    """Return a new model that uses ``config`` itself, with seeded weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=attn_implementation
        ).eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


@dataclass(frozen=True)
class Batch:
    """Left-padded prompts.

    Attributes:
        ids: [B, T].
        mask: [B, T].
    """

    ids: torch.Tensor
    mask: torch.Tensor

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """Keyword arguments of generate()."""
        return {"input_ids": self.ids, "attention_mask": self.mask}

    def row(self, index: int) -> Batch:
        """Return one row with its padding taken off."""
        real = self.mask[index].bool()
        return Batch(self.ids[index][real][None], self.mask[index][real][None])


def ragged_batch(lengths: tuple[int, ...], seed: int = 7, pad_id: int = 0) -> Batch:
    """Return random prompts of the given lengths, padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.full((len(lengths), width), pad_id)
    mask = torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = torch.randint(3, 128, (length,), generator=generator)
        mask[row, width - length :] = 1
    return Batch(ids, mask)
