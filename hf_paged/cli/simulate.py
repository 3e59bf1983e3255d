"""``hf-paged simulate``: one stream of requests, one budget, several allocators."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from hf_paged.errors import ConfigurationError
from hf_paged.simulation.allocator import Allocator
from hf_paged.simulation.length_distribution import LengthDistribution
from hf_paged.simulation.palette import require_matplotlib
from hf_paged.simulation.reference_picture import draw_reference
from hf_paged.simulation.reference_report import reference_json, reference_lines, reference_table
from hf_paged.simulation.reference_scenario import ReferenceScenario, run_reference
from hf_paged.simulation.request import Request
from hf_paged.simulation.serving import allocators_for_serving, serve
from hf_paged.simulation.serving_picture import draw_serving
from hf_paged.simulation.serving_report import serving_json, serving_tables
from hf_paged.simulation.serving_result import ServingResult
from hf_paged.simulation.workload import check_fits, draw_requests
from hf_paged.simulation.workload_file import read_requests

__all__ = ["simulate"]

_NUM_SLOTS = 8192
_MAX_LEN = 1024
_PLAIN_WIDTH = 100
"""Columns of a table that goes into a file or a pipe."""
_SERVING_PANEL = "Serving"
_DRAWING = ("--prompts", "--outputs", "--requests", "--rate", "--shared-prefix", "--samples")
"""Options that say how to draw requests."""


class Scenario(str, Enum):
    """What is simulated."""

    REFERENCE = "reference"
    SERVING = "serving"


def _serving_option(name: str, *, help: str, metavar: str | None = None) -> Any:
    return typer.Option(name, help=help, metavar=metavar, rich_help_panel=_SERVING_PANEL)


def simulate(
    context: typer.Context,
    scenario: Annotated[
        Scenario | None,
        typer.Option(
            help="reference: fill the memory, free every other request, then a long one comes. "
            "serving: requests arrive, wait, grow token by token and finish. Default: reference, "
            "or serving when an option of its own is given."
        ),
    ] = None,
    budget: Annotated[
        int | None,
        typer.Option(
            metavar="SLOTS",
            help="Token slots of each allocator. Default: what the first 40 requests need and 32 "
            f"more (reference), {_NUM_SLOTS} (serving).",
        ),
    ] = None,
    block_sizes: Annotated[
        str, typer.Option(metavar="SLOTS,...", help="Slots a block; several are compared.")
    ] = "16",
    max_len: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            help=f"What static reserves for everyone. Default: {_MAX_LEN}, or the longest request "
            "if that is longer.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of everything that is drawn at random.")] = 42,
    workload: Annotated[
        Path | None,
        _serving_option(
            "--workload",
            metavar="FILE",
            help="Requests to serve: CSV with a header, or JSONL, with arrival (a step), prompt "
            "and output (tokens); optional: samples, prefix (a name), prefix_tokens.",
        ),
    ] = None,
    prompts: Annotated[
        str,
        _serving_option(
            "--prompts",
            metavar="DISTRIBUTION",
            help="Prompt lengths: fixed:N, uniform:LOW:HIGH, normal:MEAN:DEVIATION or "
            "lognormal:MEDIAN:SIGMA, each with :SHORTEST:LONGEST behind it if you like.",
        ),
    ] = "normal:220:160:32:1024",
    outputs: Annotated[
        str, _serving_option("--outputs", metavar="DISTRIBUTION", help="Output lengths.")
    ] = "lognormal:96:0.8:1:512",
    num_requests: Annotated[int, _serving_option("--requests", help="How many to draw.")] = 200,
    rate: Annotated[
        float,
        _serving_option(
            "--rate", help="Requests that arrive in a step, on average; 0: all at the start."
        ),
    ] = 0.25,
    num_prefix_tokens: Annotated[
        int,
        _serving_option(
            "--shared-prefix",
            metavar="TOKENS",
            help="Let every prompt begin with the same tokens, as many as this.",
        ),
    ] = 0,
    num_samples: Annotated[
        int, _serving_option("--samples", help="Continuations of each prompt.")
    ] = 1,
    num_step_tokens: Annotated[
        int,
        _serving_option(
            "--step-tokens",
            metavar="TOKENS",
            help="Tokens that a step computes; prompts take several steps if need be.",
        ),
    ] = 2048,
    num_headroom_slots: Annotated[
        int,
        _serving_option(
            "--headroom",
            metavar="SLOTS",
            help="What contiguous takes beyond the tokens it has, so that a run can grow.",
        ),
    ] = 64,
    max_steps: Annotated[
        int | None,
        _serving_option(
            "--max-steps",
            metavar="STEPS",
            help="Stop here. Default: when every request is finished or refused.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the memory of each allocator (.png, .svg, .pdf)."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON to stdout, and nothing else.")
    ] = False,
) -> None:
    """Compare static, contiguous and paged memory for the KV cache; no model is loaded.

    Without options: 40 requests of a fixed seed fill the memory, every other one leaves, a long one
    comes, and the three allocators tell what they can still do.

    [bold]hf-paged simulate --rate 0.5 --shared-prefix 200 --samples 2[/bold] serves a stream,
    with prefix sharing, copy-on-write forks, eviction and swapping on top of paging.
    """
    given = _given_serving_options(context)
    if scenario is Scenario.REFERENCE and given:
        raise ConfigurationError(f"{given[0]} belongs to --scenario serving, not to reference")
    _at_least(1, "--budget", budget, "slots")
    _at_least(1, "--max-len", max_len, "tokens")
    _at_least(1, "--requests", num_requests, "requests")
    _at_least(0, "--shared-prefix", num_prefix_tokens, "tokens")
    _at_least(1, "--samples", num_samples, "samples")
    _at_least(1, "--step-tokens", num_step_tokens, "tokens")
    _at_least(0, "--headroom", num_headroom_slots, "slots")
    _at_least(1, "--max-steps", max_steps, "steps")
    if not 0 <= rate < math.inf:
        raise ConfigurationError(f"--rate: expected 0 or more requests a step, got {rate:g}")
    if plot is not None:
        require_matplotlib()

    if scenario is not Scenario.SERVING and not given:
        story = ReferenceScenario.draw(seed, budget, _MAX_LEN if max_len is None else max_len)
        result = run_reference(story, _parse_block_sizes(block_sizes, story.num_slots))
        if plot is not None:
            draw_reference(result, plot)
        if as_json:
            typer.echo(json.dumps(reference_json(result), indent=2))
        else:
            _print(*reference_lines(result), reference_table(result))
        return

    if workload is None:
        requests = draw_requests(
            num_requests,
            LengthDistribution.parse(prompts, "--prompts"),
            LengthDistribution.parse(outputs, "--outputs"),
            rate=rate,
            seed=seed,
            num_prefix_tokens=num_prefix_tokens,
            num_samples=num_samples,
        )
    else:
        for option in given:
            if option in _DRAWING:
                raise ConfigurationError(f"{option} draws requests, but --workload brings them")
        requests = read_requests(workload)
    num_slots = _NUM_SLOTS if budget is None else budget
    check_fits(requests, num_slots, max_len)
    if max_len is None:
        max_len = max(_MAX_LEN, *(r.num_prompt_tokens + r.num_output_tokens for r in requests))
    allocators = allocators_for_serving(
        num_slots, max_len, _parse_block_sizes(block_sizes, num_slots), num_headroom_slots
    )
    results = _serve_all(requests, allocators, num_step_tokens, max_steps, plot is not None)
    if plot is not None:
        draw_serving(results, plot)
    if as_json:
        typer.echo(json.dumps(serving_json(results), indent=2))
    else:
        _print(*serving_tables(results))


def _given_serving_options(context: typer.Context) -> list[str]:
    """Return the options of the serving scenario that stand on the command line."""
    given = []
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        panel = getattr(parameter, "rich_help_panel", None)
        # By name: typer brings its own copy of click's enum, or uses click's, by version.
        if panel == _SERVING_PANEL and source is not None and source.name != "DEFAULT":
            given.append(parameter.opts[0])
    return given


def _print(*parts: str | Table) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _PLAIN_WIDTH
    for part in parts:
        console.print(part, markup=False, soft_wrap=isinstance(part, str))


def _serve_all(
    requests: Sequence[Request],
    allocators: Sequence[Allocator],
    num_step_tokens: int,
    max_steps: int | None,
    keep_timeline: bool,
) -> list[ServingResult]:
    results = []
    with _progress() as progress:
        for allocator in allocators:
            task = progress.add_task(allocator.label, total=len(requests))
            results.append(
                serve(
                    requests,
                    allocator,
                    num_step_tokens=num_step_tokens,
                    max_steps=max_steps,
                    keep_timeline=keep_timeline,
                    on_progress=partial(_advance, progress, task),
                )
            )
    return results


def _advance(progress: Progress, task: TaskID, num_done: int) -> None:
    progress.update(task, completed=num_done)


def _progress() -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description:<22}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _at_least(least: int, option: str, value: int | None, unit: str) -> None:
    if value is not None and value < least:
        raise ConfigurationError(f"{option}: expected {least} or more {unit}, got {value}")


def _parse_block_sizes(text: str, num_slots: int) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1 or max(sizes) > num_slots:
        raise ConfigurationError(
            f"--block-sizes: expected whole numbers from 1 to the budget of {num_slots} slots, "
            f"like 8,16,32; got {text!r}"
        )
    return list(dict.fromkeys(sizes))
