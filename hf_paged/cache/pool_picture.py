"""A picture of the pool for notebooks (HTML, without scripts) and files (through matplotlib)."""

from __future__ import annotations

import os
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from hf_paged.cache.pool_text import (
    LETTERS,
    block_symbol,
    cell_symbol,
    headline,
    legend,
    table_runs,
)
from hf_paged.cache.pool_view import PoolBlock, PoolCell, PoolSequence, PoolView
from hf_paged.core.block_table import NO_BLOCK
from hf_paged.errors import ConfigurationError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["save", "to_html"]

_MAX_CELLS = 1000
_MAX_HTML_LINES = 64
_MAX_RUNS = 24

# Colours are seen through, over whatever the page's background is; text keeps the page's colour.
_CSS = """
.hf-paged-pool{font:13px/1.5 system-ui,sans-serif;color:inherit}
.hf-paged-pool .map{display:grid;grid-template-columns:repeat(40,15px);gap:1px;margin:.5em 0}
.hf-paged-pool i{display:inline-block;width:15px;height:15px;font:10px/15px monospace;
text-align:center;vertical-align:middle;background:rgba(128,128,128,.16);border-radius:2px}
.hf-paged-pool i.u{background:rgba(38,132,230,.5)}
.hf-paged-pool i.p{background:rgba(38,132,230,.25)}
.hf-paged-pool i.s{background:rgba(226,92,20,.6)}
.hf-paged-pool i.c{background:rgba(40,160,90,.3)}
.hf-paged-pool .key{margin:0 1.2em .5em 0;white-space:nowrap}
.hf-paged-pool .key i{width:auto;min-width:15px;padding:0 3px;box-sizing:border-box}
.hf-paged-pool table{border:0;border-collapse:collapse;margin:.5em 0;font:inherit;color:inherit}
.hf-paged-pool td{border:0;padding:2px 14px 2px 0;text-align:left;white-space:nowrap;
background:none;color:inherit}
.hf-paged-pool td:last-child{white-space:normal}
.hf-paged-pool b{display:inline-block;font:12px/1.4 monospace;padding:0 4px;margin:1px 3px 1px 0;
border-radius:2px;background:rgba(38,132,230,.28)}
.hf-paged-pool b.s{background:rgba(226,92,20,.38)}
.hf-paged-pool b.n{background:none;opacity:.65;padding:0}
"""
_CLASSES = {"░": "c", "·": "", "▒": "p", "█": "u", "▚": "s", "■": "u", "*": "u"}


def to_html(view: PoolView) -> str:
    """Return a fragment that carries its own style, for light and dark pages."""
    cells = view.cells(_MAX_CELLS, 40)
    size = cells[0].num_blocks if cells else 1
    covered = cells[-1].last + 1 if cells else 0
    note = f"A cell is {size:,} blocks. " if size > 1 else ""
    if covered < view.num_blocks:
        note += f"Blocks {covered:,} to {view.num_blocks - 1:,} are free."
    keys = "".join(
        f'<span class="key"><i class="{_class(symbol)}">{_glyph(symbol)}</i> {escape(meaning)}'
        "</span> "
        for symbol, meaning in legend(view, size)
    )
    shown = view.sequences[: max(1, _MAX_HTML_LINES // len(view.groups))]
    rows = "".join(_html_of_sequence(view, index, row) for index, row in enumerate(shown))
    if len(view.sequences) > len(shown):
        more = len(view.sequences) - len(shown)
        rows += f'<tr><td></td><td colspan="4">and {more:,} more sequences</td></tr>'
    return (
        f'<div class="hf-paged-pool"><style>{_CSS}</style><div><strong>{escape(headline(view))}'
        f'</strong></div><div class="map" role="img" aria-label="{escape(headline(view))}">'
        f"{''.join(_html_of_cell(view, cell) for cell in cells)}</div><div>{keys}</div>"
        f"<div>{note}</div><table>{rows}</table></div>"
    )


def _html_of_cell(view: PoolView, cell: PoolCell) -> str:
    if cell.num_blocks > 1:
        symbol = cell_symbol(cell)
        title = (
            f"blocks {cell.first:,}-{cell.last:,}: {cell.num_used} used ({cell.num_shared} "
            f"shared), {cell.num_cached} cached"
        )
    else:
        symbol = block_symbol(view.blocks[cell.first])
        title = f"block {cell.first}: {_describe(view, view.blocks[cell.first])}"

    return f'<i class="{_class(symbol)}" title="{escape(title)}">{_glyph(symbol)}</i>'


def _describe(view: PoolView, block: PoolBlock) -> str:
    if block.state == "free":
        return "free"
    group = ""
    if block.group is not None and len(view.groups) > 1:
        group = f", {view.groups[block.group].name}"
    if block.state == "cached":
        return f"cached{group}"
    owners = [view.sequences[index].name for index in block.sequences[:3]]
    if len(block.sequences) > len(owners):
        owners.append(f"{len(block.sequences) - len(owners)} more")
    filled = f"{block.num_filled} of {view.block_size} slots"
    return f"{', '.join(owners) or 'a running forward'}; {filled}{group}"


def _html_of_sequence(view: PoolView, index: int, sequence: PoolSequence) -> str:
    letter = LETTERS[index] if index < len(LETTERS) else "■"
    lines = []
    for number, table in enumerate(sequence.tables):
        head = f'<td><i class="u">{letter}</i></td><td>{escape(sequence.name)}</td>'
        head += f"<td>{sequence.num_tokens:,} tokens</td>"
        runs = table_runs(view, table)
        kinds = ["n" if run.first == NO_BLOCK else "s" * (run.ref_count > 1) for run in runs]
        chips = [f'<b class="{kind}">{run}</b>' for kind, run in zip(kinds, runs, strict=True)]
        if len(runs) > _MAX_RUNS:
            missing = sum(run.length for run in runs[_MAX_RUNS - 1 : -1])
            chips[_MAX_RUNS - 1 : -1] = [f'<b class="n">…{missing:,}…</b>']
        group = f"<td>{escape(view.groups[number].name)}</td>" if len(view.groups) > 1 else ""
        head = "<td></td><td></td><td></td>" if number else head
        lines.append(f"<tr>{head}{group}<td>{''.join(chips)}</td></tr>")
    return "".join(lines)


def _class(symbol: str) -> str:
    shared = symbol.isdigit() or "+" in symbol
    return "s" if shared else _CLASSES.get(symbol, "u")


def _glyph(symbol: str) -> str:
    """Return what stands in a cell: shades are colours already, and shared ones keep a sign."""
    return {"▚": "+", "·": "", "░": "c", "▒": "", "█": ""}.get(symbol, symbol)


# -- files -------------------------------------------------------------------------------------

_MAX_LINES = 40
_MAX_ENTRIES = 40
_LINE, _MARGIN, _HEAD, _FOOT = 0.3, 0.25, 0.85, 0.4  # inches
_KINDS = {
    "shared": ("#f2a97e", "shared, × how often"),
    "first": ("#4d94d8", "its own after shared ones: copied on write, or new"),
    "own": ("#a9cdf0", "its own"),
    "hidden": ("#eeeeee", "behind the window"),
}


def save(view: PoolView, path: str | os.PathLike[str]) -> None:
    """Write the block tables as a picture; see :meth:`PoolView.save`."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError(
            "save() draws with matplotlib, which is not installed: pip install hf-paged[plots]"
        ) from error
    suffix = Path(path).suffix.lstrip(".").lower() or "png"
    if suffix not in FigureCanvasAgg.get_supported_filetypes():
        raise ConfigurationError(
            f"path={os.fspath(path)!r} ends in a format that matplotlib does not write: expected "
            "e.g. 'pool.png', 'pool.svg' or 'pool.pdf'."
        )
    lines = [
        (f"{group.name}, {sequence.name}" if len(view.groups) > 1 else sequence.name, table)
        for number, group in enumerate(view.groups)
        for sequence in view.sequences
        if (table := sequence.tables[number])
    ]
    shown = lines[:_MAX_LINES]
    end = max((len(table) for _, table in shown), default=0)
    first = max(0, end - _MAX_ENTRIES)
    notes = (
        ["block tables, above each block its first token; pale: no token yet"]
        if shown
        else ["no sequences"]
    )
    notes += [f"the last {end - first} blocks only"] if first else []
    notes += [f"{len(lines) - len(shown):,} more lines left out"] if len(lines) > len(shown) else []

    left = _MARGIN + max((0.075 * len(name) for name, _ in shown), default=0.0) + 0.1
    entry = 0.14 + 0.07 * len(f"{view.end_of_map}×9")
    width = max(left + (end - first) * entry + _MARGIN, 7.5)
    height = _HEAD + len(shown) * _LINE + _FOOT
    # No pyplot: it would choose a backend and keep the figure for the whole process.
    figure = Figure(figsize=(width, height), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    axes.text(_MARGIN, 0.14, headline(view), va="top", fontsize=10)
    axes.text(_MARGIN, 0.36, "; ".join(notes), va="top", fontsize=8, color="#555555")
    step = 1 if view.block_size * end < 1000 else 4
    for index in range(-(-first // step) * step, end, step):
        x = left + (index - first + 0.5) * entry
        token = f"{index * view.block_size:,}"
        axes.text(x, _HEAD - 0.06, token, ha="center", fontsize=7, color="#555555")
    kinds = set()
    for line, (name, table) in enumerate(shown):
        y = _HEAD + line * _LINE
        axes.text(left - 0.1, y + _LINE / 2, name, ha="right", va="center", fontsize=9)
        for index in range(first, len(table)):
            kinds.add(
                _draw_entry(view, axes, table, index, left + (index - first) * entry, y, entry)
            )
    x = _MARGIN
    for kind in (kind for kind in _KINDS if kind in kinds):
        colour, meaning = _KINDS[kind]
        _draw_box(axes, x, height - 0.27, 0.14, 0.14, colour)
        axes.text(x + 0.2, height - 0.2, meaning, va="center", fontsize=8)
        x += 0.4 + 0.056 * len(meaning)
    figure.savefig(path, format=suffix, dpi=150)


def _draw_entry(
    view: PoolView, axes: Axes, table: tuple[int, ...], index: int, x: float, y: float, width: float
) -> str:
    """Draw one entry of a block table, what is empty of it pale; return its kind."""
    block_id = table[index]
    if block_id == NO_BLOCK:
        _draw_box(axes, x, y, width, _LINE, _KINDS["hidden"][0])
        return "hidden"
    block, before = view.blocks[block_id], table[index - 1] if index else NO_BLOCK
    kind, text = "own", str(block_id)
    if block.is_shared:
        kind, text = "shared", f"{block_id}×{block.ref_count}"
    elif before != NO_BLOCK and view.blocks[before].is_shared:
        kind = "first"
    _draw_box(axes, x, y, width, _LINE, _KINDS[kind][0])
    empty = (1 - block.num_filled / view.block_size) * (width - 0.03)
    if empty:
        _draw_box(axes, x + width - 0.03 - empty, y, empty + 0.03, _LINE, "#ffffffb0")
    axes.text(x + width / 2, y + _LINE / 2, text, ha="center", va="center", fontsize=7.5)
    return kind


def _draw_box(axes: Axes, x: float, y: float, width: float, height: float, colour: str) -> None:
    """Draw a box with a gap to the next one on its right and below."""
    from matplotlib.patches import Rectangle

    gap = 0.03
    axes.add_patch(Rectangle((x, y), width - gap, height - gap, facecolor=colour, linewidth=0))
