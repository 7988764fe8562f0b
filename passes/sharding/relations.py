"""Relations between the axes of an op's operands and results: one rule an op.

An op without a rule keeps all its axes whole. A rule joins axes that become one another, and keeps whole those over which the
op normalises or selects. Axes over which a product or sum runs are joined, too: the result of their shards is a partial sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import onnx_ir as ir

from graphc.ir.facts import Dim, constant, describe, dims, input_of
from graphc.ir.subgraphs import captured
from graphc.passes.sharding.axis_classes import AxisClasses
from graphc.passes.sharding.class_losses import class_axis, obstacle

Relation: TypeAlias = Callable[[AxisClasses, ir.Node, int], None]
"""Called with the classes, the node and the number of ranks."""

ELEMENTWISE = frozenset(
    (
        *("Abs", "Add", "And", "Cast", "CastLike", "Clip", "Cos", "Div", "Elu", "Equal", "Erf", "Exp", "Expand", "Gelu"),
        *("Greater", "GreaterOrEqual", "HardSigmoid", "HardSwish", "Identity", "IsInf", "IsNaN", "LeakyRelu", "Less"),
        *("LessOrEqual", "Log", "Max", "Min", "Mish", "Mod", "Mul", "Neg", "Not", "Or", "PRelu", "Pow", "Reciprocal", "Relu"),
        *("Selu", "Sigmoid", "Sign", "Sin", "Softplus", "Softsign", "Sqrt", "Sub", "Tanh", "Where", "Xor"),
    )
)
WHOLE = frozenset({"Constant", "ConstantOfShape", "Shape", "Size", "graphc::DropoutMask"})
"""Ops whose results every rank can compute whole, and take its part of."""

RESHAPES = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze"})


def relate(classes: AxisClasses, node: ir.Node, ranks: int) -> None:
    """Apply the rule of the node's op."""
    key = node.op_type if node.domain == "" else f"{node.domain}::{node.op_type}"
    if key in WHOLE:
        return
    values = [v for v in (*node.inputs, *node.outputs, *captured(node)) if v is not None]
    rule = RELATIONS.get(key)
    if rule is None or any(dims(value) is None for value in values):
        keep_whole(classes, values, f"{describe(node)} has no rule for shards")
        return
    rule(classes, node, ranks)


def keep_whole(classes: AxisClasses, values: Sequence[ir.Value], reason: str) -> None:
    """Keep all axes of ``values`` whole."""
    for value in values:
        for axis in range(len(dims(value) or ())):
            classes.block((value, axis), reason)


def _dims(value: ir.Value) -> tuple[Dim, ...]:
    return dims(value) or ()


def _align(classes: AxisClasses, value: ir.Value, result: ir.Value, skip: int = 0) -> None:
    """Join axes as broadcasting aligns them, from the last; ``skip`` leaves out that many at the end."""
    mine, its = _dims(value), _dims(result)
    for back in range(skip + 1, len(mine) + 1):
        axis, target = len(mine) - back, len(its) - back
        if mine[axis] == its[target] and mine[axis] is not None:
            classes.join((value, axis), (result, target))
        elif mine[axis] != 1:
            for one in ((value, axis), (result, target)):
                classes.block(one, f"the sizes of {value.name!r} and {result.name!r} are not known to be equal")


def _elementwise(classes: AxisClasses, node: ir.Node, ranks: int) -> None:
    operands = node.inputs[:1] if node.op_type in ("Expand", "Clip", "CastLike") else node.inputs
    for value in operands:
        if value is not None:
            _align(classes, value, node.outputs[0])


def _matmul(classes: AxisClasses, node: ir.Node, ranks: int) -> None:
    (a, b), out = node.inputs[:2], node.outputs[0]
    assert a is not None
    assert b is not None
    if len(_dims(a)) < 2 or len(_dims(b)) < 2:
        keep_whole(classes, [a, b, out], f"{describe(node)} multiplies a vector")
        return
    m, k, n, last = len(_dims(a)) - 2, len(_dims(a)) - 1, len(_dims(b)) - 1, len(_dims(out)) - 1
    classes.join((a, k), (b, n - 1))
    classes.join((a, m), (out, last - 1))
    classes.join((b, n), (out, last))
    for value in (a, b):
        _align(classes, value, out, skip=2)


def _gemm(classes: AxisClasses, node: ir.Node, ranks: int) -> None:
    a, b, out = input_of(node), input_of(node, 1), node.outputs[0]
    left, right = node.attributes.get_int("transA", 0), node.attributes.get_int("transB", 0)
    classes.join((a, 1 - left), (b, right))
    classes.join((a, left), (out, 0))
    classes.join((b, 1 - right), (out, 1))
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        _align(classes, node.inputs[2], out)


def _transpose(classes: AxisClasses, node: ir.Node, ranks: int) -> None:
    x, out = input_of(node), node.outputs[0]
    order = node.attributes.get_ints("perm") or list(reversed(range(len(_dims(x)))))
    for target, axis in enumerate(order):
        classes.join((x, axis), (out, target))


def _reshape(classes: AxisClasses, node: ir.Node, ranks: int) -> None:
    """Equal axes at both ends stay; of those between, one axis that becomes several, or the other way round."""
    x, out = input_of(node), node.outputs[0]
    mine, its = list(enumerate(_dims(x))), list(enumerate(_dims(out)))
    while mine and its and mine[0][1] == its[0][1] is not None:
        classes.join((x, mine.pop(0)[0]), (out, its.pop(0)[0]))
    while mine and its and mine[-1][1] == its[-1][1] is not None:
        classes.join((x, mine.pop()[0]), (out, its.pop()[0]))
    mine, its = ([(axis, d) for axis, d in rest if d != 1] for rest in (mine, its))
    rest = [((x, axis), d) for axis, d in mine], [((out, axis), d) for axis, d in its]
    (one, several) = rest if len(rest[0]) == 1 else rest[::-1]
    sizes = [d for _, d in several]
    chosen = next((k for k, d in enumerate(sizes) if isinstance(d, int) and d % ranks == 0), None)
    alike = len(one) == 1 and chosen is not None and all(isinstance(d, int) for d in sizes)
    for k, (axis, _) in enumerate(several):
        if not alike or k != chosen:
            classes.block(axis, f"{describe(node)} makes it part of another axis")
    if alike and chosen is not None:
        classes.join(one[0][0], several[chosen][0], math.prod(d for d in sizes[:chosen] if isinstance(d, int)))
        return
    for axis, _ in one:
        first = next((d for d in sizes if isinstance(d, int) and d > 1), 1)
        fitting = ", ".join(str(n) for n in range(2, first + 1) if first % n == 0)
        would = f"; {fitting} would divide the {first}" if fitting else ""
        classes.block(axis, f"{describe(node)} cuts it into {sizes}, none of which {ranks} divides{would}")


def _softmax(classes: AxisClasses, node: ir.Node, ranks: int) -> None:
    x, out = input_of(node), node.outputs[0]
    _align(classes, x, out)
    axis = node.attributes.get_int("axis", -1) % len(_dims(x))
    classes.block((x, axis), f"{describe(node)} normalises over it")


def _layer_norm(classes: AxisClasses, node: ir.Node, ranks: int) -> None:
    x, out = input_of(node), node.outputs[0]
    _align(classes, x, out)
    first = node.attributes.get_int("axis", -1) % len(_dims(x))
    for axis in range(first, len(_dims(x))):
        classes.block((x, axis), f"{describe(node)} normalises over it")
    keep_whole(
        classes, [v for v in (*node.inputs[1:], *node.outputs[1:]) if v is not None], f"{describe(node)} normalises over it"
    )


def reduced_axes(node: ir.Node) -> list[int] | None:
    """The axes over which a reduction runs; None where they are not known."""
    rank = len(_dims(input_of(node)))
    given = node.inputs[1] if len(node.inputs) > 1 else None
    if given is None:
        listed = list(node.attributes.get_ints("axes") or [])
        return [axis % rank for axis in listed] if listed else list(range(rank))
    known = constant(given)
    return None if known is None else [int(axis) % rank for axis in known.reshape(-1)] or list(range(rank))


def _reduce(classes: AxisClasses, node: ir.Node, ranks: int) -> None:
    x, out = input_of(node), node.outputs[0]
    axes = reduced_axes(node)
    if axes is None:
        keep_whole(classes, [x, out], f"{describe(node)} reduces over axes that are not known")
        return
    keep = node.attributes.get_int("keepdims", 1)
    target = 0
    for axis in range(len(_dims(x))):
        if axis not in axes:
            classes.join((x, axis), (out, target))
        elif node.op_type != "ReduceSum":
            classes.block((x, axis), f"{describe(node)} reduces over it")
        target += axis not in axes or bool(keep)


def _split(classes: AxisClasses, node: ir.Node, ranks: int) -> None:
    x = input_of(node)
    cut = node.attributes.get_int("axis", 0) % len(_dims(x))
    sizes = [_dims(out)[cut] for out in node.outputs]
    for out in node.outputs:
        for axis in range(len(_dims(x))):
            if axis != cut:
                classes.join((x, axis), (out, axis))
            elif len(set(sizes)) == 1 and isinstance(sizes[0], int):
                classes.join((x, axis), (out, axis), len(sizes))
            else:
                classes.block((x, axis), f"{describe(node)} cuts it into unequal parts")
                classes.block((out, axis), f"{describe(node)} makes it a part of another axis")


def _concat(classes: AxisClasses, node: ir.Node, ranks: int) -> None:
    out = node.outputs[0]
    joined = node.attributes["axis"].as_int() % len(_dims(out))
    for value in (v for v in node.inputs if v is not None):
        for axis in range(len(_dims(out))):
            if axis == joined:
                classes.block((value, axis), f"{describe(node)} joins it with others")
            else:
                classes.join((value, axis), (out, axis))
    classes.block((out, joined), f"{describe(node)} joins it from others")


def _gather(classes: AxisClasses, node: ir.Node, ranks: int) -> None:
    """Rows of a table of embeddings may be sharded: each rank looks up those that it has, and the sum is the result."""
    data, indices, out = input_of(node), input_of(node, 1), node.outputs[0]
    axis, taken = node.attributes.get_int("axis", 0) % len(_dims(data)), len(_dims(indices))
    for k in range(len(_dims(data))):
        if k != axis:
            classes.join((data, k), (out, k if k < axis else k - 1 + taken))
        elif not is_table(node):
            classes.block((data, k), f"{describe(node)} selects from it")
    keep_whole(classes, [indices], f"{describe(node)} reads the indices whole")
    for k in range(taken):
        classes.block((out, axis + k), f"{describe(node)} reads the indices whole")


def is_table(node: ir.Node) -> bool:
    """Whether a Gather looks up rows of a parameter."""
    return node.op_type == "Gather" and input_of(node).is_initializer() and node.attributes.get_int("axis", 0) == 0


def _slice(classes: AxisClasses, node: ir.Node, ranks: int) -> None:
    x, out = input_of(node), node.outputs[0]
    axes = constant(node.inputs[3]) if len(node.inputs) > 3 and node.inputs[3] is not None else None
    cut = set(range(len(_dims(x)))) if axes is None else {int(axis) % len(_dims(x)) for axis in axes.reshape(-1)}
    for axis in range(len(_dims(x))):
        classes.join((x, axis), (out, axis))
        if axis in cut:
            classes.block((x, axis), f"{describe(node)} takes a part of it")


def _over_classes(classes: AxisClasses, node: ir.Node, ranks: int) -> None:
    """The classes may be sharded; all other axes are those of labels."""
    scores, own = input_of(node), class_axis(node)
    for axis in range(len(_dims(scores))):
        reason = obstacle(node) if axis == own else "labels are whole on every rank"
        if reason:
            classes.block((scores, axis), f"{describe(node)}: {reason}")


RELATIONS: dict[str, Relation] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(RESHAPES, _reshape),
    **dict.fromkeys(("Softmax", "LogSoftmax"), _softmax),
    **dict.fromkeys(("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceSumSquare", "ReduceL2"), _reduce),
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Transpose": _transpose,
    "ArgMax": _over_classes,
    "graphc::SoftmaxCrossEntropy": _over_classes,
    "LayerNormalization": _layer_norm,
    "RMSNormalization": _layer_norm,
    "Split": _split,
    "Concat": _concat,
    "Gather": _gather,
    "Slice": _slice,
}
