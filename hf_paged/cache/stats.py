"""What the pool holds at one moment."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["KVCacheStats"]


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
    backend: str
