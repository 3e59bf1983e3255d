"""The flash-attn backends over stand-ins that check what the libraries check."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from backends import flash_stand_in
from backends.dense_oracle import dense_attention, relative_error
from backends.flash_stand_in import NUM_MULTIPROCESSORS, Calls, RefusedError
from backends.paged_batch import PagedBatch, Row, random_rows
from hf_paged.backends import flash_plan
from hf_paged.backends.base import LayerView
from hf_paged.backends.flash_attn import FlashAttn3Backend, FlashAttnBackend
from hf_paged.backends.metadata import AttentionMetadata
from hf_paged.errors import ConfigurationError, InputMismatchError

pytestmark = pytest.mark.core_suite

CPU = torch.device("cpu")
DTYPES = [torch.float16, torch.bfloat16]
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}

LENS: dict[str, list[tuple[int, int]]] = {
    "decode": [(0, 1), (3, 1), (255, 1), (256, 1), (600, 1)],
    "uniform": [(0, 3), (3, 3), (254, 3), (600, 3)],
    "fresh": [(0, 11), (0, 1), (0, 300)],
    "ragged": [(5, 4), (260, 3), (30, 2)],
    "idle": [(5, 0), (3, 1), (0, 0), (300, 1), (9, 0)],
    "idle_prompts": [(5, 0), (0, 7), (260, 3), (9, 0)],
    "mixed": [(0, 11), (5, 4), (16, 1), (0, 1), (300, 1), (270, 20)],
}
SHAPES = pytest.mark.parametrize("lens", LENS.values(), ids=LENS)
WINDOWS = [None, 1, 3, 8, 257, 10_000]
SLOPES = torch.tensor([0.0, 0.5, 0.1, 1.0])


@pytest.fixture(params=[2, 3])
def version(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def calls(version: int, monkeypatch: pytest.MonkeyPatch) -> Calls:
    return flash_stand_in.install(monkeypatch, version=version)


@pytest.fixture
def backend(version: int, calls: Calls) -> FlashAttnBackend:
    return make_backend(version)


def make_backend(version: int, *, batch_invariant: bool = False) -> FlashAttnBackend:
    return {2: FlashAttnBackend, 3: FlashAttn3Backend}[version](batch_invariant=batch_invariant)


def batch_of(
    backend: FlashAttnBackend,
    lens: Sequence[tuple[int, int]],
    *,
    window: int | None = None,
    **shape: Any,
) -> tuple[list[Row], PagedBatch]:
    rows = random_rows(lens, **{"dtype": torch.float16} | shape)
    batch = PagedBatch(rows, backend, backend.default_block_size, window=window)
    batch.view = block_major(batch.view)
    return rows, batch


def block_major(view: LayerView) -> LayerView:
    """Return the same blocks as views of a pool in which other layers' K and V lie between them."""
    pool = torch.full(
        (view.key_cache.shape[0], 3, 2, *view.key_cache.shape[1:]),
        torch.nan,
        dtype=view.key_cache.dtype,
    )
    pool[:, 1, 0], pool[:, 1, 1] = view.key_cache, view.value_cache
    return LayerView(pool[:, 1, 0], pool[:, 1, 1])


def check(backend: FlashAttnBackend, lens: Sequence[tuple[int, int]], **options: Any) -> None:
    attention = {"scale": 0.3} | options.pop("attention", {})
    rows, batch = batch_of(backend, lens, window=attention.get("window"), **options)
    out = batch.forward(**attention)
    expected = dense_attention(rows, **attention)
    assert out.shape == expected.shape
    assert out.dtype == rows[0].query.dtype
    assert relative_error(out, expected) < TOLERANCE[out.dtype]


# -- what it computes ----------------------------------------------------------------------------


@SHAPES
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_kinds_of_rows(
    backend: FlashAttnBackend, lens: Any, window: int | None, dtype: torch.dtype
) -> None:
    check(backend, lens, dtype=dtype, attention=dict(window=window))


@SHAPES
@pytest.mark.parametrize("window", [None, 3, 257])
def test_batch_invariant_computes_the_same(
    version: int, calls: Calls, lens: Any, window: int | None
) -> None:
    check(make_backend(version, batch_invariant=True), lens, attention=dict(window=window))


@SHAPES
@pytest.mark.parametrize("num_kv_heads", [1, 3])
@pytest.mark.parametrize("group_size", [1, 2, 4, 7])
def test_query_heads_of_one_key_head(
    backend: FlashAttnBackend, lens: Any, group_size: int, num_kv_heads: int
) -> None:
    check(backend, lens, group_size=group_size, num_kv_heads=num_kv_heads)
    check(backend, lens, group_size=group_size, num_kv_heads=num_kv_heads, attention=dict(window=5))


@SHAPES
@pytest.mark.parametrize("head_dim", [16, 64, 80, 256])
def test_head_dims(backend: FlashAttnBackend, lens: Any, head_dim: int) -> None:
    check(backend, lens, head_dim=head_dim, attention=dict(scale=head_dim**-0.5))


@SHAPES
@pytest.mark.parametrize("window", [None, 3])
def test_softcap(backend: FlashAttnBackend, lens: Any, window: int | None) -> None:
    check(backend, lens, attention=dict(softcap=0.5, window=window))
    check(backend, lens, attention=dict(softcap=30.0, window=window, scale=1.0))


@SHAPES
@pytest.mark.parametrize("version", [2])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_alibi(
    backend: FlashAttnBackend, lens: Any, window: int | None, dtype: torch.dtype
) -> None:
    slopes = torch.stack([SLOPES, SLOPES], dim=1).to(dtype)[:, 0]  # with gaps
    dense = SLOPES.to(dtype)
    rows, batch = batch_of(backend, lens, window=window)
    out = batch.forward(alibi_slopes=slopes, window=window, softcap=2.0)
    expected = dense_attention(rows, scale=0.3, alibi_slopes=dense, window=window, softcap=2.0)
    assert relative_error(out, expected) < TOLERANCE[out.dtype]


@SHAPES
def test_layer_with_a_smaller_window_than_its_group(backend: FlashAttnBackend, lens: Any) -> None:
    rows, batch = batch_of(backend, lens, window=280)
    out = batch.forward(window=3)
    expected = dense_attention(rows, scale=0.3, window=3)
    assert relative_error(out, expected) < TOLERANCE[out.dtype]


@SHAPES
@pytest.mark.parametrize("window", [None, 3])
def test_rows_of_any_strides(backend: FlashAttnBackend, lens: Any, window: int | None) -> None:
    _, batch = batch_of(backend, lens, window=window)
    expected = batch.forward(window=window)
    for name in ("query", "key", "value"):
        states = getattr(batch, name)
        wide = torch.cat([states[..., :3], states, states[..., :3]], dim=-1)
        setattr(batch, name, wide[..., 3:-3])  # misaligned
    assert torch.equal(batch.forward(window=window), expected)
    for name in ("query", "key", "value"):
        states = getattr(batch, name)
        setattr(batch, name, states.permute(2, 1, 0).contiguous().permute(2, 1, 0))
    assert torch.equal(batch.forward(window=window), expected)
    for name in ("query", "key", "value"):
        states = getattr(batch, name)  # heads first, as transformers has them: the kernels read it
        setattr(batch, name, states.transpose(0, 1).contiguous().transpose(0, 1))
    out = batch.forward(window=window)
    assert torch.equal(out, expected)
    assert out.is_contiguous()


@pytest.mark.parametrize("window", [None, 3])
def test_padding_rows_of_a_graph_give_zeros(
    backend: FlashAttnBackend, calls: Calls, window: int | None
) -> None:
    """Their length on the device is 0; the host lists are upper bounds, tables have free width."""
    rows, batch = batch_of(backend, [(9, 1), (260, 1), (40, 1), (7, 1)], window=window)
    metadata = batch.metadata
    backend.write(batch.key, batch.value, batch.view, metadata)
    metadata.seq_lens[2:] = 0
    metadata.block_tables = torch.nn.functional.pad(
        metadata.block_tables, (0, 3), value=metadata.null_block
    )
    metadata.block_tables[2:] = metadata.null_block
    metadata.seq_lens_list = [metadata.block_tables.shape[1] * metadata.block_size] * 4
    out = backend.forward(
        batch.query, batch.key, batch.value, batch.view, metadata, scale=0.3, window=window
    )
    expected = dense_attention(rows[:2], scale=0.3, window=window)
    assert relative_error(out[:2], expected) < TOLERANCE[out.dtype]
    assert torch.equal(out[2:], torch.zeros_like(out[2:]))
    assert calls.functions == [f"fa{backend._version}_with_kvcache"]


# -- what it calls -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lens", "window", "call", "left"),
    [
        ("decode", None, "uniform", -1),
        ("decode", 601, "uniform", -1),  # hides nothing
        ("decode", 600, "uniform", 599),
        ("decode", 1, "uniform", 0),
        ("uniform", None, "uniform", -1),
        ("uniform", 603, "uniform", -1),
        ("uniform", 602, "gathered", 601),
        ("fresh", None, "fresh", -1),
        ("idle", None, "uniform", -1),
        ("idle", 5, "uniform", 4),
        ("idle_prompts", None, "paged", -1),
        ("fresh", 300, "fresh", -1),
        ("fresh", 299, "fresh", 298),
        ("ragged", None, "paged", -1),
        ("ragged", 263, "paged", -1),
        ("ragged", 262, "gathered", 261),
        ("mixed", None, "paged", -1),
        ("mixed", 300, "gathered", 299),
        ("mixed", 1, "gathered", 0),
    ],
)
def test_each_kind_of_step_makes_one_call(
    version: int,
    backend: FlashAttnBackend,
    calls: Calls,
    lens: str,
    window: int | None,
    call: str,
    left: int,
) -> None:
    _, batch = batch_of(backend, LENS[lens], window=window)
    batch.forward(window=window, softcap=7.0)
    made, metadata = calls.pop(), flash_plan.without_idle_rows(batch.metadata)
    assert (metadata is batch.metadata) is not lens.startswith("idle")
    assert (made.softmax_scale, made.causal, made.softcap) == (0.3, True, 7.0)
    assert tuple(made.window_size) == ((-1, -1) if left < 0 else (left, 0))
    is_dense = call in ("fresh", "gathered")
    uses_varlen = is_dense or (call == "paged" and version == 2)
    assert made.function == f"fa{version}_" + ("varlen" if uses_varlen else "with_kvcache")
    table = made.arguments.get("block_table" if version == 2 else "page_table")
    assert (table is None) == is_dense
    if not is_dense:
        assert table is metadata.block_tables
        pool = made.k if uses_varlen else made.k_cache
        assert pool.data_ptr() == batch.view.key_cache.data_ptr()
    if not uses_varlen:
        assert made.cache_seqlens is metadata.seq_lens
    if call == "uniform":
        num_rows = len(metadata.query_lens_list)
        assert made.q.shape == (num_rows, len(batch.query) // num_rows, *batch.query.shape[1:])
    else:
        assert made.cu_seqlens_q is metadata.cu_seqlens_q
        assert made.max_seqlen_q == max(metadata.query_lens_list)
    if call == "fresh":
        assert made.cu_seqlens_k is metadata.cu_seqlens_q
        assert made.k.data_ptr() == batch.key.data_ptr()
    elif call == "gathered":
        visible = [min(past, left) + new for past, new in LENS[lens]]
        assert made.cu_seqlens_k.diff().tolist() == visible
        assert made.max_seqlen_k == max(visible)
    elif uses_varlen:
        assert made.cu_seqlens_k.diff().tolist() == metadata.seq_lens_list
        assert made.max_seqlen_k == max(metadata.seq_lens_list)


def test_only_decoding_and_drafts_may_be_split(backend: FlashAttnBackend, calls: Calls) -> None:
    for lens in ("decode", "uniform"):
        _, batch = batch_of(backend, LENS[lens])
        batch.forward()
        if backend._version == 2:
            assert calls.pop().num_splits == 0  # the library looks at the shapes
        else:
            width = batch.metadata.block_tables.shape[1] * batch.metadata.block_size
            assert 512 < width < 1024
            assert calls.pop().num_splits == 1


@pytest.mark.parametrize("version", [3])
@pytest.mark.parametrize(
    ("num_rows", "num_new", "width", "expected"),
    [
        (1, 1, 8, 1),  # 512 tokens
        (1, 1, 16, 2),
        (1, 1, 10_000, 32),  # the most
        (8, 1, 10_000, NUM_MULTIPROCESSORS // (8 * 2)),
        (70, 1, 10_000, 1),
        (1, 4, 10_000, 32),
        (1, 512, 10_000, NUM_MULTIPROCESSORS // (2 * 8)),  # 8 tiles of 128 query rows
    ],
)
def test_flash_attn_3_splits_by_shapes(
    backend: FlashAttnBackend,
    calls: Calls,
    num_rows: int,
    num_new: int,
    width: int,
    expected: int,
) -> None:
    _, batch = batch_of(backend, [(9, num_new)] * num_rows)
    size = width - batch.metadata.block_tables.shape[1]
    batch.metadata.block_tables = torch.nn.functional.pad(batch.metadata.block_tables, (0, size))
    batch.forward()
    assert calls.pop().num_splits == expected


@SHAPES
def test_batch_invariant_never_splits_a_row(version: int, calls: Calls, lens: Any) -> None:
    backend = make_backend(version, batch_invariant=True)
    _, batch = batch_of(backend, lens)
    batch.metadata.block_tables = torch.nn.functional.pad(batch.metadata.block_tables, (0, 4000))
    batch.forward()
    assert calls.calls
    assert all(call.arguments.get("num_splits", 1) == 1 for call in calls.calls)


@pytest.mark.parametrize("window", [None, 8, 257])
def test_batch_invariant_computes_a_row_by_the_same_call_in_every_batch(
    version: int, calls: Calls, window: int | None
) -> None:
    """Else it would meet other tiles, and round otherwise, when its neighbours change."""

    def calls_of(lens: list[tuple[int, int]]) -> list[Any]:
        calls.calls.clear()
        rows, batch = batch_of(backend, lens, window=window)
        out = batch.forward(window=window)
        assert relative_error(out, dense_attention(rows, scale=0.3, window=window)) < 2e-3
        kinds = []
        for call in calls.calls:
            table = call.arguments.get("block_table" if version == 2 else "page_table")
            is_packed = call.arguments.get("cu_seqlens_q") is not None
            kinds.append((call.function, table is None, is_packed, tuple(call.window_size)))
        return kinds

    backend = make_backend(version, batch_invariant=True)
    alone = {kind for row in LENS["mixed"] for kind in calls_of([row])}
    together = calls_of(LENS["mixed"])
    assert set(together) == alone
    for row in [(5, 3), (260, 3)]:  # equally many new tokens are nothing special here
        assert calls_of([row, row]) == calls_of([row])


def test_a_step_is_looked_at_once_for_each_window(
    backend: FlashAttnBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at = []
    make_plan = type(backend)._make_plan

    def spy(self: Any, metadata: AttentionMetadata, window: int | None) -> Any:
        looked_at.append(window)
        return make_plan(self, metadata, window)

    monkeypatch.setattr(FlashAttnBackend, "_make_plan", spy)
    _, batch = batch_of(backend, LENS["mixed"], window=8)
    for window in (8, 3, 8, 3, 8):
        batch.forward(window=window)
    assert looked_at == [8, 3]


@SHAPES
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_no_step_waits_for_the_device(
    version: int, calls: Calls, lens: Any, window: int | None, batch_invariant: bool
) -> None:
    """Tensors on "meta" have no values: whoever looked at one would raise."""
    backend = make_backend(version, batch_invariant=batch_invariant)
    _, batch = batch_of(backend, lens, window=window)
    tensors = ("block_tables", "seq_lens", "cu_seqlens_q", "slot_mapping")
    on_meta = {name: getattr(batch.metadata, name).to("meta") for name in tensors}
    batch.metadata = dataclasses.replace(batch.metadata, derived={}, **on_meta)
    batch.view = LayerView(batch.view.key_cache.to("meta"), batch.view.value_cache.to("meta"))
    for name in ("query", "key", "value"):
        setattr(batch, name, getattr(batch, name).to("meta"))
    out = batch.forward(window=window)
    assert (out.shape, out.device.type) == (batch.query.shape, "meta")


# -- operators -----------------------------------------------------------------------------------


@SHAPES
@pytest.mark.parametrize("window", [None, 3])
def test_every_call_is_one_operator(
    backend: FlashAttnBackend, calls: Calls, lens: Any, window: int | None
) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func.namespace == "hf_paged":
                seen.append((func, args))
            return func(*args, **(kwargs or {}))

    _, batch = batch_of(backend, lens, window=window)
    with Spy():
        batch.forward(window=window)
    write, attention = seen
    assert write[0] is torch.ops.hf_paged.paged_write.default
    calls.calls.clear()
    torch.library.opcheck(*attention)


@pytest.mark.parametrize("operator", ["flash_uniform", "flash_paged", "flash_dense"])
def test_without_a_library_an_operator_says_what_is_missing(
    operator: str, backend: FlashAttnBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    lens = {"flash_uniform": "decode", "flash_paged": "mixed", "flash_dense": "fresh"}[operator]
    _, batch = batch_of(backend, LENS[lens])
    monkeypatch.undo()
    with pytest.raises(InputMismatchError, match=r"on cpu .* it computes on a CUDA device only"):
        batch.forward()


@pytest.mark.parametrize("lens", ["decode", "mixed", "fresh"])
def test_a_compiled_layer_gives_the_bits_of_an_eager_one(
    backend: FlashAttnBackend, lens: str
) -> None:
    def step(batch: PagedBatch) -> torch.Tensor:
        out: torch.Tensor = batch.forward() * 2
        return out

    _, eager = batch_of(backend, LENS[lens])
    _, compiled = batch_of(backend, LENS[lens])
    expected = step(eager)
    out = torch.compile(step, backend="aot_eager")(compiled)
    torch.compiler.reset()
    assert torch.equal(out, expected)
    assert torch.equal(compiled.view.key_cache.nan_to_num(9), eager.view.key_cache.nan_to_num(9))


# -- what it refuses -----------------------------------------------------------------------------


def test_block_sizes(version: int) -> None:
    backend = make_backend(version)
    fine, bad = {2: ([256, 512], [16, 64, 128]), 3: ([16, 64, 128, 256], [1, 4, 8])}[version]
    assert backend.default_block_size % backend.block_size_multiple == 0
    for block_size in fine:
        backend.check_model(device=CPU, dtype=torch.float16, head_dim=64, block_size=block_size)
    for block_size in bad:
        with pytest.raises(ConfigurationError, match=f"block_size={block_size} does not suit"):
            backend.check_model(device=CPU, dtype=torch.float16, head_dim=64, block_size=block_size)


@pytest.mark.parametrize("version", [3])
def test_batch_invariant_flash_attn_3_keeps_to_blocks_that_are_loaded_one_way(
    version: int,
) -> None:
    model = dict(device=CPU, dtype=torch.float16, head_dim=64)
    for batch_invariant in (False, True):
        backend = make_backend(version, batch_invariant=batch_invariant)
        backend.check_model(**model, block_size=64)  # type: ignore[arg-type]
    make_backend(version).check_model(**model, block_size=128)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"block_size=128 .* batch_invariant=True"):
        backend.check_model(**model, block_size=128)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("attention", "versions"),
    [(dict(sinks=SLOPES), {2, 3}), (dict(alibi_slopes=SLOPES), {3})],
    ids=["sinks", "alibi"],
)
def test_what_the_kernels_lack_is_refused(
    version: int, backend: FlashAttnBackend, attention: dict[str, Any], versions: set[int]
) -> None:
    _, batch = batch_of(backend, [(3, 1)])
    if version in versions:
        with pytest.raises(InputMismatchError, match=next(iter(attention))):
            batch.forward(**attention)
    else:
        batch.forward(**attention)


def test_other_dtypes_are_refused(backend: FlashAttnBackend) -> None:
    _, batch = batch_of(backend, [(3, 1)], dtype=torch.float32)
    with pytest.raises(InputMismatchError, match=r"query is torch\.float32"):
        batch.forward()
    _, batch = batch_of(backend, [(3, 1)])
    batch.query = batch.query.bfloat16()
    with pytest.raises(InputMismatchError, match=r"query is torch\.bfloat16, key torch\.float16"):
        batch.forward()


def test_unequal_head_dims_are_refused(backend: FlashAttnBackend) -> None:
    batch = PagedBatch(random_rows([(3, 1)], value_dim=16, dtype=torch.float16), backend, 256)
    with pytest.raises(InputMismatchError, match="head dim of 16, keys one of 8"):
        batch.forward()


# -- the stand-in itself -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(block_tables=lambda t: t.long()), "block_table is torch.int64"),
        (dict(block_tables=lambda t: t.T.contiguous().T), "block_table has strides"),
        (dict(block_tables=lambda t: t[:, :-1]), "row 4 has 601 tokens"),
        (dict(block_tables=lambda t: t.fill_(999)), "row 0 has blocks"),
        (dict(block_tables=lambda t: t.fill_(-1)), "row 0 has blocks"),
        (dict(block_tables=lambda t: t[:3]), "is"),
        (dict(seq_lens=lambda t: t.long()), "is torch.int64"),
        (dict(seq_lens=lambda t: t.repeat_interleave(2)[::2]), "has strides"),
        (dict(value_cache=lambda t: t[:-1]), "is"),
        (dict(key_cache=lambda t: t.bfloat16()), "k is torch.bfloat16"),
        (dict(key_cache=lambda t: t.transpose(2, 3).contiguous().transpose(2, 3)), "last stride"),
        (dict(key_cache=lambda t: t[:, :, :1].repeat(1, 1, 3, 1)), "do not divide"),
        (dict(query=lambda t: t.float()), "q is torch.float32"),
        (dict(query=lambda t: torch.cat([t, t, t], -1)[..., 4:12]), "q begins at 4"),
    ],
)
def test_the_stand_in_refuses_what_the_library_would(
    version: int, backend: FlashAttnBackend, change: dict[str, Any], message: str
) -> None:
    _, batch = batch_of(backend, LENS["decode"])
    backend.write(batch.key, batch.value, batch.view, batch.metadata)
    arguments = {
        "query": batch.query,
        "key_cache": batch.view.key_cache,
        "value_cache": batch.view.value_cache,
        "block_tables": batch.metadata.block_tables,
        "seq_lens": batch.metadata.seq_lens,
    }
    library = flash_stand_in.stand_in(version, Calls())

    def attend() -> None:
        library.uniform(
            arguments["query"][:, None],
            *list(arguments.values())[1:],
            scale=0.3,
            window=-1,
            softcap=0.0,
            alibi_slopes=None,
            num_splits=1,
        )

    attend()
    for name, alter in change.items():
        arguments[name] = alter(arguments[name])
    with pytest.raises(RefusedError, match=message):
        attend()


def test_what_is_gathered_begins_at_the_window(backend: FlashAttnBackend) -> None:
    """Only visible tokens are read: an entry behind the window may name any block."""
    _, batch = batch_of(backend, [(600, 3), (0, 2)], window=5)
    plan = backend._plan(batch.metadata, 5)
    assert isinstance(plan.gathered, flash_plan.Gathered)
    assert plan.gathered.slots.tolist() == [
        batch.token_slots[0][token] for token in range(596, 600)
    ]
    assert plan.gathered.past.tolist() == [0, 1, 2, 3]
    assert plan.gathered.new.tolist() == [4, 5, 6, 7, 8]
    assert plan.gathered.cu_seqlens.tolist() == [0, 7, 9]
    assert plan == dataclasses.replace(plan, call="dense", max_query_len=3, max_seq_len=7, window=4)


def test_batch_invariant_decoding_is_told_of_its_window_at_any_length(
    version: int, calls: Calls
) -> None:
    """In a graph lengths are upper bounds, so whether a window hides anything is not known."""
    backend = make_backend(version, batch_invariant=True)
    windows = []
    for past in (5, 100):
        _, batch = batch_of(backend, [(past, 1)], window=64)
        batch.forward(window=64)
        windows.append(tuple(calls.pop().window_size))
    assert windows == [(63, 0)] * 2
