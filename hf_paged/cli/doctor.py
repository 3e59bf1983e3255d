"""``hf-paged doctor``: what works on this machine, to read and to paste into a bug report."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import torch
import typer

from hf_paged.cli.diagnosis import diagnose
from hf_paged.cli.self_check import check_backend

__all__ = ["doctor"]

_WIDTH = 100
_SIZES = frozenset({"total", "available", "free", "cgroup limit", "cgroup in use"}) | {
    "left of RLIMIT_AS",
    "default limit of a pool",
}


def doctor(
    check: Annotated[
        bool,
        typer.Option(help="Generate with a tiny patched model on every backend that works here."),
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, sizes in bytes.")] = False,
) -> None:
    """What is installed, which backends work here, and why the others do not.

    The output is plain text for a bug report. The self-check compares the tokens of a tiny random
    Llama before and after patching; the exit code is 1 if they differ.
    """
    facts = diagnose()
    checks = _self_check(facts["backends"]) if check else None
    if as_json:
        typer.echo(json.dumps(facts | {"self-check": checks}, indent=1))
    else:
        for line in _lines(facts, checks):
            typer.echo(line)
    if checks is not None and any(problem is not None for problem in checks.values()):
        raise typer.Exit(1)


def _self_check(backends: Mapping[str, Mapping[str, str | None]]) -> dict[str, str | None]:
    """Return what went wrong, or None, for each backend that can run on each device."""
    return {
        f"{name} on {device}": check_backend(name, torch.device(device))
        for device, reasons in backends.items()
        for name, reason in reasons.items()
        if reason is None
    }


def _lines(facts: Mapping[str, Any], checks: Mapping[str, str | None] | None) -> Iterator[str]:
    for section in ("installed", "machine", "native backend"):
        yield from _section(section, facts[section])
    for device, reasons in facts["backends"].items():
        yield from _section(
            f"backends on {device}",
            {name: f"no: {reason}" if reason else "works" for name, reason in reasons.items()},
        )
    yield from _section("memory", facts["memory"])
    for index, gpu in enumerate(facts["gpus"]):
        yield from _section(f"gpu {index}", gpu)
    if not facts["gpus"]:
        yield from ("gpu", "  none that torch can use", "")
    if checks is None:
        yield from ("self-check", "  skipped")
        return
    results = {
        name: f"FAILED: {problem}" if problem else "same tokens" for name, problem in checks.items()
    }
    yield from _section("self-check", results)


def _section(title: str, facts: Mapping[str, Any]) -> Iterator[str]:
    yield title
    width = max(map(len, facts), default=0)
    for name, value in facts.items():
        start = f"  {name:{width}s}  "
        yield from textwrap.wrap(
            _text(name, value),
            _WIDTH,
            initial_indent=start,
            subsequent_indent=" " * len(start),
            break_on_hyphens=False,
        )
    yield ""


def _text(name: str, value: Any) -> str:
    if value is None or value == []:
        return "-"
    if name in _SIZES:
        return f"{value / 2**30:.2f} GiB"
    return ", ".join(value) if isinstance(value, list) else str(value)
