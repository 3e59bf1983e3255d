"""What may not change a result of the native backend: other rows, threads, the order of the tasks.

With ``batch_invariant=True`` not a bit of it, otherwise no more than rounding.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from backends.paged_batch import PagedBatch, Row, random_rows
from hf_paged.backends import cpu_kernels, native
from hf_paged.backends.cpu import CpuBackend

pytestmark = [pytest.mark.core_suite, pytest.mark.usefixtures("isa")]

SHAPE: dict[str, Any] = dict(num_kv_heads=2, group_size=3, head_dim=40)
DTYPES = [torch.float32, torch.bfloat16]
DECODE = [(0, 1), (16, 1), (511, 1), (512, 1), (1500, 1), (2999, 1)]
OTHERS = [(0, 3), (700, 2), (300, 4), (0, 70), (65, 6), (2050, 20), (40, 130), (33, 0)]
ATTENTION = [
    dict(),
    dict(window=600),
    dict(softcap=5.0, sinks=torch.linspace(-1, 1, 6), alibi_slopes=torch.linspace(0, 0.5, 6)),
]


@pytest.fixture(autouse=True)
def keep_number_of_threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def batch_of(rows: list[Row], attention: dict[str, Any]) -> PagedBatch:
    return PagedBatch(rows, CpuBackend(batch_invariant=True), 16, window=attention.get("window"))


def attend_batch(batch: PagedBatch, attention: dict[str, Any]) -> list[torch.Tensor]:
    """Return the output of each row."""
    return list(batch.forward(scale=0.16, **attention).split(batch.metadata.query_lens_list))


def attend(rows: list[Row], attention: dict[str, Any] | None = None) -> list[torch.Tensor]:
    return attend_batch(batch_of(rows, attention or {}), attention or {})


class CountingHost:
    """Stands for torch's threads: runs the workers one after the other, and counts them.

    Workers take tasks until none is left, so the one that runs first does all the work.
    """

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self.calls: list[int] = []
        run_type = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
        host_type = ctypes.CFUNCTYPE(
            ctypes.c_int32,
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_int64,
            run_type,
            ctypes.c_void_p,
        )

        def parallel_for(begin: int, end: int, _: int, run: Any, context: int) -> int:
            self.calls.append(end - begin)
            for worker in reversed(range(begin, end)):
                run(worker, worker + 1, context)
            return 0

        self._callback = host_type(parallel_for)

    def threads(self) -> Any:
        address = ctypes.cast(self._callback, ctypes.c_void_p)
        return ctypes.byref(native.Threads(address, self.num_threads))


@pytest.mark.parametrize("attention", ATTENTION, ids=lambda attention: "-".join(attention) or "all")
def test_a_row_is_the_same_alone_and_at_any_place_of_a_batch(attention: Any) -> None:
    dtype = torch.float32 if attention else torch.bfloat16
    rows = random_rows([*DECODE, *OTHERS], **SHAPE, dtype=dtype)
    new_rows = [i for i, row in enumerate(rows) if row.query.shape[0]]
    torch.set_num_threads(1)
    alone = {i: attend([rows[i]], attention)[0] for i in new_rows}
    everything = list(range(len(rows)))
    for order in (everything[: len(DECODE)], everything, [*everything[9:], *everything[:9]]):
        batch = batch_of([rows[i] for i in order], attention)
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            for i, out in zip(order, attend_batch(batch, attention), strict=True):
                if i in alone:
                    assert torch.equal(out, alone[i]), f"row {i} of {order}, {num_threads} threads"


@settings(max_examples=30, deadline=None)
@given(
    lens=st.lists(
        st.tuples(
            st.integers(0, 40) | st.sampled_from([255, 511, 512, 1030, 2048]),
            st.sampled_from([0, 1, 1, 2, 6, 30]),
        ),
        min_size=2,
        max_size=6,
    ),
    picked=st.integers(0, 5),
    num_threads=st.tuples(*[st.sampled_from([1, 2])] * 2),
    attention=st.sampled_from(ATTENTION),
    num_kv_heads=st.integers(1, 4),
    group_size=st.sampled_from([1, 2, 5, 17]),
    dtype=st.sampled_from(DTYPES),
)
def test_no_other_row_reaches_a_row(
    lens: Any,
    picked: int,
    num_threads: tuple[int, int],
    attention: Any,
    num_kv_heads: int,
    group_size: int,
    dtype: torch.dtype,
) -> None:
    shape = SHAPE | dict(num_kv_heads=num_kv_heads, group_size=group_size, dtype=dtype)
    if "sinks" in attention:
        attention = attention | {
            name: torch.linspace(0, 1, num_kv_heads * group_size)
            for name in ("sinks", "alibi_slopes")
        }
    lens = [*lens, (20, 1)]  # hand over one new token at least
    rows = random_rows(lens, **shape)
    torch.set_num_threads(num_threads[0])
    together = attend(rows, attention)
    torch.set_num_threads(num_threads[1])
    picked %= len(rows)
    if lens[picked][1]:
        assert torch.equal(attend([rows[picked]], attention)[0], together[picked])


@pytest.mark.parametrize("invariant", [True, False], ids=["invariant", "free"])
@pytest.mark.parametrize(
    ("dtype", "rounding"),
    [(torch.float32, 1e-6), (torch.bfloat16, 1e-3)],
    ids=["float32", "bfloat16"],
)
@pytest.mark.parametrize("lens", [DECODE, OTHERS, DECODE[-1:], OTHERS[3:4]])
def test_any_number_of_threads_gives_the_same(
    lens: Any,
    dtype: torch.dtype,
    rounding: float,
    invariant: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = random_rows(lens, **SHAPE, dtype=dtype)
    batch = PagedBatch(rows, CpuBackend(batch_invariant=invariant), 16)
    torch.set_num_threads(1)
    expected = batch.forward()
    for num_threads in (2, 3, 7, 64):
        host = CountingHost(num_threads)
        monkeypatch.setattr(native, "threads", host.threads)
        out = batch.forward()
        if invariant:
            assert torch.equal(out, expected)
        else:
            assert (out - expected).norm() < rounding * expected.norm()
        assert host.calls, "large enough for threads"
        assert max(host.calls) <= num_threads


def test_threads_are_torchs_and_no_more_than_it_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = random_rows(DECODE, **SHAPE)
    hosts = []

    def threads() -> Any:
        hosts.append(CountingHost(torch.get_num_threads()))
        return hosts[-1].threads()

    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        given_to_kernels = native.threads()._obj
        assert given_to_kernels.num_threads == num_threads
    monkeypatch.setattr(native, "threads", threads)
    for num_threads, expected in ((1, set()), (2, {2}), (5, {5})):
        hosts.clear()
        torch.set_num_threads(num_threads)
        attend(rows)
        assert {count for host in hosts for count in host.calls} == expected


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_the_library_starts_no_threads_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = random_rows(DECODE, **SHAPE)
    torch.set_num_threads(2)
    attend(rows)
    monkeypatch.setattr(native, "threads", CountingHost(64).threads)
    before = len(os.listdir("/proc/self/task"))
    attend(rows)
    assert len(os.listdir("/proc/self/task")) == before


def test_a_small_call_wakes_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    host = CountingHost(8)
    monkeypatch.setattr(native, "threads", host.threads)
    attend(random_rows([(3, 1), (5, 1)]))
    assert host.calls == []


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("lens", [DECODE, OTHERS], ids=["decode", "mixed"])
def test_the_same_call_again_gives_the_same_bits(lens: Any, dtype: torch.dtype) -> None:
    """Which thread merges the parts of a row is chance; the order of the merge is not."""
    torch.set_num_threads(2)
    for invariant in (False, True):
        backend = CpuBackend(batch_invariant=invariant)
        batch = PagedBatch(random_rows(lens, **SHAPE, dtype=dtype), backend, 16)
        expected = batch.forward()
        for _ in range(20):
            assert torch.equal(batch.forward(), expected)


def test_python_threads_compute_at_once_and_keep_their_own_numbers_of_threads() -> None:
    backend = CpuBackend(batch_invariant=True)
    lens = [DECODE, OTHERS, DECODE[-2:], OTHERS[:3]]
    batches = [
        PagedBatch(random_rows(one, **SHAPE, seed=seed, dtype=dtype), backend, 16)
        for seed, (one, dtype) in enumerate(zip(lens, DTYPES * 2, strict=True))
    ]
    expected = [batch.forward() for batch in batches]
    start, results = threading.Barrier(len(batches)), [0] * len(batches)

    def work(index: int) -> None:
        torch.set_num_threads(1 + index % 2)
        start.wait()
        for _ in range(10):
            results[index] += torch.equal(batches[index].forward(), expected[index])

    workers = [threading.Thread(target=work, args=(index,)) for index in range(len(batches))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert results == [10] * len(batches)


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("lens", [DECODE, OTHERS], ids=["decode", "mixed"])
def test_what_a_call_leaves_in_its_workspace_reaches_no_other(
    lens: Any, dtype: torch.dtype
) -> None:
    torch.set_num_threads(1)
    batch = PagedBatch(random_rows(lens, **SHAPE, dtype=dtype), CpuBackend(), 16)
    expected = batch.forward()
    poison = random_rows(OTHERS, num_kv_heads=1, group_size=9, head_dim=200, dtype=dtype)
    for row in poison:
        row.value.fill_(torch.nan)
        row.key.fill_(torch.nan)
    assert PagedBatch(poison, CpuBackend(), 16).forward().isnan().all()
    assert torch.equal(batch.forward(), expected)


def test_a_workspace_ends_with_its_thread_and_when_scratch_is_released() -> None:
    backend = CpuBackend()
    batch = PagedBatch(random_rows(DECODE, **SHAPE), backend, 16)
    expected = batch.forward()
    held = cpu_kernels._workspaces.workspace
    assert held.num_bytes > 0
    backend.release_scratch()
    assert not hasattr(cpu_kernels._workspaces, "workspace")
    assert torch.equal(batch.forward(), expected)
