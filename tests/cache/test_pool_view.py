"""The pool as plain data and as a picture: exact block ids, block size 4."""

from __future__ import annotations

import builtins
import dataclasses
import io
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from forwards import PROMPT, new, run, start, table
from hf_paged.cache.layout import KVLayout
from hf_paged.cache.pool_text import to_text
from hf_paged.cache.pool_view import PoolBlock, PoolView, look_at_pool
from hf_paged.cache.runtime import PagedRuntime
from hf_paged.cache.stats import KVCacheStats, human_bytes
from hf_paged.config import PagedConfig
from hf_paged.core.allocation import NewTokens
from hf_paged.core.sequence import Sequence
from hf_paged.errors import ConfigurationError

pytestmark = pytest.mark.core_suite

FREE = PoolBlock("free", 0, (), None, 0)
PNG = b"\x89PNG\r\n\x1a\n"


class Rows:
    """A cache, as far as its runtime knows it."""

    def __init__(self, runtime: PagedRuntime, *sequences: Sequence) -> None:
        self.rows = runtime.own_rows(self)
        self.rows.sequences = list(sequences)

    @property
    def sequences(self) -> list[Sequence]:
        return self.rows.sequences


def make_runtime(num_blocks: int, windows: tuple[int | None, ...] = (None,)) -> PagedRuntime:
    config = PagedConfig(num_blocks=num_blocks, block_size=4, backend="torch_reference")
    layout = KVLayout(windows, 2, 8, torch.float32)
    return PagedRuntime(config, layout, torch.device("cpu"), None)  # type: ignore[arg-type]


def story(num_blocks: int = 12) -> tuple[PagedRuntime, list[Rows]]:
    """Fork, copy on write, a shared prefix, a prefix that stayed, as the tests below tell it."""
    runtime = make_runtime(num_blocks)
    manager = runtime.manager
    gone = start(manager, [50, 51, 52, 53, 54])
    parent = start(manager, PROMPT)
    child = manager.fork(parent)
    run(manager, new(child, [30]))
    other = start(manager, [*PROMPT[:8], 40])
    manager.free(gone)
    return runtime, [Rows(runtime, parent, child), Rows(runtime, other)]


# -- who owns what -----------------------------------------------------------------------------


def test_an_empty_pool() -> None:
    view = look_at_pool(make_runtime(5))
    assert view.blocks == (FREE,) * 5
    assert (view.sequences, view.eviction_order, view.cells(100)) == ((), (), [])
    assert repr(view) == (
        "PoolView(5 blocks of 4: 0 used, 0 of them shared, 0 cached, 5 free; 0 sequences)"
    )


def test_fork_copy_on_write_shared_prefix_and_cached() -> None:
    runtime, _caches = story()
    view = look_at_pool(runtime)
    assert [(s.name, s.num_tokens, s.tables) for s in view.sequences] == [
        ("cache 0 row 0", 10, ((2, 3, 4),)),
        ("cache 0 row 1", 11, ((2, 3, 5),)),
        ("cache 1 row 0", 9, ((2, 3, 6),)),
    ]
    assert view.blocks == (
        PoolBlock("cached", 0, (), 0, 4),
        FREE,  # a block of one token is no known prefix
        PoolBlock("used", 3, (0, 1, 2), 0, 4),
        PoolBlock("used", 3, (0, 1, 2), 0, 4),
        PoolBlock("used", 1, (0,), 0, 2),
        PoolBlock("used", 1, (1,), 0, 3),
        PoolBlock("used", 1, (2,), 0, 1),
        *[FREE] * 5,
    )
    assert (view.num_used, view.num_shared, view.num_cached, view.num_free) == (5, 2, 1, 6)


def test_a_window_and_full_attention_take_blocks_from_one_pool() -> None:
    runtime = make_runtime(12, windows=(8, None))
    sequence = start(runtime.manager, list(range(10, 28)))
    view = look_at_pool(runtime)
    assert [(group.name, group.layers, group.window) for group in view.groups] == [
        ("full attention", (1,), None),
        ("window 8", (0,), 8),
    ]
    tables = (tuple(table(sequence)), tuple(table(sequence, 1)))
    assert view.sequences[0].tables == tables == ((0, 1, 2, 3, 4), (-1, -1, 5, 6, 7))
    assert [block.group for block in view.blocks] == [0] * 5 + [1] * 3 + [None] * 4
    assert "window 8        (2 behind) 5-7" in to_text(view)
    runtime.manager.free(sequence)
    cached = [index for index, block in enumerate(look_at_pool(runtime).blocks) if block.group == 1]
    assert cached == [5, 6], "cached blocks keep their group, the partly filled one is gone"


def test_groups_of_equal_windows_are_numbered() -> None:
    view = look_at_pool(make_runtime(4, windows=(8, 8, None)))
    assert [group.name for group in view.groups] == ["full attention", "window 8 #1", "window 8 #2"]


def test_caches_keep_their_number_and_rows_their_order() -> None:
    runtime, caches = story()
    caches[0].sequences.reverse()
    names = {s.name: s.tables[0] for s in look_at_pool(runtime).sequences}
    assert names["cache 0 row 0"] == (2, 3, 5)
    caches.pop(0)
    assert [s.name for s in look_at_pool(runtime).sequences] == ["cache 1 row 0"]


def test_sequences_of_no_known_cache_are_numbered_by_age() -> None:
    runtime = make_runtime(12)
    first, second = start(runtime.manager, PROMPT), start(runtime.manager, [7, 8])
    known = Rows(runtime, start(runtime.manager, [9]))
    view = look_at_pool(runtime)
    assert [s.name for s in view.sequences] == ["cache 0 row 0", "sequence 0", "sequence 1"]
    expected = [table(sequence) for sequence in (*known.sequences, first, second)]
    assert [list(s.tables[0]) for s in view.sequences] == expected


def test_a_running_forward_holds_the_source_of_its_copy() -> None:
    """The rollback gives the block back to the row, so nobody may take it meanwhile."""
    runtime = make_runtime(8)
    manager = runtime.manager
    parent = start(manager, PROMPT)
    child = manager.fork(parent)
    allocation = manager.begin([new(parent, [30]), new(child, [31])])
    (source, copy), *_ = allocation.copies
    blocks = look_at_pool(runtime).blocks
    assert (source, blocks[source].ref_count, len(blocks[source].sequences)) == (2, 2, 1)
    assert (blocks[copy].ref_count, blocks[copy].num_filled) == (1, 0)
    manager.rollback(allocation)
    assert look_at_pool(runtime).blocks[copy] == FREE


# -- it only looks -----------------------------------------------------------------------------


def test_looking_changes_nothing() -> None:
    runtime, _caches = story()
    for token in (60, 70, 80):
        runtime.manager.free(start(runtime.manager, [token] * 4))
    states, stats = runtime.manager.pool.states(), runtime.stats()
    view = look_at_pool(runtime)
    assert len(str(view)) and len(view._repr_html_())
    assert (runtime.manager.pool.states(), runtime.stats()) == (states, stats)
    assert list(view.eviction_order) == states.cached
    counts = (view.num_free, view.num_cached, view.num_used)
    assert counts == (stats.free_blocks, stats.cached_blocks, stats.used_blocks)
    runtime.manager.check_integrity()


def test_a_view_stays_as_it_was() -> None:
    runtime, caches = story()
    view, again = look_at_pool(runtime), look_at_pool(runtime)
    assert view == again
    for sequence in (s for cache in caches for s in cache.sequences):
        runtime.manager.free(sequence)
    runtime.clear_prefix_cache()
    assert look_at_pool(runtime).num_free == 12
    assert view == again
    with pytest.raises(dataclasses.FrozenInstanceError):
        view.block_size = 5  # type: ignore[misc]


def test_blocks_of_collected_caches_are_not_shown() -> None:
    runtime, caches = story()
    caches.pop()
    assert [s.name for s in look_at_pool(runtime).sequences] == ["cache 0 row 0", "cache 0 row 1"]


# -- in a terminal -----------------------------------------------------------------------------


def test_the_picture_can_be_read_without_colour() -> None:
    runtime, _caches = story(100)
    assert to_text(look_at_pool(runtime), width=80).splitlines() == [
        "KV pool: 100 blocks of 4 tokens, 50.5 KiB: 5 used (2 shared), 1 cached, 94 free",
        "  0  ░·33ABC·························································",
        " 64  36 free blocks from here on",
        "     A-C of one sequence: 3   2-9 + shared by so many: 2   ░ cached: 1",
        "     · free: 94",
        "A  cache 0 row 0  10 tokens  2-3×3 4",
        "B  cache 0 row 1  11 tokens  2-3×3 5",
        "C  cache 1 row 0   9 tokens  2-3×3 6",
    ]


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_rich_prints_it_in_colour_and_where_only_ascii_goes(encoding: str) -> None:
    runtime, _caches = story()
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, width=100, force_terminal=True, color_system="standard")
    console.print(look_at_pool(runtime), runtime.stats())
    file.seek(0)
    printed = file.read()
    assert "\x1b[" in printed
    assert ("2-3x3" if encoding == "ascii" else "2-3×3") in printed


@pytest.mark.parametrize("width", [8, 20, 40, 200])
def test_lines_keep_to_the_width(width: int) -> None:
    runtime = make_runtime(3000)
    caches = [Rows(runtime, start(runtime.manager, [seed, *range(4000)])) for seed in range(2)]
    for seed in range(30):  # ids that do not count up cannot be drawn together
        run(runtime.manager, *(new(c.sequences[0], [seed] * 4) for c in caches))
    lines = to_text(look_at_pool(runtime), width=width).splitlines()
    assert max(map(len, lines)) <= width
    if width == 200:
        assert lines[-1].startswith("B  cache 1 row 0  4,121 tokens  1001-2")


def test_many_sequences() -> None:
    runtime = make_runtime(80)
    _caches = [Rows(runtime, start(runtime.manager, [token])) for token in range(70)]
    view = look_at_pool(runtime)
    text = to_text(view, width=100)
    assert "z■■■" in text
    assert "and 6 more sequences" in text
    assert "and 6 more sequences" in view._repr_html_()


# -- large pools -------------------------------------------------------------------------------


def test_cells_are_runs_of_a_round_number_of_blocks() -> None:
    runtime = make_runtime(100_000)
    start(runtime.manager, PROMPT)
    view = look_at_pool(runtime)
    assert view.cells(1000, 64)[-1].last == 63, "the map ends where only free blocks follow"
    run(runtime.manager, NewTokens(runtime.manager.new_sequence(), 4 * 34_567))
    cells = look_at_pool(runtime).cells(1000)
    assert {cell.num_blocks for cell in cells} == {50}
    assert sum(cell.num_used for cell in cells) == 34_570
    assert [cell.first for cell in cells] == list(range(0, 34_570, 50))


def test_100_000_blocks_are_drawn_quickly_and_small() -> None:
    runtime = make_runtime(100_000)
    manager = runtime.manager
    sequences = [manager.new_sequence() for _ in range(50)]
    run(manager, *(NewTokens(sequence, 4 * 1900) for sequence in sequences))
    sequences += [manager.fork(sequence) for sequence in sequences]
    took = []
    for _ in range(3):
        begin = time.perf_counter()
        view = look_at_pool(runtime)
        html, text = view._repr_html_(), to_text(view, width=100)
        took.append(time.perf_counter() - begin)
    assert min(took) < 0.5
    assert len(html) < 200_000
    assert len(text.splitlines()) < 100
    assert "a cell is 100 blocks" in text


def test_html_stays_small_with_many_groups_rows_and_scattered_tables() -> None:
    runtime = make_runtime(1000, windows=(None, 512, 512, 512, 512, 512))
    manager = runtime.manager
    caches = [Rows(runtime, *(manager.new_sequence() for _ in range(10))) for _ in range(2)]
    rows = [sequence for cache in caches for sequence in cache.sequences]
    for _ in range(32):  # row after row takes a block, so no two neighbours can be drawn together
        for sequence in rows[:5]:
            run(manager, NewTokens(sequence, 4))
    caches += [Rows(runtime, *(manager.fork(sequence) for sequence in rows)) for _ in range(8)]
    view = look_at_pool(runtime)
    assert (len(view.sequences), view.num_shared) == (45, 960)
    html = view._repr_html_()
    parse(html)
    assert len(html) < 200_000
    assert "and 35 more sequences" in html


# -- in a notebook -----------------------------------------------------------------------------


class Tags(HTMLParser):
    """Notes which tags occur and what stays open."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.stack: list[str] = []
        self.titles: list[str | None] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.add(tag)
        self.stack.append(tag)
        self.titles += [value for name, value in attrs if name == "title"]

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag


def parse(html: str) -> Tags:
    tags = Tags()
    tags.feed(html)
    tags.close()
    assert tags.stack == []
    return tags


def test_html_closes_its_tags_and_needs_nothing_else() -> None:
    runtime, _caches = story()
    html = look_at_pool(runtime)._repr_html_()
    tags = parse(html)
    assert not tags.seen & {"script", "link", "img"}
    assert "http" not in html
    assert "block 4: cache 0 row 0; 2 of 4 slots" in tags.titles
    assert "block 2: cache 0 row 0, cache 0 row 1, cache 1 row 0; 4 of 4 slots" in tags.titles
    assert tags.titles.count("block 1: free") == 1


def test_html_escapes_names() -> None:
    runtime, _caches = story()
    view = look_at_pool(runtime)
    bad = tuple(s._replace(name="<script>&\"'") for s in view.sequences)
    html = dataclasses.replace(view, sequences=bad)._repr_html_()
    assert "<script>" not in html
    assert "&lt;script&gt;&amp;" in html
    parse(html)


# -- as a file ---------------------------------------------------------------------------------


def test_save_draws_block_tables(tmp_path: Path) -> None:
    runtime, _caches = story()
    view = look_at_pool(runtime)
    view.save(tmp_path / "pool.png")
    view.save(str(tmp_path / "bare"))
    assert (tmp_path / "pool.png").read_bytes().startswith(PNG)
    assert (tmp_path / "bare").read_bytes().startswith(PNG)
    view.save(tmp_path / "pool.svg")
    assert "<svg" in (tmp_path / "pool.svg").read_text()
    look_at_pool(make_runtime(3)).save(tmp_path / "empty.png")


def test_save_names_a_format_that_it_cannot_write(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"pool\.doc.*expected"):
        look_at_pool(make_runtime(3)).save(tmp_path / "pool.doc")
    assert list(tmp_path.iterdir()) == []


def test_save_names_the_extra_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigurationError, match=r"pip install hf-paged\[plots\]$") as caught:
        look_at_pool(make_runtime(3)).save(tmp_path / "pool.png")
    assert "\n" not in str(caught.value)


# -- figures -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (5 * 2**30, "5.0 GiB"),
        (2**51, "2,048.0 TiB"),
    ],
)
def test_human_bytes(num_bytes: int, text: str) -> None:
    assert human_bytes(num_bytes) == text


def test_stats_as_a_table_with_units() -> None:
    runtime, _caches = story()
    stats = runtime.stats()
    file = io.StringIO()
    Console(file=file, width=100).print(stats)
    lines = {" ".join(line.split()) for line in file.getvalue().splitlines()}
    assert "pool 12 blocks of 4 tokens, 6.5 KiB in all" in lines
    assert "used 5 42%, 2.5 KiB, 70% of the slots filled" in lines
    assert "prefix hits 8 of 24 prompt tokens, 33%" in lines
    tags = parse(stats._repr_html_())
    assert not tags.seen & {"script", "style"}
    assert "6.5 KiB in all" in stats._repr_html_()


def test_stats_stay_a_plain_dataclass() -> None:
    stats = make_runtime(5).stats()
    assert KVCacheStats(**dataclasses.asdict(stats)) == stats
    assert repr(stats).startswith("KVCacheStats(block_size=4, num_blocks=5, free_blocks=5,")
    assert "&lt;b&gt;" in dataclasses.replace(stats, backend="<b>")._repr_html_()
    assert isinstance(look_at_pool(make_runtime(5)), PoolView)
