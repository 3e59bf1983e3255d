"""The transformers ``Cache`` whose K and V lie in the pool of a patched model.

It implements the interface of ``Cache`` as transformers 5.17 to 5.24 call it. Lengths that
transformers sees are those of the padded rectangle, since ``generate()`` slices by them; the real
lengths are :attr:`PagedCache.seq_lens`.
"""

from __future__ import annotations

import operator
from types import TracebackType
from typing import Any, NoReturn

import torch
import transformers
from packaging.version import Version
from transformers.cache_utils import DynamicCache

from hf_paged.cache import dense
from hf_paged.cache.columns import Columns
from hf_paged.cache.runtime import PagedRuntime, runtime_of
from hf_paged.cache.step import PagedStep, reserve
from hf_paged.cache.step_cache import StepCache
from hf_paged.cache.step_inputs import StepInputs, new_tokens
from hf_paged.core.allocation import Allocation
from hf_paged.core.interrupts import whole
from hf_paged.core.sequence import Sequence
from hf_paged.errors import CacheStateError, ConfigurationError, InputMismatchError

__all__ = ["PagedCache"]

_CROP_TAKES_LENGTHS = Version(transformers.__version__) < Version("5.18")
"""Up to 5.17 a positive argument of crop is the length to keep; later it is an error."""


class PagedCache(StepCache):
    """K and V of a batch of rows, stored in blocks that equal prefixes share.

    Blocks are taken as tokens come and go back when the cache is released, leaves its ``with``
    block or is garbage-collected.

    Example:
        >>> cache = hf_paged.PagedCache(model)                          # doctest: +SKIP
        >>> logits = model(input_ids, past_key_values=cache).logits     # doctest: +SKIP
        >>> branch = cache.fork()            # shares every block       # doctest: +SKIP

    Args:
        model: a patched model; a PEFT wrapper around one will do.

    Raises:
        ConfigurationError: the model is not patched.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._init(runtime_of(model))

    def _init(self, runtime: PagedRuntime) -> None:
        super().__init__(runtime)
        self._rows = runtime.own_rows(self)
        self._is_open = False
        self._columns = Columns(0)
        self._is_recording = False
        self._is_released = False
        self._reason_of_release: str | None = None
        self._is_in_forward = False
        self._num_layers: int | None = None
        self._new_real = self._columns.real
        self._past: dict[int, dense.StoredTokens] = {}
        self._allocation: Allocation | None = None
        self._hold_window = False

    # -- what is inside ----------------------------------------------------------------------

    @property
    def seq_lens(self) -> list[int]:
        """Tokens stored for each row, padding left out."""
        return [sequence.num_tokens for sequence in self._rows.sequences]

    @property
    def block_tables(self) -> list[list[list[int]]]:
        """Block ids of each row in each layer group: ``block_tables[group][row]``.

        A Llama has one group. Entries behind a sliding window are -1.
        """
        groups = range(len(self.runtime.manager.groups))
        rows = self._rows.sequences
        return [[sequence.tables[group].ids.tolist() for sequence in rows] for group in groups]

    @property
    def sequences(self) -> list[Sequence]:
        """The rows; empty before the first forward. For this package alone."""
        return self._rows.sequences

    @property
    def columns(self) -> Columns:
        """Which columns of the rectangle are real. For this package alone."""
        return self._columns

    def gaps_behind_windows(self, real: torch.Tensor) -> list[bool]:
        """Tell for each row whether padding between its tokens shifts a window.

        A window counts columns: K and V behind a gap differ from those of the same tokens without
        one. For this package alone.

        Args:
            real: [B, T] bool, the new columns.
        """
        if not self._has_windows:
            return [False] * real.shape[0]
        return self._columns.rows_with_gaps(real)

    @property
    def _has_windows(self) -> bool:
        return any(group.window for group in self.runtime.manager.groups)

    # -- one forward -------------------------------------------------------------------------

    def begin_forward(self, inputs: StepInputs, num_layers: int, *, is_paged: bool) -> PagedStep:
        """Reserve the blocks of a forward; :meth:`end_forward` must follow.

        Args:
            inputs: what the model was called with.
            num_layers: layers that the forward runs.
            is_paged: False: attend by the model's own code over gathered K and V.

        Raises:
            KVCacheFullError: too few blocks; nothing has changed.
            InputMismatchError: rows or mask do not fit the cache.
            CacheStateError: the cache is released, or in a forward of another thread.
        """
        self.check_usable()
        if self._is_in_forward:
            raise CacheStateError(
                "the cache is in a forward of another thread already: expected one forward at a "
                "time; give each thread a cache of its own (cache.fork())."
            )
        is_new = not self._is_open
        self._open_rows(inputs.num_rows)
        if self._num_layers not in (None, num_layers):
            raise InputMismatchError(
                f"the cache holds {self._num_layers} layers, this forward runs {num_layers}: "
                "expected the same number; use a new cache."
            )
        try:
            step = self._make_step(inputs, num_layers, is_paged=is_paged)
        except BaseException:
            if is_new:
                self._close_rows()
            raise
        self._is_in_forward = True
        self._num_layers = num_layers
        return step

    def _make_step(self, inputs: StepInputs, num_layers: int, *, is_paged: bool) -> PagedStep:
        real, hides_past = self.columns.new_columns(inputs.attention_mask, inputs.num_columns)
        is_dense = bool(real.all())
        if (
            hides_past
            or (not is_dense and self.columns.is_padded_late(real))
            # A window counts columns, the blocks count tokens; with gaps the two differ.
            or (self._has_windows and self.columns.has_gaps)
        ):
            is_paged = False
        rows = new_tokens(self, inputs, real, hides_past=hides_past)
        runtime, hold_window = self.runtime, self._is_recording
        occasion = runtime.occasion
        allocation = runtime.scheduler.allocate(
            lambda: reserve(runtime, rows, hold_window=hold_window, occasion=occasion)
        )
        runtime.count_step()
        self._new_real, self._past = real, {}
        self._allocation, self._hold_window = allocation, hold_window
        try:
            metadata = runtime.build_metadata(
                allocation, None if is_dense else torch.nonzero(real.flatten())[:, 0].numpy()
            )
        except BaseException:
            self.roll_back(allocation)
            raise
        return PagedStep(
            self,
            metadata,
            num_rows=inputs.num_rows,
            num_columns=inputs.num_columns,
            num_layers=num_layers,
            is_paged=is_paged,
        )

    def end_forward(self, step: PagedStep, *, is_complete: bool) -> None:
        """Commit a forward, or roll it back; the cache is then ready for the next."""
        try:
            assert self._allocation is not None
            self.settle(
                step, self._allocation, is_complete=is_complete, hold_window=self._hold_window
            )
            if is_complete:
                self._columns.append(self._new_real)
        finally:
            self._allocation = None
            self._is_in_forward = False
            if self._columns.num_columns == 0:
                self._close_rows()

    def gather_past(
        self, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy what ``layer`` has stored into the padded shape; see :func:`dense.gather`."""
        group = self.runtime.group_of_layer[layer]
        if group not in self._past:
            self._past[group] = dense.find_stored(self, group)
        return dense.gather(self, layer, self._past[group], key, value)

    @whole
    def take_over(self, sequences: list[Sequence], real: torch.Tensor) -> None:
        """Make an empty cache hold rows that a packed call has computed. For this package alone.

        Args:
            sequences: one a row; freed by this cache from now on.
            real: [B, C] bool on the CPU, the columns of the rectangle that are no padding.
        """
        self._check_idle()
        assert not self._is_open
        with self.runtime.lock:
            self._rows.sequences = sequences
            self._columns = Columns(len(sequences))
            self._columns.append(real)
            self._is_open = True
            self._num_layers = self.runtime.layout.num_layers

    def abandon(self, reason: str) -> None:
        """Release the cache; say ``reason`` to whoever uses it. For this package alone."""
        self.release()
        self._reason_of_release = reason

    @whole
    def check_prompt(self, inputs: StepInputs) -> None:
        """Raise now what a prompt given in several forwards would raise in one of them.

        Raises:
            KVCacheFullError: the rows do not fit together.
        """
        self.check_usable()
        is_new = not self._is_open
        self._open_rows(inputs.num_rows)
        runtime = self.runtime
        try:
            real, hides = self._columns.new_columns(inputs.attention_mask, inputs.num_columns)
            rows = new_tokens(self, inputs, real, hides_past=hides)
            runtime.scheduler.allocate(
                lambda: runtime.manager.check_fits(rows, occasion="the prompt of generate()")
            )
        finally:
            if is_new:
                self._close_rows()

    # -- lengths, as transformers asks for them ----------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the columns so far, padding included."""
        return self._columns.num_columns

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return the column of the next query."""
        return self._columns.num_columns

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return how many columns a layer's mask covers, and the first of them."""
        num_past, window = self._columns.num_columns, self.runtime.layout.windows[layer_idx]
        first = 0 if window is None else max(0, num_past - window + 1)
        return num_past - first + query_length, first

    @property
    def is_croppable(self) -> bool:
        """Always: see :meth:`crop`."""
        return True

    @property
    def is_initialized(self) -> bool:
        """Whether a forward has stored something."""
        return self._is_open

    @property
    def batch_size(self) -> int:
        """Rows, -1 before the first forward."""
        return len(self.sequences) if self._is_open else -1

    def __repr__(self) -> str:
        """Show the rows at a glance."""
        state = "released" if self._is_released else f"seq_lens={self.seq_lens}"
        return f"PagedCache({state}, block_size={self.runtime.block_size})"

    # -- rows --------------------------------------------------------------------------------

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make row i a fork of row ``beam_idx[i]``: permutes tables, copies no K or V.

        Args:
            beam_idx: [B'] integers in [0, B).

        Raises:
            CacheStateError: an index out of range.
        """
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the given rows, in that order; ``indices`` may be a bool mask."""
        if indices.dtype == torch.bool:
            indices = torch.nonzero(indices)[:, 0]
        self._select(indices.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row ``repeats`` times; the copies share every block."""
        self._select([row for row in range(len(self.sequences)) for _ in range(repeats)])

    @whole
    def crop(self, tokens_to_remove: int | None = None, max_length: int | None = None) -> None:
        """Forget the last columns; a block is freed only when it is empty.

        Args:
            tokens_to_remove: negative: forget that many columns. 0: forget none. Both let go of
                what lies behind a window. Positive: up to transformers 5.17 the number of
                columns to keep, as there; later an error, as there.
            max_length: the old name of the argument.

        Raises:
            CacheStateError: more columns than there are, or tokens behind a window that are gone.
        """
        self._check_idle()
        given = tokens_to_remove if tokens_to_remove is not None else max_length
        num_columns = self._columns.num_columns
        try:
            number = operator.index(given)  # type: ignore[arg-type]  # a tensor will do as well
        except TypeError as error:
            raise ConfigurationError(
                f"crop({given!r}): expected a negative integer, the columns to remove, or 0."
            ) from error
        if number > 0 and not _CROP_TAKES_LENGTHS:
            raise ValueError(
                f"crop({number}): expected a negative integer, the columns to remove, or 0; the "
                f"cache has {num_columns} columns."
            )
        keep = min(number, num_columns) if number > 0 else num_columns + number
        if keep < 0:
            raise CacheStateError(
                f"crop({number}) removes more than there is: the cache has {num_columns} columns."
            )
        manager = self.runtime.manager
        with self.runtime.lock:
            lost = self._columns.num_real_after(keep)
            kept = [s.num_tokens - n for s, n in zip(self.sequences, lost, strict=True)]
            for sequence, num_tokens in zip(self.sequences, kept, strict=True):
                if num_tokens < sequence.num_tokens and not manager.can_crop(sequence, num_tokens):
                    raise CacheStateError(
                        f"crop({number}) reaches behind a sliding window whose tokens are gone: "
                        "call activate_past_recording() before the forward that is to be undone."
                    )
            for sequence, num_tokens in zip(self.sequences, kept, strict=True):
                manager.crop(sequence, num_tokens)
                manager.drop_hidden(sequence)
            self._columns.crop(keep)

    def activate_past_recording(self) -> None:
        """From now on keep tokens behind a window until :meth:`crop` is called."""
        self._is_recording = True

    @property
    def records_past(self) -> bool:
        """Whether tokens behind a window stay until :meth:`crop`."""
        return self._is_recording

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether a layer keeps tokens behind its window until :meth:`crop`."""
        return self._is_recording and self.is_sliding[layer_idx]

    @whole
    def reset(self) -> None:
        """Forget everything; the cache can be used again, with any number of rows."""
        self._check_idle()
        self._close_rows()

    # -- life --------------------------------------------------------------------------------

    @whole
    def fork(self) -> PagedCache:
        """Return an independent cache with the same tokens; copies tables, no K or V."""
        self._check_idle()
        twin = type(self).__new__(type(self))
        twin._init(self.runtime)
        with self.runtime.lock:
            if self._is_open:
                twin._rows.sequences = [self.runtime.manager.fork(s) for s in self.sequences]
                twin._columns = self._columns.select(list(range(len(self.sequences))))
                twin._is_open = True
        twin._is_recording = self._is_recording
        twin._num_layers = self._num_layers
        return twin

    def __copy__(self) -> PagedCache:
        """Fork."""
        return self.fork()

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedCache:
        """Fork."""
        twin = memo[id(self)] = self.fork()
        return twin

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse: a cache is a handle to the memory of this process."""
        raise CacheStateError(
            "a PagedCache cannot be pickled, its K and V lie in this process's pool; pickle "
            "cache.to_dynamic_cache() instead."
        )

    def to_dynamic_cache(self) -> DynamicCache:
        """Return a DynamicCache with the same K and V, zeros in padded columns.

        Use it with the attention mask of the same rows; blocks of this cache stay as they are.
        """
        self._check_idle()
        return dense.to_dynamic_cache(self, self._num_layers or 0)

    @whole
    def release(self) -> None:
        """Give all blocks back now; using the cache afterwards is an error. Idempotent."""
        if not self._is_released:
            self._check_idle()
        self._close_rows()
        self._is_released = True

    def __enter__(self) -> PagedCache:
        """Return the cache itself."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Release the cache."""
        self.release()

    # -- inside ------------------------------------------------------------------------------

    def check_usable(self) -> None:
        """Raise if the cache was released or its model unpatched.

        Raises:
            CacheStateError: either.
        """
        if self._is_released:
            raise CacheStateError(
                f"the cache was released: {self._reason_of_release or 'make a new one.'}"
            )
        super().check_usable()

    def _check_idle(self) -> None:
        self.check_usable()
        if self._is_in_forward:
            raise CacheStateError(
                "the cache is in a forward: expected no fork(), crop(), reordering, reset() or "
                "release() before it has ended."
            )

    @whole
    def _open_rows(self, num_rows: int) -> None:
        if not self._is_open:
            with self.runtime.lock:
                self._rows.sequences = [
                    self.runtime.manager.new_sequence() for _ in range(num_rows)
                ]
            self._columns = Columns(num_rows)
            self._is_open = True
        elif len(self.sequences) != num_rows:
            raise InputMismatchError(
                f"the cache holds {len(self.sequences)} rows, the inputs have {num_rows}: "
                "expected the same number; use a new cache, batch_select_indices(), or for beams "
                "and return sequences batch_repeat_interleave()."
            )

    @whole
    def _close_rows(self) -> None:
        with self.runtime.lock:
            for sequence in self.sequences:
                self.runtime.manager.free(sequence)
            self._rows.sequences = []
            self._is_open = False
            self._columns = Columns(0)
            self._num_layers = None

    @whole
    def _select(self, rows: list[int]) -> None:
        self._check_idle()
        sequences = self.sequences
        if not self._is_open or rows == list(range(len(sequences))):
            return
        for row in rows:
            if not 0 <= row < len(sequences):
                raise CacheStateError(
                    f"row index {row} is out of range: expected 0 to {len(sequences) - 1}."
                )
        manager = self.runtime.manager
        with self.runtime.lock:
            moved: set[int] = set()
            selected = []
            for row in rows:
                selected.append(manager.fork(sequences[row]) if row in moved else sequences[row])
                moved.add(row)
            for row, sequence in enumerate(sequences):
                if row not in moved:
                    manager.free(sequence)
            self._rows.sequences = selected
            self._columns = self._columns.select(rows)
