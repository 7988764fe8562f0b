"""Update nodes: what replaces state at the end of a step. Optimizers by PyTorch's definitions, elementwise over parameters.

Common to all optimizers: ``grad`` and ``divisor`` are summed over the ranks, and the gradient used is grad / divisor;
``lr`` is a rank-0 float; ``step`` is the rank-0 int64 number of this update, 1 for the first; parameters, gradients and
state have one shape, which may be that of a flat buffer of several parameters (attribute ``bucket`` names it); the gradient
of a float32 parameter may have half precision.
Scalars that depend on the step are computed in float64, as PyTorch does in Python. With ``clip_value`` above 0 each element
of grad / divisor is limited to ±clip_value before anything else (``torch.nn.utils.clip_grad_value_``). Where the rank-0 bool
``skip`` is given and true, parameters and state stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.ir.builder import Builder
from graphc.ir.declare import InferFunction, Role, Spec, declare, same_as, spec_of
from graphc.ir.facts import static_dims

LOW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
"""Types that the gradient of a float32 parameter may have; it counts as float32 in the update."""


def like_parameter(outputs: int, *same: int, low: tuple[int, ...] = ()) -> InferFunction:
    """Inference of an update: ``outputs`` tensors like input 0; the inputs ``same``, where given, must be like it too.

    Those of ``low`` may have half precision instead.
    """

    def infer(inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> Sequence[Spec]:
        parameter = inputs[0]
        spec = spec_of(parameter)
        shape = static_dims(parameter) if parameter is not None else None
        for index, value in ((k, inputs[k]) for k in same):
            if value is None:
                continue
            if value.dtype != spec[0] and not (index in low and value.dtype in LOW):
                raise ValueError(f"{value.name!r} is {value.dtype}, the parameter {spec[0]}")
            other = static_dims(value)
            if shape is not None and other is not None and shape != other:
                raise ValueError(f"{value.name!r} has shape {list(other)}, the parameter {list(shape)}")
        return [spec] * outputs

    return infer


@declare(
    "SGD",
    inputs="param grad lr divisor? skip?",
    outputs="next_param",
    attributes={"weight_decay": 0.0, "clip_value": 0.0},
    infer=like_parameter(1, 1, low=(1,)),
    next_value={0: 0},
    gradient=1,
    elementwise=True,
)
def sgd(
    op: Builder,
    param: ir.Value,
    grad: ir.Value,
    lr: ir.Value,
    divisor: ir.Value | None = None,
    skip: ir.Value | None = None,
    *,
    weight_decay: float,
    clip_value: float,
) -> ir.Value:
    """g = grad/divisor + weight_decay·param;  param' = param − lr·g"""
    g = _gradient(op, param, grad, divisor, weight_decay, clip_value)
    return _unless(op, skip, param, op.Sub(param, op.Mul(op.cast_like(lr, param), g)))


@declare(
    "Momentum",
    inputs="param grad momentum_buffer step lr divisor? skip?",
    outputs="next_param next_momentum_buffer",
    attributes={"momentum": 0.9, "dampening": 0.0, "nesterov": 0, "weight_decay": 0.0, "clip_value": 0.0},
    infer=like_parameter(2, 1, 2, low=(1,)),
    next_value={0: 0, 1: 2},
    gradient=1,
    elementwise=True,
)
def momentum_sgd(
    op: Builder,
    param: ir.Value,
    grad: ir.Value,
    momentum_buffer: ir.Value,
    step: ir.Value,
    lr: ir.Value,
    divisor: ir.Value | None = None,
    skip: ir.Value | None = None,
    *,
    momentum: float,
    dampening: float,
    nesterov: int,
    weight_decay: float,
    clip_value: float,
) -> tuple[ir.Value, ir.Value]:
    """``torch.optim.SGD`` with momentum.

    g = grad/divisor + weight_decay·param;  b' = g at step 1, else momentum·b + (1 − dampening)·g
    param' = param − lr·b', or with Nesterov param − lr·(g + momentum·b')
    """
    g = _gradient(op, param, grad, divisor, weight_decay, clip_value)
    buffer = op.Add(op.Mul(momentum_buffer, momentum), op.Mul(g, 1.0 - dampening) if dampening else g)
    if dampening:  # without it a buffer of zeros already gives g at step 1
        buffer = op.Where(op.Equal(step, 1), g, buffer)
    direction = op.Add(g, op.Mul(buffer, momentum)) if nesterov else buffer
    following = op.Sub(param, op.Mul(op.cast_like(lr, param), direction))
    return _unless(op, skip, param, following), _unless(op, skip, momentum_buffer, buffer)


def _adam(
    op: Builder,
    param: ir.Value,
    g: ir.Value,
    exp_avg: ir.Value,
    exp_avg_sq: ir.Value,
    step: ir.Value,
    lr: ir.Value,
    beta1: float,
    beta2: float,
    eps: float,
) -> tuple[ir.Value, ir.Value, ir.Value]:
    first = op.Add(exp_avg, op.Mul(op.Sub(g, exp_avg), 1.0 - beta1))
    second = op.Add(op.Mul(exp_avg_sq, beta2), op.Mul(op.Mul(g, g), 1.0 - beta2))
    count = _double(op, step)
    size = op.Div(_double(op, lr), op.Sub(1.0, op.Pow(np.float64(beta1), count)))
    root = op.Sqrt(op.Sub(1.0, op.Pow(np.float64(beta2), count)))
    denominator = op.Add(op.Div(op.Sqrt(second), op.cast_like(root, param)), eps)
    return op.Sub(param, op.Mul(op.cast_like(size, param), op.Div(first, denominator))), first, second


@declare(
    "Adam",
    inputs="param grad exp_avg exp_avg_sq step lr divisor? skip?",
    outputs="next_param next_exp_avg next_exp_avg_sq",
    attributes={"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "clip_value": 0.0},
    infer=like_parameter(3, 1, 2, 3, low=(1,)),
    next_value={0: 0, 1: 2, 2: 3},
    gradient=1,
    elementwise=True,
)
def adam(
    op: Builder,
    param: ir.Value,
    grad: ir.Value,
    exp_avg: ir.Value,
    exp_avg_sq: ir.Value,
    step: ir.Value,
    lr: ir.Value,
    divisor: ir.Value | None = None,
    skip: ir.Value | None = None,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    clip_value: float,
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """``torch.optim.Adam`` (Kingma and Ba 2015, algorithm 1, with L2 regularisation).

    g = grad/divisor + weight_decay·param;  m' = β1·m + (1 − β1)·g;  v' = β2·v + (1 − β2)·g²
    param' = param − lr/(1 − β1ᵗ) · m' / (√v'/√(1 − β2ᵗ) + eps)
    """
    g = _gradient(op, param, grad, divisor, weight_decay, clip_value)
    found = _adam(op, param, g, exp_avg, exp_avg_sq, step, lr, beta1, beta2, eps)
    return _unless(op, skip, param, found[0]), _unless(op, skip, exp_avg, found[1]), _unless(op, skip, exp_avg_sq, found[2])


@declare(
    "AdamW",
    inputs="param grad exp_avg exp_avg_sq step lr divisor? skip?",
    outputs="next_param next_exp_avg next_exp_avg_sq",
    attributes={"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 1e-2, "clip_value": 0.0},
    infer=like_parameter(3, 1, 2, 3, low=(1,)),
    next_value={0: 0, 1: 2, 2: 3},
    gradient=1,
    elementwise=True,
)
def adamw(
    op: Builder,
    param: ir.Value,
    grad: ir.Value,
    exp_avg: ir.Value,
    exp_avg_sq: ir.Value,
    step: ir.Value,
    lr: ir.Value,
    divisor: ir.Value | None = None,
    skip: ir.Value | None = None,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    clip_value: float,
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """``torch.optim.AdamW`` (Loshchilov and Hutter 2019): Adam on (1 − lr·weight_decay)·param, without decay in g."""
    g, decayed = _gradient(op, param, grad, divisor, 0.0, clip_value), param
    if weight_decay:
        keep = op.Sub(1.0, op.Mul(_double(op, lr), weight_decay))
        decayed = op.Mul(param, op.cast_like(keep, param))
    found = _adam(op, decayed, g, exp_avg, exp_avg_sq, step, lr, beta1, beta2, eps)
    return _unless(op, skip, param, found[0]), _unless(op, skip, exp_avg, found[1]), _unless(op, skip, exp_avg_sq, found[2])


@declare(
    "Adagrad",
    inputs="param grad sum step lr divisor? skip?",
    outputs="next_param next_sum",
    attributes={"lr_decay": 0.0, "eps": 1e-10, "weight_decay": 0.0, "clip_value": 0.0},
    infer=like_parameter(2, 1, 2, low=(1,)),
    next_value={0: 0, 1: 2},
    gradient=1,
    elementwise=True,
)
def adagrad(
    op: Builder,
    param: ir.Value,
    grad: ir.Value,
    sum: ir.Value,
    step: ir.Value,
    lr: ir.Value,
    divisor: ir.Value | None = None,
    skip: ir.Value | None = None,
    *,
    lr_decay: float,
    eps: float,
    weight_decay: float,
    clip_value: float,
) -> tuple[ir.Value, ir.Value]:
    """``torch.optim.Adagrad`` (Duchi, Hazan and Singer 2011).

    g = grad/divisor + weight_decay·param;  s' = s + g²;  param' = param − lr/(1 + (t − 1)·lr_decay) · g / (√s' + eps)
    """
    g = _gradient(op, param, grad, divisor, weight_decay, clip_value)
    total = op.Add(sum, op.Mul(g, g))
    size = _double(op, lr)
    if lr_decay:
        size = op.Div(size, op.Add(op.Mul(op.Sub(_double(op, step), 1.0), lr_decay), 1.0))
    change = op.Div(g, op.Add(op.Sqrt(total), eps))
    following = op.Sub(param, op.Mul(op.cast_like(size, param), change))
    return _unless(op, skip, param, following), _unless(op, skip, sum, total)


def _infer_rmsprop(inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> Sequence[Spec]:
    grad_avg, momentum_buffer = inputs[3], inputs[4]
    if bool(attributes["centered"]) != (grad_avg is not None):
        raise ValueError("grad_avg must be given exactly when centered")
    if bool(attributes["momentum"]) != (momentum_buffer is not None):
        raise ValueError("momentum_buffer must be given exactly when momentum is not 0")
    return like_parameter(4, 1, 2, 3, 4, low=(1,))(inputs, attributes)


@declare(
    "RMSprop",
    inputs="param grad square_avg grad_avg? momentum_buffer? lr divisor? skip?",
    outputs="next_param next_square_avg next_grad_avg? next_momentum_buffer?",
    attributes={
        "alpha": 0.99,
        "eps": 1e-8,
        "momentum": 0.0,
        "centered": 0,
        "weight_decay": 0.0,
        "clip_value": 0.0,
    },
    infer=_infer_rmsprop,
    next_value={0: 0, 1: 2, 2: 3, 3: 4},
    gradient=1,
    elementwise=True,
)
def rmsprop(
    op: Builder,
    param: ir.Value,
    grad: ir.Value,
    square_avg: ir.Value,
    grad_avg: ir.Value | None,
    momentum_buffer: ir.Value | None,
    lr: ir.Value,
    divisor: ir.Value | None = None,
    skip: ir.Value | None = None,
    *,
    alpha: float,
    eps: float,
    momentum: float,
    centered: int,
    weight_decay: float,
    clip_value: float,
) -> tuple[ir.Value | None, ...]:
    """``torch.optim.RMSprop`` (Tieleman and Hinton 2012; centered: Graves 2013).

    g = grad/divisor + weight_decay·param;  s' = α·s + (1 − α)·g²
    ``centered`` (needs grad_avg): a' = α·a + (1 − α)·g and s' − a'² in place of s' below
    ``momentum`` (needs momentum_buffer): b' = momentum·b + g/(√s' + eps);  param' = param − lr·b'
    otherwise param' = param − lr·g/(√s' + eps).  An output whose state is left out is unused.
    """
    g = _gradient(op, param, grad, divisor, weight_decay, clip_value)
    square = op.Add(op.Mul(square_avg, alpha), op.Mul(op.Mul(g, g), 1.0 - alpha))
    next_average, variance = None, square
    if grad_avg is not None:
        average = op.Add(grad_avg, op.Mul(op.Sub(g, grad_avg), 1.0 - alpha))
        variance = op.Sub(square, op.Mul(average, average))
        next_average = _unless(op, skip, grad_avg, average)
    change = op.Div(g, op.Add(op.Sqrt(variance), eps))
    next_buffer = None
    if momentum_buffer is not None:
        change = op.Add(op.Mul(momentum_buffer, momentum), change)
        next_buffer = _unless(op, skip, momentum_buffer, change)
    following = op.Sub(param, op.Mul(op.cast_like(lr, param), change))
    return _unless(op, skip, param, following), _unless(op, skip, square_avg, square), next_average, next_buffer


@declare(
    "RunningAverage",
    inputs="running batch count skip?",
    outputs="next_running",
    attributes={"momentum": 0.9},
    infer=like_parameter(1, 1),
    next_value={0: 0},
    source=1,
    roles={0: Role.STATISTIC},
    reduces={1: "sum", 2: "sum"},
)
def running_average(
    op: Builder,
    running: ir.Value,
    batch: ir.Value,
    count: ir.Value,
    skip: ir.Value | None = None,
    *,
    momentum: float,
) -> ir.Value:
    """running' = momentum·running + (1 − momentum)·batch/count: ONNX's meaning of ``momentum`` (PyTorch's is one minus it).

    ``batch`` is a statistic times the number of samples it is of, ``count`` (a scalar) that number: both are summed over the
    ranks, so that each sample weighs the same however the batch is divided.
    """
    share = op.Div(op.scalar(1.0 - momentum, running), op.cast_like(count, running))
    return _unless(op, skip, running, op.Add(op.Mul(running, momentum), op.Mul(batch, share)))


def _infer_narrow(inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> Sequence[Spec]:
    spec = spec_of(inputs[0])
    spec_of(inputs[1])
    return [spec]


@declare(
    "Narrow",
    inputs="copy wide skip?",
    outputs="next_copy",
    infer=_infer_narrow,
    next_value={0: 0},
    source=1,
    roles={0: Role.COPY},
    elementwise=True,
)
def narrow(op: Builder, copy: ir.Value, wide: ir.Value, skip: ir.Value | None = None) -> ir.Value:
    """copy' = the new parameter, rounded to the type of ``copy``: what the next step's products read.

    In a skipped step the parameter is the old one, and so is the copy.
    """
    return op.Cast(wide, to=int(copy.dtype or ir.DataType.BFLOAT16))  # type: ignore[no-any-return]


@declare(
    "Increment",
    inputs="step skip?",
    outputs="next_step",
    infer=same_as(0),
    next_value={0: 0},
    roles={0: Role.COUNTER},
)
def increment(op: Builder, step: ir.Value, skip: ir.Value | None = None) -> ir.Value:
    """step' = step + 1"""
    return _unless(op, skip, step, op.Add(step, 1))


def _gradient(
    op: Builder, param: ir.Value, grad: ir.Value, divisor: ir.Value | None, weight_decay: float, clip_value: float
) -> ir.Value:
    """clip(grad / divisor) + weight_decay · param"""
    g = grad if grad.dtype == param.dtype else op.cast_like(grad, param)
    g = g if divisor is None else op.Div(g, op.cast_like(divisor, g))
    if clip_value:
        g = op.Clip(g, op.scalar(-clip_value, g), op.scalar(clip_value, g))
    return op.Add(g, op.Mul(param, weight_decay)) if weight_decay else g


def _unless(op: Builder, skip: ir.Value | None, old: ir.Value, new: ir.Value) -> ir.Value:
    """The new state, or the old one in a step that is skipped."""
    return new if skip is None else op.Where(skip, old, new)


def _double(op: Builder, value: ir.Value) -> ir.Value:
    return value if value.dtype == ir.DataType.DOUBLE else op.Cast(value, to=int(ir.DataType.DOUBLE))
