"""A batch several times larger than the pool: rows wait for each other, and all come back.

    python examples/batch_larger_than_pool.py [--model ID_OR_FOLDER] [--max-new-tokens 20]

`generate()` gets all rows at once. Those that do not fit wait; if the pool runs dry in the middle,
the youngest gives way. Then the same prompts go through `generate_batch`, results as they finish.
The exit code is 1 if an answer differs from that of the unpatched model, which gets all the memory,
or if no row had to wait.
"""

from __future__ import annotations

import argparse
import math
import sys

import hf_paged
from prompts import PROMPTS
from real_model import load

BATCH = PROMPTS[:9]  # eight short questions, then a longer text
BLOCK_SIZE = 16


def answers(model, tokenizer, max_new_tokens: int) -> list[list[int]]:
    """Return the tokens of each answer, greedy, without the padding behind it."""
    inputs = tokenizer(list(BATCH), padding=True, return_tensors="pt")
    output = model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)
    return [
        without_padding(row, tokenizer) for row in output[:, inputs.input_ids.shape[1] :].tolist()
    ]


def without_padding(answer: list[int], tokenizer) -> list[int]:
    while answer and answer[-1] == tokenizer.pad_token_id:
        answer.pop()
    return answer


def main() -> int:
    parser = argparse.ArgumentParser(description="A batch larger than the pool.")
    parser.add_argument("--model", help="hub id or folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--max-new-tokens", type=int, default=20, metavar="N")
    args = parser.parse_args()

    model, tokenizer = load(args.model)
    expected = answers(model, tokenizer, args.max_new_tokens)

    needed = [
        math.ceil((len(ids) + args.max_new_tokens) / BLOCK_SIZE)
        for ids in tokenizer(list(BATCH)).input_ids
    ]
    num_blocks = max(needed)  # no row can do with less than it takes alone
    print(f"{len(BATCH)} rows need up to {sum(needed)} blocks, the pool has {num_blocks}")
    hf_paged.patch(model, num_blocks=num_blocks, block_size=BLOCK_SIZE)
    got = answers(model, tokenizer, args.max_new_tokens)
    stats = hf_paged.stats(model)
    print(
        f"at most {stats.peak_used_blocks} blocks in use, {stats.peak_used_bytes / 2**20:.1f} MiB; "
        f"{stats.preemptions} times a row gave way; {stats.computed_tokens} tokens computed, "
        f"{stats.padded_tokens_avoided} of a padded batch were not"
    )

    streamed = {}
    for output in hf_paged.generate_batch(
        model, BATCH, tokenizer=tokenizer, do_sample=False, max_new_tokens=args.max_new_tokens
    ):
        answer = output.sequences[0][len(output.prompt_ids) :]
        streamed[output.index] = without_padding(answer, tokenizer)
        print(f"prompt {output.index}: {len(answer)} tokens, {output.finish_reasons[0]}")

    print("\n" + tokenizer.decode(max(got, key=len), skip_special_tokens=True).strip())
    is_right = got == expected and [streamed[i] for i in range(len(BATCH))] == expected
    if not is_right or sum(needed) <= num_blocks or hf_paged.stats(model).used_blocks != 0:
        print("\nFAILED: other answers than the unpatched model's, or blocks left behind.")
        return 1
    print(f"\nThe answers of the unpatched model in all {len(BATCH)} rows, twice.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
