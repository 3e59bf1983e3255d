"""Beam search: beams copy tables of block ids where they used to copy keys and values.

    python examples/beam_search.py [--model ID_OR_FOLDER] [--max-new-tokens 40] [--num-beams 4]
                                   [--picture pool.png]

Beams that have a past in common share its blocks. The exit code is 1 if tokens or scores differ
from those of the unpatched model, or if the beams take as much memory as separate ones.
"""

from __future__ import annotations

import argparse
import sys

import torch

import hf_paged
from prompts import STORY
from real_model import CACHE_NAME, load

PROMPT = STORY[0] + "\n\nThe moral of the story is"


def main() -> int:
    parser = argparse.ArgumentParser(description="Beam search in shared blocks.")
    parser.add_argument("--model", help="hub id or folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--max-new-tokens", type=int, default=40, metavar="N")
    parser.add_argument("--num-beams", type=int, default=4, metavar="N")
    parser.add_argument("--picture", metavar="FILE", help="draw the pool as the beams leave it")
    args = parser.parse_args()

    model, tokenizer = load(args.model)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    options = {
        "num_beams": args.num_beams,
        "num_return_sequences": args.num_beams,
        "do_sample": False,
        "max_new_tokens": args.max_new_tokens,
        "return_dict_in_generate": True,
        "output_scores": True,
    }
    unpatched = model.generate(**inputs, **options)
    layers = unpatched[CACHE_NAME].layers
    separate = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)

    hf_paged.patch(model)
    output = model.generate(**inputs, **options)
    if args.picture:
        hf_paged.plot_pool(model).save(args.picture)
    output[CACHE_NAME].release()
    stats = hf_paged.stats(model)

    num_prompt = inputs.input_ids.shape[1]
    for tokens, score in zip(output.sequences, output.sequences_scores.tolist(), strict=True):
        text = tokenizer.decode(tokens[num_prompt:], skip_special_tokens=True)
        print(f"{score:6.3f}  {' '.join(text.split())}")

    print(f"\n{args.num_beams} beams of {num_prompt} tokens of prompt and up to", end=" ")
    print(f"{output.sequences.shape[1] - num_prompt} new ones")
    print(f"{args.num_beams} separate caches: {separate / 2**20:6.2f} MiB, reordered at every step")
    print(
        f"the pool's peak:   {stats.peak_used_bytes / 2**20:6.2f} MiB, {stats.peak_used_blocks} "
        f"blocks; in all {stats.cow_copies} were copied before a beam wrote into one it shared"
    )
    same_tokens = torch.equal(output.sequences, unpatched.sequences)
    same_scores = torch.allclose(
        output.sequences_scores, unpatched.sequences_scores, rtol=0, atol=1e-3
    )
    if not (same_tokens and same_scores and stats.peak_used_bytes < separate):
        print("FAILED: other beams than the unpatched model's, or memory that is not shared.")
        return 1
    print("The beams of the unpatched model.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
