"""A chat that keeps its prefix: each turn computes only what is new.

    python examples/chat.py [--model ID_OR_FOLDER] [--max-new-tokens 40]

Each turn gives `generate()` the whole conversation and the cache of the turn before. What the
cache holds is not computed again. The same chat on the unpatched model starts every turn from
nothing. The exit code is 1 if the two give different tokens, or if the paged chat computes a token
of the conversation twice.
"""

from __future__ import annotations

import argparse
import sys

import torch

import hf_paged
from real_model import CACHE_NAME, load

QUESTIONS = (
    "What is the capital of Portugal?",
    "Which river flows through it?",
    "And where does this river begin?",
)


def turn_text(tokenizer, question: str, *, is_first: bool) -> str:
    """Return what a turn adds to the conversation, up to where the model answers."""
    turns = [{"role": "user", "content": question}]
    if not is_first:
        # What the template writes after an answer belongs to the next turn.
        earlier = ({"role": "user", "content": "?"}, {"role": "assistant", "content": "<ANSWER>"})
        turns = [*earlier, *turns]
    text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    return text.split("<ANSWER>")[-1]


def chat(model, tokenizer, max_new_tokens: int, *, keep_cache: bool) -> tuple[list, list[int]]:
    """Return the conversation after each turn, and how many tokens each turn computed."""
    conversation = torch.empty(1, 0, dtype=torch.long)
    cache = None
    after, computed = [], []
    for question in QUESTIONS:
        text = turn_text(tokenizer, question, is_first=not after)
        new = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        if after and conversation[0, -1] == new[0, 0]:
            new = new[:, 1:]  # the answer has already ended its turn
        prompt = torch.cat([conversation, new], dim=1)
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            return_dict_in_generate=True,
            output_hidden_states=True,
            **({CACHE_NAME: cache} if cache is not None else {}),
        )
        conversation = output.sequences
        after.append(conversation)
        # One entry a step; in it, one [rows, tokens computed in this step, width] a layer.
        computed.append(sum(step[-1].shape[1] for step in output.hidden_states))
        if keep_cache:
            cache = output[CACHE_NAME]
    if cache is not None:
        print(f"the cache after {len(after)} turns: {cache}")
        cache.release()  # or let it be garbage-collected
    return after, computed


def main() -> int:
    parser = argparse.ArgumentParser(description="A chat that keeps its prefix.")
    parser.add_argument("--model", help="hub id or folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--max-new-tokens", type=int, default=40, metavar="N", help="per answer")
    args = parser.parse_args()

    model, tokenizer = load(args.model)
    if tokenizer.chat_template is None:
        parser.error(f"--model {args.model}: expected a model with a chat template")
    expected, from_nothing = chat(model, tokenizer, args.max_new_tokens, keep_cache=False)
    hf_paged.patch(model)
    got, with_cache = chat(model, tokenizer, args.max_new_tokens, keep_cache=True)

    print("\nturn  conversation  computed from nothing  computed with the cache of the last turn")
    for turn, conversation in enumerate(got):
        length = conversation.shape[1]
        print(f"{turn + 1:4} {length:13} {from_nothing[turn]:22} {with_cache[turn]:40}")
    print("\n" + tokenizer.decode(got[-1][0], skip_special_tokens=True))

    same = all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    # The last token of the last answer is chosen, but never fed back.
    if not same or sum(with_cache) != got[-1].shape[1] - 1:
        print("FAILED: other tokens than the unpatched model, or tokens computed twice.")
        return 1
    print("The tokens of the unpatched model, and each one computed once.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
