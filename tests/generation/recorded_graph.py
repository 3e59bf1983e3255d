"""A CUDA graph's stand-in on the CPU: it replays what was launched, not the Python around it.

Like the real one it bakes in every number that Python passed, reads and writes the memory it was
captured over, and does not know if that memory has been given back. Unlike it, it notices:

- reading a value on the host while capturing (``item``, ``tolist``, a branch on a tensor),
- an output whose shape depends on values,
- memory that a replay needs and nobody keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

_LOOKS = frozenset(
    {
        torch.Tensor.item,
        torch.Tensor.tolist,
        torch.Tensor.numpy,
        torch.Tensor.__bool__,
        torch.Tensor.__int__,
        torch.Tensor.__float__,
        torch.Tensor.__index__,
    }
)


class CaptureError(RuntimeError):
    """What a CUDA graph could not record, or would read from memory that is gone."""


class _Outside:
    """A tensor that a graph did not make: by address, since a graph keeps no memory alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._storage = StorageWeakRef(storage)
        self._like = (tensor.storage_offset(), tensor.shape, tensor.stride())
        self._dtype = tensor.dtype

    def get(self) -> torch.Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            raise CaptureError(
                f"a replay reads {self._dtype} {tuple(self._like[1])} in memory that was given back"
            )
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._like)


class _HostLooks(TorchFunctionMode):
    """Refuses to look at values while the model's Python runs; kernels may."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in _LOOKS and not self._recorder.in_kernel:
            raise CaptureError(f"{function.__name__}() waits for the device during a capture")
        return function(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    """Runs each operation and notes it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, list[Any]]] = []
        self.made: list[torch.Tensor] = []
        self.in_kernel = False
        self._made_storages: set[int] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op is torch.ops.aten._local_scalar_dense.default:
            raise CaptureError("a value is read on the host during a capture")
        masks = [x for x in tree_flatten(args)[0] if getattr(x, "dtype", None) == torch.bool]
        if torch.Tag.dynamic_output_shape in op.tags and (
            op is not torch.ops.aten.index.Tensor or masks
        ):
            raise CaptureError(f"the shape of what {op} returns depends on values")
        self.in_kernel = True
        try:
            out = op(*args, **kwargs)
        finally:
            self.in_kernel = False
        inputs = tree_map(self._note, (args, kwargs))
        for tensor in tree_flatten(out)[0]:
            if isinstance(tensor, torch.Tensor):
                self.made.append(tensor)
                self._made_storages.add(tensor.untyped_storage()._cdata)
        self.calls.append((op, inputs, tree_flatten(out)[0]))
        return out

    def _note(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.untyped_storage()._cdata in self._made_storages:
            self.made.append(value)
            return value
        return _Outside(value)


class RecordedGraph:
    """Implements :class:`hf_paged.generation.device_graph.DeviceGraph`."""

    def __init__(self, *_: object) -> None:
        self._recorder = _Recorder()
        self.num_replays = 0

    def capture(self, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        with self._recorder, _HostLooks(self._recorder):
            return function()

    def replay(self) -> None:
        self.num_replays += 1
        with torch.no_grad():
            for op, inputs, outputs in self._recorder.calls:
                flat, spec = tree_flatten(inputs, is_leaf=lambda x: isinstance(x, _Outside))
                tensors = [x.get() if isinstance(x, _Outside) else x for x in flat]
                args, kwargs = tree_unflatten(tensors, spec)
                addresses = {
                    t.untyped_storage().data_ptr() for t in tensors if isinstance(t, torch.Tensor)
                }
                for old, new in zip(outputs, tree_flatten(op(*args, **kwargs))[0], strict=True):
                    if not isinstance(old, torch.Tensor):
                        continue
                    assert old.shape == new.shape
                    if new.untyped_storage().data_ptr() not in addresses:
                        old.copy_(new)
