"""Does a patched model say here what the unpatched one says?"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils import logging as transformers_logging

from hf_paged.integration.patching import patch, unpatch

__all__ = ["check_backend"]

_LENGTHS = (5, 37, 18)
_NUM_NEW = 16


def check_backend(backend: str, device: torch.device) -> str | None:
    """Compare the tokens of a tiny random Llama with and without the backend; takes a second.

    Ragged rows, left-padded, in fp32: greedy and with beams.

    Args:
        backend: a registered name.
        device: where the model is.

    Returns:
        What went wrong, in one line, or None.
    """
    verbosity = transformers_logging.get_verbosity()
    set_verbosity: Any = transformers_logging.set_verbosity
    set_verbosity(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.random.fork_rng():
            warnings.simplefilter("ignore")
            return _compare(backend, device)
    # Whatever is wrong with this machine belongs into the report; it must not end it.
    except Exception as error:
        words = " ".join(str(error).split())
        return f"{type(error).__name__}: {words}"
    finally:
        set_verbosity(verbosity)


def _compare(backend: str, device: torch.device) -> str | None:
    is_half = backend.startswith("flash_attn")  # they take nothing else
    model = _tiny_llama(device, torch.float16 if is_half else torch.float32)
    inputs = _prompts(device)
    for name, options in (("greedy search", {}), ("three beams", {"num_beams": 3})):
        arguments: dict[str, Any] = inputs | options
        arguments |= {"max_new_tokens": _NUM_NEW, "do_sample": False}
        expected = model.generate(**arguments)
        patch(model, backend=backend, num_blocks=128, debug=True)
        try:
            tokens = model.generate(**arguments)
        finally:
            unpatch(model)
        if not torch.equal(tokens, expected):
            differing = (tokens != expected).sum() if tokens.shape == expected.shape else "all"
            return f"{name}: {differing} of {expected.numel()} tokens differ"
    return None


def _tiny_llama(device: torch.device, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # far from uniform attention: a wrong K changes the tokens
                parameter.normal_(std=0.3)
    return model.to(device)


def _prompts(device: torch.device) -> dict[str, torch.Tensor]:
    width = max(_LENGTHS)
    ids = torch.randint(3, 256, (len(_LENGTHS), width))
    mask = torch.arange(width) >= width - torch.tensor(_LENGTHS)[:, None]
    return {
        "input_ids": (ids * mask).to(device),
        "attention_mask": mask.long().to(device),
    }
