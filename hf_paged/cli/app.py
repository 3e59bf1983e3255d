"""The program ``hf-paged``: its commands, and how it fails."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer
from rich.console import Console

from hf_paged.errors import HFPagedError

__all__ = ["app", "main"]

app = typer.Typer(
    name="hf-paged",
    help="A paged KV cache for Hugging Face causal language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; what the caller got wrong is one line on stderr and exit code 2.

    Args:
        arguments: without the program's name; None: ``sys.argv[1:]``.

    Returns:
        The exit code.
    """
    try:
        app(args=None if arguments is None else list(arguments), standalone_mode=True)
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except HFPagedError as error:
        Console(stderr=True, highlight=False).print(f"hf-paged: {error}", markup=False)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
