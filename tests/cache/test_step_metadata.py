"""What the rows of a forward are, in arrays: exact numbers, padded, and sent once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from forwards import make_manager, new
from hf_paged.cache import step_metadata
from hf_paged.cache.step_metadata import build_metadata
from hf_paged.errors import InputMismatchError

pytestmark = pytest.mark.core_suite

CPU = torch.device("cpu")


def build(windows: Any = (None,), *, for_device: bool = False, index: Any = None) -> Any:
    """Two rows over 9 blocks of 4: one decodes behind 6 tokens, one brings a prompt of 5."""
    manager = make_manager(9, 4, list(windows))
    first, second = manager.new_sequence(), manager.new_sequence()
    manager.commit(manager.begin([new(first, [*range(6)])]))
    allocation = manager.begin([new(first, [6]), new(second, [1] * 5)])
    metadata = build_metadata(
        allocation.rows,
        num_groups=len(windows),
        block_size=4,
        null_block=9,
        for_device=for_device,
        token_index=index,
    )
    return metadata, allocation


def test_rows_in_arrays() -> None:
    metadata, _ = build()
    assert metadata.seq_lens.tolist() == [7, 5]
    assert metadata.query_lens.tolist() == [1, 5]
    assert metadata.block_tables[0].tolist() == [[0, 1], [2, 3]]
    assert metadata.slots[0].tolist() == [6, 8, 9, 10, 11, 12]
    group = metadata.of_group(0, CPU)
    assert group.cu_seqlens_q.tolist() == [0, 1, 6]
    assert (group.seq_lens_list, group.query_lens_list) == ([7, 5], [1, 5])
    assert {t.dtype for t in (group.block_tables, group.seq_lens, group.cu_seqlens_q)} == {
        torch.int32
    }
    assert group.slot_mapping.dtype == torch.int64
    assert metadata.of_group(0, CPU) is group, "built once"


def test_groups_share_lengths_and_have_their_own_tables() -> None:
    metadata, _ = build((None, 3))
    full, sliding = (metadata.of_group(group, CPU) for group in (0, 1))
    assert full.seq_lens.data_ptr() == sliding.seq_lens.data_ptr()
    assert full.block_tables.tolist() != sliding.block_tables.tolist()
    assert set(full.slot_mapping.tolist()).isdisjoint(sliding.slot_mapping.tolist())


def test_kernels_get_tables_padded_to_a_power_of_two() -> None:
    metadata, _ = build(for_device=True)
    assert metadata.width == 8
    assert metadata.block_tables[0].tolist() == [[0, 1] + [9] * 6, [2, 3] + [9] * 6]


def test_padding_rows_have_a_query_and_no_token() -> None:
    manager = make_manager(9, 4, [None])
    rows = [manager.new_sequence() for _ in range(3)]
    manager.commit(manager.begin([new(row, [i] * 5) for i, row in enumerate(rows)]))
    allocation = manager.begin([new(row, [7]) for row in rows])
    metadata = build_metadata(
        allocation.rows, num_groups=1, block_size=4, null_block=9, for_device=True
    ).padded(4, 16)
    assert metadata.seq_lens.tolist() == [6, 6, 6, 0]
    assert metadata.query_lens.tolist() == [1, 1, 1, 1]
    assert metadata.block_tables[0].shape == (4, 16)
    assert metadata.block_tables[0][3].tolist() == [9] * 16
    assert metadata.slots[0].tolist()[3] == -1
    assert [array.dtype for array in metadata.arrays()] == [np.int32] * 3 + [np.int64]
    assert metadata.arrays()[1].tolist() == [0, 1, 2, 3, 4]


def test_everything_is_sent_to_a_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []

    def send(arrays: Any, device: torch.device) -> Any:
        sent.append(device)
        return [torch.from_numpy(array).to(device) for array in arrays]

    monkeypatch.setattr(step_metadata, "send", send)
    meta = torch.device("meta")
    metadata, _ = build((None, 3), index=np.arange(6))
    for device in (CPU, meta, CPU, meta):
        assert metadata.of_group(1, device).block_tables.device == device
        assert metadata.of_group(0, device).slot_mapping.device == device
        assert metadata.index_on(device).device == device
    assert sent == [CPU, meta]


@pytest.mark.parametrize("bad", [-2, 10, 2**30])
def test_a_table_that_leads_out_of_the_pool_does_not_reach_a_kernel(bad: int) -> None:
    _, allocation = build()
    allocation.rows[0].sequence.tables[0].ids[1] = bad
    arguments: dict[str, Any] = dict(num_groups=1, block_size=4, null_block=9)
    with pytest.raises(InputMismatchError, match=r"block_tables\[0\]"):
        build_metadata(allocation.rows, for_device=True, **arguments)
