"""ONNX forms of PyTorch's functions of single elements that its exporter lacks (seen in 2.13).

Gradients follow from the forms. They are those of PyTorch, except that places where a function has a kink may count otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from graphc.frontends.torch_export.forms import FLOAT64, like, opset, typed

ERFINV_CENTRE = (
    2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503, -0.00417768164,
    0.246640727, 1.50140941,
)  # fmt: skip
ERFINV_TAIL = (
    -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613, 0.00943887047, 1.00167406,
    2.83297682,
)  # fmt: skip
"""Polynomials of M. Giles, Approximating the erfinv function, 2012; the highest power first."""

STIRLING = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360)
"""Of 1/x, 1/x³ and so on in Stirling's series of the logarithm of the gamma function."""
SHIFT = 8
"""By how much an argument is raised before Stirling's series, whose error then is below 1e-15."""


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Entries of the ``custom_translation_table`` of ``torch.onnx.export``."""
    import torch
    from onnxscript import BOOL as LOGICAL
    from onnxscript.function_libs.torch_lib.tensor_typing import TFloat as X

    aten = torch.ops.aten
    table: list[tuple[Any, Callable[..., Any], dict[str, Any]]] = [
        (aten.hypot.default, _hypot, {"x": X, "y": X}),
        (aten.copysign.Tensor, _copysign, {"x": X, "y": X}),
        (aten.signbit.default, _signbit, {"x": X, "return": LOGICAL}),
        (aten.fmax.default, _larger("GreaterOrEqual"), {"x": X, "y": X}),
        (aten.fmin.default, _larger("LessOrEqual"), {"x": X, "y": X}),
        (aten.erfinv.default, _erfinv, {"x": X}),
        (aten.lgamma.default, _lgamma, {"x": X}),
        (aten.digamma.default, _digamma, {"x": X}),
    ]
    return {operator: typed(function, {"return": X} | kinds) for operator, function, kinds in table}


def _hypot(x: Any, y: Any) -> Any:
    op = opset()
    return op.Sqrt(op.Add(op.Mul(x, x), op.Mul(y, y)))


def _signbit(x: Any) -> Any:
    """Of -0, too."""
    op = opset()
    zero = like(0.0, x)
    return op.Or(op.Less(x, zero), op.And(op.Equal(x, zero), op.Less(op.Reciprocal(x), zero)))


def _copysign(x: Any, y: Any) -> Any:
    op = opset()
    size = op.Abs(x)
    return op.Where(_signbit(y), op.Neg(size), size)


def _larger(comparison: str) -> Callable[..., Any]:
    def extreme(x: Any, y: Any) -> Any:
        op = opset()
        return op.Where(op.Or(getattr(op, comparison)(x, y), op.IsNaN(y)), x, y)

    return extreme


def _polynomial(x: Any, coefficients: Sequence[float]) -> Any:
    op, y = opset(), like(coefficients[0], x)
    for number in coefficients[1:]:
        y = op.Add(op.Mul(y, x), like(number, x))
    return y


def _erfinv(x: Any) -> Any:
    """In double precision: 3e-7 of the result are the error of the approximation, in float32."""
    op = opset()
    wide = op.Cast(x, to=FLOAT64)
    one, bound = like(1.0, wide), like(5.0, wide)
    w = op.Neg(op.Log(op.Mul(op.Sub(one, wide), op.Add(one, wide))))
    centre = _polynomial(op.Sub(w, like(2.5, w)), ERFINV_CENTRE)
    tail = _polynomial(op.Sub(op.Sqrt(op.Max(w, bound)), like(3.0, w)), ERFINV_TAIL)
    return op.CastLike(op.Mul(op.Where(op.Less(w, bound), centre, tail), wide), x)


def _lgamma(x: Any) -> Any:
    """Stirling's series of a raised argument; below one half, by reflection."""
    op = opset()
    wide = op.Cast(x, to=FLOAT64)
    low = op.Less(wide, like(0.5, wide))
    z = op.Where(low, op.Sub(like(1.0, wide), wide), wide)
    product = z
    for k in range(1, SHIFT):
        product = op.Mul(product, op.Add(z, like(float(k), z)))
    t = op.Add(z, like(float(SHIFT), z))
    inverse = op.Reciprocal(t)
    series = op.Mul(_polynomial(op.Mul(inverse, inverse), STIRLING[::-1]), inverse)
    start = op.Sub(op.Mul(op.Sub(t, like(0.5, t)), op.Log(t)), t)
    upper = op.Sub(op.Add(op.Add(start, like(math.log(2 * math.pi) / 2, t)), series), op.Log(product))
    turned = op.Sin(op.Mul(op.Where(low, wide, like(0.5, wide)), like(math.pi, wide)))
    reflected = op.Sub(op.Sub(like(math.log(math.pi), wide), op.Log(op.Abs(turned))), upper)
    return op.CastLike(op.Where(low, reflected, upper), x)


def _digamma(x: Any) -> Any:
    """The derivative of :func:`_lgamma`, by the same series."""
    op = opset()
    wide = op.Cast(x, to=FLOAT64)
    low = op.Less(wide, like(0.5, wide))
    z = op.Where(low, op.Sub(like(1.0, wide), wide), wide)
    raised = op.Reciprocal(z)
    for k in range(1, SHIFT):
        raised = op.Add(raised, op.Reciprocal(op.Add(z, like(float(k), z))))
    t = op.Add(z, like(float(SHIFT), z))
    inverse = op.Reciprocal(t)
    square = op.Mul(inverse, inverse)
    slopes = [number * (2 * k + 1) for k, number in enumerate(STIRLING)]
    series = op.Mul(_polynomial(square, slopes[::-1]), square)
    upper = op.Sub(op.Sub(op.Sub(op.Log(t), op.Mul(inverse, like(0.5, t))), series), raised)
    angle = op.Mul(op.Where(low, wide, like(0.25, wide)), like(math.pi, wide))
    reflected = op.Sub(upper, op.Div(op.Mul(like(math.pi, wide), op.Cos(angle)), op.Sin(angle)))
    return op.CastLike(op.Where(low, reflected, upper), x)
