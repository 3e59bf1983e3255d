"""Compile what a call would launch, for devices that are not here; read what it takes of them."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hf_paged.backends import triton_kernels

KERNELS = [name for name in vars(triton_kernels) if name.endswith("_kernel")]
_TYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class Launch:
    kernel: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]


@dataclass(frozen=True)
class Usage:
    """What one program of a kernel takes.

    Attributes:
        kernel: its name.
        shared: bytes of shared memory.
        registers: of a thread.
        stack: bytes of a thread in local memory: spilled registers.
    """

    kernel: str
    shared: int
    registers: int
    stack: int


def launches_of(function: Any, *arguments: Any, **keywords: Any) -> list[Launch]:
    """Return what a function of triton_kernels would launch; meta tensors will do."""
    launches: list[Launch] = []

    def recorder(kernel: Any) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            launches.append(Launch(kernel, args, options))

        return mock.MagicMock(__getitem__=lambda _, __: launch)

    recorders = {name: recorder(getattr(triton_kernels, name)) for name in KERNELS}
    with mock.patch.multiple(triton_kernels, **recorders):
        function(*arguments, **keywords)
    return launches


def compile_launch(launch: Launch, capability: int) -> Usage:
    """Compile with the specializations that a launch on a device would choose."""
    names = launch.kernel.arg_names
    values = dict(zip(names, launch.arguments, strict=False))
    values |= {name: launch.options[name] for name in names if name in launch.options}
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(names):
        value, parameter = values[name], launch.kernel.params[index]
        specialized = not parameter.do_not_specialize
        is_one = isinstance(value, int) and value == 1
        if value is None or parameter.is_constexpr or (specialized and is_one):
            signature[name], constants[name] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[name] = _TYPES[value.dtype]
            divisible = True  # as torch allocates
        elif isinstance(value, float):
            signature[name], divisible = "fp32", False
        else:
            signature[name] = "i32" if value < 2**31 else "i64"
            divisible = value % 16 == 0
        if specialized and divisible and not parameter.do_not_specialize_on_alignment:
            attributes[(index,)] = [["tt.divisibility", 16]]
    compiled = triton.compile(
        ASTSource(launch.kernel, signature, constants, attributes),
        target=GPUTarget("cuda", capability, 32),
        options={k: v for k, v in launch.options.items() if k not in names},
    )
    usage = _resource_usage(compiled.asm["cubin"])
    return Usage(launch.kernel.__name__, compiled.metadata.shared, usage["REG"], usage["STACK"])


def _resource_usage(cubin: bytes) -> dict[str, int]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    return {name: int(number) for name, number in re.findall(r"\b(REG|STACK):(\d+)", text)}
