"""What K and V of a model depend on besides tokens and positions, in one comparable value.

Counters such as ``Tensor._version`` are no evidence: fused AdamW, writes through ``.data`` and
``load_state_dict(assign=True)`` leave them as they were. So every parameter and buffer is read.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import types
import weakref
from collections.abc import Hashable, Iterator
from functools import partial
from typing import Any

import torch
import xxhash
from torch.nn.modules import module as torch_module

from hf_paged.integration.model_spec import ModelSeams
from hf_paged.integration.weight_digest import digest

__all__ = ["ModelComputation", "has_dynamic_rope", "has_user_hooks"]

logger = logging.getLogger("hf_paged")

_DYNAMIC_ROPE = ("dynamic", "longrope")
"""RoPE whose frequencies depend on the length of the call: equal tokens, different K."""
_TORCH_ATTRIBUTES = frozenset(torch.nn.Module().__dict__)
_NOT_PLAIN = "(an object)"
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, partial)
_serials: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_next_serial = itertools.count()


class ModelComputation:
    """The model's side of :class:`hf_paged.cache.runtime.Computation`.

    Args:
        seams: of the patched model; its modules are kept alive by the model, not by this object.
    """

    def __init__(self, seams: ModelSeams) -> None:
        self._base = weakref.ref(seams.base)
        self._has_warned = False

    def is_determined(self) -> bool:
        """Whether equal tokens give equal K and V in every row of a forward now.

        A hook of the user may treat rows differently, dropout does; transformers' own output
        recorders and accelerate's device hooks do not.
        """
        base = self._base()
        if base is None or has_user_hooks(base):
            return False
        return not any(module.training for module in base.modules())

    def fingerprint(self) -> Hashable | None:
        """Return a digest of weights, buffers and settings; None if a weight cannot be read."""
        base = self._base()
        config: Any = None if base is None else base.config
        if base is None or has_dynamic_rope(config):
            return None
        everything = xxhash.xxh3_128()
        everything.update(f"{config.to_dict()} {config._attn_implementation}".encode())
        device_type = base.device.type
        if device_type != "meta":  # weights that accelerate offloaded are met below
            everything.update(f"{torch.is_autocast_enabled(device_type)}".encode())
            everything.update(f"{torch.get_autocast_dtype(device_type)}".encode())
        classes: dict[type, None] = {}
        for name, module in base.named_modules():
            cls = getattr(type(module), "_hf_paged_original_class", type(module))
            classes[cls] = None
            everything.update(f"{name} {_serial(cls)} {list(_settings(module))}".encode())
        everything.update(f"{[list(_code(cls)) for cls in classes]}".encode())
        seen: set[tuple[int, int]] = set()
        tensors = (*base.named_parameters(), *base.named_buffers(), *_tensor_attributes(base))
        try:
            for name, tensor in tensors:
                everything.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                if (place := (tensor.data_ptr(), tensor.nbytes)) not in seen:
                    seen.add(place)
                    everything.update(digest(tensor))
        except (RuntimeError, TypeError, NotImplementedError):
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "parameter %s cannot be read (%s on %s): prefixes are not reused across "
                    "calls, since a change of the weights would go unnoticed",
                    name,
                    type(tensor).__name__,
                    tensor.device,
                )
            return None
        return everything.digest()


def has_user_hooks(model: torch.nn.Module) -> bool:
    """Whether a hook or a replaced forward, neither transformers' nor accelerate's, sees tensors.

    Args:
        model: looked at with all its modules.
    """
    if _has_user_hooks(torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks):
        return True
    return any(
        _has_user_hooks(module._forward_hooks, module._forward_pre_hooks)
        or _has_foreign_forward(module)
        for module in model.modules()
    )


def has_dynamic_rope(config: Any) -> bool:
    """Whether the frequencies of RoPE depend on the length of the call."""
    return bool(_rope_types(config) & set(_DYNAMIC_ROPE))


def _serial(thing: Any) -> int | None:
    """Return a number that no other class or function has, now or later; an id may come again."""
    try:
        return _serials.setdefault(thing, next(_next_serial))
    except TypeError:  # no weak references
        return None


def _code(cls: type) -> Iterator[int | None]:
    """Yield what a class's forward runs: itself and the functions of its module that it names."""
    forward: Any = getattr(cls, "forward", None)
    yield _serial(forward)
    function = inspect.unwrap(forward)
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    for name in names:
        called = function.__globals__.get(name)
        if isinstance(called, _FUNCTIONS):
            yield _serial(called)


def _tensor_attributes(base: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors that are neither parameters nor buffers."""
    for prefix, module in base.named_modules():
        for name, value in module.__dict__.items():
            if isinstance(value, torch.Tensor):
                yield f"{prefix}.{name}", value


def _settings(module: torch.nn.Module) -> Iterator[tuple[str, object]]:
    """Yield the plain attributes of a module: scales, windows, active adapters, ..."""
    for name, value in module.__dict__.items():
        if name not in _TORCH_ATTRIBUTES and not name.startswith("_output_capturing"):
            plain = _plain(value)
            if plain is not _NOT_PLAIN:
                yield name, plain


def _plain(value: object) -> object:
    """Return a value that prints the same whenever it is equal, or _NOT_PLAIN."""
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return value
    if isinstance(value, _FUNCTIONS):
        return _serial(value)
    if isinstance(value, dict):
        return [(_plain(k), _plain(v)) for k, v in value.items()]
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    return _NOT_PLAIN


def _has_user_hooks(*hook_dicts: dict[int, Any]) -> bool:
    return any(
        getattr(hook.func if isinstance(hook, partial) else hook, "__module__", "")
        != "transformers.utils.output_capturing"
        for hooks in hook_dicts
        for hook in hooks.values()
    )


def _has_foreign_forward(module: torch.nn.Module) -> bool:
    """Whether somebody other than accelerate replaced ``module.forward``."""
    if "forward" not in module.__dict__:
        return False
    hook = getattr(module, "_hf_hook", None)
    hooks = getattr(hook, "hooks", (hook,))
    return not all(type(h).__module__.startswith("accelerate.") for h in hooks)


def _rope_types(config: Any) -> set[str]:
    """Return every rope type that a config names, whatever form its transformers version uses."""
    found: set[str] = set()
    stack = [getattr(config, "rope_parameters", None), getattr(config, "rope_scaling", None)]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            found.update(str(item[k]) for k in ("rope_type", "type") if k in item)
            stack.extend(item.values())
    return found
