"""Which backends exist, and which one ``backend="auto"`` takes."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch

from hf_paged.backends.base import AttentionBackend
from hf_paged.backends.cpu import CpuBackend
from hf_paged.backends.flash_attn import FlashAttn3Backend, FlashAttnBackend
from hf_paged.backends.torch_gather import TorchGatherBackend
from hf_paged.backends.torch_reference import TorchReferenceBackend
from hf_paged.backends.triton import TritonBackend
from hf_paged.errors import ConfigurationError

__all__ = ["available_backends", "backend_names", "create_backend"]

logger = logging.getLogger(__name__)

_BACKENDS: dict[str, type[AttentionBackend]] = {
    backend.name: backend
    for backend in (
        CpuBackend,
        FlashAttn3Backend,
        FlashAttnBackend,
        TritonBackend,
        TorchGatherBackend,
        TorchReferenceBackend,
    )
}
_AUTO_ORDER = {
    "cpu": (CpuBackend.name, TorchGatherBackend.name),
    "cuda": (
        FlashAttn3Backend.name,
        FlashAttnBackend.name,
        TritonBackend.name,
        TorchGatherBackend.name,
    ),
}
"""What "auto" tries on a device type, the fastest first."""


def backend_names() -> tuple[str, ...]:
    """Return every registered name, the preferred one first."""
    return tuple(_BACKENDS)


def available_backends(device: torch.device | str | None = None) -> dict[str, str | None]:
    """Return the name of every backend with the reason why it cannot run, None where it can.

    A setting that no backend can follow (``HF_PAGED_CPU_ISA``) is such a reason, too.

    Example:
        >>> available_backends("cpu")["torch"] is None
        True
        >>> available_backends("cpu")["flash_attn"]
        'it computes on a CUDA device only'

    Args:
        device: where it would run; None: the current CUDA device if there is one, else the CPU.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    reasons: dict[str, str | None] = {}
    for name, backend in _BACKENDS.items():
        try:
            reasons[name] = backend.unavailable_reason(device)
        except ConfigurationError as error:
            reasons[name] = str(error)
    return reasons


def create_backend(
    name: str,
    device: torch.device,
    *,
    batch_invariant: bool = False,
    check: Callable[[AttentionBackend], None] | None = None,
) -> AttentionBackend:
    """Return a new backend; a name that was given never falls back to another one.

    Args:
        name: a registered name, or "auto" for the first that runs on ``device`` as it is. Kernels
            are downloaded from the Hugging Face hub only for a backend that was named.
        device: where the first layer's keys are.
        batch_invariant: see :class:`AttentionBackend`.
        check: raises ConfigurationError if a backend lacks what the model needs; "auto" passes
            over such a one.

    Raises:
        ConfigurationError: an unknown name, or one that cannot run on ``device`` or cannot give
            what is asked.
    """
    if name == "auto":
        return _choose(device, batch_invariant, check)
    if name not in _BACKENDS:
        known = ", ".join(repr(n) for n in ("auto", *_BACKENDS))
        raise ConfigurationError(f"backend={name!r} is unknown: expected one of {known}.")
    backend = _BACKENDS[name]
    if issubclass(backend, FlashAttnBackend):
        reason = backend.unavailable_reason(device, may_download=True)
    else:
        reason = backend.unavailable_reason(device)
    if reason is not None:
        raise ConfigurationError(
            f"backend={name!r} cannot run on {device}: {reason}. Pass backend='auto', or move the "
            "model first."
        )
    return _make(backend, device, batch_invariant, check)


def _make(
    backend: type[AttentionBackend],
    device: torch.device,
    batch_invariant: bool,
    check: Callable[[AttentionBackend], None] | None,
) -> AttentionBackend:
    if batch_invariant and not backend.supports_batch_invariance:
        able = ", ".join(repr(n) for n, b in _BACKENDS.items() if b.supports_batch_invariance)
        raise ConfigurationError(
            f"batch_invariant=True is nothing that backend {backend.name!r} on {device} can "
            f"promise: expected one of {able}; pass batch_invariant=False or such a backend."
        )
    made = backend(batch_invariant=batch_invariant)
    if check is not None:
        check(made)
    return made


def _choose(
    device: torch.device,
    batch_invariant: bool,
    check: Callable[[AttentionBackend], None] | None,
) -> AttentionBackend:
    skipped: dict[str, str] = {}
    *names, last = _AUTO_ORDER.get(device.type, (TorchGatherBackend.name,))
    for name in names:
        reason = _BACKENDS[name].unavailable_reason(device)
        if reason is None:
            try:
                backend = _make(_BACKENDS[name], device, batch_invariant, check)
            except ConfigurationError as error:
                reason = str(error)
            else:
                _say_once(name, device.type, tuple(skipped.items()))
                return backend
        skipped[name] = reason
    _say_once(last, device.type, tuple(skipped.items()))
    return _make(_BACKENDS[last], device, batch_invariant, check)


@functools.cache
def _say_once(choice: str, device_type: str, skipped: tuple[tuple[str, str], ...]) -> None:
    reasons = "; ".join(
        f"{name!r} is not available on {device_type}: {why.removesuffix('.')}"
        for name, why in skipped
    )
    if skipped and choice == TorchGatherBackend.name:
        logger.warning("hf_paged computes attention in %r, which is slow: %s", choice, reasons)
    else:
        logger.info(
            "hf_paged computes attention on %s in backend %r%s",
            device_type,
            choice,
            f" ({reasons})" if reasons else "",
        )
