"""Which backends exist, and which one ``backend="auto"`` takes."""

from __future__ import annotations

import functools
import logging

import torch

from hf_paged.backends.base import AttentionBackend
from hf_paged.backends.cpu import CpuBackend
from hf_paged.backends.torch_gather import TorchGatherBackend
from hf_paged.backends.torch_reference import TorchReferenceBackend
from hf_paged.errors import ConfigurationError

__all__ = ["available_backends", "backend_names", "create_backend"]

logger = logging.getLogger(__name__)

_BACKENDS: dict[str, type[AttentionBackend]] = {
    backend.name: backend for backend in (CpuBackend, TorchGatherBackend, TorchReferenceBackend)
}
_AUTO_ORDER = {"cpu": (CpuBackend.name, TorchGatherBackend.name)}
"""What "auto" tries on a device type, the fastest first."""


def backend_names() -> tuple[str, ...]:
    """Return every registered name, the preferred one first."""
    return tuple(_BACKENDS)


def available_backends(device: torch.device) -> dict[str, str | None]:
    """Return every registered name with the reason why it cannot run on ``device``, None: it can.

    A setting that no backend can follow (``HF_PAGED_CPU_ISA``) is such a reason, too.
    """
    reasons: dict[str, str | None] = {}
    for name, backend in _BACKENDS.items():
        try:
            reasons[name] = backend.unavailable_reason(device)
        except ConfigurationError as error:
            reasons[name] = str(error)
    return reasons


def create_backend(
    name: str, device: torch.device, *, batch_invariant: bool = False
) -> AttentionBackend:
    """Return a new backend; a name that was given never falls back to another one.

    Args:
        name: a registered name, or "auto" for the first that runs on ``device``.
        device: where the first layer's keys are.
        batch_invariant: see :class:`AttentionBackend`.

    Raises:
        ConfigurationError: an unknown name, or one that cannot run on ``device`` or cannot give
            what is asked.
    """
    if name == "auto":
        name = _choose(device)
    if name not in _BACKENDS:
        known = ", ".join(repr(n) for n in ("auto", *_BACKENDS))
        raise ConfigurationError(f"backend={name!r} is unknown: expected one of {known}.")
    backend = _BACKENDS[name]
    reason = backend.unavailable_reason(device)
    if reason is not None:
        raise ConfigurationError(
            f"backend={name!r} cannot run on {device}: {reason}. Pass backend='auto', or move the "
            "model first."
        )
    if batch_invariant and not backend.supports_batch_invariance:
        able = ", ".join(repr(n) for n, b in _BACKENDS.items() if b.supports_batch_invariance)
        raise ConfigurationError(
            f"batch_invariant=True is nothing that backend {name!r} on {device} can promise: "
            f"expected one of {able}; pass batch_invariant=False or such a backend."
        )
    return backend(batch_invariant=batch_invariant)


def _choose(device: torch.device) -> str:
    for name in _AUTO_ORDER.get(device.type, (TorchGatherBackend.name,)):
        reason = _BACKENDS[name].unavailable_reason(device)
        if reason is None:
            return name
        _say_once(name, device.type, reason)
    raise AssertionError(f"no backend runs on {device}")


@functools.cache
def _say_once(name: str, device_type: str, reason: str) -> None:
    logger.warning(
        "hf_paged's fast backend %r is not available on %s, a slower one is used: %s",
        name,
        device_type,
        reason,
    )
