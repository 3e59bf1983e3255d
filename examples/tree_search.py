"""Tree search: `PagedCache.fork()` opens a branch without computing or copying its past.

    python examples/tree_search.py [--model ID_OR_FOLDER] [--max-new-tokens 24]

Each round opens three branches at each leaf: they begin with the three likeliest tokens and go on
greedily for a while. The two branches of the highest score stay, the others are released. A score
is the sum of the log-probabilities of the tokens. The exit code is 1 if a score is not that of one
plain forward of the unpatched model, or if the blocks in use are not fewer than copies would take.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass

import torch

import hf_paged
from prompts import STORY
from real_model import CACHE_NAME, load

PROMPT = STORY[0] + "\n\nOne of the programmers had an idea:"
ROUNDS, WIDTH, KEEP = 3, 3, 2


@dataclass
class Branch:
    """A node of the tree: the tokens after the prompt, and all that is needed to go on."""

    cache: hf_paged.PagedCache
    logits: torch.Tensor  # [vocabulary], for the token to come
    tokens: list[int]
    score: float


def grow(model, parent: Branch, token: int, num_tokens: int) -> Branch:
    """Return a branch of `parent` that goes on with `token`, then greedily."""
    branch = Branch(parent.cache.fork(), parent.logits, list(parent.tokens), parent.score)
    for _ in range(num_tokens):
        branch.score += branch.logits.log_softmax(-1)[token].item()
        branch.tokens.append(token)
        output = model(torch.tensor([[token]]), **{CACHE_NAME: branch.cache})
        branch.logits = output.logits[0, -1]
        token = int(branch.logits.argmax())
    return branch


def plain_score(model, prompt: torch.Tensor, tokens: list[int]) -> float:
    """Return the log-probability of `tokens` after the prompt, by one forward without a cache."""
    ids = torch.cat([prompt, torch.tensor([tokens])], dim=1)
    log_probs = model(ids, use_cache=False).logits[0, prompt.shape[1] - 1 : -1].log_softmax(-1)
    return log_probs.gather(-1, torch.tensor(tokens)[:, None]).sum().item()


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(description="Tree search with PagedCache.fork().")
    parser.add_argument("--model", help="hub id or folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--max-new-tokens", type=int, default=24, metavar="N", help="at least 3")
    args = parser.parse_args()
    if args.max_new_tokens < ROUNDS:
        parser.error(f"--max-new-tokens: expected at least {ROUNDS}, got {args.max_new_tokens}")

    model, tokenizer = load(args.model)
    prompt = tokenizer(PROMPT, return_tensors="pt").input_ids
    hf_paged.patch(model)
    block_size = hf_paged.stats(model).block_size

    cache = hf_paged.PagedCache(model)
    logits = model(prompt, **{CACHE_NAME: cache}).logits[0, -1]
    leaves = [Branch(cache, logits, [], 0.0)]
    is_smaller = True
    print(f"prompt of {prompt.shape[1]} tokens: {hf_paged.stats(model).used_blocks} blocks")
    for round_number in range(1, ROUNDS + 1):
        branches = [
            grow(model, leaf, token, args.max_new_tokens // ROUNDS)
            for leaf in leaves
            for token in leaf.logits.topk(WIDTH).indices.tolist()
        ]
        used = hf_paged.stats(model).used_blocks
        copies = sum(
            math.ceil(branch.cache.seq_lens[0] / block_size) for branch in (*leaves, *branches)
        )
        is_smaller = is_smaller and used < copies
        for leaf in leaves:
            leaf.cache.release()
        branches.sort(key=lambda branch: branch.score, reverse=True)
        leaves, pruned = branches[:KEEP], branches[KEEP:]
        for branch in pruned:
            branch.cache.release()
        print(
            f"round {round_number}: {len(branches)} branches, {used} blocks in use, copies would "
            f"take {copies}; after pruning {hf_paged.stats(model).used_blocks}"
        )
    for leaf in leaves:
        leaf.cache.release()

    hf_paged.unpatch(model)
    plain = [plain_score(model, prompt, leaf.tokens) for leaf in leaves]
    for leaf, score in zip(leaves, plain, strict=True):
        text = " ".join(tokenizer.decode(leaf.tokens).split())
        print(f"\n{leaf.score:8.4f} (unpatched, in one forward: {score:.4f})  {text}")
    same = all(abs(leaf.score - score) < 1e-3 for leaf, score in zip(leaves, plain, strict=True))
    if not same or not is_smaller:
        print("\nFAILED: other scores than the unpatched model's, or branches that share nothing.")
        return 1
    print("\nThe scores of the unpatched model.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
