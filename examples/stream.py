"""A stream to the terminal: words appear as they are computed.

    python examples/stream.py [--model ID_OR_FOLDER] [--max-new-tokens 60]

Streamers are transformers' own and know nothing of the paged cache. The exit code is 1 if the
tokens differ from those of the unpatched model, or if they did not come one by one.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from transformers import TextStreamer

import hf_paged
from real_model import load

PROMPT = "Here is how to make a good cup of tea:"


class TimedTextStreamer(TextStreamer):
    """A `TextStreamer` that also notes when each token came; the first is the prompt."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())
        super().put(value)


def main() -> int:
    parser = argparse.ArgumentParser(description="A stream to the terminal.")
    parser.add_argument("--model", help="hub id or folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--max-new-tokens", type=int, default=60, metavar="N")
    args = parser.parse_args()

    model, tokenizer = load(args.model)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    options = {"do_sample": False, "max_new_tokens": args.max_new_tokens}
    expected = model.generate(**inputs, **options)

    hf_paged.patch(model)
    streamer = TimedTextStreamer(tokenizer, skip_special_tokens=True)
    output = model.generate(**inputs, **options, streamer=streamer)

    num_prompt, num_new = inputs.input_ids.shape[1], output.shape[1] - inputs.input_ids.shape[1]
    start, first, last = streamer.times[0], streamer.times[1], streamer.times[-1]
    print(
        f"\nfirst of {num_new} tokens after {first - start:.2f} s, last after {last - start:.2f} s"
    )
    stats = hf_paged.stats(model)
    print(
        f"at most {stats.peak_used_blocks} blocks ({stats.peak_used_bytes / 2**20:.2f} MiB) for "
        f"{num_prompt} + {num_new} tokens, {stats.used_blocks} in use now"
    )
    if not torch.equal(output, expected) or len(streamer.times) != 1 + num_new:
        print("FAILED: other tokens than the unpatched model, or not one by one.")
        return 1
    print("The tokens of the unpatched model, each streamed when it was chosen.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
