"""A hand-written greedy loop over a paged cache.

    python examples/decoding_loop.py [--model ID_OR_FOLDER] [--max-new-tokens 40]

A `PagedCache` goes wherever a `DynamicCache` went. It takes a block whenever its last one is full,
and gives all of them back at the end of its `with`. The exit code is 1 if the loop chooses other
tokens than the unpatched `generate()`, or if a block is still in use afterwards.
"""

from __future__ import annotations

import argparse
import sys

import torch

import hf_paged
from real_model import CACHE_NAME, load

PROMPT = "Once upon a time there was a small computer that could only add. Every day it added"


def main() -> int:
    parser = argparse.ArgumentParser(description="A hand-written greedy loop over a paged cache.")
    parser.add_argument("--model", help="hub id or folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--max-new-tokens", type=int, default=40, metavar="N")
    args = parser.parse_args()

    model, tokenizer = load(args.model)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    expected = model.generate(**inputs, do_sample=False, max_new_tokens=args.max_new_tokens)

    hf_paged.patch(model)
    block_size = hf_paged.stats(model).block_size
    ends = model.generation_config.eos_token_id  # a number, a list of numbers, or None
    ends = ends if isinstance(ends, list) else [ends]
    ids = inputs.input_ids  # [1, T]
    with torch.no_grad(), hf_paged.PagedCache(model) as cache:
        new = ids
        for _ in range(args.max_new_tokens):
            # cache=cache, or before transformers 5.24 past_key_values=cache
            logits = model(new, **{CACHE_NAME: cache}).logits
            [stored], [table] = cache.seq_lens, cache.block_tables[0]
            if new is ids or stored % block_size == 1:  # the prompt, or a block was begun
                print(f"{stored:4} tokens stored in {len(table)} blocks: {table}")
            new = logits[:, -1:].argmax(-1)
            ids = torch.cat([ids, new], dim=1)
            if new.item() in ends:
                break
        stats = hf_paged.stats(model)
        print(
            f"{stats.live_tokens:4} tokens stored at the end, {stats.used_bytes / 2**20:.2f} MiB, "
            f"{stats.utilization:.0%} of it filled"
        )
    left = hf_paged.stats(model).used_blocks
    print(f"{left:4} blocks in use after the with block")

    print("\n" + tokenizer.decode(ids[0], skip_special_tokens=True))
    if not torch.equal(ids, expected) or left != 0:
        print("\nFAILED: other tokens than the unpatched generate(), or blocks left behind.")
        return 1
    print("\nThe tokens of the unpatched generate().")
    return 0


if __name__ == "__main__":
    sys.exit(main())
