"""norm_epilogues: let batch norms add and cut off their results while they write them, and their gradients while they read.

    before   y = BatchNormalizationTraining(x, scale, bias)    z = Relu(y)
             dy = ReluGrad(dz, z)                              dx = BatchNormalizationTrainingGrad(dy, x, …)
    after    z = FusedBatchNormalization(x, scale, bias; activation="relu")
             dx = FusedBatchNormalizationGrad(dz, x, scale, bias, …; activation="relu")

A gradient stays where something else reads what the activation lets pass, and a norm where something else reads its result.

Shapes are static: a backend whose kernels compute this asks for the pass over its plans
(:attr:`graphc.backend.Capabilities.rewrites`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from graphc.errors import counted
from graphc.ir.builder import Builder
from graphc.ir.facts import constant, input_of, is_zero, required, static_dims
from graphc.passes.optimize.axis_order import only_user
from graphc.passes.optimize.simplify import dead_code_elimination, replace
from graphc.pipeline import Context, graph_pass

_TRAINING, _GRADIENT = ("graphc", "BatchNormalizationTraining"), ("graphc", "BatchNormalizationTrainingGrad")


@graph_pass("norm_epilogues", changes="form")
def norm_epilogues(model: ir.Model, ctx: Context, *, fewest: int = 1) -> bool:
    """Take bounds, and a sum in front of them, into float32 batch norms and their gradients.

    Args:
        fewest: positions of a channel from which the backend has kernels.
    """
    graph, op = model.graph, Builder(model.graph)
    norms = [node for node in graph if (node.domain, node.op_type) == _TRAINING and _is_taken(node, fewest)]
    # gradients first: then the activation alone reads the result
    gradients = sum(_cuts_off(graph, op, node, user) for node in norms for user in _gradients_of(node))
    if gradients:
        dead_code_elimination(graph)
    order = {node: place for place, node in enumerate(graph)}
    count = sum(_adds_and_cuts_off(graph, op, node, order) for node in norms)
    if not gradients and not count:
        return False
    dead_code_elimination(graph)
    ctx.note(f"norm_epilogues: {counted(count, 'norm')} and {counted(gradients, 'gradient')} with what follows")
    return True


def _is_taken(node: ir.Node, fewest: int) -> bool:
    shape = static_dims(input_of(node, 0))
    if shape is None or 0 in shape or math.prod(shape[2:]) < fewest:
        return False
    return all(required(value).dtype == ir.DataType.FLOAT for value in (*node.inputs, *node.outputs))


def _gradients_of(norm: ir.Node) -> Iterator[ir.Node]:
    for user, index in list(norm.outputs[1].uses()):
        if ((user.domain, user.op_type), index) != (_GRADIENT, 3) or user.graph is not norm.graph:
            continue
        if (user.inputs[1], user.inputs[2], user.inputs[4]) == (norm.inputs[0], norm.inputs[1], norm.outputs[3]):
            yield user


def _cuts_off(graph: ir.Graph, op: Builder, norm: ir.Node, user: ir.Node) -> bool:
    """Let a gradient cut off its operand itself."""
    slope = input_of(user, 0)
    mask = slope.producer()
    found = _masked(mask, norm.outputs[0]) if mask is not None and only_user(slope) is user else None
    if found is None:
        return False
    dz, attributes = found
    op.before, op.scope = user, user.name or user.op_type
    operands = (dz, *norm.inputs[:3], norm.outputs[1], norm.outputs[3])
    made = op.graphc.FusedBatchNormalizationGrad(*operands, **attributes)
    return _replace_all(graph, op, user.outputs, made)


def _replace_all(graph: ir.Graph, op: Builder, olds: Sequence[ir.Value], news: Sequence[ir.Value]) -> bool:
    done = [replace(graph, op, *pair) for pair in zip(olds, news, strict=True)]
    return all(done)


def _masked(node: ir.Node, y: ir.Value) -> tuple[ir.Value, Mapping[str, Any]] | None:
    """What a node lets pass where y, a norm's result, lies between bounds, and these as attributes."""
    if (node.domain, node.op_type) == ("graphc", "ReluGrad"):
        return (input_of(node, 0), {"activation": "relu"}) if _is_relu_of(input_of(node, 1), y) else None
    if (node.domain, node.op_type) != ("", "Where") or not is_zero(input_of(node, 2)):
        return None
    if static_dims(input_of(node, 1)) != static_dims(y):
        return None
    bounds = _bounds(input_of(node, 0), y)
    return None if bounds is None else (input_of(node, 1), bounds)


def _is_relu_of(z: ir.Value, y: ir.Value) -> bool:
    producer = z.producer()
    return producer is not None and (producer.domain, producer.op_type) == ("", "Relu") and producer.inputs[0] is y


def _bounds(condition: ir.Value, y: ir.Value) -> Mapping[str, Any] | None:
    """The attributes of a gradient that is zero where ``condition`` is false."""
    node = condition.producer()
    if node is None or node.domain:
        return None
    if node.op_type == "Greater":
        of_relu = input_of(node, 0) is y or _is_relu_of(input_of(node, 0), y)
        return {"activation": "relu"} if of_relu and is_zero(input_of(node, 1)) else None
    tests = [test for value in node.inputs if value is not None and (test := value.producer()) is not None]
    names = [test.op_type for test in tests if not test.domain and test.inputs[0] is y] if node.op_type == "And" else []
    if names not in (["Greater", "Less"], ["GreaterOrEqual", "LessOrEqual"]):
        return None
    low, high = (_number(test.inputs[1]) for test in tests)
    if low is None or high is None:
        return None
    return {"activation": "clip", "alpha": low, "beta": high, "closed": int(names[0] != "Greater")}


def _number(value: ir.Value | None) -> float | None:
    known = constant(value) if value is not None else None
    return None if known is None or known.size != 1 else float(known.item())


def _adds_and_cuts_off(graph: ir.Graph, op: Builder, norm: ir.Node, order: dict[ir.Node, int]) -> bool:
    """Let a norm add to its results and cut them off itself.

    Args:
        order: of the nodes. What is added must be there before the norm, whose statistics others read; a new node is added.
    """
    result, residual, node = norm.outputs[0], None, only_user(norm.outputs[0])
    if node is not None and (node.domain, node.op_type) == ("", "Add"):
        first, second = input_of(node, 0), input_of(node, 1)
        residual = second if first is result else first
        source = residual.producer()
        if residual is result or static_dims(residual) != static_dims(result):
            return False
        if source is not None and order.get(source, order[norm]) >= order[norm]:
            return False
        result = node.outputs[0]
        node = only_user(result)
    activation = _activation_of(node) if node is not None else None
    if node is not None and activation is not None:
        result = node.outputs[0]
    elif residual is None:
        return False
    op.before, op.scope = norm, norm.name or norm.op_type
    epsilon = norm.attributes.get_float("epsilon", 1e-5)
    y, *statistics = op.graphc.FusedBatchNormalization(*norm.inputs[:3], residual, epsilon=epsilon, **(activation or {}))
    order[required(y.producer())] = order[norm]
    return _replace_all(graph, op, (result, *norm.outputs[1:]), (y, *statistics))


def _activation_of(node: ir.Node) -> Mapping[str, Any] | None:
    """Attributes of the activation that a node computes; None: it is none that cuts off."""
    if node.domain or node.op_type not in ("Relu", "Clip"):
        return None
    if node.op_type == "Relu":
        return {"activation": "relu"}
    low, high = (_number(value) for value in (*node.inputs, None, None)[1:3])
    return None if low is None or high is None else {"activation": "clip", "alpha": low, "beta": high}
