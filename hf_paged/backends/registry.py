"""Which backends exist, and which one ``backend="auto"`` takes."""

from __future__ import annotations

import torch

from hf_paged.backends.base import AttentionBackend
from hf_paged.backends.torch_gather import TorchGatherBackend
from hf_paged.backends.torch_reference import TorchReferenceBackend
from hf_paged.errors import ConfigurationError

__all__ = ["backend_names", "create_backend"]

_BACKENDS: dict[str, type[AttentionBackend]] = {
    backend.name: backend for backend in (TorchGatherBackend, TorchReferenceBackend)
}
_AUTO_ORDER = (TorchGatherBackend.name,)


def backend_names() -> tuple[str, ...]:
    """Return every registered name, the preferred one first."""
    return tuple(_BACKENDS)


def create_backend(name: str, device: torch.device) -> AttentionBackend:
    """Return a new backend; a name that was given never falls back to another one.

    Args:
        name: a registered name, or "auto" for the first that runs on ``device``.
        device: where the first layer's keys are.

    Raises:
        ConfigurationError: an unknown name, or one that cannot run on ``device``.
    """
    if name == "auto":
        name = next(n for n in _AUTO_ORDER if _BACKENDS[n].unavailable_reason(device) is None)
    if name not in _BACKENDS:
        known = ", ".join(repr(n) for n in ("auto", *_BACKENDS))
        raise ConfigurationError(f"backend={name!r} is unknown: expected one of {known}.")
    reason = _BACKENDS[name].unavailable_reason(device)
    if reason is not None:
        raise ConfigurationError(
            f"backend={name!r} cannot run on {device}: {reason}. Pass backend='auto', or move the "
            "model first."
        )
    return _BACKENDS[name]()
