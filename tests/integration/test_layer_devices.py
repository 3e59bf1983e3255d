"""Where the layers of a model compute, whatever holds their weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_paged.integration.model_spec import find_seams
from tiny_models import build

pytestmark = pytest.mark.core_suite

META, CPU = torch.device("meta"), torch.device("cpu")


class QuantizedLinear(torch.nn.Module):
    """Weights in buffers, as those of AWQ and GPTQ."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("qweight", torch.zeros(4, dtype=torch.int32))


def test_weights_in_buffers_tell_where_a_layer_is() -> None:
    """Layer 1 has buffers on another device, layer 2 nothing at all."""
    model: Any = build("llama")
    for index, layer in enumerate(model.model.layers):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            if index == 1:
                setattr(layer.self_attn, name, QuantizedLinear())
            if index == 2:
                setattr(layer.self_attn, name, torch.nn.Identity())
    model.model.layers[1].self_attn._hf_hook = type("Hook", (), {"execution_device": "xpu:1"})()
    model.model.layers[1].self_attn.to(META)
    assert find_seams(model).layer_devices == [CPU, torch.device("xpu:1"), CPU, CPU]


def test_an_offloaded_layer_computes_where_its_hook_says() -> None:
    model: Any = build("llama")
    attention = model.model.layers[2].self_attn.to(META)
    attention._hf_hook = type("Hook", (), {"execution_device": "cpu"})()
    assert find_seams(model).layer_devices == [CPU] * 4
