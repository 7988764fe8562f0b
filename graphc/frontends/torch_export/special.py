"""ONNX forms of PyTorch's functions of single elements that its exporter lacks, or writes down so that they overflow or lose
their digits where PyTorch's do not (seen in 2.13).

It writes ``logsigmoid`` as ``Log(Sigmoid(x))``, and ``binary_cross_entropy_with_logits`` with it: minus infinity for logits
below -88. ``logaddexp`` overflows above 88, ``log1p``, ``expm1``, ``erfc`` and ``erfcx`` are differences of numbers that may be
nearly equal, ``sinc`` divides zero by zero. A bound of ``clamp`` with both bounds halves the gradient of what equals it.

Gradients follow from the forms. They are those of PyTorch, except that places where a function has a kink may count otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Optional

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


ERFCX = (
    1.7552176307433927e-08, 8.5263598174830333e-09, -2.1430692275823639e-07, -2.7749611122883763e-08, 1.6959958079430478e-06,
    -1.0083452170479683e-06, -1.1399726074447365e-05, 2.2410019228612918e-05, 5.1626016222598531e-05, -0.00029016629854870584,
    0.00029372142956717463, 0.0017556295098350434, -0.0097465811943057371, 0.028362276757789878, -0.058693398387769276,
    0.092304321226304067, -0.10880393015455231, 0.082276738487123635, 0.003585415485781718, -0.14024059858550611,
    1.2375126308378264,
)  # fmt: skip
"""(1 + 2z)·exp(z²)·erfc(z) for z ≥ 0 in powers of (z - 3.75)/(z + 3.75), as M. Shepherd and J. Laframboise write it (1981);
fitted to 3e-15 of 60 digits."""


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Entries of the ``custom_translation_table`` of ``torch.onnx.export``."""
    import torch
    from onnxscript import BOOL as LOGICAL
    from onnxscript.function_libs.torch_lib.tensor_typing import TFloat as X
    from onnxscript.function_libs.torch_lib.tensor_typing import TReal

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
        (aten.log_sigmoid.default, _log_sigmoid, {"x": X}),
        (aten.logaddexp.default, log_add_exp, {"x": X, "y": X}),
        (aten.logaddexp2.default, _log_add_exp2, {"x": X, "y": X}),
        (aten.log1p.default, _log1p, {"x": X}),
        (aten.expm1.default, _expm1, {"x": X}),
        (aten.special_expm1.default, _expm1, {"x": X}),
        (aten.sinc.default, _sinc, {"x": X}),
        (aten.erfc.default, _erfc, {"x": X}),
        (aten.special_erfcx.default, _erfcx, {"x": X}),
        (aten.special_log_ndtr.default, _log_ndtr, {"x": X}),
        (aten.hardtanh.default, _hardtanh, {"x": X, "min_val": float, "max_val": float}),
        (aten.clamp.Tensor, _clamp, {"x": TReal, "low": Optional[TReal], "high": Optional[TReal], "return": TReal}),  # noqa: UP045
        (aten.clamp_min.Tensor, _clamp, {"x": TReal, "low": TReal, "return": TReal}),
        (aten.clamp_max.Tensor, _clamp_high, {"x": TReal, "high": TReal, "return": TReal}),
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


def _log_sigmoid(x: Any) -> Any:
    op = opset()
    return op.Neg(op.Softplus(op.Neg(x)))


def log_add_exp(x: Any, y: Any) -> Any:
    """Two that are minus infinity have no difference."""
    op = opset()
    apart = op.Where(op.Equal(x, y), like(0.0, x), op.Sub(x, y))
    return op.Add(op.Max(x, y), op.Softplus(op.Neg(op.Abs(apart))))


def _log_add_exp2(x: Any, y: Any) -> Any:
    op = opset()
    unit = like(math.log(2), x)
    return op.Div(log_add_exp(op.Mul(x, unit), op.Mul(y, unit)), unit)


def _log1p(x: Any) -> Any:
    op = opset()
    zero = like(0.0, x)
    small = op.Less(op.Abs(x), like(0.5, x))
    near, far = op.Where(small, x, zero), op.Where(small, zero, x)
    series = op.Mul(op.Atanh(op.Div(near, op.Add(near, like(2.0, x)))), like(2.0, x))
    return op.Where(small, series, op.Log(op.Add(far, like(1.0, x))))


def _expm1(x: Any) -> Any:
    op = opset()
    zero, one = like(0.0, x), like(1.0, x)
    small = op.Less(x, one)
    half = op.Tanh(op.Mul(op.Where(small, x, zero), like(0.5, x)))
    return op.Where(small, op.Div(op.Add(half, half), op.Sub(one, half)), op.Sub(op.Exp(op.Where(small, zero, x)), one))


def _sinc(x: Any) -> Any:
    op = opset()
    none, one = op.Equal(x, like(0.0, x)), like(1.0, x)
    angle = op.Mul(op.Where(none, one, x), like(math.pi, x))
    return op.Where(none, one, op.Div(op.Sin(angle), angle))


def _erfcx_of(z: Any) -> Any:
    """exp(z²)·erfc(z) for z ≥ 0."""
    op = opset()
    centre = like(3.75, z)
    power = op.Div(op.Sub(z, centre), op.Add(z, centre))
    return op.Div(_polynomial(power, ERFCX), op.Add(op.Add(z, z), like(1.0, z)))


def _erfcx(x: Any) -> Any:
    op = opset()
    negative = op.Less(x, like(0.0, x))
    mirrored = _erfcx_of(op.Where(negative, op.Neg(x), x))  # Abs has no slope at zero
    below = op.Where(negative, x, like(0.0, x))
    return op.Where(negative, op.Sub(op.Mul(op.Exp(op.Mul(below, below)), like(2.0, x)), mirrored), mirrored)


def _erfc(x: Any) -> Any:
    op = opset()
    one = like(1.0, x)
    low = op.Less(x, like(0.5, x))
    near, far = op.Where(low, x, like(0.0, x)), op.Where(low, one, x)
    return op.Where(low, op.Sub(one, op.Erf(near)), op.Mul(op.Exp(op.Neg(op.Mul(far, far))), _erfcx_of(far)))


def _log_ndtr(x: Any) -> Any:
    """The logarithm of the normal distribution, which is log(erfc(-x/√2)/2)."""
    op = opset()
    low = op.Less(x, like(-1.0, x))
    near, far = op.Where(low, like(0.0, x), x), op.Where(low, x, like(-1.0, x))
    root, half = like(-math.sqrt(0.5), x), like(0.5, x)
    tail = op.Sub(op.Log(op.Mul(_erfcx_of(op.Mul(far, root)), half)), op.Mul(op.Mul(far, far), half))
    upper = _log1p(op.Neg(op.Mul(_erfc(op.Neg(op.Mul(near, root))), half)))
    return op.Where(low, tail, upper)


def _hardtanh(x: Any, min_val: float = -1.0, max_val: float = 1.0) -> Any:
    """What equals a bound has no gradient; of six and of zero, the gradient of Clip says so too."""
    op = opset()
    low, high = like(min_val, x), like(max_val, x)
    if (min_val, max_val) == (0, 6):
        return op.Clip(x, low, high)
    return op.Where(op.LessOrEqual(x, low), low, op.Where(op.GreaterOrEqual(x, high), high, x))


def _clamp(x: Any, low: Any = None, high: Any = None) -> Any:
    """What equals a bound has the gradient, and the bound has none."""
    op = opset()
    numbers = all(bound is None or (bound.shape is not None and len(bound.shape) == 0) for bound in (low, high))
    low, high = (None if bound is None else op.CastLike(bound, x) for bound in (low, high))
    if numbers:
        return op.Clip(x, low, high)
    if low is not None:
        x = op.Where(op.Less(x, low), low, x)
    return x if high is None else op.Where(op.Greater(x, high), high, x)


def _clamp_high(x: Any, high: Any) -> Any:
    return _clamp(x, None, high)
