"""Run the ```python blocks of a Markdown file, in order, in one namespace: `readme_code.py FILE`.

A block whose preceding line is `<!-- not run -->` is skipped (blank lines between do not matter).
Line numbers in a traceback are those of the Markdown file. Blocks may import from `examples/`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

NOT_RUN = "<!-- not run -->"
ROOT = Path(__file__).resolve().parent.parent


def python_blocks(text: str) -> Iterator[tuple[int, str, bool]]:
    """Yield (number of the block's first line, its code, whether it is run)."""
    lines = iter(enumerate(text.splitlines(), start=1))
    previous = ""
    for number, line in lines:
        if line.startswith("```"):
            code = []
            for _, inner in lines:
                if inner.rstrip() == "```":
                    break
                code.append(inner)
            else:
                raise SystemExit(f"line {number}: the block is never closed")
            if line[3:].split()[:1] == ["python"]:
                yield number + 1, "\n".join(code) + "\n", previous != NOT_RUN
        if line.strip():
            previous = line.strip()


def main(markdown: str) -> int:
    path = Path(markdown)
    sys.path.insert(0, str(ROOT / "examples"))
    namespace = {"__name__": "__main__"}
    ran = 0
    for first, code, run in python_blocks(path.read_text(encoding="utf-8")):
        if not run:
            print(f"{path.name}:{first}: not run")
            continue
        start = time.perf_counter()
        exec(compile("\n" * (first - 1) + code, str(path), "exec"), namespace)
        print(f"{path.name}:{first}: ran in {time.perf_counter() - start:.1f} s")
        ran += 1
    if not ran:
        print(f"{path.name}: no block was run")
    return 0 if ran else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
