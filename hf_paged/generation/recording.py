"""A model's forward over packed tokens as graphs, cut at the attention of each layer.

The model's own Python runs once, on tensors without data, and every operation that reaches ATen is
recorded. Configs, masks and the registered attention answer as they do in an eager paged forward,
and nothing of them is left at run time.

    ids ─▶ [piece 0] ─▶ attention 0 ─▶ [piece 1] ─▶ attention 1 ─▶ ... ─▶ [piece n] ─▶ logits
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from hf_paged.cache.packed_batch import PackedCache
from hf_paged.cache.runtime import PagedRuntime
from hf_paged.cache.step import PagedStep
from hf_paged.cache.step_inputs import StepInputs
from hf_paged.errors import UnsupportedModelError

__all__ = ["Attention", "Forward", "Piece", "Register", "Weight", "check_dynamic", "cut", "record"]

Forward = Callable[[PackedCache, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Takes a cache, ids [1, N], positions [1, N] and an index [L] into N; returns logits [L, V]."""

_library = torch.library.Library("hf_paged", "FRAGMENT")
_library.define(
    "layer_attention(Tensor query, Tensor key, Tensor value, int layer, float scale, int? window, "
    "float? softcap, Tensor? sinks) -> Tensor"
)
_layer_attention = torch.ops.hf_paged.layer_attention.default


def _fake_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object
) -> torch.Tensor:
    num_rows, num_heads, num_columns, _head_dim = query.shape
    return query.new_empty(num_rows, num_columns, num_heads, value.shape[3])


torch.library.register_fake("hf_paged::layer_attention", _fake_attention, lib=_library)


@dataclass(frozen=True)
class Register:
    """A value that pieces and attention hand to one another; the first three are the inputs."""

    index: int


@dataclass(frozen=True)
class Weight:
    """A tensor of the model, by its name in the recorded module."""

    name: str


@dataclass
class Attention:
    """Attention of one layer, between two pieces.

    Attributes:
        arguments: query, key, value, layer, scale, window, softcap, sinks: a register, a weight,
            or a constant.
        output: where its result goes.
        dead: registers that nobody reads afterwards.
    """

    arguments: list[Any]
    output: Register
    dead: list[int] = field(default_factory=list)


@dataclass
class Piece:
    """What a model computes between two attentions.

    Attributes:
        graph: its placeholders are the values of ``inputs``, then ``weights``; it returns a tuple.
        inputs: registers to read.
        outputs: registers to write.
        weights: tensors of the recorded module.
        dead: registers that nobody reads afterwards.
    """

    graph: fx.Graph
    inputs: list[Register]
    outputs: list[Register]
    weights: list[Weight]
    dead: list[int] = field(default_factory=list)

    def signature(self) -> tuple[Any, ...]:
        """Return equal values for graphs that compute the same from equally shaped inputs."""
        number = {node: index for index, node in enumerate(self.graph.nodes)}

        def describe(node: fx.Node) -> Any:
            arguments = fx.map_arg((node.args, node.kwargs), lambda n: f"%{number[n]}")
            if node.op == "placeholder":
                return _describe(node.meta["val"])
            return (node.op, str(node.target), str(arguments))

        return tuple(describe(node) for node in self.graph.nodes)


class _RecordedStep(PagedStep):
    """Stands for a step while the model is recorded; nothing is stored."""

    def __init__(self, cache: PackedCache) -> None:
        self.cache = cache
        self.is_paged = True
        self.masks_issued = False
        self._stored: tuple[Any, ...] | None = None

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Remember what the layer is about to attend to."""
        if not self.is_paged:
            raise UnsupportedModelError("the model wants a mask that is neither causal nor sliding")
        self._stored = (key, value, layer)
        return key, value

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Record one operation, at which the graph is cut."""
        stored, self._stored = self._stored, None
        if stored is None or any(
            a is not b for a, b in zip(stored, (key, value, layer), strict=True)
        ):
            raise UnsupportedModelError(f"layer {layer} attends to something else than it stored")
        out: torch.Tensor = _layer_attention(
            query, key, value, layer, scale, window, softcap, sinks
        )
        return out


class _RecordedBatch(PackedCache):
    """The ``cache`` argument while the model is recorded."""

    def begin_forward(self, inputs: StepInputs, num_layers: int, *, is_paged: bool) -> PagedStep:
        if not is_paged:
            raise UnsupportedModelError("the model wants its own attention (train(), weights)")
        return _RecordedStep(self)

    def end_forward(self, step: PagedStep, *, is_complete: bool) -> None:
        """Nothing was reserved."""


def record(
    forward: Forward, runtime: PagedRuntime, device: torch.device, *, is_dynamic: bool
) -> fx.GraphModule:
    """Return the graph of ``forward``; weights are its attributes, not copied.

    Args:
        forward: of the patched model.
        runtime: of the patched model.
        device: of the ids.
        is_dynamic: any N and L of at least 2; otherwise N = L = 1.

    Raises:
        Exception: what the model's code meets where it looks at data.
    """
    # Unequal numbers, or the two sizes would count as one.
    num_tokens, num_logits = (7, 5) if is_dynamic else (1, 1)
    ids, positions = (torch.zeros(1, num_tokens, dtype=torch.int64, device=device) for _ in "ip")
    index = torch.zeros(num_logits, dtype=torch.int64, device=device)

    def recorded(ids: torch.Tensor, positions: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return forward(_RecordedBatch(runtime), ids, positions, index)

    module = make_fx(
        recorded,
        tracing_mode="symbolic" if is_dynamic else "fake",
        _allow_non_fake_inputs=True,
    )(ids, positions, index)
    module.graph.eliminate_dead_code()
    if is_dynamic:
        check_dynamic(module)
    return module


def check_dynamic(module: fx.GraphModule) -> None:
    """Refuse graphs that would be wrong for other sizes than those they were recorded with.

    Raises:
        UnsupportedModelError: code of the model, or of the compiler, has looked at a size.
    """
    nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
    sizes = [node.meta["val"].shape[-1] for node in nodes]
    guards = nodes[0].meta["val"].fake_mode.shape_env.guards
    if guards or not all(isinstance(size, torch.SymInt) for size in sizes):
        raise UnsupportedModelError(
            f"the model's code depends on the number of tokens ({[str(g.expr) for g in guards]})"
        )


def cut(module: fx.GraphModule) -> tuple[list[Piece | Attention], int]:
    """Cut a recorded graph at its attentions.

    Returns:
        Pieces and attentions in order, and the number of registers.
    """
    part_of: dict[fx.Node, int] = {}
    parts: list[list[fx.Node]] = [[]]
    inputs: list[fx.Node] = []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            inputs.append(node)
        elif node.op == "output":
            result = node.args[0]
        elif node.op != "get_attr":
            if node.target is _layer_attention:
                parts += [[node], []]
                part_of[node] = len(parts) - 2
            else:
                parts[-1].append(node)
                part_of[node] = len(parts) - 1
    registers = {node: Register(index) for index, node in enumerate(inputs)}
    for part, nodes in enumerate(parts):
        for node in nodes:
            is_read_elsewhere = any(part_of.get(user) != part for user in node.users)
            if is_read_elsewhere:
                registers[node] = Register(len(registers))
    assert isinstance(result, fx.Node)
    tasks: list[Piece | Attention] = []
    for nodes in filter(None, parts):
        if nodes[0].target is _layer_attention:
            arguments = [_argument(a, registers) for a in nodes[0].args]
            tasks.append(Attention(arguments, registers[nodes[0]]))
        else:
            tasks.append(_piece(nodes, registers))
    _find_dead(tasks)
    return tasks, len(registers)


def _argument(argument: Any, registers: dict[fx.Node, Register]) -> Any:
    if not isinstance(argument, fx.Node):
        return argument
    return Weight(str(argument.target)) if argument.op == "get_attr" else registers[argument]


def _piece(nodes: list[fx.Node], registers: dict[fx.Node, Register]) -> Piece:
    inside = set(nodes)
    outside = dict.fromkeys(
        used for node in nodes for used in node.all_input_nodes if used not in inside
    )
    values = [node for node in outside if node.op != "get_attr"]
    weights = {node.target: node for node in outside if node.op == "get_attr"}
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in (*values, *weights.values()):
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in outside:
        if node.op == "get_attr":  # one weight may be read by several nodes
            copies[node] = copies[weights[node.target]]
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    outputs = [node for node in nodes if node in registers]
    graph.output(tuple(copies[node] for node in outputs))
    return Piece(
        graph,
        [registers[node] for node in values],
        [registers[node] for node in outputs],
        [Weight(str(name)) for name in weights],
    )


def _find_dead(tasks: list[Piece | Attention]) -> None:
    """Note after which task a value is read no more, so that its memory is free again."""
    seen: set[int] = set()
    for task in reversed(tasks):
        read = task.inputs if isinstance(task, Piece) else task.arguments
        indices = {item.index for item in read if isinstance(item, Register)}
        task.dead = sorted(indices - seen)
        seen |= indices


def _describe(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (str(tuple(value.shape)), str(value.stride()), value.dtype, value.device)
    return str(value)
