"""Shape helpers for symbolic dimensions; static shapes decompose them to one or two ONNX ops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.ir.builder import Builder
from graphc.ir.declare import Spec, declare, spec_of
from graphc.ir.facts import constant, shape_of_result, static_dims


def _reduce_sum_to(inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> Sequence[Spec]:
    return [(spec_of(inputs[0])[0], shape_of_result(inputs[1]))]


@declare("ReduceSumTo", inputs="x shape", outputs="y", infer=_reduce_sum_to)
def reduce_sum_to(op: Builder, x: ir.Value, shape: ir.Value) -> ir.Value:
    """y = x summed over the axes along which a tensor of ``shape`` broadcasts to the shape of x."""
    want = constant(shape)
    have = static_dims(x)
    if want is not None and have is not None:
        target = [int(d) for d in want]
        lead = len(have) - len(target)
        axes = list(range(lead)) + [lead + k for k, d in enumerate(target) if d == 1 and have[lead + k] != 1]
        if not axes:
            return x
        summed = op.ReduceSum(x, axes, keepdims=1)
        return op.Reshape(summed, np.array(target, dtype=np.int64)) if lead else summed  # type: ignore[no-any-return]
    have_shape = op.Shape(x)
    missing = op.Sub(op.Shape(have_shape), op.Shape(shape))
    ones = op.Expand(op.const(np.array([1], dtype=np.int64)), missing)
    padded = op.Concat(ones, shape, axis=0)
    differ = op.Not(op.Equal(padded, have_shape))
    axes_value = op.Squeeze(op.NonZero(differ), [0])
    summed = op.ReduceSum(x, axes_value, keepdims=1, noop_with_empty_axes=1)
    return op.Reshape(summed, shape)  # type: ignore[no-any-return]
