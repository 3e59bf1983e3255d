"""The model that ``hf-paged plan`` plans for: looked up by name, or described by flags."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_paged.cli.kv_footprint import KVFootprint, LayerFootprint
from hf_paged.cli.model_probe import probe_model
from hf_paged.errors import ConfigurationError

__all__ = ["PlannedModel", "describe_model", "positive"]

_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "float64": torch.float64,
}


@dataclass(frozen=True)
class PlannedModel:
    """What is planned for: a model by name, or one described by flags."""

    name: str
    dtype: torch.dtype
    footprint: KVFootprint
    max_positions: int | None = None
    is_patchable: bool | None = None
    refusal: str | None = None
    notes: tuple[str, ...] = ()


def describe_model(
    model: str | None, by_hand: dict[str, int | None], dtype: str | None
) -> PlannedModel:
    """Return the model that the arguments of ``hf-paged plan`` name or describe.

    Args:
        model: what :func:`~hf_paged.cli.model_probe.probe_model` takes, or None.
        by_hand: the flags that describe a model, "--layers" to "--sliding-layers", by their names.
        dtype: what "--dtype" said.

    Raises:
        ConfigurationError: both, neither, or a value that cannot be.
        UnsupportedModelError: a model that keeps something else than K and V.
    """
    chosen = None
    if dtype is not None:
        chosen = _DTYPES.get(dtype.removeprefix("torch."))
        if chosen is None:
            raise ConfigurationError(
                f"--dtype {dtype!r} is unknown: expected one of {', '.join(_DTYPES)}."
            )
    given = [flag for flag, value in by_hand.items() if value is not None]
    if model is not None:
        if given:
            raise ConfigurationError(
                f"MODEL={model!r} and {', '.join(given)} both describe the model: expected one of "
                "the two; drop the other."
            )
        found = probe_model(model, chosen)
        return PlannedModel(
            f"{model} ({found.architecture})",
            found.dtype,
            found.footprint,
            found.max_positions,
            found.refusal is None,
            found.refusal,
            found.notes,
        )
    needed = ("--layers", "--kv-heads", "--head-dim")
    missing = [flag for flag in needed if by_hand[flag] is None]
    if chosen is None:
        missing.append("--dtype")
    if missing:
        raise ConfigurationError(
            f"{', '.join(missing)} missing: expected MODEL, or all of {', '.join(needed)} and "
            "--dtype; e.g. --layers 32 --kv-heads 8 --head-dim 128 --dtype bf16."
        )
    assert chosen is not None
    layers, kv_heads, head_dim = (positive(flag, by_hand[flag]) for flag in needed)
    return PlannedModel(
        f"{layers} layers x {kv_heads} kv heads x {head_dim}",
        chosen,
        _footprint_by_hand(layers, 2 * kv_heads * head_dim * chosen.itemsize, by_hand),
    )


def _footprint_by_hand(
    num_layers: int, bytes_per_token: int, by_hand: dict[str, int | None]
) -> KVFootprint:
    window, num_sliding = by_hand["--window"], by_hand["--sliding-layers"]
    if window is None and num_sliding is not None:
        raise ConfigurationError(
            f"--sliding-layers {num_sliding} without --window: expected the window in tokens; "
            "e.g. --window 1024."
        )
    if window is None:
        num_sliding = 0
    else:
        positive("--window", window)
        num_sliding = num_layers if num_sliding is None else num_sliding
        if not 1 <= num_sliding <= num_layers:
            raise ConfigurationError(
                f"--sliding-layers {num_sliding} is out of range: expected 1 to {num_layers}, as "
                "--layers says."
            )
    sliding = LayerFootprint(bytes_per_token, window)
    full = LayerFootprint(bytes_per_token)
    return KVFootprint((sliding,) * num_sliding + (full,) * (num_layers - num_sliding), num_layers)


def positive(flag: str, value: int | None) -> int:
    """Return the value of ``flag``.

    Raises:
        ConfigurationError: it is missing or less than 1.
    """
    if value is None or value < 1:
        raise ConfigurationError(f"{flag} {value} is out of range: expected at least 1.")
    return value
