"""Requests from a file: CSV with a header, or one JSON object a line.

    arrival,prompt,output            {"arrival": 0, "prompt": 220, "output": 64}
    0,220,64                         {"arrival": 1.5, "prompt": 97, "output": 12}
    1.5,97,12

``arrival`` is a step, lengths are in tokens. Three more columns may be there: ``samples``
(continuations of the prompt), ``prefix`` (a name) and ``prefix_tokens`` (how many tokens prompts
with the same name have in common).
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from hf_paged.errors import ConfigurationError
from hf_paged.simulation.request import Request

__all__ = ["read_requests"]

_REQUIRED = ("arrival", "prompt", "output")
_OPTIONAL = ("samples", "prefix", "prefix_tokens")


def read_requests(path: Path) -> list[Request]:
    """Read a workload, ordered by arrival.

    Args:
        path: ends in ``.csv``, ``.jsonl`` or ``.ndjson``.

    Raises:
        ConfigurationError: names the file, the line and what is wrong there.
    """
    readers = {".csv": _csv_rows, ".jsonl": _jsonl_rows, ".ndjson": _jsonl_rows}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ConfigurationError(f"{path}: expected a file that ends in .csv, .jsonl or .ndjson")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigurationError(f"{path}: cannot be read: {reason}") from error
    prefixes: dict[str, int] = {}
    rows = [
        _Row(f"line {line} of {path}", row).request(prefixes) for line, row in reader(path, text)
    ]
    if not rows:
        raise ConfigurationError(f"{path}: holds no requests")
    rows.sort(key=lambda request: request.arrival)
    return [replace(request, number=number) for number, request in enumerate(rows)]


def _csv_rows(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, object]]]:
    reader = csv.reader(text.splitlines(), strict=True)
    columns: list[str] | None = None
    try:
        for cells in reader:
            if not cells:
                continue
            stripped = [cell.strip() for cell in cells]
            if columns is None:
                columns = stripped
                _check_columns(columns, f"line {reader.line_num} of {path}")
            elif len(cells) != len(columns):
                raise ConfigurationError(
                    f"line {reader.line_num} of {path}: {len(cells)} values for {len(columns)} "
                    f"columns ({', '.join(columns)})"
                )
            else:
                named = zip(columns, stripped, strict=True)
                yield reader.line_num, {name: cell for name, cell in named if cell}
    except csv.Error as error:
        raise ConfigurationError(f"line {reader.line_num} of {path}: no CSV: {error}") from error


def _jsonl_rows(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, object]]]:
    for line, content in enumerate(text.splitlines(), start=1):
        if not content.strip():
            continue
        where = f"line {line} of {path}"
        try:
            row = json.loads(content)
        except json.JSONDecodeError as error:
            raise ConfigurationError(f"{where}: no JSON: {error.msg}") from error
        if not isinstance(row, dict):
            raise ConfigurationError(f"{where}: expected an object, got {content.strip()[:40]!r}")
        _check_columns(list(row), where)
        yield line, row


def _check_columns(columns: list[str], where: str) -> None:
    known = (*_REQUIRED, *_OPTIONAL)
    unknown = [name for name in columns if name not in known]
    missing = [name for name in _REQUIRED if name not in columns]
    if unknown:
        raise ConfigurationError(
            f"{where}: unknown column {unknown[0]!r}; known are {', '.join(known)}"
        )
    if missing:
        raise ConfigurationError(f"{where}: column {missing[0]!r} is missing")
    if len(set(columns)) < len(columns):
        raise ConfigurationError(f"{where}: a column is named twice: {', '.join(columns)}")


class _Row:
    """One line of a file, and where it stands."""

    def __init__(self, where: str, values: Mapping[str, object]) -> None:
        self._where = where
        self._values = values

    def request(self, prefixes: dict[str, int]) -> Request:
        """Check the line; ``prefixes`` numbers the prefix names seen so far."""
        num_prompt_tokens = self._count("prompt", at_least=1)
        num_prefix_tokens = self._count("prefix_tokens", at_least=0, default=0)
        prefix = self._values.get("prefix")
        if (prefix is None) != (num_prefix_tokens == 0):
            raise ConfigurationError(
                f"{self._where}: prefix and prefix_tokens belong together, one is missing"
            )
        if num_prefix_tokens > num_prompt_tokens:
            raise ConfigurationError(
                f"{self._where}: prefix_tokens {num_prefix_tokens} is more than prompt "
                f"{num_prompt_tokens}"
            )
        return Request(
            0,
            self._arrival(),
            num_prompt_tokens,
            self._count("output", at_least=1),
            self._count("samples", at_least=1, default=1),
            None if prefix is None else prefixes.setdefault(str(prefix), len(prefixes)),
            num_prefix_tokens,
            self._where,
        )

    def _arrival(self) -> float:
        arrival = self._number("arrival", None)
        if not arrival >= 0 or math.isinf(arrival):
            raise ConfigurationError(
                f"{self._where}: arrival must be a step, 0 or later, got {arrival:g}"
            )
        return arrival

    def _count(self, column: str, *, at_least: int, default: int | None = None) -> int:
        number = self._number(column, default)
        if not number >= at_least or number % 1 != 0:
            raise ConfigurationError(
                f"{self._where}: {column} must be a whole number of at least {at_least}, "
                f"got {number:g}"
            )
        return int(number)

    def _number(self, column: str, default: int | None) -> float:
        value = self._values.get(column, default)
        try:
            if isinstance(value, bool) or not isinstance(value, int | float | str):
                raise ValueError
            return float(value)
        except (ValueError, OverflowError):
            got = "nothing" if value is None else repr(value)
            raise ConfigurationError(
                f"{self._where}: {column} must be a number, got {got}"
            ) from None
