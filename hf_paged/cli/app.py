"""The program ``hf-paged``: its commands, and how it fails."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import typer
from rich.console import Console

from hf_paged.cli.doctor import doctor
from hf_paged.cli.plan import plan
from hf_paged.cli.simulate import simulate
from hf_paged.errors import HFPagedError

__all__ = ["app", "main"]

_UsageError: Any = typer.BadParameter.__mro__[1]
"""What the parser raises; typer keeps it in other places in other versions."""

_INTERRUPTED = 130
"""The exit code of a shell's Ctrl-C."""

app = typer.Typer(
    name="hf-paged",
    help="A paged KV cache for Hugging Face causal language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command()(plan)
app.command()(doctor)
app.command()(simulate)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; what the caller got wrong is one line on stderr and exit code 2.

    Args:
        arguments: without the program's name; None: ``sys.argv[1:]``.

    Returns:
        The exit code.
    """
    try:
        code = app(
            args=None if arguments is None else list(arguments),
            prog_name="hf-paged",
            standalone_mode=False,
        )
    except HFPagedError as error:
        return _fail(str(error))
    except _UsageError as error:
        return _fail(error.format_message())
    except typer.Abort:
        return _INTERRUPTED
    return code if isinstance(code, int) else 0


def _fail(message: str) -> int:
    Console(stderr=True, highlight=False).print(
        f"hf-paged: {message}", markup=False, soft_wrap=True
    )
    return 2


if __name__ == "__main__":
    sys.exit(main())
