"""Standard ops that the fusion compiler takes apart: normalisations and the like, as reductions and elementwise ops.

    Softmax(x)   ─►   e = Exp(x − ReduceMax(x));  e ÷ ReduceSum(e)

Sums over half-precision operands are taken in float32, as the standard's ``stash_type`` asks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir

from graphc.backends.cupy.libraries.registry import results, special
from graphc.backends.cupy.rewrite.rules import table
from graphc.backends.fusion.lowering import is_expression
from graphc.gradient import key_of
from graphc.ir.builder import Builder
from graphc.ir.facts import constant, rank, static_dims
from graphc.ir.functions import emit_body, has_body
from graphc.ir.ops.normalization import EPSILON, batch_normalized

Rule = Callable[[Builder, ir.Node], Sequence[ir.Value | None] | None]


def _axis(node: ir.Node, default: int) -> int:
    assert node.inputs[0] is not None
    return node.attributes.get_int("axis", default) % rank(node.inputs[0])


def _single(op: Builder, x: ir.Value) -> ir.Value:
    """``x`` in the type in which it is summed."""
    half = x.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    return op.Cast(x, to=int(ir.DataType.FLOAT)) if half else x


def _softmax(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    source = node.inputs[0]
    assert source is not None
    x, axis = _single(op, source), _axis(node, -1)
    e = op.Exp(op.Sub(x, op.ReduceMax(x, [axis])))
    return [op.cast_like(op.Div(e, op.ReduceSum(e, [axis])), source)]


def _log_softmax(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    source = node.inputs[0]
    assert source is not None
    x, axis = _single(op, source), _axis(node, -1)
    shifted = op.Sub(x, op.ReduceMax(x, [axis]))
    return [op.cast_like(op.Sub(shifted, op.Log(op.ReduceSum(op.Exp(shifted), [axis]))), source)]


def _log_sum_exp(op: Builder, node: ir.Node) -> Sequence[ir.Value] | None:
    x = node.inputs[0]
    assert x is not None
    axes = node.inputs[1] if len(node.inputs) > 1 else None
    if axes is not None and constant(axes) is None:
        return None
    wide = _single(op, x)
    noop = node.attributes.get_int("noop_with_empty_axes", 0)
    most = op.ReduceMax(wide, axes, keepdims=1, noop_with_empty_axes=noop)
    total = op.ReduceSum(op.Exp(op.Sub(wide, most)), axes, keepdims=1, noop_with_empty_axes=noop)
    found = op.Add(op.Log(total), most)
    if not node.attributes.get_int("keepdims", 1):
        found = op.Reshape(found, op.shape(node.outputs[0]))
    return [op.cast_like(found, x)]


def _layer_normalization(op: Builder, node: ir.Node) -> Sequence[ir.Value | None]:
    source, scale = node.inputs[0], node.inputs[1]
    assert source is not None
    assert scale is not None
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    x = _single(op, source)
    axes = list(range(_axis(node, -1), rank(source)))
    mean = op.ReduceMean(x, axes)
    centred = op.Sub(x, mean)
    variance = op.ReduceMean(op.Mul(centred, centred), axes)
    inverse = op.Reciprocal(op.Sqrt(op.Add(variance, node.attributes.get_float("epsilon", 1e-5))))
    normal = op.cast_like(op.Mul(centred, inverse), source)
    y = op.Mul(normal, scale)
    if bias is not None:
        y = op.Add(y, bias)
    return [y, mean, inverse][: len(node.outputs)]


def _rms_normalization(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    source, scale = node.inputs[0], node.inputs[1]
    assert source is not None
    x = _single(op, source)
    axes = list(range(_axis(node, -1), rank(source)))
    mean = op.ReduceMean(op.Mul(x, x), axes)
    inverse = op.Reciprocal(op.Sqrt(op.Add(mean, node.attributes.get_float("epsilon", 1e-5))))
    return [op.Mul(op.cast_like(op.Mul(x, inverse), source), scale)]


def _batch_normalization(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    source, scale, bias, mean, variance = node.inputs
    assert source is not None
    assert mean is not None
    assert variance is not None
    x, count = _single(op, source), rank(source)
    others = list(range(1, count - 1))

    def along(value: ir.Value | None) -> ir.Value:
        assert value is not None
        return op.cast_like(op.Unsqueeze(value, others), x) if others else op.cast_like(value, x)

    results: list[ir.Value] = []
    m, v = along(mean), along(variance)
    if node.attributes.get_int("training_mode", 0):
        axes = [0, *range(2, count)]
        m = op.ReduceMean(x, axes)
        centred = op.Sub(x, m)
        v = op.ReduceMean(op.Mul(centred, centred), axes)
        momentum = node.attributes.get_float("momentum", 0.9)
        for running, batch in ((mean, m), (variance, v)):
            now = op.Reshape(op.cast_like(batch, running), op.shape(running))
            results.append(op.Add(op.Mul(running, momentum), op.Mul(now, 1.0 - momentum)))
    epsilon = node.attributes.get_float("epsilon", 1e-5)
    factor = op.Mul(op.Reciprocal(op.Sqrt(op.Add(v, epsilon))), along(scale))
    y = op.Add(op.Mul(op.Sub(x, m), factor), along(bias))
    return [op.cast_like(y, source), *results][: len(node.outputs)]


def _batch_normalization_training(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    x, scale, bias = (v for v in node.inputs if v is not None)
    return batch_normalized(op, x, scale, bias, 1, node.attributes.get_float("epsilon", EPSILON))


RULES: Mapping[str, Rule] = {
    "Softmax": _softmax,
    "LogSoftmax": _log_softmax,
    "ReduceLogSumExp": _log_sum_exp,
    "LayerNormalization": _layer_normalization,
    "RMSNormalization": _rms_normalization,
    "BatchNormalization": _batch_normalization,
    "graphc::BatchNormalizationTraining": _batch_normalization_training,
}
"""Op → what it is made of; the last in place of its general decomposition."""


def is_composite(node: ir.Node) -> bool:
    """Whether :func:`take_apart` replaces the node."""
    return key_of(node.domain, node.op_type) in RULES


def take_apart(graph: ir.Graph) -> None:
    """Replace what has a rule here or in :mod:`.rules`, and what only the standard's own definition takes apart.

    The outputs keep their names where they are results of the graph.
    """
    op = Builder(graph)
    while sum(_replaced(op, node) for node in list(graph)):  # what has been emitted may have a rule too
        pass


def _replaced(op: Builder, node: ir.Node) -> bool:
    op.before, op.scope = node, node.name or node.op_type
    results = _parts(op, node)
    if results is None:
        return False
    for old, new in zip(node.outputs, results, strict=False):
        if new is None:
            continue
        if old.is_graph_output():
            name = old.name
            old.name = op.unique(f"{name}.replaced", value=True)
            (new,) = op.emit("Identity", [new])
            new.name = name
        old.replace_all_uses_with(new, replace_graph_outputs=True)
    assert node.graph is not None
    node.graph.remove(node, safe=True)
    return True


def _parts(op: Builder, node: ir.Node) -> Sequence[ir.Value | None] | None:
    key = key_of(node.domain, node.op_type)
    if key in RULES:
        return RULES[key](op, node)
    if not (key in table.RULES or has_body(node.op_type, node.domain)) or is_expression(node) or special(node) is not None:
        return None
    if any(static_dims(v) is None for v in (*node.inputs, *results(node)) if v is not None):
        return None
    found = table.RULES[key](op, node) if key in table.RULES else None
    return found if found is not None or not has_body(node.op_type, node.domain) else emit_body(op, node)
