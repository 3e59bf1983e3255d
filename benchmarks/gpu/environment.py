"""Versions, device, available backends."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from runner import Check, Machine, Skip, expect

from hf_paged.backends.registry import available_backends, create_backend
from hf_paged.cli.diagnosis import diagnose


def facts(device: torch.device) -> dict[str, Any]:
    """Return hardware, versions and backends, as ``hf-paged doctor`` finds them."""
    found = diagnose()
    return {
        "hardware": found["machine"] | {"gpus": found["gpus"]},
        "versions": found["installed"] | {"cuda": torch.version.cuda},
        "backends": {
            name: reason or "available" for name, reason in available_backends(device).items()
        },
    }


def versions(machine: Machine) -> str:
    import triton

    words = [f"torch {torch.__version__}", f"triton {triton.__version__}"]
    if machine.is_cuda:
        properties = torch.cuda.get_device_properties(machine.device)
        words += [
            properties.name,
            f"sm{properties.major}{properties.minor}",
            f"{properties.multi_processor_count} SMs",
            f"{properties.total_memory / 2**30:.0f} GiB",
        ]
        capability = (properties.major, properties.minor)
        expect(capability >= (8, 0), f"the kernels need sm80, the device is {capability}")
    return ", ".join(words)


def backends(machine: Machine) -> str:
    reasons = available_backends(machine.device)
    expect(reasons["triton"] is None, f"triton is not available: {reasons['triton']}")
    chosen = create_backend("auto", machine.device).name
    if machine.is_cuda:
        expect(chosen != "torch", "auto falls back to gather and SDPA")
    return f"auto takes {chosen}; " + "; ".join(
        f"{name}: {reason or 'available'}" for name, reason in reasons.items()
    )


def two_devices(machine: Machine) -> str:
    """A model whose layers lie on two GPUs; see also generating.py."""
    from generating import generate
    from small_models import build, patched, prompts

    if torch.cuda.device_count() < 2:
        raise Skip(f"needs two CUDA devices, there are {torch.cuda.device_count()}")
    if importlib.util.find_spec("accelerate") is None:
        raise Skip("needs accelerate for device_map")
    from accelerate import dispatch_model

    model = build("llama", machine, num_hidden_layers=4)
    batch = prompts(machine, (20, 3, 9))
    expected = generate(model, batch)
    device_map = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1}
    device_map |= {f"model.layers.{layer}": layer // 2 for layer in range(4)}
    model = dispatch_model(model, device_map)
    with patched(model):
        expect(torch.equal(generate(model, batch), expected), "other tokens than on one device")
    return "the tokens of one device"


CHECKS = (
    Check("environment/versions", versions),
    Check("environment/backends", backends),
    Check("environment/two-devices", two_devices, needs_cuda=True),
)
