"""Turns what trains into initializers, and other constants into ``Constant`` nodes.

    before  shape ─► ConstantOfShape ─► W ─► Conv         after   W (initializer) ─► Conv
            anchors (initializer) ─► Mul                          Constant ─► anchors ─► Mul

Caffe2's converter and light model zoos write weights as ``ConstantOfShape``, older exporters as ``Constant``, half-precision
converters as ``Constant → Cast``, and PyTorch's TorchScript exporter writes a second parameter of equal initial value as
``Identity`` of the first. The parameter gets the name that the rest of the graph uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import onnx_ir as ir

from graphc.ir.builder import Builder
from graphc.ir.exporter_records import is_detached, recorded_kinds
from graphc.ir.facts import FLOATS, inputs_of, is_state
from graphc.ir.model_bytes import check_constant
from graphc.ir.names import BUFFER, PARAMETER
from graphc.ir.parameters import Decision, is_running_statistic
from graphc.passes.parameters.decide import Rules
from graphc.passes.parameters.uses import Use

_SMALL = 4096
"""Initializers of integers with at most this many elements become ``Constant`` nodes."""


def filler_nodes(graph: ir.Graph) -> list[ir.Node]:
    """The nodes of ``graph`` that may hold a parameter, in graph order."""
    return [n for n in graph if n.domain == "" and n.op_type in ("Constant", "ConstantOfShape", "Identity", "Cast")]


def promote(model: ir.Model, fillers: Iterable[ir.Node], train: Sequence[str] | None = None) -> tuple[list[Decision], int]:
    """Turn what trains into initializers, and other constants into ``Constant`` nodes.

    Args:
        fillers: nodes that may hold a parameter, also inside bodies.
        train: globs of constants that train whatever the rules say.

    Returns:
        A decision for each float constant, and the number of parameters taken from nodes.
    """
    graph, count, rules = model.graph, 0, Rules(model, train)
    merged = model.producer_name == "pytorch" and not recorded_kinds(graph)
    sources: dict[ir.Value, ir.TensorProtocol] = {}
    taken: list[Decision] = []
    for node in fillers:
        out = node.outputs[0]
        if is_detached(node) or (node.op_type == "Identity" and _alias(graph, node, merged)):
            continue
        tensor = _tensor_of(node, sources)
        if tensor is None or tensor.dtype not in FLOATS:
            continue
        sources[out] = tensor
        if any(BUFFER in source.metadata_props for source in inputs_of(node)):
            out.metadata_props[BUFFER] = "true"
        users = list(out.uses())
        if len(users) == 1 and users[0].node.op_type in ("Identity", "Cast") and not out.is_graph_output():
            continue  # the parameter takes the name that the rest of the graph uses
        decision = rules.decide(out, tensor)
        taken.append(decision)
        if (decision.trains or decision.rule == Use.STATISTIC.value) and not (
            node.graph is not graph and out.is_graph_output()
        ):
            _make_initializer(graph, out, tensor)
            count += 1
    known = {decision.name for decision in taken}
    held = [value for name, value in graph.initializers.items() if name not in known]
    decisions = [made for value in held if (made := _decide_initializer(rules, value)) is not None]
    _to_constants(graph, {d.name for d in decisions if not d.trains})
    for node in reversed(list(filler_nodes(graph))):
        if not node.outputs[0].uses() and not node.outputs[0].is_graph_output():
            graph.remove(node, safe=True)
    return decisions + taken, count


def _decide_initializer(rules: Rules, value: ir.Value) -> Decision | None:
    tensor = value.const_value
    if tensor is None or tensor.dtype not in FLOATS or is_state(value) or (value.name or "").startswith("graphc."):
        return None
    return rules.decide(value, tensor)


def _alias(graph: ir.Graph, node: ir.Node, merged: bool) -> bool:
    """Resolve an Identity of an initializer; returns True when the node is gone.

    Args:
        merged: parameters of equal initial value are one (a running variance and a scale, all layers of an encoder), as the
            TorchScript exporter writes them, and each is to be its own. In other files it is one parameter used twice.
    """
    source, out = node.inputs[0], node.outputs[0]
    if source is None or not source.is_initializer() or source.const_value is None or out.is_graph_output():
        return False
    tensor = source.const_value
    known = PARAMETER in source.metadata_props or BUFFER in source.metadata_props
    if merged and not known and len(source.uses()) > 1 and tensor.dtype in FLOATS and tensor.shape:
        _make_initializer(graph, out, tensor)
        return True
    out.replace_all_uses_with(source)
    graph.remove(node, safe=True)
    return True


def _make_initializer(graph: ir.Graph, out: ir.Value, tensor: ir.TensorProtocol) -> None:
    """Replace a node output by an initializer of the same name; removes the node when it has no other use."""
    node, name = out.producer(), out.name or ""
    new = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape.numpy()), const_value=tensor)
    new.metadata_props.update(out.metadata_props)
    out.replace_all_uses_with(new, replace_graph_outputs=True)
    if node is not None and node.graph is not None:
        node.graph.remove(node, safe=True)
    graph.register_initializer(new)


def _tensor_of(node: ir.Node, sources: dict[ir.Value, ir.TensorProtocol]) -> ir.TensorProtocol | None:
    """Return the tensor of a filler node; ``ConstantOfShape`` allocates nothing."""
    if node.op_type == "Constant":
        return constant_tensor(node)
    source = node.inputs[0]
    if source is None:
        return None
    if node.op_type == "ConstantOfShape":
        shape = source.const_value if source.is_initializer() else None
        producer = source.producer()
        if shape is None and producer is not None and producer.op_type == "Constant":
            shape = constant_tensor(producer)
        if shape is None:
            return None
        fill = node.attributes["value"].as_tensor() if "value" in node.attributes else ir.tensor(np.zeros(1, np.float32))
        size = [int(d) for d in shape.numpy().reshape(-1)]
        check_constant(node, size, fill.dtype.bitwidth / 8, sum(t.nbytes for t in sources.values()))
        # a view of one element takes no memory until it is trained
        return ir.Tensor(np.broadcast_to(fill.numpy().reshape(()), size), dtype=fill.dtype, name=node.outputs[0].name)
    found = sources.get(source)
    if found is None or node.op_type == "Identity":
        return found
    dtype = ir.DataType(node.attributes["to"].as_int())
    return ir.Tensor(found.numpy().astype(dtype.numpy()), dtype=dtype, name=node.outputs[0].name) if dtype in FLOATS else None


def constant_tensor(node: ir.Node) -> ir.TensorProtocol | None:
    """The tensor of a ``Constant`` node, from any of its attributes."""
    return ir.convenience.get_const_tensor(node.outputs[0])


def _to_constants(graph: ir.Graph, idle: set[str]) -> None:
    """Turn initializers into ``Constant`` nodes of the same name: floats named in ``idle``, and small integers."""
    found = list(_constants(graph, idle))
    if not found:
        return
    for value in found:
        del graph.initializers[value.name or ""]
    op = Builder(graph, before=next(iter(graph), None))
    for value in found:
        (out,) = op.emit("Constant", [], {"value": value.const_value}, outputs=[value.name or ""], name=value.name)
        value.replace_all_uses_with(out)


def _constants(graph: ir.Graph, idle: set[str]) -> Iterator[ir.Value]:
    for name, value in graph.initializers.items():
        tensor = value.const_value
        if tensor is None or value.is_graph_output() or is_state(value) or name.startswith("graphc."):
            continue
        if tensor.dtype in FLOATS:
            if name in idle and value.uses() and not is_running_statistic(value):
                yield value
        elif tensor.size <= _SMALL and BUFFER not in value.metadata_props:
            yield value
