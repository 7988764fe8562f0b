"""Convolutions with what follows them: a scale and a shift of each channel, a sum, an activation.

    y = graphc.FusedConv(x, w, scale?, shift?, residual?; attributes of Conv, activation, alpha, beta)

The ``epilogues`` pass makes them, for backends whose kernels compute it while they write their results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from graphc.errors import ModelError
from graphc.ir.builder import Builder
from graphc.ir.declare import Spec, declare, spec_of
from graphc.ir.facts import rank
from graphc.ir.infer import infer_outputs
from graphc.ir.ops.convolution import CONV, FORWARD

ACTIVATIONS: Mapping[str, Callable[[Builder, ir.Value, float, float], ir.Value]] = {
    "": lambda op, x, alpha, beta: x,
    "relu": lambda op, x, alpha, beta: op.Relu(x),
    "leaky_relu": lambda op, x, alpha, beta: op.LeakyRelu(x, alpha=alpha),
    "clip": lambda op, x, alpha, beta: op.Clip(x, op.scalar(alpha, x), op.scalar(beta, x)),
    "hard_sigmoid": lambda op, x, alpha, beta: op.HardSigmoid(x, alpha=alpha, beta=beta),
    "hard_swish": lambda op, x, alpha, beta: op.HardSwish(x),
}
"""Activations by name: those that take less time than to write and read their operand once more. ``alpha`` is the slope of a
LeakyRelu, the lower bound of a Clip, and with ``beta`` the line of a HardSigmoid; ``beta`` is the upper bound of a Clip.
"""

_ACTIVATION = {"activation": "", "alpha": 0.0, "beta": 0.0}


def _activated(op: Builder, x: ir.Value, activation: str, alpha: float, beta: float) -> ir.Value:
    if activation not in ACTIVATIONS:
        raise ModelError(f"an activation is one of {', '.join(filter(None, ACTIVATIONS))}, not {activation!r}")
    return ACTIVATIONS[activation](op, x, alpha, beta)


def _as_conv(inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> Sequence[Spec]:
    known = {name: value for name in CONV if (value := attributes.get(name)) is not None}
    attrs = {attr.name: attr for attr in ir.convenience.convert_attributes(known)}
    ((type_, shape),) = infer_outputs(FORWARD, "", list(inputs[:2]), attrs, num_outputs=1)
    return [(type_.dtype if type_ is not None else spec_of(inputs[0])[0], shape)]


@declare("FusedConv", inputs="x w scale? shift? residual?", outputs="y", infer=_as_conv, attributes={**CONV, **_ACTIVATION})
def fused_conv(
    op: Builder,
    x: ir.Value,
    w: ir.Value,
    scale: ir.Value | None = None,
    shift: ir.Value | None = None,
    residual: ir.Value | None = None,
    *,
    activation: str,
    alpha: float,
    beta: float,
    **attributes: Any,
) -> ir.Value:
    """y = activation(scale · Conv(x, w) + shift + residual); scale and shift have an element for each channel of y."""
    given = {name: value for name, value in attributes.items() if value is not None}
    of_channel = [-1, *[1] * (rank(x) - 2)]
    if scale is None:
        y = op.Conv(x, w, shift, **given)
    else:
        y = op.Mul(op.Conv(x, w, **given), op.Reshape(scale, of_channel))
        y = y if shift is None else op.Add(y, op.Reshape(shift, of_channel))
    y = y if residual is None else op.Add(y, residual)
    return _activated(op, y, activation, alpha, beta)
