"""``hf-paged plan``: how many tokens and sequences fit into a memory budget."""

from __future__ import annotations

import json
import re
from typing import Annotated

import torch
import typer

from hf_paged.cache.memory import num_free_bytes
from hf_paged.cli.plan_report import make_report, print_report
from hf_paged.cli.planned_model import describe_model, positive
from hf_paged.config import PagedConfig, parse_kv_memory
from hf_paged.errors import ConfigurationError

__all__ = ["plan"]


def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Id on the Hugging Face hub, or a folder with a config.json. Only the config is "
            "read, never the weights.",
            show_default=False,
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Budget for K and V: '4GiB', '512MB', bytes, or a fraction in (0, 1) of the "
            "memory that is free here. Default: 0.5, as hf_paged.patch does.",
            show_default=False,
        ),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help="Tokens that the sequences have in the cache. Default: 128,512,2048, or what "
            "--prompt and --new say.",
            show_default=False,
        ),
    ] = None,
    prompt: Annotated[
        int | None,
        typer.Option(help="Tokens of a prompt; with --new, one more length.", show_default=False),
    ] = None,
    new: Annotated[
        int | None,
        typer.Option(
            help="New tokens after --prompt; the last one is never stored.", show_default=False
        ),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            help="Tokens that StaticCache reserves for each sequence. Default: the longest length.",
            show_default=False,
        ),
    ] = None,
    block_size: Annotated[
        int, typer.Option(help="Tokens a block, a power of two; others are compared with it.")
    ] = 16,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32, bfloat16 or float16. Default: the config's.", show_default=False
        ),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="Instead of MODEL: layers.", show_default=False)
    ] = None,
    kv_heads: Annotated[
        int | None,
        typer.Option(help="Instead of MODEL: key/value heads a layer.", show_default=False),
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option(help="Instead of MODEL: size of a head.", show_default=False)
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(
            help="Instead of MODEL: attention window of the sliding layers.", show_default=False
        ),
    ] = None,
    sliding_layers: Annotated[
        int | None,
        typer.Option(
            help="Instead of MODEL: how many layers slide. Default with --window: all.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, sizes in bytes.")] = False,
) -> None:
    """How many tokens and sequences fit into a memory budget.

    Compares transformers' DynamicCache (every row padded to the longest), StaticCache (every row as
    long as the longest can be) and the paged cache, and block sizes with each other.

    hf-paged plan HuggingFaceTB/SmolLM2-135M-Instruct --memory 4GiB

    hf-paged plan --layers 32 --kv-heads 8 --head-dim 128 --dtype bf16 --memory 4GiB
    """
    PagedConfig(block_size=block_size)
    num_bytes = _parse_memory(memory)
    counts = _all_lengths(lengths, prompt, new)
    longest = positive("--max-length", max_length) if max_length is not None else max(counts)
    if longest < max(counts):
        raise ConfigurationError(
            f"--max-length {longest} is less than the longest sequence of {max(counts)} tokens: "
            f"expected at least that; pass --max-length {max(counts)} or leave it out."
        )
    by_hand = {
        "--layers": layers,
        "--kv-heads": kv_heads,
        "--head-dim": head_dim,
        "--window": window,
        "--sliding-layers": sliding_layers,
    }
    subject = describe_model(model, by_hand, dtype)
    report = make_report(subject, num_bytes, counts, longest, block_size)
    if as_json:
        typer.echo(json.dumps(report, indent=1))
    else:
        print_report(report)


def _parse_memory(memory: str | None) -> int:
    fraction = 0.5 if memory is None else None
    if memory is not None and re.fullmatch(r"0?\.\d+", memory.strip()):
        fraction = float(memory)
    free = num_free_bytes(torch.device("cpu"))
    try:
        if fraction is not None and 0 < fraction < 1:
            return parse_kv_memory(fraction, num_free_bytes=free)
        return parse_kv_memory(memory or "", num_free_bytes=free)
    except ConfigurationError as error:
        raise ConfigurationError(str(error).replace("kv_memory=", "--memory ", 1)) from None


def _all_lengths(lengths: str | None, prompt: int | None, new: int | None) -> list[int]:
    counts = []
    if lengths is not None:
        for word in lengths.split(","):
            if not word.strip().isdecimal() or int(word) < 1:
                raise ConfigurationError(
                    f"--lengths {lengths!r} has {word!r} in it: expected numbers of tokens of at "
                    "least 1 and commas between them; e.g. --lengths 128,512,2048."
                )
            counts.append(int(word))
    if (prompt is None) != (new is None):
        given, other = ("--prompt", "--new") if new is None else ("--new", "--prompt")
        raise ConfigurationError(
            f"{given} without {other}: expected both; e.g. --prompt 512 --new 128."
        )
    if prompt is not None:
        counts.append(positive("--prompt", prompt) + positive("--new", new) - 1)
    return sorted(set(counts)) if counts else [128, 512, 2048]
