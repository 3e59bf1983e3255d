"""A recorded forward whose pieces are compiled, run one after the other.

Between two pieces Python hands K and V to the step, which checks, writes and attends as ever. So
block tables, lengths and slots are no inputs of a graph, the pool is none, and any backend will do.
Pieces of equal layers are equal but for their weights, which are inputs: a model of 30 layers
compiles three or four of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import fx
from tqdm import tqdm

from hf_paged.cache.runtime import PagedRuntime
from hf_paged.cache.step import PagedStep
from hf_paged.generation.recording import (
    Attention,
    Forward,
    Piece,
    Register,
    Weight,
    check_dynamic,
    cut,
    record,
)

__all__ = ["CompiledGraph", "compile_graph"]

logger = logging.getLogger("hf_paged")

Function = Callable[..., Any]
_Call = tuple[Function | None, list[int], list[Any], list[int], list[int]]
"""Function (None: attention), registers it reads, constants after them, registers written, dead."""


class CompiledGraph:
    """What :func:`compile_graph` makes; threads may share it.

    Args:
        tasks: pieces and attentions in order.
        num_registers: values that they hand to one another.
        functions: of each piece by its place in ``tasks``; takes its inputs, then its weights.
        weights: tensors by name.
        names: what the model calls those of them that it has registered.
    """

    def __init__(
        self,
        tasks: list[Piece | Attention],
        num_registers: int,
        functions: dict[int, Function],
        weights: dict[str, torch.Tensor],
        names: dict[str, str],
    ) -> None:
        self._tasks = tasks
        self._num_registers = num_registers
        self._functions = functions
        self._weights = weights
        self._names = names
        self._plan: list[_Call] = []

    def load_weights(self, model: torch.nn.Module) -> None:
        """Look every weight up, since it may have been replaced by another of its kind."""
        registered = _registered(model)
        weights = self._weights | {name: registered[place] for name, place in self._names.items()}
        self._plan = [
            self._bind(self._functions.get(place), task, weights)
            for place, task in enumerate(self._tasks)
        ]

    def run(
        self, step: PagedStep, ids: torch.Tensor, positions: torch.Tensor, index: torch.Tensor
    ) -> torch.Tensor:
        """Compute one forward; K and V go to ``step``.

        Args:
            step: of the forward, B x T = 1 x N.
            ids: [1, N] int64.
            positions: [1, N] int64.
            index: [L] int64, tokens whose logits are wanted; at least two unless N is one.

        Returns:
            [L, V].
        """
        values: list[Any] = [None] * self._num_registers
        values[:3] = ids, positions, index
        results: Any = ()
        for function, inputs, constants, outputs, dead in self._plan:
            arguments = [values[place] for place in inputs]
            for place in dead:
                values[place] = None
            if function is None:
                results = (_attend(step, constants, *arguments),)
            else:
                results = function(*arguments, *constants)
            for place, result in zip(outputs, results, strict=True):
                values[place] = result
        logits: torch.Tensor = results[0]
        return logits

    @staticmethod
    def _bind(
        function: Function | None, task: Piece | Attention, weights: dict[str, torch.Tensor]
    ) -> _Call:
        """Return what :meth:`run` does for a task, weights filled in."""
        if isinstance(task, Attention):
            registers = [item.index for item in task.arguments if isinstance(item, Register)]
            constants = [item for item in task.arguments if not isinstance(item, Register)]
            outputs = [task.output]
        else:
            registers = [register.index for register in task.inputs]
            constants, outputs = [*task.weights], task.outputs
        bound = [weights[item.name] if isinstance(item, Weight) else item for item in constants]
        return function, registers, bound, [register.index for register in outputs], task.dead


def compile_graph(
    forward: Forward,
    model: torch.nn.Module,
    runtime: PagedRuntime,
    device: torch.device,
    *,
    is_dynamic: bool,
    freeze: bool,
) -> CompiledGraph:
    """Record ``forward`` and compile it; takes seconds to minutes, and says so.

    What was compiled before, in another process too, comes from inductor's cache on disk.

    Args:
        forward: of the patched model.
        model: whose weights are inputs of the graph.
        runtime: of the model.
        device: of the ids.
        is_dynamic: for any numbers of tokens and logits from two on; otherwise for one of each.
        freeze: make weights constants, packed as the compiler likes them.

    Raises:
        Exception: whatever recording or compiling meets; the model is as it was.
    """
    what = "the forward of several tokens" if is_dynamic else "the forward of one token"
    logger.info("compiling %s%s ...", what, " with frozen weights" if freeze else "")
    start = time.perf_counter()
    with torch.no_grad():
        module = record(forward, runtime, device, is_dynamic=is_dynamic)
        tasks, num_registers = cut(module)
        nodes = [node for node in module.graph.nodes if node.op == "get_attr"]
        weights = {str(node.target): getattr(module, node.target) for node in nodes}
        recorded_s = time.perf_counter() - start
        functions = _compile_pieces(module, tasks, weights, what, freeze=freeze)
        if is_dynamic:
            check_dynamic(module)
    logger.info(
        "compiled %s in %.1f s (%.1f s to record it)%s",
        what,
        time.perf_counter() - start,
        recorded_s,
        f"; packed weights take up to {_num_packed_bytes(weights) / 2**20:.0f} MiB more"
        if freeze
        else "",
    )
    name_of = {id(tensor): name for name, tensor in _registered(model).items()}
    names = {key: name_of[id(tensor)] for key, tensor in weights.items() if id(tensor) in name_of}
    graph = CompiledGraph(tasks, num_registers, functions, weights, names)
    graph.load_weights(model)
    return graph


def _compile_pieces(
    module: fx.GraphModule,
    tasks: list[Piece | Attention],
    weights: dict[str, torch.Tensor],
    what: str,
    *,
    freeze: bool,
) -> dict[int, Function]:
    """Return a function for each piece; equal ones share it."""
    first_input = next(node for node in module.graph.nodes if node.op == "placeholder")
    fake_mode = first_input.meta["val"].fake_mode
    functions: dict[int, Function] = {}
    known: dict[Any, Function] = {}
    pieces = [(place, task) for place, task in enumerate(tasks) if isinstance(task, Piece)]
    # disable=None: a bar on a terminal, else nothing.
    for place, piece in tqdm(pieces, desc=f"hf_paged: compiling {what}", disable=None, leave=False):
        placeholders = [node for node in piece.graph.nodes if node.op == "placeholder"]
        for node, weight in zip(placeholders[len(piece.inputs) :], piece.weights, strict=True):
            node.meta["val"] = fake_mode.from_tensor(weights[weight.name], static_shapes=True)
        key = place if freeze else piece.signature()  # frozen weights are part of the function
        if key not in known:
            known[key] = _compile(piece, placeholders, weights, freeze=freeze)
        functions[place] = known[key]
    return functions


def _compile(
    piece: Piece, placeholders: list[fx.Node], weights: dict[str, torch.Tensor], *, freeze: bool
) -> Function:
    root = torch.nn.Module()
    inputs = [node.meta["val"] for node in placeholders]
    if not freeze:
        return _inductor(fx.GraphModule(root, piece.graph), inputs, freeze=False)
    for node, weight in zip(placeholders[len(piece.inputs) :], piece.weights, strict=True):
        root.register_buffer(weight.name, weights[weight.name].detach(), persistent=False)
        with piece.graph.inserting_before(node):
            constant = piece.graph.get_attr(weight.name)
        constant.meta = dict(node.meta)
        node.replace_all_uses_with(constant)
        piece.graph.erase_node(node)
    frozen = _inductor(fx.GraphModule(root, piece.graph), inputs[: len(piece.inputs)], freeze=True)
    piece.weights = []
    return frozen


def _inductor(module: fx.GraphModule, inputs: list[Any], *, freeze: bool) -> Function:
    from torch._inductor import compile  # imports for seconds, and only who compiles needs it

    function: Function = compile(module, inputs, options={"freezing": freeze})
    return function


def _attend(
    step: PagedStep,
    constants: list[Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    layer, scale, window, softcap, *rest = constants
    key, value = step.update(key, value, layer)
    return step.attend(
        query,
        key,
        value,
        layer,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=rest[0] if rest else sinks,
    )


def _registered(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by name, a shared one by each of its names."""
    return dict(
        chain(
            model.named_parameters(remove_duplicate=False),
            model.named_buffers(remove_duplicate=False),
        )
    )


def _num_packed_bytes(weights: dict[str, torch.Tensor]) -> int:
    return sum(weight.nbytes for weight in weights.values() if weight.ndim == 2)
