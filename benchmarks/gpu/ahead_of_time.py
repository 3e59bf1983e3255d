"""Compile what calls would launch on one kind of device; print the shared memory of each kernel.

python ahead_of_time.py CAPABILITY, in a process where Triton does not interpret.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hf_paged.backends import triton_kernels

KERNELS = [name for name in vars(triton_kernels) if name.endswith("_kernel")]
TYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]


def launches_of(function: Any, *arguments: Any, **keywords: Any) -> list[Launch]:
    """Return kernel, arguments and options of all that a function of triton_kernels launches."""
    launches: list[Launch] = []

    def recorder(kernel: Any) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            launches.append((kernel, args, options))

        return mock.MagicMock(__getitem__=lambda *_: launch)

    recorders = {name: recorder(getattr(triton_kernels, name)) for name in KERNELS}
    with mock.patch.multiple(triton_kernels, **recorders):
        function(*arguments, **keywords)
    return launches


def compile_launch(launch: Launch, capability: int) -> tuple[str, int]:
    """Return the kernel's name and its bytes of shared memory."""
    kernel, arguments, options = launch
    names = kernel.arg_names
    values = dict(zip(names, arguments, strict=False))
    values |= {name: options[name] for name in names if name in options}
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], Any] = {}
    for index, name in enumerate(names):
        value, parameter = values[name], kernel.params[index]
        is_special = not parameter.do_not_specialize
        is_one = is_special and isinstance(value, int) and value == 1
        if value is None or parameter.is_constexpr or is_one:
            signature[name], constants[name] = "constexpr", value
            continue
        divisible = True  # as torch allocates
        if isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
        elif isinstance(value, float):
            signature[name], divisible = "fp32", False
        else:
            signature[name], divisible = "i32" if value < 2**31 else "i64", value % 16 == 0
        if is_special and divisible and not parameter.do_not_specialize_on_alignment:
            attributes[(index,)] = [["tt.divisibility", 16]]
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, attributes),
        target=GPUTarget("cuda", capability, 32),
        options={name: value for name, value in options.items() if name not in names},
    )
    return kernel.__name__, compiled.metadata.shared


def attention(dtype: torch.dtype, head_dim: int, *, is_full: bool) -> list[Launch]:
    """Return the launches of decoding rows, split, and of prompts; ``is_full``: with every option.

    Tensors are on "meta": they have shapes and no values.
    """

    def make(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    query, new, pool = make(8, 32, head_dim), make(8, 8, head_dim), make(65, 2, 16, 8, head_dim)
    options: dict[str, Any] = {}
    if is_full:
        options = dict(window=1000, softcap=30.0, sinks=make(32), alibi_slopes=make(32))
    return launches_of(
        triton_kernels.attend,
        query,
        new,
        new,
        pool[:, 0],
        pool[:, 1],
        make(4, 64, dtype=torch.int32),
        make(4, dtype=torch.int32),
        make(5, dtype=torch.int32),
        max_query_len=5,
        has_single_token_rows=True,
        num_splits=8,
        scale=0.1,
        **options,
    )


def all_launches(capability: int) -> Iterator[Launch]:
    yield from attention(torch.bfloat16, 128, is_full=False)
    cache = torch.empty(65, 2, 16, 8, 128, dtype=torch.bfloat16, device="meta")
    new = torch.empty(8, 8, 128, dtype=torch.bfloat16, device="meta")
    index = torch.empty(8, dtype=torch.int64, device="meta")
    yield from launches_of(triton_kernels.write, new, new, cache[:, 0], cache[:, 1], index)
    yield from launches_of(triton_kernels.copy_blocks, cache, index, index)
    if capability == 80:  # the least shared memory, and the largest tiles
        yield from attention(torch.bfloat16, 256, is_full=True)
        yield from attention(torch.float32, 256, is_full=True)


if __name__ == "__main__":
    wanted = int(sys.argv[1])
    print(json.dumps([compile_launch(launch, wanted) for launch in all_launches(wanted)]))
