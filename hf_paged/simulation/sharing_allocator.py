"""The project's own cache manager: shared prefixes, copy-on-write forks, eviction."""

from __future__ import annotations

from hf_paged.core.allocation import NewTokens
from hf_paged.core.cache_manager import KVCacheManager
from hf_paged.core.layer_group import LayerGroup
from hf_paged.core.sequence import Sequence
from hf_paged.errors import KVCacheFullError
from hf_paged.simulation.allocator import Allocator
from hf_paged.simulation.memory_strip import Segment
from hf_paged.simulation.paged_allocator import pool_strip
from hf_paged.simulation.request import Request

__all__ = ["SharingAllocator", "token_ids"]

_VERSION = "simulated weights"
"""One model, so everything computed is comparable."""


_STREAM_BITS, _KIND_BITS = 32, 16
"""Of a token id: its index in its stream, and whose stream that is."""


def token_ids(request: Request, sample: int, start: int, end: int) -> list[int]:
    """Return ids of tokens ``start`` to ``end - 1`` of a sample.

    Equal exactly where the simulated texts are: in a prefix of one number, and in the prompt that
    the samples of a request have in common.
    """
    prefix_end = min(end, request.num_prefix_tokens if request.prefix is not None else 0)
    prompt_end = min(end, request.num_prompt_tokens)
    streams = (
        (0, request.prefix or 0, start, prefix_end),
        (1, request.number, max(start, prefix_end), prompt_end),
        (2 + sample, request.number, max(start, prompt_end), end),
    )
    return [
        (((number << _KIND_BITS) + kind) << _STREAM_BITS) + index
        for kind, number, first, last in streams
        for index in range(first, last)
    ]


class SharingAllocator(Allocator):
    """Sequences of :class:`KVCacheManager`, a transaction for each prefill and each token.

    Args:
        num_slots: the budget; what is left of it after whole blocks is never used.
        block_size: slots a block.
        forks: compute a prompt once and fork it for the other samples; the block that is partly
            filled is then shared too, until one of them writes. False: each sample is a row of
            its own, and only whole blocks are shared.
        keeps_prefixes: what ended requests leave behind is found by later ones, until room is
            needed and the least recently used is evicted. False: shared only while in use.
        swaps: see :class:`Allocator`.
        name: see :class:`Allocator`.
    """

    def __init__(
        self,
        num_slots: int,
        block_size: int,
        *,
        forks: bool = False,
        keeps_prefixes: bool = False,
        swaps: bool = False,
        name: str = "+ sharing",
    ) -> None:
        super().__init__(num_slots)
        self.name = name
        self.block_size: int = block_size
        self.forks = forks
        self.swaps = swaps
        self._keeps_prefixes = keeps_prefixes
        self.manager = KVCacheManager(num_slots // block_size, block_size, [LayerGroup((0,), None)])
        self._sequences: dict[int, list[Sequence]] = {}

    def admit(self, request: Request, num_generated: int = 0) -> bool:
        """Store the prompt, as far as no one has it already, and what follows it."""
        end = request.num_prompt_tokens + num_generated
        sequences = [self.manager.new_sequence()]
        if self.forks and request.num_samples > 1:
            fits = self._store(request, sequences, request.num_prompt_tokens)
            if fits:
                sequences += [
                    self.manager.fork(sequences[0]) for _ in range(1, request.num_samples)
                ]
                fits = num_generated == 0 or self._store(request, sequences, end)
        else:
            sequences += [self.manager.new_sequence() for _ in range(1, request.num_samples)]
            fits = self._store(request, sequences, end)
        if not fits:
            for sequence in sequences:
                self.manager.free(sequence)
            return False
        self._sequences[request.number] = sequences
        return True

    def grow(self, request: Request) -> bool:
        """Store a token of each sample in one forward; who shares its block copies it first."""
        sequences = self._sequences[request.number]
        return self._store(request, sequences, sequences[0].num_tokens + 1)

    def free(self, request: Request) -> None:
        """Drop every reference; known prefixes stay cached if they are kept."""
        for sequence in self._sequences.pop(request.number):
            self.manager.free(sequence)

    @property
    def num_reserved_slots(self) -> int:
        """Slots of the blocks in use; cached ones give way and do not count."""
        return self.manager.pool.num_used * self.block_size

    @property
    def num_live_slots(self) -> int:
        """Slots of the blocks in use that hold a token."""
        return self.manager.pool.num_live_slots

    def strip(self) -> list[Segment]:
        """Return the state of every block's slots."""
        return pool_strip(self.manager.pool, self.block_size, self.num_slots)

    def counters(self) -> dict[str, int]:
        """Return what the manager counts: prefix hits, copies on write, evictions."""
        return {
            "num_prefix_hit_tokens": self.manager.num_prefix_hit_tokens,
            "num_cow_copies": self.manager.num_cow_copies,
            "num_evicted_blocks": self.manager.pool.num_evictions,
        }

    def _store(self, request: Request, sequences: list[Sequence], end: int) -> bool:
        start = sequences[0].num_tokens
        rows = [
            NewTokens(
                sequence,
                end - start,
                token_ids(request, sample, start, end),
                first_position=start,
                version=_VERSION,
                keep=self._keeps_prefixes,
            )
            for sample, sequence in enumerate(sequences)
        ]
        try:
            allocation = self.manager.begin(rows)
        except KVCacheFullError:
            return False
        self.manager.commit(allocation)
        return True
