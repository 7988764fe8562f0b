"""epilogues: let convolutions scale, add and activate their results while they write them.

    before   y = Relu(Add(BatchNormalization(Conv(x, w), gamma, beta, mean, var), r))
    after    scale = gamma / Sqrt(var + epsilon);  y = FusedConv(x, w, scale, beta - mean·scale, r; activation="relu")

Followed are, in this order: a BatchNormalization in inference mode and sums with a number for each channel, a sum with another
tensor, an activation. A result that something else reads too, such as a gradient, ends the walk there.

Shapes are static: a backend whose kernels compute this asks for the pass over its plans
(:attr:`graphc.backend.Capabilities.rewrites`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from graphc.errors import counted
from graphc.ir.builder import Builder
from graphc.ir.facts import constant, input_of, is_zero, required, static_dims
from graphc.ir.names import marks_of
from graphc.ir.ops.convolution import CONV
from graphc.passes.optimize.axis_order import only_user
from graphc.passes.optimize.simplify import dead_code_elimination, replace
from graphc.pipeline import Context, graph_pass


@graph_pass("epilogues", changes="form")
def epilogues(model: ir.Model, ctx: Context) -> bool:
    """Take what follows float32 convolutions into them."""
    graph, count = model.graph, 0
    op = Builder(graph)
    for node in [node for node in graph if node.domain == "" and _is_taken(node)]:
        chain = _Chain(node)
        chain.walk()
        if chain.absorbed:
            count += chain.write(graph, op)
    if not count:
        return False
    dead_code_elimination(graph)
    ctx.note(f"epilogues: {counted(count, 'convolution')} with what follows")
    return True


def _is_taken(node: ir.Node) -> bool:
    shapes = [static_dims(value) for value in (*node.inputs, *node.outputs) if value is not None]
    known = all(shape is not None and 0 not in shape for shape in shapes)
    return node.op_type == "Conv" and node.outputs[0].dtype == ir.DataType.FLOAT and known


@dataclass
class _Chain:
    """A convolution and the nodes behind it that it can compute, the last of which makes ``result``."""

    node: ir.Node
    result: ir.Value = field(init=False)
    absorbed: int = 0
    norm: ir.Node | None = None
    shifts: list[ir.Value] = field(default_factory=list)
    residual: ir.Value | None = None
    activation: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.result = self.node.outputs[0]
        self.marks = marks_of(self.node)

    def walk(self) -> None:
        """Follow the only reader of each result."""
        while not self.activation:
            node = only_user(self.result)
            if node is None or node.domain or marks_of(node) != self.marks or not self._takes(node):
                break
            self.absorbed += 1
            self.result = node.outputs[0]

    def _takes(self, node: ir.Node) -> bool:
        if self.residual is None and node.op_type == "Add":
            return self._takes_sum(node)
        if node.op_type == "BatchNormalization":
            return self._takes_norm(node)
        found = activation_of(node)
        if found is not None:
            self.activation = found
        return found is not None

    def _takes_sum(self, node: ir.Node) -> bool:
        first, second = input_of(node, 0), input_of(node, 1)
        other = second if first is self.result else first
        shape, own = static_dims(other), static_dims(self.result) or ()
        if other is self.result or shape is None or static_dims(node.outputs[0]) != own:
            return False
        lifted = (1,) * (len(own) - len(shape)) + shape
        if lifted == (1, own[1], *(1 for _ in own[2:])) and lifted != own:
            self.shifts.append(other)
            return True
        if shape != own:
            return False
        self.residual = other
        return True

    def _takes_norm(self, node: ir.Node) -> bool:
        taken = self.norm is None and not self.shifts and self.residual is None
        if not taken or node.attributes.get_int("training_mode", False) or any(out.uses() for out in node.outputs[1:]):
            return False
        if any(required(value).dtype != ir.DataType.FLOAT for value in node.inputs):
            return False
        self.norm = node
        return True

    def write(self, graph: ir.Graph, op: Builder) -> bool:
        """Replace the chain by one node, where its last node is: by then all operands are there."""
        node = self.node
        op.before, op.scope, op.marks = required(self.result.producer()), node.name or node.op_type, self.marks
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        bias = None if bias is None or is_zero(bias) else bias
        scale, shift = (None, bias) if self.norm is None else self._of_norm(op, self.norm, bias)
        for other in self.shifts:
            flat = op.Reshape(other, [-1])
            shift = flat if shift is None else op.Add(shift, flat)
        window = {name: attribute.value for name, attribute in node.attributes.items() if name in CONV}
        operands = (*node.inputs[:2], scale, shift, self.residual)
        return replace(graph, op, self.result, op.graphc.FusedConv(*operands, **window, **self.activation))

    @staticmethod
    def _of_norm(op: Builder, node: ir.Node, bias: ir.Value | None) -> tuple[ir.Value, ir.Value]:
        """Scale and shift of each channel."""
        _, gamma, beta, mean, variance = (input_of(node, k) for k in range(5))
        scale = op.Div(gamma, op.Sqrt(op.Add(variance, node.attributes.get_float("epsilon", 1e-5))))
        centred = op.Neg(mean) if bias is None else op.Sub(bias, mean)
        return scale, op.Add(op.Mul(centred, scale), beta)


def activation_of(node: ir.Node) -> Mapping[str, Any] | None:
    """Attributes of the activation that a node computes; None: it is none of them."""
    attributes = node.attributes
    match node.op_type:
        case "Relu":
            return {"activation": "relu"}
        case "HardSwish":
            return {"activation": "hard_swish"}
        case "LeakyRelu":
            return {"activation": "leaky_relu", "alpha": attributes.get_float("alpha", 0.01)}
        case "HardSigmoid":
            line = {"alpha": attributes.get_float("alpha", 0.2), "beta": attributes.get_float("beta", 0.5)}
            return {"activation": "hard_sigmoid", **line}
        case "Clip":
            bounds = [constant(value) if value is not None else None for value in (*node.inputs, None, None)[1:3]]
            if any(bound is None or bound.size != 1 for bound in bounds):
                return None
            low, high = (float(required(bound).item()) for bound in bounds)
            return {"activation": "clip", "alpha": low, "beta": high}
    return None
