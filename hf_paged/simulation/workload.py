"""A stream of requests: drawn at random, or checked after it was read from a file."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hf_paged.errors import ConfigurationError
from hf_paged.simulation.length_distribution import LengthDistribution
from hf_paged.simulation.request import Request

__all__ = ["check_fits", "draw_requests"]


def draw_requests(
    num_requests: int,
    prompts: LengthDistribution,
    outputs: LengthDistribution,
    *,
    rate: float,
    seed: int,
    num_prefix_tokens: int = 0,
    num_samples: int = 1,
) -> list[Request]:
    """Draw requests whose arrivals are a Poisson process.

    Args:
        num_requests: at least 1.
        prompts: prompt lengths, without the common prefix.
        outputs: output lengths.
        rate: requests that arrive in a step, on average; 0: all are there at the start.
        seed: equal seeds give equal requests.
        num_prefix_tokens: tokens with which every prompt begins, the same ones.
        num_samples: continuations of each prompt.
    """
    generator = random.Random(seed)
    requests = []
    arrival = 0.0
    for number in range(num_requests):
        if rate:
            arrival += generator.expovariate(rate)
        requests.append(
            Request(
                number,
                arrival,
                num_prefix_tokens + prompts.sample(generator),
                outputs.sample(generator),
                num_samples,
                0 if num_prefix_tokens else None,
                num_prefix_tokens,
                f"request {number}",
            )
        )
    return requests


def check_fits(requests: Sequence[Request], num_slots: int, max_len: int | None) -> None:
    """Refuse a stream with a request that could not run alone.

    Args:
        requests: in any order.
        num_slots: the budget.
        max_len: most tokens of a prompt and its output; None: no limit but the budget.

    Raises:
        ConfigurationError: names the first request that is too long.
    """
    for request in requests:
        total = request.num_prompt_tokens + request.num_output_tokens
        what = (
            f"{request.origin}: prompt {request.num_prompt_tokens} + output "
            f"{request.num_output_tokens} = {total} tokens"
        )
        if request.num_stored_tokens > num_slots:
            raise ConfigurationError(
                f"{what} can never fit into the budget of {num_slots} slots; raise --budget or "
                "leave the request out"
            )
        if max_len is not None and total > max_len:
            raise ConfigurationError(
                f"{what}, but --max-len is {max_len}; raise it or leave the request out"
            )
