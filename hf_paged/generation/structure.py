"""Tells whether a model is still the one that something was recorded or captured of."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import chain
from typing import Any

import torch

__all__ = ["addresses_of", "structure_of"]

_TORCH_ATTRIBUTES = frozenset(torch.nn.Module().__dict__)


def structure_of(model: Any) -> Hashable:
    """Return equal values while a recording holds: code, plain settings, kinds of weights.

    What weights hold does not count: it is read when a recording runs.
    """
    modules = tuple(
        (name, type(module), type(module).forward, module.training, repr(_settings(module)))
        for name, module in model.named_modules()
    )
    first: dict[int, int] = {}  # tells tied weights from untied ones
    tensors = tuple(
        (name, tensor.dtype, tensor.shape, tensor.device, first.setdefault(id(tensor), index))
        for index, (name, tensor) in enumerate(
            chain(
                model.named_parameters(remove_duplicate=False),
                model.named_buffers(remove_duplicate=False),
            )
        )
    )
    config = model.config
    return modules, tensors, repr(config.to_dict()), config._attn_implementation_internal


def addresses_of(model: Any) -> tuple[int, ...]:
    """Return where the weights of ``model`` lie, and tensors that its modules hold besides."""
    attributes = (
        value
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, torch.Tensor)
    )
    return tuple(
        address
        for tensor in chain(model.parameters(), model.buffers(), attributes)
        for address in _addresses(tensor)
    )


def _addresses(tensor: Any) -> Iterator[int]:
    """Yield the address of a tensor, or those of the tensors that it wraps (torchao)."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor.data_ptr()
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _addresses(getattr(tensor, name))


def _settings(module: Any) -> list[tuple[str, Any]]:
    return [
        item
        for item in vars(module).items()
        if item[0] not in _TORCH_ATTRIBUTES and _is_plain(item)
    ]


def _is_plain(item: tuple[str, Any]) -> bool:
    def is_plain(value: Any) -> bool:
        if isinstance(value, dict):
            return all(map(is_plain, value.values()))
        if isinstance(value, (list, tuple)):
            return all(map(is_plain, value))
        return value is None or isinstance(value, (bool, int, float, str))

    return is_plain(item[1])
