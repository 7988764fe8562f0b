"""Relations between the axes of an op's operands and results: one rule an op.

An op without a rule keeps all its axes whole. A rule joins axes that become one another, and keeps whole those over which the
op normalises or selects. Axes over which a product or sum runs are joined, too: the result of their shards is a partial sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import onnx_ir as ir

from graphc.ir.facts import Dim, constant, describe, dims, input_of
from graphc.ir.subgraphs import captured
from graphc.passes.sharding.axis_classes import AxisClasses
from graphc.passes.sharding.channels import (
    relate_channel_norm,
    relate_convolution,
    relate_moments,
    relate_pad,
    relate_pooling,
    relate_resize,
    relate_tile,
)
from graphc.passes.sharding.class_losses import class_axis, obstacle
from graphc.passes.sharding.ratio import Ratio
from graphc.passes.sharding.reshapes import relate_reshape

Relation: TypeAlias = Callable[[AxisClasses, ir.Node], None]
"""Called with the classes and the node."""

ELEMENTWISE = frozenset(
    (
        *("Abs", "Add", "And", "Atan", "Cast", "CastLike", "Ceil", "Celu", "Clip", "Cos", "Div", "Elu", "Equal", "Erf", "Exp"),
        *("Expand", "Floor", "Gelu", "Round", "Sinh", "Cosh", "Sum", "Tan", "ThresholdedRelu"),
        *("Greater", "GreaterOrEqual", "HardSigmoid", "HardSwish", "Identity", "IsInf", "IsNaN", "LeakyRelu", "Less"),
        *(
            "LessOrEqual",
            "Log",
            "Max",
            "Mean",
            "Min",
            "Mish",
            "Mod",
            "Mul",
            "Neg",
            "Not",
            "Or",
            "PRelu",
            "Pow",
            "Reciprocal",
            "Relu",
        ),
        *("Selu", "Sigmoid", "Sign", "Sin", "Softplus", "Softsign", "Sqrt", "Sub", "Tanh", "Where", "Xor"),
    )
)
WHOLE = frozenset({"Constant", "ConstantOfShape", "Shape", "Size", "graphc::DropoutMask", "graphc::Uniform"})
"""Ops whose results every rank can compute whole, and take its part of."""

RESHAPES = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze"})

CHANNEL_NORMS = ("InstanceNormalization", "GroupNormalization", "BatchNormalization", "graphc::BatchNormalizationTraining")


def relate(classes: AxisClasses, node: ir.Node) -> None:
    """Apply the rule of the node's op."""
    key = node.op_type if node.domain == "" else f"{node.domain}::{node.op_type}"
    if key in WHOLE:
        return
    values = [v for v in (*node.inputs, *node.outputs, *captured(node)) if v is not None]
    rule = RELATIONS.get(key)
    if rule is None or any(dims(value) is None for value in values):
        keep_whole(classes, values, f"{describe(node)} has no rule for shards")
        return
    rule(classes, node)


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


def _elementwise(classes: AxisClasses, node: ir.Node) -> None:
    operands = node.inputs[:1] if node.op_type in ("Expand", "Clip", "CastLike") else node.inputs
    for value in operands:
        if value is not None:
            _align(classes, value, node.outputs[0])


def _matmul(classes: AxisClasses, node: ir.Node) -> None:
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


def _gemm(classes: AxisClasses, node: ir.Node) -> None:
    a, b, out = input_of(node), input_of(node, 1), node.outputs[0]
    left, right = node.attributes.get_int("transA", 0), node.attributes.get_int("transB", 0)
    classes.join((a, 1 - left), (b, right))
    classes.join((a, left), (out, 0))
    classes.join((b, 1 - right), (out, 1))
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        _align(classes, node.inputs[2], out)


def _transpose(classes: AxisClasses, node: ir.Node) -> None:
    x, out = input_of(node), node.outputs[0]
    order = node.attributes.get_ints("perm") or list(reversed(range(len(_dims(x)))))
    for target, axis in enumerate(order):
        classes.join((x, axis), (out, target))


def _softmax(classes: AxisClasses, node: ir.Node) -> None:
    x, out = input_of(node), node.outputs[0]
    _align(classes, x, out)
    axis = node.attributes.get_int("axis", -1) % len(_dims(x))
    classes.block((x, axis), f"{describe(node)} normalises over it")


def _layer_norm(classes: AxisClasses, node: ir.Node) -> None:
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


def _reduce(classes: AxisClasses, node: ir.Node) -> None:
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


def _split(classes: AxisClasses, node: ir.Node) -> None:
    x = input_of(node)
    cut = node.attributes.get_int("axis", 0) % len(_dims(x))
    sizes = [_dims(out)[cut] for out in node.outputs]
    for out in node.outputs:
        for axis in range(len(_dims(x))):
            if axis != cut:
                classes.join((x, axis), (out, axis))
            elif len(set(sizes)) == 1 and isinstance(sizes[0], int):
                classes.join((x, axis), (out, axis), Ratio.of(len(sizes)))
            else:
                classes.block((x, axis), f"{describe(node)} cuts it into unequal parts")
                classes.block((out, axis), f"{describe(node)} makes it a part of another axis")


def _concat(classes: AxisClasses, node: ir.Node) -> None:
    """Equal parts are blocks of the result."""
    out, values = node.outputs[0], [v for v in node.inputs if v is not None]
    joined = node.attributes["axis"].as_int() % len(_dims(out))
    sizes = [_dims(value)[joined] for value in values]
    for value in values:
        for axis in range(len(_dims(out))):
            if axis != joined:
                classes.join((value, axis), (out, axis))
            elif len(set(sizes)) == 1 and isinstance(sizes[0], int):
                classes.join((out, axis), (value, axis), Ratio.of(len(values)))
            else:
                classes.block((value, axis), f"{describe(node)} joins it with others")
                classes.block((out, axis), f"{describe(node)} joins it from others")


def _gather(classes: AxisClasses, node: ir.Node) -> None:
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


def sliced(node: ir.Node) -> dict[int, tuple[int, int] | None]:
    """The axes that a Slice cuts → start and stop; None where they or the size are not known, or the step is not 1."""
    x = input_of(node)
    starts, stops, listed, steps = (
        constant(node.inputs[k]) if len(node.inputs) > k and node.inputs[k] is not None else None for k in (1, 2, 3, 4)
    )
    axes = list(range(len(_dims(x)))) if listed is None else [int(axis) % len(_dims(x)) for axis in listed.reshape(-1)]
    if listed is None and starts is not None:
        axes = axes[: starts.size]
    found: dict[int, tuple[int, int] | None] = {}
    for k, axis in enumerate(axes):
        size = _dims(x)[axis]
        unit = len(node.inputs) < 5 or (steps is not None and int(steps.reshape(-1)[k]) == 1)
        known = starts is not None and stops is not None and (listed is not None or len(node.inputs) < 4)
        if not (unit and known and isinstance(size, int)) or starts is None or stops is None:
            found[axis] = None
            continue
        start, stop, _ = slice(int(starts.reshape(-1)[k]), int(stops.reshape(-1)[k])).indices(size)
        found[axis] = start, max(start, stop)
    return found


def _slice(classes: AxisClasses, node: ir.Node) -> None:
    """One of several equal parts is a block of the operand; a slice of everything, as exporters write one, is none."""
    x, out = input_of(node), node.outputs[0]
    cut = sliced(node)
    for axis, size in enumerate(_dims(x)):
        place = cut.get(axis)
        if axis not in cut or place == (0, size):
            classes.join((x, axis), (out, axis))
            continue
        part = 0 if place is None else place[1] - place[0]
        if part > 1 and place is not None and isinstance(size, int) and size % part == 0 == place[0] % part:
            classes.join((x, axis), (out, axis), Ratio.of(size // part))
        else:
            classes.block((x, axis), f"{describe(node)} takes a part of it")
            classes.block((out, axis), f"{describe(node)} makes it a part of another axis")


def equation_of(node: ir.Node) -> tuple[list[str], str] | None:
    """The labels of the operands and of the result of an Einsum; None where it has other than plain labels."""
    left, arrow, right = node.attributes["equation"].as_string().replace(" ", "").partition("->")
    terms = left.split(",")
    plain = arrow and all(term.isalpha() and len(set(term)) == len(term) for term in (*terms, *filter(None, [right])))
    return (terms, right) if plain else None


def _einsum(classes: AxisClasses, node: ir.Node) -> None:
    values, equation = [v for v in node.inputs if v is not None], equation_of(node)
    if equation is None or any(len(t) != len(_dims(v)) for t, v in zip(equation[0], values, strict=True)):
        keep_whole(classes, [*values, node.outputs[0]], f"{describe(node)} has an equation without a rule for shards")
        return
    terms, result = equation
    places: dict[str, tuple[ir.Value, int]] = {}
    for term, value in zip([*terms, result], [*values, node.outputs[0]], strict=True):
        for axis, label in enumerate(term):
            first = places.setdefault(label, (value, axis))
            classes.join(first, (value, axis))
            if _dims(first[0])[first[1]] != _dims(value)[axis]:
                classes.block(first, f"{describe(node)} repeats it")


def _all_reduce(classes: AxisClasses, node: ir.Node) -> None:
    for value, out in zip(node.inputs, node.outputs, strict=True):
        assert value is not None
        _align(classes, value, out)


def _over_classes(classes: AxisClasses, node: ir.Node) -> None:
    """The classes may be sharded; all other axes are those of labels."""
    scores, own = input_of(node), class_axis(node)
    for axis in range(len(_dims(scores))):
        reason = obstacle(node) if axis == own else "labels are whole on every rank"
        if reason:
            classes.block((scores, axis), f"{describe(node)}: {reason}")


RELATIONS: dict[str, Relation] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(RESHAPES, relate_reshape),
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
    "Einsum": _einsum,
    "Pad": relate_pad,
    "Tile": relate_tile,
    "Resize": relate_resize,
    "graphc::RunningAverage": _elementwise,
    "graphc::StopGradient": _elementwise,
    "graphc::MaskGradient": _elementwise,
    "graphc::AllReduce": _all_reduce,
    **dict.fromkeys(("Conv", "ConvTranspose"), relate_convolution),
    **dict.fromkeys(CHANNEL_NORMS, relate_channel_norm),
    **dict.fromkeys(("graphc::BatchMoments", "graphc::BatchStatistics", "graphc::SharedNormalization"), relate_moments),
    **dict.fromkeys(("MaxPool", "AveragePool", "LpPool", "GlobalAveragePool", "GlobalMaxPool"), relate_pooling),
}
