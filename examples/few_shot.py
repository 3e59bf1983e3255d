"""Few-shot evaluation: the examples in the prompt are computed once, not once a question.

    python examples/few_shot.py [--model ID_OR_FOLDER] [--questions 12]

A question is answered by the choice of the highest log-likelihood after five solved examples.
The examples go into one `PagedCache`; each question is a fork of it, each choice a fork of that.
The exit code is 1 if a log-likelihood is not that of a plain forward of the unpatched model, or if
no tokens were saved.
"""

from __future__ import annotations

import argparse
import sys

import torch

import hf_paged
from real_model import CACHE_NAME, load

SHOTS = """Question: What do bees make?
Answer: honey

Question: How many legs does a spider have?
Answer: eight

Question: What is frozen water called?
Answer: ice

Question: Where do birds lay their eggs?
Answer: in a nest

Question: Who flies an aeroplane?
Answer: a pilot
"""
QUESTIONS = (  # (question, choices, index of the right one)
    ("What do cows eat?", ("sand", "grass", "paint"), 1),
    ("What is the capital of France?", ("Paris", "New York", "Tokyo"), 0),
    ("Which animal barks?", ("a cat", "a fish", "a dog"), 2),
    ("What is two plus two?", ("four", "nine", "twelve"), 0),
    ("What do people read?", ("soup", "books", "shoes"), 1),
    ("What shines in the sky at night?", ("a spoon", "the kitchen", "the moon"), 2),
    ("Where do fish live?", ("in the water", "in the sky", "in a tree"), 0),
    ("Which day comes after Monday?", ("Sunday", "Tuesday", "Friday"), 1),
    ("What falls from the clouds?", ("rain", "bread", "letters"), 0),
    ("What has strings and makes music?", ("a hammer", "a violin", "a pillow"), 1),
    ("What is the opposite of day?", ("morning", "summer", "night"), 2),
    ("Who helps people who are ill?", ("a doctor", "a thief", "a painter"), 0),
)


def log_likelihood(logits: torch.Tensor, choice: torch.Tensor) -> float:
    """Return log p(choice); `logits` [T, vocabulary] are those before each of its T tokens."""
    return logits.log_softmax(-1).gather(-1, choice[0, :, None]).sum().item()


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(description="Few-shot evaluation over a shared prefix.")
    parser.add_argument("--model", help="hub id or folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--questions", type=int, default=len(QUESTIONS), metavar="N")
    args = parser.parse_args()

    model, tokenizer = load(args.model)
    shots = tokenizer(SHOTS, return_tensors="pt").input_ids
    tasks = []  # ids of the question, ids of each choice, index of the right one
    for question, choices, right in QUESTIONS[: args.questions]:
        texts = [f"\nQuestion: {question}\nAnswer:"]
        texts += [f" {choice}" for choice in choices]
        ids = [tokenizer(t, return_tensors="pt", add_special_tokens=False).input_ids for t in texts]
        tasks.append((ids[0], ids[1:], right))

    plain, plain_tokens = [], 0
    for question, choices, _ in tasks:
        for choice in choices:
            ids = torch.cat([shots, question, choice], dim=1)
            logits = model(ids, use_cache=False).logits[0, -choice.shape[1] - 1 : -1]
            plain.append(log_likelihood(logits, choice))
            plain_tokens += ids.shape[1]

    hf_paged.patch(model)
    paged, paged_tokens, correct = [], shots.shape[1], 0
    with hf_paged.PagedCache(model) as prefix:
        model(shots, **{CACHE_NAME: prefix}, logits_to_keep=1)
        for question, choices, right in tasks:
            with prefix.fork() as asked:
                before = model(question, **{CACHE_NAME: asked}).logits[0, -1:]
                paged_tokens += question.shape[1]
                for choice in choices:
                    with asked.fork() as answered:
                        logits = model(choice, **{CACHE_NAME: answered}).logits[0, :-1]
                    paged.append(log_likelihood(torch.cat([before, logits]), choice))
                    paged_tokens += choice.shape[1]
            scores = paged[-len(choices) :]
            correct += scores.index(max(scores)) == right
        stats = hf_paged.stats(model)

    difference = max(abs(a - b) for a, b in zip(paged, plain, strict=True))
    print(f"{len(tasks)} questions of 3 choices after {shots.shape[1]} tokens of examples")
    print(f"right answers:     {correct} of {len(tasks)}")
    print(f"tokens computed:   {paged_tokens}, without a cache {plain_tokens}")
    print(
        f"blocks:            {stats.used_blocks} for the examples, {stats.peak_used_blocks} at most"
    )
    print(f"log-likelihoods differ from a plain forward by at most {difference:.1e}")
    if difference > 1e-3 or paged_tokens >= plain_tokens:
        print("FAILED: other log-likelihoods than the unpatched model's, or nothing saved.")
        return 1
    print("The log-likelihoods of the unpatched model.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
