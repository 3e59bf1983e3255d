"""A tokenizer of 128 words, for the tiny models."""

from __future__ import annotations

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer: token i is the word ``w<i>``, padded on the left."""
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "abcdef": 3}  # transformers probes with abcdef
    vocabulary |= {f"w{i}": i for i in range(4, 128)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="abcdef"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="abcdef",
        padding_side="left",
    )
