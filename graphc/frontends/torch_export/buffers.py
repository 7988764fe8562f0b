"""Keeps what a module changes while it trains: spectral norm's vectors, moving averages, counters, weights of a teacher.

    torch.div(x, x.norm(), out=u)              u' = x / ‖x‖
    sigma = u @ (W @ v)                        sigma = graphc.BufferValue(u, u') @ (W @ v)

``torch.export`` records the assignments, and its ONNX exporter drops them: what follows reads u', and nothing says whose next
value that is. :func:`expose` marks in a captured program what reads such a buffer, and adds what it holds at the end;
:func:`collect` makes ``graphc.BufferValue(stored, current)`` nodes of the marks. They call a function of the file, which takes
the stored value; ``train_mode`` puts the current one in its place, and an update.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import onnx_ir as ir
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, OutputSpec, TensorArgument
from torch.fx import Graph, GraphModule, Node
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree

from graphc.frontends.torch_export.marks import OPERATOR, arguments
from graphc.ir import DOMAIN
from graphc.ir.facts import FLOATS
from graphc.ir.names import BUFFER
from graphc.ir.subgraphs import captured as captured_by

_KIND = "BufferValue"

_REGION = torch.ops.higher_order.wrap_with_set_grad_enabled
"""A call of a part of the program: argument 1 is its graph, the others are its operands."""


@dataclass
class _Uses:
    """How a program uses its buffers.

    Attributes:
        whole: the nodes, in any of the program's graphs, that are a whole buffer → the buffer's name.
        written: names of the buffers that are assigned to.
        reads: (the node that reads, the whole buffer that it reads).
    """

    whole: dict[Node, str] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)
    reads: list[tuple[Node, Node]] = field(default_factory=list)


def changed(captured: ExportedProgram, module: torch.nn.Module) -> list[str]:
    """Names of the buffers and parameters that a program captured of ``module`` assigns to, except counts of normalisations."""
    counters = {
        f"{name}.num_batches_tracked".lstrip(".") for name, part in module.named_modules() if isinstance(part, _NormBase)
    }
    return sorted(_uses_of(captured).written - counters)


def expose(captured: ExportedProgram, names: Collection[str], always: Collection[str]) -> None:
    """Mark what reads the buffers ``names``, and make what they hold at the end the program's last outputs.

    Args:
        always: buffers that change in evaluation too: its results then come from the current value.
    """
    uses, graph, signature = _uses_of(captured), captured.graph, captured.graph_signature
    for reader, value in uses.reads:
        if (name := uses.whole[value]) in names and name not in always:
            with reader.graph.inserting_before(reader):
                reader.replace_input_with(value, _mark(reader.graph, value, name))
    held = _held(captured)
    places = {held[n.name]: n for n in graph.nodes if n.name in held}
    result = graph.output_node()
    with graph.inserting_before(result):
        last = [_mark(graph, places[name], name, updates=1) for name in names]
    outputs = (*pytree.tree_leaves(result.args), *last)
    result.args = (outputs,)
    signature.output_specs.extend(OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(node.name), None) for node in last)
    call = captured.module_call_graph[0]
    assert call.signature is not None
    call.signature = replace(call.signature, out_spec=pytree.tree_structure(tuple(range(len(outputs)))))
    for part in captured.graph_module.modules():
        if isinstance(part, GraphModule):
            part.recompile()


def pass_through(captured: ExportedProgram, names: Collection[str]) -> None:
    """Give what the program computes with after it has assigned to the parameters ``names`` the gradient of these.

    PyTorch assigns without a gradient: the parameter is what it was assigned, and its gradient that of this value.
    """
    uses, graph = _uses_of(captured), captured.graph
    places = {node: uses.whole[node] for node in graph.nodes if node.op == "placeholder" and uses.whole.get(node) in names}
    with graph.inserting_after(list(graph.nodes)[len(captured.graph_signature.input_specs) - 1]):
        before = {name: _call(graph, torch.ops.aten.clone.default, node) for node, name in places.items()}
    for reader, value in uses.reads:
        if (name := uses.whole[value]) in before and reader.graph is graph:
            with graph.inserting_before(reader):
                adjoint = _own(graph, "AdjointOf", value, [value], {"call": -1})
                through = _own(graph, "AddAdjoint", value, [adjoint, before[name], adjoint], {})
                reader.replace_input_with(value, _own(graph, "TakeAdjoint", value, [value, adjoint, through], {}))
    captured.graph_module.recompile()


def _call(graph: Graph, operator_: Any, value: Node) -> Node:
    made = graph.call_function(operator_, (value,))
    made.meta = dict(value.meta)
    return made


def _own(graph: Graph, kind: str, like: Node, inputs: list[Node], attributes: Mapping[str, int | str]) -> Node:
    by_place, by_name = arguments(kind, inputs, like.meta["val"], attributes)
    return graph.call_function(OPERATOR, by_place, by_name)


def _mark(graph: Graph, value: Node, name: str, updates: int = 0) -> Node:
    """A node ``graphc.BufferValue(value)`` with the buffer's name; :func:`collect` adds what is stored."""
    return _own(graph, _KIND, value, [value], {"updates": updates, "buffer": name})


def _held(captured: ExportedProgram) -> dict[str, str]:
    """Placeholder → name of the buffer or parameter that it is."""
    return {**captured.graph_signature.inputs_to_buffers, **captured.graph_signature.inputs_to_parameters}


def _uses_of(captured: ExportedProgram) -> _Uses:
    held, found = _held(captured), _Uses()
    _visit(captured.graph_module, {node: held[node.name] for node in captured.graph.nodes if node.name in held}, found)
    found.reads += [(reader, value) for reader, value in _returned(captured.graph) if value in found.whole]
    return found


def _returned(graph: Graph) -> Iterator[tuple[Node, Node]]:
    result = graph.output_node()
    yield from ((result, value) for value in result.all_input_nodes)


def _visit(module: GraphModule, known: Mapping[Node, str], found: _Uses) -> list[str | None]:
    """Add the uses in one graph, given which placeholders are buffers; returns which results are whole buffers."""
    whole = found.whole
    whole.update(known)
    results: dict[Node, list[str | None]] = {}  # of regions
    views: dict[Node, Node] = {}  # views → what they are views of
    assigned: set[Node] = set()  # views through which something is assigned: they stay views of the buffer itself
    reads: list[tuple[Node, Node]] = []
    for node in module.graph.nodes:
        if node.target is _REGION:
            body = getattr(module, node.args[1].target)
            inside = [n for n in body.graph.nodes if n.op == "placeholder"]
            operands = zip(inside, node.args[2:], strict=True)
            results[node] = _visit(body, {inner: whole[outer] for inner, outer in operands if outer in whole}, found)
        elif node.target is operator.getitem and node.args[0] in results:
            name = results[node.args[0]][node.args[1]]
            if name is not None:
                whole[node] = name
        elif node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            targets = _targets(node)
            reads += [(node, value) for value in node.all_input_nodes if value not in targets]
            for target in targets:
                if target in whole:
                    whole[node] = whole[target]  # an assignment returns what it assigns to
                elif target in views or target in assigned:
                    views[node] = target
                buffer = target
                while buffer in views:
                    assigned.add(buffer)
                    buffer = views[buffer]
                if buffer in whole:
                    found.written.add(whole[buffer])
            if not targets and _is_view(node) and isinstance(node.args[0], Node):
                views[node] = node.args[0]
    found.reads += [(reader, value) for reader, value in reads if value in whole and reader not in assigned]
    return [
        whole.get(value) if isinstance(value, Node) else None for value in pytree.tree_leaves(module.graph.output_node().args)
    ]


def _targets(node: Node) -> list[Node]:
    """What an operator assigns to, by its schema."""
    found = []
    for k, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[k] if k < len(node.args) and not argument.kwarg_only else node.kwargs.get(argument.name)
            found += [value for value in pytree.tree_leaves(given) if isinstance(value, Node)]
    return found


def _is_view(node: Node) -> bool:
    return any(result.alias_info is not None for result in node.target._schema.returns)  # type: ignore[union-attr]


def collect(model: ir.Model, module: torch.nn.Module, names: Collection[str]) -> list[str]:
    """Turn the marks of :func:`expose` into ``BufferValue(stored, current)`` nodes, and take its outputs away.

    Returns:
        Names of the buffers that stay as they are: integers that depend on the inputs, which several workers cannot average.
    """
    if not names:
        return []
    graph, tensors = model.graph, {**dict(module.named_buffers()), **dict(module.named_parameters())}
    del graph.outputs[-len(names) :]
    marks = [node for node in graph if node.op_type == _KIND and node.domain == DOMAIN]
    last = {node.attributes["buffer"].as_string(): node for node in marks if node.attributes["updates"].as_int()}
    computed = _computed_from_inputs(graph)
    kept = {name for name, node in last.items() if node.outputs[0].dtype in FLOATS or node.inputs[0] not in computed}
    known: dict[tuple[ir.Value, ir.Value], ir.Node] = {}
    for node in marks:
        name, current = node.attributes["buffer"].as_string(), node.inputs[0]
        assert current is not None
        if name in kept and current.name != name:
            stored = graph.initializers.get(name) or _initializer(graph, name, tensors[name])
            stored.metadata_props[BUFFER] = "true"
            first = known.setdefault((stored, current), node)
            if first is node:
                _fill(node, stored)
                continue
            if node is last[name]:
                first.attributes["updates"] = ir.AttrInt64("updates", 1)
            current = first.outputs[0]
        node.outputs[0].replace_all_uses_with(current, replace_graph_outputs=True)
        graph.remove(node, safe=True)
    return [name for name in names if name not in kept]


def _computed_from_inputs(graph: ir.Graph) -> set[ir.Value]:
    found = set(graph.inputs)
    for node in graph:
        if not found.isdisjoint(value for value in (*node.inputs, *captured_by(node)) if value is not None):
            found.update(node.outputs)
    return found


def _initializer(graph: ir.Graph, name: str, tensor: torch.Tensor) -> ir.Value:
    """A buffer that the exporter left out, for nothing else reads it."""
    held = ir.tensor_adapters.TorchTensor(tensor.detach().cpu(), name=name)
    value = ir.Value(name=name, type=ir.TensorType(held.dtype), shape=ir.Shape(held.shape), const_value=held)
    graph.register_initializer(value)
    return value


def _fill(node: ir.Node, stored: ir.Value) -> None:
    """Put what is stored in front of a mark's operand."""
    (current,), updates = node.inputs, node.attributes["updates"]
    node.resize_inputs(2)
    node.replace_input_with(0, stored)
    node.replace_input_with(1, current)
    node.attributes.clear()
    node.attributes["updates"] = updates
