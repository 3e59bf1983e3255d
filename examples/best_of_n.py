"""Best of n: sample n answers to one prompt, keep the one that the model itself likes best.

    python examples/best_of_n.py [--model ID_OR_FOLDER] [--max-new-tokens 40] [-n 8]

The samples share the blocks of the prompt; the unpatched model stores it n times. The exit code is
1 if the unpatched model samples other tokens under the same seed, or if the prompt is stored more
than once.
"""

from __future__ import annotations

import argparse
import math
import sys

import torch

import hf_paged
from prompts import STORY
from real_model import CACHE_NAME, load

PROMPT = STORY[1] + "\n\nIn one sentence, this text says that"


def mean_log_probs(output, prompt_length: int, eos_token_id) -> torch.Tensor:
    """Return the mean log-probability of each answer's tokens under the model itself, [n]."""
    answers = output.sequences[:, prompt_length:]  # [n, T]
    logits = torch.stack(output.logits, dim=1)  # [n, T, vocabulary], before the temperature
    log_probs = logits.log_softmax(-1).gather(-1, answers[..., None])[..., 0]
    # An answer ends with its first end-of-sequence token; what follows is padding.
    ends = torch.isin(answers, torch.tensor([] if eos_token_id is None else eos_token_id))
    real = ends.cumsum(1) - ends.int() == 0
    return (log_probs * real).sum(1) / real.sum(1)


def main() -> int:
    parser = argparse.ArgumentParser(description="Sample n answers, keep the likeliest.")
    parser.add_argument("--model", help="hub id or folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--max-new-tokens", type=int, default=40, metavar="N")
    parser.add_argument("-n", type=int, default=8, help="samples (8)")
    args = parser.parse_args()

    model, tokenizer = load(args.model)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    options = {
        "do_sample": True,
        "temperature": 0.8,
        "top_k": 50,
        "num_return_sequences": args.n,
        "max_new_tokens": args.max_new_tokens,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    torch.manual_seed(0)
    unpatched = model.generate(**inputs, **options)
    layers = unpatched[CACHE_NAME].layers
    separate = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)

    hf_paged.patch(model)
    torch.manual_seed(0)
    output = model.generate(**inputs, **options)
    output[CACHE_NAME].release()
    stats = hf_paged.stats(model)

    num_prompt = inputs.input_ids.shape[1]
    scores = mean_log_probs(output, num_prompt, model.generation_config.eos_token_id)
    best = int(scores.argmax())
    for row, score in enumerate(scores.tolist()):
        text = tokenizer.decode(output.sequences[row, num_prompt:], skip_special_tokens=True)
        print(f"{'*' if row == best else ' '} {score:6.2f}  {' '.join(text.split())}")

    # The prompt's full blocks once; for each sample the rest of the prompt and its answer, but for
    # the last token, which is never fed back.
    num_new = output.sequences.shape[1] - num_prompt
    shared = num_prompt // stats.block_size
    own = math.ceil((num_prompt % stats.block_size + num_new - 1) / stats.block_size)
    print(f"\nprompt of {num_prompt} tokens, {args.n} answers of up to {num_new}")
    print(f"{args.n} separate caches: {separate / 2**20:7.2f} MiB")
    print(
        f"the pool's peak:   {stats.peak_used_bytes / 2**20:7.2f} MiB, {stats.peak_used_blocks} "
        f"blocks (at most {shared} shared + {args.n} x {own} of their own)"
    )
    is_shared = stats.peak_used_blocks <= shared + args.n * own
    if not torch.equal(output.sequences, unpatched.sequences) or not is_shared:
        print("FAILED: other samples than the unpatched model, or a prompt that is not shared.")
        return 1
    print("The samples of the unpatched model under the same seed.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
