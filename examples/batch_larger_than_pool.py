"""A batch larger than the pool: what does not fit together goes in waves.

    python examples/batch_larger_than_pool.py [--model ID_OR_FOLDER] [--max-new-tokens 20]

hf_paged does not wait inside a call. `generate()` raises `KVCacheFullError`, which says how many of
the rows would have fitted; the caller passes fewer rows. If the prompts fit and their answers do
not, the error comes in the middle and the work of that wave is lost. The exit code is 1 if an
answer differs from that of the unpatched model, which gets the whole batch and all the memory.
"""

from __future__ import annotations

import argparse
import math
import sys

import hf_paged
from hf_paged.errors import KVCacheFullError
from prompts import PROMPTS
from real_model import load

BATCH = PROMPTS[:9]  # eight short questions, then a longer text
BLOCK_SIZE = 16


def answers(model, tokenizer, prompts, max_new_tokens: int) -> list[list[int]]:
    """Return the tokens of each answer, greedy, without the padding behind it."""
    inputs = tokenizer(list(prompts), padding=True, return_tensors="pt")
    output = model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)
    rows = output[:, inputs.input_ids.shape[1] :].tolist()
    for row in rows:
        while row and row[-1] == tokenizer.pad_token_id:
            row.pop()
    return rows


def answers_in_waves(model, tokenizer, prompts, max_new_tokens: int) -> list[list[int]]:
    """Return the same, with as many rows at a time as the pool holds."""
    done, size = [], len(prompts)
    while len(done) < len(prompts):
        wave = prompts[len(done) : len(done) + size]
        try:
            done += answers(model, tokenizer, wave, max_new_tokens)
        except KVCacheFullError as error:
            print(
                f"{len(wave):3} rows: {error.num_needed_blocks} more blocks needed, "
                f"{error.num_available_blocks} available; {error.num_rows_that_fit} rows fit"
            )
            if len(wave) == 1:
                raise  # not even one row fits
            # 0 if the first row itself found no block in the middle of its answer.
            size = error.num_rows_that_fit or len(wave) // 2
        else:
            print(f"{len(wave):3} rows: done, {len(done)} of {len(prompts)}")
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description="A batch larger than the pool, in waves.")
    parser.add_argument("--model", help="hub id or folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--max-new-tokens", type=int, default=20, metavar="N")
    args = parser.parse_args()

    model, tokenizer = load(args.model)
    expected = answers(model, tokenizer, BATCH, args.max_new_tokens)

    # Half of what the batch can need, but enough for its longest row.
    needed = [
        math.ceil((len(ids) + args.max_new_tokens) / BLOCK_SIZE)
        for ids in tokenizer(list(BATCH)).input_ids
    ]
    num_blocks = max(sum(needed) // 2, *needed)
    print(f"{len(BATCH)} rows need up to {sum(needed)} blocks, the pool has {num_blocks}")
    hf_paged.patch(model, num_blocks=num_blocks, block_size=BLOCK_SIZE)
    got = answers_in_waves(model, tokenizer, BATCH, args.max_new_tokens)

    stats = hf_paged.stats(model)
    print(
        f"at most {stats.peak_used_blocks} blocks in use, {stats.peak_used_bytes / 2**20:.1f} MiB; "
        f"{stats.used_blocks} now"
    )
    print("\n" + tokenizer.decode(max(got, key=len), skip_special_tokens=True).strip())
    if got != expected or stats.used_blocks != 0:
        print("\nFAILED: other answers than the unpatched model's, or blocks left behind.")
        return 1
    print(f"\nThe answers of the unpatched model in all {len(BATCH)} rows.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
