"""Running products and their gradient.

y = graphc.RunningProduct(x; axis)                ─►  products of two, of four and so on: few runtimes have CumProd
dx = graphc.RunningProductGrad(dy, x, y, axis)    of y = CumProd(x, axis)  ─►  sums of dy·y, and products without a zero
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from graphc.ir.builder import Builder
from graphc.ir.declare import REQUIRED, declare, same_as
from graphc.ir.facts import constant, dims, rank


@declare("RunningProduct", inputs="x", outputs="y", attributes={"axis": REQUIRED}, infer=same_as(0))
def running_product(op: Builder, x: ir.Value, *, axis: int) -> ir.Value:
    """yᵢ = Π_{k≤i} xₖ along an axis; CumProd where its length is not known."""
    length, by, y = (dims(x) or {axis: None})[axis], 1, x
    if not isinstance(length, int):
        return op.CumProd(x, op.const(axis))  # type: ignore[no-any-return]
    while by < length:
        ones = op.ones_like(op.Slice(y, [0], [by], [axis]))
        y = op.Mul(y, op.Concat(ones, op.Slice(y, [0], [-by], [axis]), axis=axis))
        by *= 2
    return op.Identity(y)  # type: ignore[no-any-return]


@declare(
    "RunningProductGrad",
    inputs="dy x y axis",
    outputs="dx",
    attributes={"exclusive": 0, "reverse": 0},
    infer=same_as(1),
)
def running_product_grad(
    op: Builder, dy: ir.Value, x: ir.Value, y: ir.Value, axis: ir.Value, *, exclusive: int, reverse: int
) -> ir.Value:
    """dxᵢ = Σ_{j≥i} dyⱼ·yⱼ/xᵢ before the first zero of a row, 0 behind it; y = CumProd(x, axis) with the same attributes.

    At the first zero itself the products are those of x with a one in its place.
    """
    zero = op.Equal(x, 0.0)
    met = op.CumSum(op.cast_like(zero, x), axis, reverse=reverse)
    first = op.And(zero, op.Equal(met, 1.0))
    filled = op.Where(first, op.scalar(1, x), x)
    place = constant(axis)
    if place is None or exclusive or reverse:
        products = op.CumProd(filled, axis, exclusive=exclusive, reverse=reverse)
    else:
        products = op.graphc.RunningProduct(filled, axis=int(place.reshape(-1)[0]) % rank(x))

    def flow(values: Any) -> Any:
        return op.CumSum(op.Mul(dy, values), axis, exclusive=exclusive, reverse=1 - reverse)

    before = op.Div(flow(y), op.Where(zero, op.scalar(1, x), x))
    behind = op.Where(first, flow(products), op.scalar(0, x))
    return op.Where(op.Equal(met, 0.0), before, behind)  # type: ignore[no-any-return]
