"""dequantize: give a quantised file float weights and float products, so that it trains.

    before   x ─► DynamicQuantizeLinear ─► MatMulInteger(·, W:int8) ─► Cast ─► Mul(scales) ─► y
    after    x ─► MatMul(·, W:float32) ─► y

Integers have no gradient. Constant integers with a scale become float parameters of the same name; an export writes them
back as integers. Integer products become float products of the real numbers. Activations that a ``QuantizeLinear`` rounds stay
rounded: their gradient passes straight through the rounding. Parameters of 16-bit floats become float32, and the rest of the
graph with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import onnx_ir as ir

from graphc.errors import UsageError, counted, nearest
from graphc.ir.builder import Builder
from graphc.ir.facts import FLOATS, dtype_of, input_of, rank
from graphc.ir.parameters import DECISIONS, Decision
from graphc.passes.legalize.structure import remove_dead
from graphc.passes.parameters.decide import Rules
from graphc.passes.quantization.half_precision import widen
from graphc.passes.quantization.integer_products import INTEGER_PRODUCTS, replace_product
from graphc.passes.quantization.real_values import RealValues, along, first_of, moved
from graphc.passes.quantization.weights import Weights, factors, tensor_of
from graphc.pipeline import Context, graph_pass

MODES = ("auto", "always", "never")


@graph_pass("dequantize", requires=("legalize",), changes="form")
def dequantize(model: ir.Model, ctx: Context, *, mode: str = "auto", train: Sequence[str] | None = None) -> bool:
    """Replace integers that stand for real numbers by floats, and 16-bit floats by float32.

    Args:
        mode: ``auto``: weights and products become float32, rounded activations stay rounded. ``always``: activations are no
            longer rounded either, only limited to the range of their integers. ``never``: the graph stays as it is; a
            training that needs the gradient of an integer product is refused.
        train: glob patterns of constants that train whatever the rules say, as of ``legalize``.

    Raises:
        UsageError: an unknown mode.
    """
    if mode not in MODES:
        raise UsageError(f"dequantize={mode!r}{nearest(mode, MODES)}; it is {', '.join(MODES[:-1])} or {MODES[-1]}")
    graph = model.graph
    if mode == "never":
        return False
    decisions: list[Decision] = ctx.values.get(DECISIONS, [])
    halves = widen(graph, [decision.name for decision in decisions if decision.trains])
    if halves:
        ctx.values[DECISIONS] = [replace(d, dtype="float") if d.dtype in halves else d for d in decisions]
        _report(ctx, mode, 0, halves, [], to="float32")
    if not any(_concerns(node) for node in graph):
        return bool(halves)
    op = Builder(graph)
    weights = Weights(graph, op)
    reals = RealValues(op, weights, rounds=mode == "auto")
    products, lost = 0, list[str]()
    for node in list(graph):
        op.before, op.scope = node, node.name or node.op_type
        if node.domain:
            continue
        if node.op_type in _QUANTISED_PRODUCTS:
            _quantised_product(op, node, reals)
            products += 1
        elif node.op_type in INTEGER_PRODUCTS:
            lost += replace_product(op, node, reals)
            products += 1
        elif node.op_type == "DequantizeLinear":
            _dequantized(op, node, reals)
        elif node.op_type == "Mul":
            _cast_weight(node, weights)
    for node in graph:
        if node.op_type in ("Conv", "Gemm", "ConvTranspose") and not node.domain:
            weights.follow(first_of(node.inputs, 2), first_of(node.inputs, 1))
    remove_dead(graph)
    weights.finish(Rules(model, train))
    _update_decisions(ctx, graph, weights.decisions)
    _report(ctx, mode, products, weights.types, lost)
    return True


_QUANTISED_PRODUCTS = {"QLinearMatMul": "MatMul", "QLinearConv": "Conv"}
"""Product of quantised tensors with their scales → the float op that computes it."""


def _concerns(node: ir.Node) -> bool:
    if node.domain:
        return False
    if node.op_type in INTEGER_PRODUCTS or node.op_type in _QUANTISED_PRODUCTS or node.op_type == "DequantizeLinear":
        return True
    return node.op_type == "Cast" and _integers_behind(node.outputs[0]) is not None


def _quantised_product(op: Builder, node: ir.Node, reals: RealValues) -> None:
    """y = QuantizeLinear(a · b), with a and b the real numbers of the operands and the bias"""
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = (input_of(node, k) for k in range(8))
    axes = (rank(a) - 2, rank(b) - 1) if node.op_type == "QLinearMatMul" else (1, 0)
    values = [
        reals.real(q, scale, zero, attributes={"axis": axis} if rank(scale) else None)
        for q, scale, zero, axis in ((a, a_scale, a_zero, axes[0]), (b, b_scale, b_zero, axes[1]))
    ]
    bias = first_of(node.inputs, 8)
    if bias is not None:
        values.append(_bias(op, bias, a_scale, b_scale, reals))
    (y,) = op.emit(_QUANTISED_PRODUCTS[node.op_type], values, dict(node.attributes))
    q = op.QuantizeLinear(y, y_scale, y_zero)
    node.outputs[0].replace_all_uses_with(q, replace_graph_outputs=True)


def _bias(op: Builder, bias: ir.Value, a_scale: ir.Value, b_scale: ir.Value, reals: RealValues) -> ir.Value:
    """A bias of 32-bit integers, whose scale is the product of those of the operands."""
    scales = [factor for scale in (a_scale, b_scale) for factor in factors(scale)]
    found = reals.weights.parameter(bias, scales, None, dtype=dtype_of(a_scale), align=along(0, 1))
    return found if found is not None else op.Mul(op.Cast(bias, to=int(dtype_of(a_scale))), op.Mul(a_scale, b_scale))


def _dequantized(op: Builder, node: ir.Node, reals: RealValues) -> None:
    """Replace a DequantizeLinear of a constant, or of a tensor that was moved, by the real numbers."""
    q, scale, zero = input_of(node, 0), input_of(node, 1), first_of(node.inputs, 2)
    attributes = {name: node.attributes.get_int(name, 0) for name in ("axis", "block_size") if name in node.attributes}
    producer = q.producer()
    rounded = producer is not None and tensor_of(q) is None and not moved(producer)
    if rounded and reals.rounds:
        return  # it has a straight-through gradient already
    value = reals.real(q, scale, zero, attributes=attributes, dtype=dtype_of(node.outputs[0]))
    made = value.producer()
    if made is not None and made.op_type == "DequantizeLinear" and list(made.inputs) == list(node.inputs):
        return
    if node.outputs[0].is_graph_output():
        value, old = op.Identity(value), node.outputs[0]
        name, old.name = old.name, op.unique(f"{old.name}.rounded", value=True)
        old.replace_all_uses_with(value, replace_graph_outputs=True)
        value.name = name
        return
    node.outputs[0].replace_all_uses_with(value)


def _integers_behind(value: ir.Value | None) -> tuple[ir.Value, ir.Value | None] | None:
    """The constant integers, and their zero point, of ``Cast(W)`` or ``Sub(Cast(W), zero)``."""
    node = value.producer() if value is not None else None
    if node is None or node.domain or value is None or value.dtype not in FLOATS:
        return None
    if node.op_type == "Cast":
        stored = tensor_of(node.inputs[0])
        bits = None if stored is None else stored.dtype.bitwidth
        small = stored is not None and bits is not None and bits <= 8 and stored.dtype != ir.DataType.BOOL
        return (input_of(node), None) if small and stored is not None and stored.dtype.is_integer() else None
    if node.op_type == "Sub":
        found = _integers_behind(node.inputs[0])
        zero = first_of(node.inputs, 1)
        return None if found is None or found[1] is not None or tensor_of(zero) is None else (found[0], zero)
    return None


def _cast_weight(node: ir.Node, weights: Weights) -> None:
    """Make a parameter of W·s with constant integers W that a Cast makes float: a weight quantised without ONNX's ops."""
    for integers, scale in ((0, 1), (1, 0)):
        found = _integers_behind(node.inputs[integers])
        scales = factors(input_of(node, scale)) if found is not None else []
        if found is None or rank(found[0]) < 1:
            continue
        count = rank(found[0])

        def align(shape: tuple[int, ...], count: int = count) -> tuple[int, ...] | None:
            return shape if len(shape) <= count else None

        value = weights.parameter(*found[:1], scales, found[1], dtype=dtype_of(node.outputs[0]), align=align)
        if value is not None and value.shape == node.outputs[0].shape and not node.outputs[0].is_graph_output():
            node.outputs[0].replace_all_uses_with(value)
        return


def _update_decisions(ctx: Context, graph: ir.Graph, made: list[Decision]) -> None:
    """Take the constants that are gone from the list that ``legalize`` made, and add the float weights."""
    here = set(graph.initializers) | {v.name for node in graph if node.op_type == "Constant" for v in node.outputs}
    own = {decision.name for decision in made}
    kept = [d for d in ctx.values.get(DECISIONS, ()) if d.name in here and d.name not in own]
    ctx.values[DECISIONS] = [*kept, *made]


def _report(ctx: Context, mode: str, products: int, types: Mapping[str, int], lost: list[str], to: str = "float") -> None:
    parts = []
    if products:
        parts.append(f"{counted(products, 'integer product')} {'is' if products == 1 else 'are'} computed in float")
    if types:
        kinds = ", ".join(f"{number} of {kind}" for kind, number in sorted(types.items()))
        verb = "is" if sum(types.values()) == 1 else "are"
        parts.append(f"{counted(sum(types.values()), 'parameter')} ({kinds}) {verb} {to} while training")
    if parts:
        other = "never" if mode == "auto" else "auto"
        ctx.note(f"dequantize: {' and '.join(parts)}; an export rounds them again (--dequantize {other} changes this)")
    if lost:
        names = ", ".join(map(repr, lost[:8])) + (f" and {len(lost) - 8} more" if len(lost) > 8 else "")
        ctx.warn("dequantize", f"no scale found for {names}, which train in steps of their integers")
