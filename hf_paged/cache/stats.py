"""What the pool holds at one moment."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["KVCacheStats", "human_bytes"]


def human_bytes(num_bytes: float) -> str:
    """Return a number of bytes in the unit that suits it.

    >>> human_bytes(512), human_bytes(3 * 2**19)
    ('512 B', '1.5 MiB')
    """
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while num_bytes >= 1024 and len(units) > 1:
        num_bytes /= 1024
        del units[0]
    return f"{num_bytes:.0f} B" if units[0] == "B" else f"{num_bytes:,.1f} {units[0]}"


@dataclass(frozen=True)
class KVCacheStats:
    """Figures of one patched model's pool; see :func:`hf_paged.stats`.

    free_blocks + cached_blocks + used_blocks = num_blocks, always.

    Attributes:
        block_size: tokens a block.
        num_blocks: usable blocks.
        free_blocks: hold nothing.
        cached_blocks: hold a known prefix and belong to nobody.
        used_blocks: some sequence refers to them.
        peak_used_blocks: most used blocks since the last reset.
        bytes_per_block: K and V of ``block_size`` tokens in each layer of a layer group.
        capacity_bytes: of all usable blocks and the null block.
        used_bytes: ``used_blocks * bytes_per_block``.
        peak_used_bytes: ``peak_used_blocks * bytes_per_block``.
        live_tokens: token slots in used blocks that hold a token, each counted once however many
            sequences share it; a token counts once for every layer group that stores it.
        utilization: ``live_tokens / (used_blocks * block_size)``; 1.0 when nothing is used.
        utilization_at_peak: the same at the moment of the peak.
        prefix_query_tokens: prompt tokens that were looked up since the last reset.
        prefix_hit_tokens: of these, tokens whose blocks were there already.
        cow_copies: blocks copied because a sequence wrote into one that others read.
        evictions: cached blocks that gave way to new ones.
        running: rows of packed calls that hold blocks now.
        waiting: rows of packed calls that hold none and wait for some.
        preemptions: times that a row gave its blocks back to let an older one go on.
        swapped_out_blocks: blocks that rows stored outside of the pool as they gave way.
        swapped_in_blocks: of these, blocks that came back.
        computed_tokens: tokens that went through a forward with a paged cache, padding left out.
        padded_tokens_avoided: tokens, padding included, that rectangles would have computed for
            the packed calls, less what these computed.
        backend: name of the attention backend.
    """

    block_size: int
    num_blocks: int
    free_blocks: int
    cached_blocks: int
    used_blocks: int
    peak_used_blocks: int
    bytes_per_block: int
    capacity_bytes: int
    used_bytes: int
    peak_used_bytes: int
    live_tokens: int
    utilization: float
    utilization_at_peak: float
    prefix_query_tokens: int
    prefix_hit_tokens: int
    cow_copies: int
    evictions: int
    running: int
    waiting: int
    preemptions: int
    swapped_out_blocks: int
    swapped_in_blocks: int
    computed_tokens: int
    padded_tokens_avoided: int
    backend: str

    def __rich__(self) -> Table:
        """Draw a table with human units."""
        from rich import box
        from rich.table import Table

        table = Table(title="KV pool", title_justify="left", box=box.SIMPLE, show_header=False)
        table.add_column(style="bold")
        table.add_column(justify="right")
        table.add_column()
        for name, number, note in self._lines():
            table.add_row(name, number, note)
        return table

    def _repr_html_(self) -> str:
        head, left, right = (
            f'style="text-align:{side};padding:.1em .8em .1em 0"'
            for side in ("left", "left", "right")
        )
        lines = "".join(
            f"<tr><th {head}>{escape(name)}</th><td {right}>{escape(number)}</td>"
            f"<td {left}>{escape(note)}</td></tr>"
            for name, number, note in self._lines()
        )
        style = 'style="border:0;font:13px/1.5 system-ui,sans-serif;color:inherit"'
        return f"<table {style}><caption {left}><b>KV pool</b></caption>{lines}</table>"

    def _lines(self) -> list[tuple[str, str, str]]:
        """Return name, number and note of each line of the table."""
        blocks = self.num_blocks

        def part(count: int, whole: int) -> str:
            return f"{count / whole:.0%}" if whole else "-"

        def used(count: int, num_bytes: int, utilization: float) -> str:
            note = f"{part(count, blocks)}, {human_bytes(num_bytes)}"
            return f"{note}, {utilization:.0%} of the slots filled" if count else note

        queried = self.prefix_query_tokens
        return [
            (
                "pool",
                f"{blocks:,} blocks",
                f"of {self.block_size:,} tokens, {human_bytes(self.capacity_bytes)} in all",
            ),
            (
                "used",
                f"{self.used_blocks:,}",
                used(self.used_blocks, self.used_bytes, self.utilization),
            ),
            (
                "used at the peak",
                f"{self.peak_used_blocks:,}",
                used(self.peak_used_blocks, self.peak_used_bytes, self.utilization_at_peak),
            ),
            ("cached", f"{self.cached_blocks:,}", part(self.cached_blocks, blocks)),
            ("free", f"{self.free_blocks:,}", part(self.free_blocks, blocks)),
            ("live tokens", f"{self.live_tokens:,}", ""),
            (
                "prefix hits",
                f"{self.prefix_hit_tokens:,}",
                f"of {queried:,} prompt tokens, {part(self.prefix_hit_tokens, queried)}",
            ),
            ("copied on write", f"{self.cow_copies:,}", "blocks"),
            ("evicted", f"{self.evictions:,}", "blocks"),
            ("rows", f"{self.running:,}", f"running, {self.waiting:,} waiting"),
            (
                "gave way",
                f"{self.preemptions:,}",
                f"times; {self.swapped_out_blocks:,} blocks swapped out, "
                f"{self.swapped_in_blocks:,} in",
            ),
            (
                "computed",
                f"{self.computed_tokens:,}",
                f"tokens; {self.padded_tokens_avoided:,} that a padded batch computes were not",
            ),
            ("backend", self.backend, ""),
        ]
