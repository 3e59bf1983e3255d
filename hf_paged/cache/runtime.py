"""What all calls of one patched model share: its pool, its storage, its backend."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Hashable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary, WeakSet, ref

import numpy as np
import torch

from hf_paged.backends.registry import create_backend
from hf_paged.cache.layout import KVLayout
from hf_paged.cache.sizing import choose_block_size, choose_num_blocks, make_block_file
from hf_paged.cache.stats import KVCacheStats
from hf_paged.cache.step_metadata import StepMetadata, build_metadata
from hf_paged.cache.storage import KVStorage
from hf_paged.config import PagedConfig
from hf_paged.core.allocation import Allocation
from hf_paged.core.cache_manager import KVCacheManager
from hf_paged.core.interrupts import interruptible, whole
from hf_paged.core.row_scheduler import RowScheduler
from hf_paged.core.scheduler import Call, Scheduler
from hf_paged.core.sequence import Sequence
from hf_paged.errors import ConfigurationError

if TYPE_CHECKING:
    from hf_paged.cache.packed_batch import PackedBatch

__all__ = [
    "Computation",
    "OwnedRows",
    "PackedForward",
    "PagedRuntime",
    "find_runtime",
    "inner_model",
    "register_runtime",
    "runtime_of",
]

logger = logging.getLogger("hf_paged")

_DEFAULT_BATCH_TOKENS = 2048

_runtimes: WeakKeyDictionary[torch.nn.Module, PagedRuntime] = WeakKeyDictionary()


@dataclass(eq=False)
class OwnedRows:
    """The sequences of one cache or one running call.

    Attributes:
        number: by which a picture of the pool names the owner.
        sequences: freed when the owner is garbage-collected.
    """

    number: int
    sequences: list[Sequence] = field(default_factory=list)


class Computation(Protocol):
    """What K and V of a model depend on besides tokens and positions."""

    def is_determined(self) -> bool:
        """Whether equal tokens give equal K and V in this forward (no hooks, no dropout)."""

    def fingerprint(self) -> Hashable | None:
        """Return equal values only for equal weights, adapters and settings; None: unknown."""


class PackedForward(Protocol):
    """The patched model as the packed runner calls it."""

    def begin_call(self) -> None:
        """Be told that forwards of a new call follow; the model may have changed."""

    def forward(self, batch: PackedBatch, device: torch.device) -> torch.Tensor:
        """Return the logits [m, V] of the tokens that ``batch`` wants, given ids on ``device``."""

    def close(self) -> None:
        """Let go of memory of the device."""

    def obstacle(self) -> str | None:
        """Return why rows must stay in rectangles now, or None."""


class PagedRuntime:
    """Pool, storage, scheduler and backend of one patched model.

    Args:
        config: what the user asked for.
        layout: what the model stores for a token.
        device: where the model is when patched.
        layer_devices: where each layer is then.
        computation: tells what K and V depend on besides tokens and positions.

    Attributes:
        packed_model: set when the model is patched.

    Raises:
        ConfigurationError: a limit that holds no block, or more than the machine has.
    """

    def __init__(
        self,
        config: PagedConfig,
        layout: KVLayout,
        device: torch.device,
        computation: Computation,
        layer_devices: list[torch.device] | None = None,
    ) -> None:
        self.config = config
        self.layout = layout
        self.computation = computation
        self.backend = create_backend(
            config.backend,
            device,
            batch_invariant=config.batch_invariant,
            check=lambda backend: backend.check_model(
                device=device,
                dtype=layout.dtype,
                head_dim=layout.head_dim,
                block_size=choose_block_size(config, backend),
                uses_sinks=layout.uses_sinks,
            ),
        )
        self.block_size = choose_block_size(config, self.backend)
        layer_devices = layer_devices or [device] * layout.num_layers
        bytes_on = layout.bytes_on_devices(self.block_size, layer_devices)
        self.bytes_per_block = sum(bytes_on.values())
        self.num_blocks = choose_num_blocks(config, bytes_on)
        self.storage = KVStorage(
            self.backend, layout, self.num_blocks, self.block_size, layer_devices
        )
        self.manager = KVCacheManager(
            self.num_blocks,
            self.block_size,
            layout.groups,
            on_emptied=self._poison if config.debug else None,
        )
        self.group_of_layer = {
            layer: index for index, group in enumerate(layout.groups) for layer in group.layers
        }
        self.scheduler = Scheduler(self.num_blocks, self.reclaim)
        self.current_call: ContextVar[Call | None] = ContextVar("current_call", default=None)
        self.scope: ContextVar[Hashable] = ContextVar("scope", default=None)
        self.max_batch_tokens = config.max_batch_tokens or _DEFAULT_BATCH_TOKENS
        self.row_schedulers: WeakSet[RowScheduler] = WeakSet()
        self.packed_model: PackedForward | None = None
        self.block_file = make_block_file(config, self.storage, self.bytes_per_block, device)
        self.num_preemptions = 0
        self.num_avoided_tokens = 0
        self.is_active = True
        self._owned: dict[ref[Any], OwnedRows] = {}
        self._dead_owners: deque[ref[Any]] = deque()
        self._num_owners = 0
        logger.info(
            "KV pool: %d blocks of %d tokens, %d bytes each, %.1f MiB in all; backend %s",
            self.num_blocks,
            self.block_size,
            self.bytes_per_block,
            self.num_blocks * self.bytes_per_block / 2**20,
            self.backend.name,
        )

    @property
    def lock(self) -> Any:
        """Guards the pool and its sequences; re-entrant."""
        return self.scheduler.lock

    @whole
    def own_rows(self, owner: Any) -> OwnedRows:
        """Return a place for the sequences of ``owner``, freed soon after it is collected.

        A finalizer in Python could be interrupted, and could run while the lock is held. So the
        interpreter itself notes who died, and :meth:`reclaim` looks.
        """
        with self.lock:
            rows = OwnedRows(self._num_owners)
            self._num_owners += 1
            self._owned[ref(owner, self._dead_owners.append)] = rows
            return rows

    def rows_of_owners(self) -> dict[Sequence, tuple[int, int]]:
        """Return (owner, row) of each sequence that has an owner; the lock must be held."""
        return {
            sequence: (rows.number, row)
            for rows in self._owned.values()
            for row, sequence in enumerate(rows.sequences)
        }

    @property
    def occasion(self) -> str:
        """What a forward is about to happen for, as an error message says it."""
        call = self.current_call.get()
        return "a forward" if call is None else f"step {call.num_steps} of generate()"

    def count_step(self) -> None:
        """Count a forward of the running call, whose blocks are reserved."""
        call = self.current_call.get()
        if call is not None:
            call.num_steps += 1

    @whole
    def reclaim(self) -> None:
        """Free the sequences of owners that were collected; the lock must be held."""
        while self._dead_owners:
            for sequence in self._owned.pop(self._dead_owners.popleft()).sequences:
                self.manager.free(sequence)

    def build_metadata(
        self, allocation: Allocation, token_index: np.ndarray | None = None
    ) -> StepMetadata:
        """Put the rows of a forward into arrays; see :func:`build_metadata`."""
        return build_metadata(
            allocation.rows,
            num_groups=len(self.manager.groups),
            block_size=self.block_size,
            null_block=self.num_blocks,
            for_device=self.backend.supports_graphs,
            token_index=token_index,
        )

    def version(self, *, is_first_forward: bool, is_prompt: bool) -> tuple[Hashable | None, bool]:
        """Return the version of K and V about to be computed, and whether to keep the blocks.

        A ``generate()`` takes its version once. Weights can change between two forwards of a
        hand-written loop, so there only the first forward of a cache is shareable.

        Args:
            is_first_forward: the cache is empty.
            is_prompt: the forward has more than one token a row.
        """
        call = self.current_call.get()
        if call is None and not is_first_forward:
            return None, False
        # Looking at every module takes time: not again at each decoding step of a call.
        is_known = call is not None and call.version is not None
        if (is_prompt or is_first_forward or not is_known) and not self.computation.is_determined():
            return None, False
        if call is not None and call.version is not None:
            return call.version, call.keep
        fingerprint = None
        if self.config.prefix_caching:
            with interruptible():  # reads every weight, and nothing of the pool has changed yet
                fingerprint = self.computation.fingerprint()
        # An object equals nothing but itself: rows of this call share, later calls do not.
        version = (object() if fingerprint is None else fingerprint, self.scope.get())
        keep = fingerprint is not None
        if call is not None:
            call.version, call.keep = version, keep
        return version, keep

    @property
    def hit_rate(self) -> float:
        """Part of the prompt tokens looked up since the last reset that was stored already."""
        queried = self.manager.num_prefix_query_tokens
        return self.manager.num_prefix_hit_tokens / queried if queried else 0.0

    def _poison(self, block_ids: list[int]) -> None:
        if self.block_file is not None:
            self.block_file.await_blocks(block_ids)
        self.storage.poison(block_ids)

    @whole
    def stats(self) -> KVCacheStats:
        """Return the figures of this moment."""
        with self.lock:
            self.reclaim()
            manager, pool = self.manager, self.manager.pool
            return KVCacheStats(
                block_size=self.block_size,
                num_blocks=pool.num_blocks,
                free_blocks=pool.num_free,
                cached_blocks=pool.num_cached,
                used_blocks=pool.num_used,
                peak_used_blocks=manager.peak_used_blocks,
                bytes_per_block=self.bytes_per_block,
                capacity_bytes=(pool.num_blocks + 1) * self.bytes_per_block,
                used_bytes=pool.num_used * self.bytes_per_block,
                peak_used_bytes=manager.peak_used_blocks * self.bytes_per_block,
                live_tokens=pool.num_live_slots,
                utilization=manager.utilization,
                utilization_at_peak=manager.utilization_at_peak,
                prefix_query_tokens=manager.num_prefix_query_tokens,
                prefix_hit_tokens=manager.num_prefix_hit_tokens,
                cow_copies=manager.num_cow_copies,
                evictions=pool.num_evictions,
                running=sum(rows.num_active for rows in self.row_schedulers),
                waiting=sum(rows.num_waiting for rows in self.row_schedulers),
                preemptions=self.num_preemptions
                + sum(rows.num_preemptions for rows in self.row_schedulers),
                swapped_out_blocks=self.block_file.num_stored if self.block_file else 0,
                swapped_in_blocks=self.block_file.num_loaded if self.block_file else 0,
                computed_tokens=manager.num_computed_tokens,
                padded_tokens_avoided=self.num_avoided_tokens,
                backend=self.backend.name,
            )

    @whole
    def reset_stats(self) -> None:
        """Set peaks to what is used now and counters to 0."""
        with self.lock:
            self.reclaim()
            self.manager.reset_stats()
            self.num_preemptions = self.num_avoided_tokens = 0
            if self.block_file is not None:
                self.block_file.num_stored = self.block_file.num_loaded = 0
            for rows in self.row_schedulers:
                rows.num_preemptions = 0

    @whole
    def clear_prefix_cache(self) -> None:
        """Drop cached blocks; used ones stay."""
        with self.lock:
            self.reclaim()
            self.manager.clear_cached()

    @whole
    def trim(self) -> None:
        """Give the memory of free blocks and of scratch buffers back to the system."""
        with self.lock:
            self.reclaim()
            self.storage.trim(self.manager.pool.free_blocks())

    @whole
    def close(self) -> None:
        """Give back all memory; caches that still live answer with an error from now on."""
        with self.lock:
            self.is_active = False
            if self.packed_model is not None:
                self.packed_model.close()
            self.packed_model = None  # what is compiled keeps weights alive
            self.block_file = None
            self.storage.clear()


def register_runtime(model: torch.nn.Module, runtime: PagedRuntime | None) -> None:
    """Make ``runtime`` the one of ``model``, or forget it (None)."""
    if runtime is None:
        _runtimes.pop(model, None)
    else:
        _runtimes[model] = runtime


def inner_model(model: torch.nn.Module) -> torch.nn.Module:
    """Return the transformers model inside a PEFT wrapper, or ``model`` itself."""
    get_base_model = getattr(model, "get_base_model", None)
    if callable(get_base_model) and hasattr(model, "peft_config"):
        base: torch.nn.Module = get_base_model()
        return base
    return model


def find_runtime(model: torch.nn.Module) -> PagedRuntime | None:
    """Return the runtime of a patched model, or None."""
    return _runtimes.get(inner_model(model)) if isinstance(model, torch.nn.Module) else None


def runtime_of(model: torch.nn.Module) -> PagedRuntime:
    """Return the runtime of a patched model.

    Raises:
        ConfigurationError: the model is not patched.
    """
    runtime = find_runtime(model)
    if runtime is None:
        raise ConfigurationError(
            f"model is not patched: expected a model (not its config) that hf_paged.patch() "
            f"returned, got {type(model).__name__}; call hf_paged.patch(model) first."
        )
    return runtime
