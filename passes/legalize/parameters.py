"""Turns parameters hidden behind nodes into initializers, and small constants into ``Constant`` nodes.

    before  shape ─► ConstantOfShape ─► W ─► Conv         after   W (initializer) ─► Conv

Caffe2's converter and light model zoos write weights as ``ConstantOfShape``, older exporters as ``Constant``, half-precision
converters as ``Constant → Cast``, and PyTorch's TorchScript exporter writes a second parameter of equal initial value as
``Identity`` of the first. The parameter gets the name that the rest of the graph uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import onnx_ir as ir

from graphc.ir.builder import Builder
from graphc.ir.facts import FLOATS, is_state
from graphc.ir.names import BUFFER

_WEIGHT_INPUTS: dict[str, frozenset[int]] = {
    "BatchNormalization": frozenset({1, 2, 3, 4}),
    "BiasGelu": frozenset({1}),
    "Conv": frozenset({1, 2}),
    "ConvTranspose": frozenset({1, 2}),
    "DeformConv": frozenset({1, 3}),
    "FusedMatMul": frozenset({0, 1}),
    "GRU": frozenset({1, 2, 3}),
    "Gather": frozenset({0}),
    "Gemm": frozenset({0, 1, 2}),
    "GroupNormalization": frozenset({1, 2}),
    "InstanceNormalization": frozenset({1, 2}),
    "LSTM": frozenset({1, 2, 3, 7}),
    "LayerNormalization": frozenset({1, 2}),
    "MatMul": frozenset({0, 1}),
    "PRelu": frozenset({1}),
    "RMSNormalization": frozenset({1}),
    "RNN": frozenset({1, 2, 3}),
    "SkipLayerNormalization": frozenset({2, 3, 4}),
}
"""(op, input) pairs whose operand is a weight."""

_VIEWS = frozenset({"Identity", "Cast", "Unsqueeze", "Squeeze", "Reshape", "Transpose", "Flatten"})
"""Ops that pass a weight on: their input 0 is a weight where their output is one."""

_ELEMENTWISE = frozenset({"Add", "Sub", "Mul", "Div"})

_LINEAR = frozenset({"MatMul", "Conv", "ConvTranspose", "Gemm", "Einsum"})

_CONSTANT_LIMIT = 4096
"""Initializers of at most this many elements become ``Constant`` nodes unless they are parameters."""


def filler_nodes(graph: ir.Graph) -> list[ir.Node]:
    """The nodes of ``graph`` that may hold a parameter, in graph order."""
    return [n for n in graph if n.domain == "" and n.op_type in ("Constant", "ConstantOfShape", "Identity", "Cast")]


def promote(model: ir.Model, fillers: Iterable[ir.Node]) -> int:
    """Turn the outputs of ``fillers`` that are weights into initializers; returns their number."""
    graph, count = model.graph, 0
    from_torch = model.producer_name == "pytorch"
    sources: dict[ir.Value, ir.TensorProtocol] = {}
    chained: set[ir.Value] = set()  # read by one Identity or Cast only: the parameter takes its output's name
    for node in fillers:
        out = node.outputs[0]
        if node.op_type == "Identity" and _alias(graph, node, from_torch):
            continue
        tensor = _tensor_of(node, sources)
        if tensor is None or tensor.dtype not in FLOATS or not tensor.shape:
            continue
        sources[out] = tensor
        users = list(out.uses())
        if len(users) == 1 and users[0].node.op_type in ("Identity", "Cast") and not out.is_graph_output():
            chained.add(out)
            continue
        certain = node.op_type == "ConstantOfShape"
        if BUFFER in out.metadata_props or not any(_is_weight(n, k, out, certain) for n, k in users):
            continue
        _make_initializer(graph, out, tensor)
        count += 1
    for node in reversed(list(filler_nodes(graph))):
        if not node.outputs[0].uses() and not node.outputs[0].is_graph_output():
            graph.remove(node, safe=True)
    return count


def _alias(graph: ir.Graph, node: ir.Node, from_torch: bool) -> bool:
    """Resolve an Identity of an initializer; returns True when the node is gone.

    The TorchScript exporter merges parameters of equal initial value that way (a running variance with a scale, all
    layers of an encoder), so each gets its own copy in its files. In other files it is one parameter used twice.
    """
    source, out = node.inputs[0], node.outputs[0]
    if source is None or not source.is_initializer() or source.const_value is None or out.is_graph_output():
        return False
    tensor = source.const_value
    if from_torch and len(source.uses()) > 1 and tensor.dtype in FLOATS and tensor.shape:
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
    if node is not None:
        graph.remove(node, safe=True)
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


def _is_weight(node: ir.Node, index: int, value: ir.Value, certain: bool, depth: int = 0) -> bool:
    """Whether ``value`` is used as a weight here.

    ``certain``: the value is known not to be a constant of a formula, so any scale or shift counts as a weight.
    """
    if index in _WEIGHT_INPUTS.get(node.op_type, ()):
        return True
    if node.op_type in _ELEMENTWISE:
        if certain:
            return True
        other = node.inputs[1 - index]
        producer = other.producer() if other is not None else None
        return node.op_type == "Add" and producer is not None and producer.op_type in _LINEAR
    if node.op_type in _VIEWS and index == 0 and depth < 8:
        return any(_is_weight(n, k, node.outputs[0], certain, depth + 1) for n, k in node.outputs[0].uses())
    return False


def small_initializers_to_constants(graph: ir.Graph) -> None:
    """Turn small initializers that are not parameters (integers, scalars, scales) into ``Constant`` nodes of the same name."""
    found = list(_constants(graph))
    if not found:
        return
    for value in found:
        del graph.initializers[value.name or ""]
    op = Builder(graph, before=next(iter(graph), None))
    for value in found:
        (out,) = op.emit("Constant", [], {"value": value.const_value}, outputs=[value.name or ""], name=value.name)
        value.replace_all_uses_with(out)


def _constants(graph: ir.Graph) -> Iterator[ir.Value]:
    for value in graph.initializers.values():
        tensor = value.const_value
        if tensor is None or value.is_graph_output() or is_state(value) or (value.name or "").startswith("graphc."):
            continue
        if (tensor.dtype not in FLOATS or not tensor.shape or _says_sizes(value)) and tensor.size <= _CONSTANT_LIMIT:
            yield value


_SIZES = frozenset({("Resize", 1), ("Resize", 2), ("Upsample", 1)})
"""(op, input) pairs of float operands that are settings (scales, regions), not weights, although files store them as
initializers.
"""


def _says_sizes(value: ir.Value) -> bool:
    uses = list(value.uses())
    return bool(uses) and all((node.op_type, index) in _SIZES for node, index in uses)
