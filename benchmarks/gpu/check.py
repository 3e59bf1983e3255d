"""Does hf_paged work on this GPU? About forty checks and a few timings, in five minutes at most.

    python benchmarks/gpu/check.py --json out.json     on a machine with a CUDA device
    python benchmarks/gpu/check.py --cpu               what can be checked without one
    python benchmarks/gpu/check.py --only attention/window graphs/model

Prints a table, then one line: passed=N failed=0 skipped=M. The exit code is 0 if none failed.
README.md beside this file says what each check proves.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runner import Check


def all_checks() -> list[Check]:
    """Return every check in the order in which they run: what others depend on comes first."""
    import attention
    import environment
    import fit
    import generating
    import graphs
    import libraries
    import rectangles
    import stores
    import timing
    import transfers

    modules: tuple[Any, ...] = (
        environment,
        stores,
        attention,
        transfers,
        graphs,
        rectangles,
        generating,
        libraries,
        fit,
        timing,
    )
    return [check for module in modules for check in module.CHECKS]


def use_interpreter(is_wanted: bool) -> None:
    """Start again if Triton would not run as wanted: it looks at the variable when imported."""
    wanted = "1" if is_wanted else "0"
    if os.environ.get("TRITON_INTERPRET", "0") != wanted:
        os.environ["TRITON_INTERPRET"] = wanted
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def main(arguments: Sequence[str] | None = None, checks: Sequence[Check] | None = None) -> int:
    """Run and return the exit code; ``checks``: other ones than :func:`all_checks`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cpu", action="store_true", help="Triton interprets; no GPU is used")
    parser.add_argument("--json", type=Path, help="write every figure there")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these checks alone")
    parser.add_argument("--time-limit", type=float, default=300.0, help="seconds, 300 by default")
    options = parser.parse_args(arguments)
    use_interpreter(options.cpu)

    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    if options.cpu:
        torch.set_num_threads(1)  # tiny models: threads cost more than they save
    elif torch.cuda.is_available():
        torch.set_float32_matmul_precision("highest")  # tf32 would change tokens
    else:
        parser.error("torch finds no CUDA device here; --cpu checks what can be checked without")

    import environment
    from runner import Machine, Runner

    known = list(all_checks() if checks is None else checks)
    names = [check.name for check in known]
    unknown = [name for name in options.only or () if name not in names]
    if unknown:
        parser.error(f"no check is named {', '.join(unknown)}: expected some of {' '.join(names)}")
    device = torch.device("cpu") if options.cpu else torch.device("cuda", 0)
    return Runner(
        [check for check in known if not options.only or check.name in options.only],
        Machine(device),
        time_limit=options.time_limit,
        json_file=options.json,
        facts=environment.facts(device),
    ).run()


if __name__ == "__main__":
    sys.exit(main())
