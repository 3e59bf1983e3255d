"""The models, and text for them to read."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))


def load(name: str) -> tuple[Any, list[int]]:
    """Return (model, tokens of a text); "smollm2" in fp32, or a "tiny" random Llama."""
    if name == "tiny":
        torch.manual_seed(1)
        config = LlamaConfig(
            vocab_size=512,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=4096,
            initializer_range=0.3,
            pad_token_id=0,
        )
        return LlamaForCausalLM(config).eval(), torch.randint(3, 512, (997,)).tolist()
    from prompts import STORY
    from real_model import load_smollm2

    model, tokenizer = load_smollm2(torch.float32)
    return model, tokenizer("\n\n".join(STORY)).input_ids


def token_bytes(model: Any) -> int:
    """Return the bytes of K and V of one token in all layers."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    elements = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim
    return elements * model.dtype.itemsize
