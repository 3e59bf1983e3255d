"""A picture of the pool in a terminal: letters and shades that need no colour to be read.

KV pool: 24 blocks of 4 tokens, 48.0 KiB: 7 used (4 shared), 3 cached, 14 free
 0  4433ABC░░░··············
A-C by one sequence 3   2-9 shared by so many 4   ░ cached 3   · free 14
A  cache 0 row 0  10 tokens  0-1×3 2
"""

from __future__ import annotations

import io
import shutil
import string
from collections.abc import Iterator
from typing import NamedTuple

from rich.console import Console, ConsoleOptions
from rich.text import Text

from hf_paged.cache.pool_view import PoolBlock, PoolCell, PoolView
from hf_paged.cache.stats import human_bytes
from hf_paged.core.block_table import NO_BLOCK

__all__ = [
    "FREE",
    "LETTERS",
    "PoolPicture",
    "TableRun",
    "block_symbol",
    "cell_symbol",
    "headline",
    "legend",
    "table_runs",
    "to_text",
]

LETTERS = string.ascii_uppercase + string.ascii_lowercase
"""Of the first sequences; later ones are all ``OTHER``."""

OTHER, MANY, RUNNING, CACHED, FREE = "■", "+", "*", "░", "·"
SOME_USED, ALL_USED, SOME_SHARED = "▒", "█", "▚"

_IN_ASCII = str.maketrans("■░·▒█▚×…", "@-.:=#x~")
_OWN_COLOURS = ("green", "cyan", "blue", "red")
_STYLES = {
    FREE: "dim",
    CACHED: "yellow",
    SOME_SHARED: "bold magenta",
    MANY: "bold magenta",
    RUNNING: "bold",
    SOME_USED: "green",
    ALL_USED: "green",
    OTHER: "green",
}
_MAX_CELLS = 1024
_MAX_LINES = 64
_WIDEST_MAP = 64


class TableRun(NamedTuple):
    """Neighbours in a block table whose ids count up and that equally many refer to.

    Attributes:
        first: block id of the first, -1 for entries behind the window.
        length: entries.
        ref_count: references to each of the blocks.
    """

    first: int
    length: int
    ref_count: int

    def __str__(self) -> str:
        """Return ``7``, ``0-3×4`` where four refer to each block, or ``(2 behind)``."""
        if self.first == NO_BLOCK:
            return f"({self.length} behind)"
        ids = f"{self.first}"
        if self.length > 1:
            ids += f"-{self.first + self.length - 1}"
        return f"{ids}×{self.ref_count}" if self.ref_count > 1 else ids


def table_runs(view: PoolView, table: tuple[int, ...]) -> list[TableRun]:
    """Cut a block table into runs."""
    runs: list[TableRun] = []
    first = expected = NO_BLOCK
    length = count = 0
    for block_id in table:
        ref_count = 0 if block_id == NO_BLOCK else view.blocks[block_id].ref_count
        if length and (block_id != expected or ref_count != count):
            runs.append(TableRun(first, length, count))
            length = 0
        if not length:
            first, count = block_id, ref_count
        length += 1
        expected = NO_BLOCK if block_id == NO_BLOCK else block_id + 1
    return [*runs, TableRun(first, length, count)] if length else runs


def block_symbol(block: PoolBlock) -> str:
    """Return the character of one block."""
    if block.state != "used":
        return FREE if block.state == "free" else CACHED
    if block.is_shared:
        return str(block.ref_count) if block.ref_count <= 9 else MANY
    if not block.sequences:
        return RUNNING
    return LETTERS[block.sequences[0]] if block.sequences[0] < len(LETTERS) else OTHER


def cell_symbol(cell: PoolCell) -> str:
    """Return the character of a run of several blocks."""
    if cell.num_shared:
        return SOME_SHARED
    if cell.num_used:
        return ALL_USED if cell.num_used == cell.num_blocks else SOME_USED
    return CACHED if cell.num_cached else FREE


def headline(view: PoolView) -> str:
    """Return the pool in one sentence."""
    return (
        f"KV pool: {view.num_blocks:,} blocks of {view.block_size:,} tokens, "
        f"{human_bytes((view.num_blocks + 1) * view.bytes_per_block)}: {view.num_used:,} used "
        f"({view.num_shared:,} shared), {view.num_cached:,} cached, {view.num_free:,} free"
    )


def legend(view: PoolView, blocks_per_cell: int) -> list[tuple[str, str]]:
    """Return the symbols of a map, each with its meaning and the number of its blocks."""
    entries: list[tuple[str, str]] = []
    running = sum(block.ref_count == 1 and not block.sequences for block in view.blocks)
    if blocks_per_cell > 1:
        entries.append((ALL_USED, "all used"))
        entries.append((SOME_USED, "some used"))
        entries.append((SOME_SHARED, "some shared"))
        entries.append((CACHED, "some cached, none used"))
        entries.append((FREE, "free"))
        return entries
    if own := view.num_used - view.num_shared - running:
        count = min(len(view.sequences), len(LETTERS))
        letters = LETTERS[0] if count == 1 else f"{LETTERS[0]}-{LETTERS[count - 1]}"
        more = f" {OTHER}" if len(view.sequences) > len(LETTERS) else ""
        entries.append((letters + more, f"of one sequence: {own:,}"))
    if view.num_shared:
        entries.append((f"2-9 {MANY}", f"shared by so many: {view.num_shared:,}"))
    if running:
        entries.append((RUNNING, f"of a running forward: {running:,}"))
    if view.num_cached:
        entries.append((CACHED, f"cached: {view.num_cached:,}"))
    entries.append((FREE, f"free: {view.num_free:,}"))
    return entries


class PoolPicture:
    """What rich draws for a :class:`PoolView`.

    Args:
        view: to be drawn.
    """

    def __init__(self, view: PoolView) -> None:
        self._view = view

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Yield the headline, the map with its legend, and a line a sequence."""
        for line in self._lines(options.max_width):
            if options.ascii_only:
                line.plain = line.plain.translate(_IN_ASCII)
            yield line

    def _lines(self, width: int) -> Iterator[Text]:
        yield Text(headline(self._view), style="bold")
        yield from self._map(width)
        yield from self._sequences(width)

    def _map(self, width: int) -> Iterator[Text]:
        view = self._view
        margin = len(f"{view.num_blocks:,}") + 2
        num_columns = next((n for n in (_WIDEST_MAP, 32, 16) if n + margin <= width), 8)
        cells = view.cells(_MAX_CELLS, num_columns)
        size = cells[0].num_blocks if cells else 1
        for start in range(0, len(cells), num_columns):
            line = Text(f"{cells[start].first:>{margin - 2},}  ", style="", no_wrap=True)
            for cell in cells[start : start + num_columns]:
                block = view.blocks[cell.first]
                symbol = block_symbol(block) if size == 1 else cell_symbol(cell)
                line.append(symbol, style=_style(symbol))
            yield line
        covered = cells[-1].last + 1 if cells else 0
        if covered < view.num_blocks:
            rest = view.num_blocks - covered
            yield Text(f"{covered:>{margin - 2},}  {rest:,} free blocks from here on", style="dim")
        line = Text(" " * margin)
        if size > 1:
            line.append(f"a cell is {size:,} blocks")
        for symbol, meaning in legend(view, size):
            if line.plain.strip():
                line.append("   ")
            if len(line) + len(symbol) + 1 + len(meaning) > width and line.plain.strip():
                line.rstrip()
                yield line
                line = Text(" " * margin)
            line.append(symbol, style=_style(symbol)).append(f" {meaning}")
        yield line

    def _sequences(self, width: int) -> Iterator[Text]:
        view = self._view
        shown = view.sequences[: max(1, _MAX_LINES // len(view.groups))]
        name_width = max((len(sequence.name) for sequence in shown), default=0)
        tokens_width = max((len(f"{s.num_tokens:,}") for s in shown), default=0)
        group_width = max(len(group.name) for group in view.groups)
        for index, sequence in enumerate(shown):
            letter = LETTERS[index] if index < len(LETTERS) else OTHER
            head = f"  {sequence.name:<{name_width}}  {sequence.num_tokens:>{tokens_width},} tokens"
            for number, table in enumerate(sequence.tables):
                line = Text(no_wrap=True, overflow="ellipsis")
                if number == 0:
                    line.append(letter, style=_style(letter)).append(head)
                else:
                    line.append(" " * (len(head) + 1))
                if len(sequence.tables) > 1:
                    line.append(f"  {view.groups[number].name:<{group_width}}")
                runs = table_runs(view, table)
                for run in _shorten(runs, width - len(line) - 2):
                    style = "dim"
                    if isinstance(run, TableRun) and run.ref_count:
                        style = "bold magenta" if run.ref_count > 1 else _style(letter)
                    line.append(" " if run is not runs[0] else "  ").append(str(run), style=style)
                yield line
        if len(view.sequences) > len(shown):
            yield Text(f"and {len(view.sequences) - len(shown):,} more sequences", style="dim")


def to_text(view: PoolView, width: int | None = None) -> str:
    """Return the picture without colour.

    Args:
        view: to be drawn.
        width: of a line in characters; None: of the terminal.
    """
    width = width or shutil.get_terminal_size((100, 24)).columns
    file = io.StringIO()
    console = Console(file=file, width=width, color_system=None, legacy_windows=False)
    console.print(PoolPicture(view))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def _style(symbol: str) -> str:
    if symbol in LETTERS:
        return _OWN_COLOURS[LETTERS.index(symbol) % len(_OWN_COLOURS)]
    return _STYLES.get(symbol, "bold magenta" if symbol.isdigit() or MANY in symbol else "")


def _shorten(runs: list[TableRun], width: int) -> list[TableRun | str]:
    """Leave out runs before the last until the line fits; say how many entries are missing."""
    if sum(len(str(run)) + 1 for run in runs) <= width + 1:
        return list(runs)
    room = width - len(str(runs[-1])) - len("…1,000,000…") - 2
    kept: list[TableRun | str] = []
    for run in runs[:-1]:
        room -= len(str(run)) + 1
        if room < 0:
            break
        kept.append(run)
    missing = sum(run.length for run in runs[len(kept) : -1])
    return [*kept, f"…{missing:,}…", runs[-1]]
