"""What the tokens of one forward are, in tensors: built once a step, read by every layer.

Dimensions: B rows with new tokens, N new tokens of all rows end to end ("packed"), W entries of
the longest block table.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["AttentionMetadata"]


@dataclass
class AttentionMetadata:
    """One layer group's view of one forward.

    Attributes:
        block_size: tokens a block.
        null_block: the block that is all zeros and is never written.
        block_tables: [B, W] int32; entry ``[b, i]`` holds tokens ``i * block_size`` onwards of
            row b. Entries behind the window and past the end name the null block.
        seq_lens: [B] int32, tokens of each row after this forward.
        cu_seqlens_q: [B + 1] int32, where the new tokens of each row begin in N.
        slot_mapping: [N] int64, ``block_id * block_size + offset``; -1: the token is not stored.
        seq_lens_list, query_lens_list: the same as Python ints, for loops without a sync.
        derived: what a backend computes from the above once a step, by its own keys.
    """

    block_size: int
    null_block: int
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    slot_mapping: torch.Tensor
    seq_lens_list: list[int]
    query_lens_list: list[int]
    derived: dict[Hashable, Any] = field(default_factory=dict)

    @property
    def is_decode(self) -> bool:
        """Whether every row has one new token."""
        return all(query_len == 1 for query_len in self.query_lens_list)
