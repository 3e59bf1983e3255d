"""What the tokens of one forward are: built on the host, sent to each device in one copy.

Dimensions: B rows with new tokens, N new tokens of all rows end to end, W entries of a block table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hf_paged.backends.limits import check_step
from hf_paged.backends.metadata import AttentionMetadata
from hf_paged.backends.upload import send
from hf_paged.core.allocation import RowAllocation
from hf_paged.core.block_table import NO_BLOCK

__all__ = ["StepMetadata", "build_metadata", "pad_to"]

_MIN_PADDED_WIDTH = 8


@dataclass(eq=False)
class StepMetadata:
    """One forward's rows, for each layer group.

    Attributes:
        block_size: tokens a block.
        null_block: see :class:`AttentionMetadata`.
        seq_lens: [B] int32.
        query_lens: [B] int32.
        block_tables: of each group, [B, W] int32.
        slots: of each group, [N] int64.
        token_index: [N] int64, where the N tokens are in the shape in which the model computes;
            None: they are all of it.
    """

    block_size: int
    null_block: int
    seq_lens: np.ndarray
    query_lens: np.ndarray
    block_tables: list[np.ndarray]
    slots: list[np.ndarray]
    token_index: np.ndarray | None = None

    def __post_init__(self) -> None:
        """Nothing is on a device yet."""
        self._on_device: dict[torch.device, list[torch.Tensor]] = {}
        self._groups: dict[tuple[torch.device, int], AttentionMetadata] = {}

    @property
    def width(self) -> int:
        """W."""
        return int(self.block_tables[0].shape[1])

    def padded(self, num_rows: int, width: int) -> StepMetadata:
        """Return a decoding step with empty rows added up to ``num_rows``, and wider tables.

        An empty row has a query, no token, and a slot that is not stored.
        """
        return StepMetadata(
            self.block_size,
            self.null_block,
            pad_to(self.seq_lens, (num_rows,), 0),
            pad_to(self.query_lens, (num_rows,), 1),
            [pad_to(tables, (num_rows, width), self.null_block) for tables in self.block_tables],
            [pad_to(slots, (num_rows,), -1) for slots in self.slots],
        )

    def send(self, device: torch.device) -> None:
        """Send all to ``device``, if they are not there yet."""
        if device not in self._on_device:
            self._on_device[device] = send(self.arrays(), device)

    def place(self, device: torch.device, tensors: list[torch.Tensor]) -> None:
        """Let layers on ``device`` read these tensors, in the shapes of :meth:`arrays`."""
        self._on_device[device] = tensors

    def arrays(self) -> list[np.ndarray]:
        """Return what is sent, in that order."""
        starts = np.zeros(len(self.query_lens) + 1, np.int32)
        np.cumsum(self.query_lens, out=starts[1:])
        index = [] if self.token_index is None else [self.token_index]
        return [self.seq_lens, starts, *self.block_tables, *self.slots, *index]

    def of_group(self, group: int, device: torch.device) -> AttentionMetadata:
        """Return what layers of ``group`` on ``device`` read."""
        metadata = self._groups.get((device, group))
        if metadata is None:
            self.send(device)
            seq_lens, starts, *tensors = self._on_device[device]
            metadata = self._groups[device, group] = AttentionMetadata(
                block_size=self.block_size,
                null_block=self.null_block,
                block_tables=tensors[group],
                seq_lens=seq_lens,
                cu_seqlens_q=starts,
                slot_mapping=tensors[len(self.block_tables) + group],
                seq_lens_list=self.seq_lens.tolist(),
                query_lens_list=self.query_lens.tolist(),
            )
        return metadata

    def index_on(self, device: torch.device) -> torch.Tensor | None:
        """Return :attr:`token_index` on ``device``."""
        if self.token_index is None:
            return None
        self.send(device)
        return self._on_device[device][-1]


def pad_to(array: np.ndarray, shape: tuple[int, ...], value: int) -> np.ndarray:
    """Return ``array`` with ``value`` behind it in each dimension, up to ``shape``.

    As ``np.pad``, which takes longer than the rest of a small step.
    """
    if array.shape == shape:
        return array
    larger = np.full(shape, value, array.dtype)
    larger[tuple(map(slice, array.shape))] = array
    return larger


def build_metadata(
    rows: Sequence[RowAllocation],
    *,
    num_groups: int,
    block_size: int,
    null_block: int,
    for_device: bool,
    token_index: np.ndarray | None = None,
) -> StepMetadata:
    """Put the rows of an allocation into arrays.

    Args:
        rows: what a forward adds to each row.
        num_groups: layer groups.
        block_size: tokens a block.
        null_block: named where a row has no block.
        for_device: kernels will read the tables where nobody checks them: check them here, and pad
            their width to a power of two, so that launches differ in few shapes.
        token_index: see :class:`StepMetadata`.

    Raises:
        InputMismatchError: a table or a slot leads out of the pool.
    """
    width = max((len(table) for row in rows for table in row.sequence.tables), default=0)
    if for_device:
        width = max(_MIN_PADDED_WIDTH, 1 << (width - 1).bit_length()) if width else width
    block_tables, slots = [], []
    for group in range(num_groups):
        tables = np.full((len(rows), width), null_block, np.int32)
        for entries, row in zip(tables, rows, strict=True):
            ids = row.sequence.tables[group].ids
            entries[: len(ids)] = ids
        tables[tables == NO_BLOCK] = null_block
        block_tables.append(tables)
        slots.append(
            np.array([slot for row in rows for slot in row.slots(group, block_size)], np.int64)
        )
    metadata = StepMetadata(
        block_size,
        null_block,
        np.array([row.end for row in rows], np.int32),
        np.array([row.end - row.start for row in rows], np.int32),
        block_tables,
        slots,
        token_index,
    )
    if for_device:
        for tables, group_slots in zip(block_tables, slots, strict=True):
            check_step(
                tables,
                metadata.seq_lens,
                metadata.query_lens,
                group_slots,
                block_size=block_size,
                null_block=null_block,
            )
    return metadata
