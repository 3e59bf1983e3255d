"""Tells whether a model is still the one that something was recorded or captured of."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import chain
from typing import Any

__all__ = ["structure_of"]


def structure_of(model: Any) -> Hashable:
    """Return equal values while a recording holds: code, plain settings, kinds of weights.

    What weights hold does not count: it is read when a recording runs.
    """
    modules = tuple(
        (name, type(module), type(module).forward, repr([*filter(_is_plain, vars(module).items())]))
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


def _is_plain(item: tuple[str, Any]) -> bool:
    def is_plain(value: Any) -> bool:
        if isinstance(value, dict):
            return all(map(is_plain, value.values()))
        if isinstance(value, (list, tuple)):
            return all(map(is_plain, value))
        return value is None or isinstance(value, (bool, int, float, str))

    return is_plain(item[1])
