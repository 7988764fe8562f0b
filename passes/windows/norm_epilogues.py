"""norm_epilogues: let batch norms add to and activate their results while they write them, and their gradients while they read.

    before   y = BatchNormalizationTraining(x, scale, bias)    z = Relu(y)
             dy = ReluGrad(dz, z)                              dx = BatchNormalizationTrainingGrad(dy, x, …)
    after    z = FusedBatchNormalization(x, scale, bias; activation="relu")
             dx = FusedBatchNormalizationGrad(dz, x, scale, bias, …; activation="relu")

A gradient stays where something else reads what the activation lets pass, and a norm where something else reads its result.
Activations are those of :data:`graphc.ir.ops.norm_epilogues.SLOPES`.

Shapes are static: a backend whose kernels compute this asks for the pass over its plans
(:attr:`graphc.backend.Capabilities.rewrites`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import onnx_ir as ir

from graphc.errors import counted
from graphc.ir.builder import Builder
from graphc.ir.facts import constant, input_of, is_zero, required, static_dims
from graphc.ir.ops.norm_epilogues import SLOPES
from graphc.passes.optimize.axis_order import only_user
from graphc.passes.optimize.simplify import dead_code_elimination, replace
from graphc.passes.windows.epilogues import activation_of
from graphc.pipeline import Context, graph_pass

_TRAINING, _GRADIENT = ("graphc", "BatchNormalizationTraining"), ("graphc", "BatchNormalizationTrainingGrad")
_AGAIN = ("graphc", "Recompute")

_MOST_COMPARED = 64
"""Pairs of values that are compared at most to find out whether two norms have the same operand."""

_ROUNDING = 1e-6
"""By how much a factor of 1/3 may differ."""


@graph_pass("norm_epilogues", changes="form")
def norm_epilogues(model: ir.Model, ctx: Context, *, fewest: int = 1) -> bool:
    """Take activations, and a sum in front of them, into float32 batch norms and their gradients.

    Args:
        fewest: positions of a channel from which the backend has kernels.
    """
    graph, op = model.graph, Builder(model.graph)
    norms = [node for node in graph if (node.domain, node.op_type) == _TRAINING and _is_taken(node, fewest)]
    # gradients first: then the activation alone reads the result
    gradients = sum(_bends(graph, op, node, user) for node in norms for user in _gradients_of(node))
    if gradients:
        dead_code_elimination(graph)
    order = {node: place for place, node in enumerate(graph)}
    count = sum(_adds_and_activates(graph, op, node, order) for node in norms)
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
        operands = [_saved(user.inputs[k]) for k in (1, 2, 4)]
        if operands == [_saved(value) for value in (*norm.inputs[:2], norm.outputs[3])]:
            yield user


def _saved(value: ir.Value | None) -> ir.Value | None:
    """The value that a recomputed region has under another name."""
    while value is not None and (node := value.producer()) is not None and (node.domain, node.op_type) == _AGAIN:
        value = node.inputs[node.outputs.index(value)]
    return value


def _is_result(value: ir.Value | None, norm: ir.Node) -> bool:
    """Whether a value is what a norm makes, or would be if it had not been recomputed: steps have the same bits then."""
    value = _saved(value)
    return value is norm.outputs[0] or _same(value, norm.outputs[0], {})


def _same(a: ir.Value | None, b: ir.Value | None, seen: dict[tuple[ir.Value, ir.Value], bool]) -> bool:
    """Whether two values are made alike of the same ones."""
    a, b = _saved(a), _saved(b)
    if a is b or a is None or b is None:
        return a is b
    if (a, b) not in seen:
        m, n = a.producer(), b.producer()
        alike = m is not None and n is not None and len(seen) < _MOST_COMPARED
        seen[a, b] = False
        if alike and _form(required(m)) == _form(required(n)) and required(m).outputs.index(a) == required(n).outputs.index(b):
            # weights first: where they differ, nothing in front of them needs comparing
            pairs = zip(reversed(required(m).inputs), reversed(required(n).inputs), strict=True)
            seen[a, b] = all(_same(x, y, seen) for x, y in pairs)
    return seen[a, b]


def _form(node: ir.Node) -> tuple[Any, ...]:
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    return node.domain, node.op_type, attributes, len(node.inputs)


def _bends(graph: ir.Graph, op: Builder, norm: ir.Node, user: ir.Node) -> bool:
    """Let a gradient compute its operand, that of an activation, itself."""
    slope = input_of(user, 0)
    node = slope.producer()
    found = _slope_of(node, norm) if node is not None and only_user(slope) is user else None
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


Slope: TypeAlias = tuple[ir.Value, Mapping[str, Any]]
"""The gradient behind an activation, and the attributes of this one."""


def _slope_of(node: ir.Node, norm: ir.Node) -> Slope | None:
    """Of which activation of a norm's result a node computes the gradient."""
    if (node.domain, node.op_type) == ("graphc", "ReluGrad"):
        return (input_of(node, 0), {"activation": "relu"}) if _is_relu_of(input_of(node, 1), norm) else None
    shape, found = static_dims(norm.outputs[0]), None
    if not node.domain and node.op_type in ("Add", "Where") and static_dims(node.outputs[0]) == shape:
        found = _slope_of_silu(node, norm) if node.op_type == "Add" else _slope_of_where(node, norm)
    return found if found is not None and static_dims(found[0]) == shape else None


def _slope_of_where(node: ir.Node, norm: ir.Node) -> Slope | None:
    condition, yes, no = (input_of(node, k) for k in range(3))
    if is_zero(no):
        bounds = _bounds(condition, norm)
        return None if bounds is None else (yes, bounds)
    test = _made_by(condition, "Greater", "Less")
    if test is None or not _is_result(test.inputs[0], norm):
        return None
    if test.op_type == "Greater" and is_zero(input_of(test, 1)):
        alpha = _factor(no, yes)
        return None if alpha is None else (yes, {"activation": "leaky_relu", "alpha": alpha})
    inner = _made_by(no, "Where")
    if not is_zero(yes) or _number(test.inputs[1]) != -3 or inner is None:
        return None
    below, bent, dz = _made_by(inner.inputs[0], "LessOrEqual"), _made_by(inner.inputs[1], "Mul"), input_of(inner, 2)
    if below is None or not _is_result(below.inputs[0], norm) or _number(below.inputs[1]) != 3 or bent is None:
        return None
    line = _made_by(_other(bent, dz), "Add")
    third = _factor(line.inputs[0], required(below.inputs[0])) if line is not None and _number(line.inputs[1]) == 0.5 else None
    if third is None or abs(third - 1 / 3) > _ROUNDING:
        return None
    return dz, {"activation": "hard_swish"}


def _slope_of_silu(node: ir.Node, norm: ir.Node) -> Slope | None:
    """Of dz·s + (dz·y)·(s·(1 - s)) with s = Sigmoid(y) and the norm's result y."""
    direct, bent = (_made_by(value, "Mul") for value in node.inputs)
    if direct is None or bent is None:
        return None
    for s in direct.inputs:
        sigmoid = _made_by(s, "Sigmoid")
        if s is None or sigmoid is None or not _is_result(sigmoid.inputs[0], norm):
            continue
        dz = _other(direct, s)
        for first in bent.inputs:
            product, bend = _made_by(first, "Mul"), _made_by(_other(bent, required(first)), "Mul")
            rest = _made_by(_other(bend, s), "Sub") if bend is not None else None
            known = dz is not None and product is not None and _is_result(_other(product, dz), norm)
            if known and rest is not None and rest.inputs[1] is s and _number(rest.inputs[0]) == 1:
                return required(dz), {"activation": "silu"}
    return None


def _made_by(value: ir.Value | None, *ops: str) -> ir.Node | None:
    """The node that makes a value, if it is one of these."""
    value = _saved(value)
    node = value.producer() if value is not None else None
    return node if node is not None and not node.domain and node.op_type in ops else None


def _other(node: ir.Node, value: ir.Value) -> ir.Value | None:
    """The other operand of a node of two; None: this one is none of them."""
    first, second = node.inputs
    return second if first is value else first if second is value else None


def _factor(value: ir.Value | None, of: ir.Value) -> float | None:
    """The number that ``of`` is multiplied with to make a value; None: it is not made so."""
    product = _made_by(value, "Mul")
    return None if product is None else _number(_other(product, of))


def _is_relu_of(z: ir.Value, norm: ir.Node) -> bool:
    node = _made_by(_saved(z), "Relu")
    return node is not None and _is_result(node.inputs[0], norm)


def _bounds(condition: ir.Value, norm: ir.Node) -> Mapping[str, Any] | None:
    """The attributes of a gradient that is zero where ``condition`` is false."""
    node = condition.producer()
    if node is None or node.domain:
        return None
    if node.op_type == "Greater":
        of_relu = _is_result(node.inputs[0], norm) or _is_relu_of(input_of(node, 0), norm)
        return {"activation": "relu"} if of_relu and is_zero(input_of(node, 1)) else None
    tests = [test for value in node.inputs if value is not None and (test := value.producer()) is not None]
    tests = [test for test in tests if not test.domain and _is_result(test.inputs[0], norm)] if node.op_type == "And" else []
    names = [test.op_type for test in tests]
    if names not in (["Greater", "Less"], ["GreaterOrEqual", "LessOrEqual"]):
        return None
    low, high = (_number(test.inputs[1]) for test in tests)
    if low is None or high is None:
        return None
    return {"activation": "clip", "alpha": low, "beta": high, "closed": int(names[0] != "Greater")}


def _number(value: ir.Value | None) -> float | None:
    known = constant(value) if value is not None else None
    return None if known is None or known.size != 1 else float(known.item())


def _adds_and_activates(graph: ir.Graph, op: Builder, norm: ir.Node, order: dict[ir.Node, int]) -> bool:
    """Let a norm add to its results and activate them itself.

    Args:
        order: of the nodes. What is added must be there before the norm, whose statistics others read; a new node is added.
    """
    result, residual, node = norm.outputs[0], None, only_user(norm.outputs[0]) or _silu_of(norm.outputs[0])
    if node is not None and (node.domain, node.op_type) == ("", "Add"):
        first, second = input_of(node, 0), input_of(node, 1)
        residual = second if first is result else first
        source = residual.producer()
        if residual is result or static_dims(residual) != static_dims(result):
            return False
        if source is not None and order.get(source, order[norm]) >= order[norm]:
            return False
        result = node.outputs[0]
        node = only_user(result) or _silu_of(result)
    activation = _activation_of(node, result) if node is not None else None
    if node is not None and activation is not None:
        result = node.outputs[0]
    elif residual is None:
        return False
    op.before, op.scope = norm, norm.name or norm.op_type
    epsilon = norm.attributes.get_float("epsilon", 1e-5)
    y, *statistics = op.graphc.FusedBatchNormalization(*norm.inputs[:3], residual, epsilon=epsilon, **(activation or {}))
    order[required(y.producer())] = order[norm]
    return _replace_all(graph, op, (result, *norm.outputs[1:]), (y, *statistics))


def _silu_of(y: ir.Value) -> ir.Node | None:
    """The product of y with its sigmoid, if nothing else reads either."""
    users = {use.node for use in y.uses()}
    sigmoid = next((node for node in users if not node.domain and node.op_type == "Sigmoid"), None)
    product = only_user(sigmoid.outputs[0]) if sigmoid is not None else None
    if product is None or product.domain or product.op_type != "Mul" or users != {sigmoid, product} or y.is_graph_output():
        return None
    return product if _other(product, y) is required(sigmoid).outputs[0] else None


def _activation_of(node: ir.Node, y: ir.Value) -> Mapping[str, Any] | None:
    """Attributes of the activation of y that a node computes; None: of none that a norm takes."""
    if node.domain:
        return None
    if node.op_type == "Mul":
        return {"activation": "silu"} if _silu_of(y) is node else None
    found = activation_of(node)
    return found if found is not None and found["activation"] in SLOPES else None
