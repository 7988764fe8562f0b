"""Update ops, which replace state at the end of a step; optimizers follow PyTorch's definitions.

Common to all optimizers: formulas are elementwise; ``grad`` and ``divisor`` are summed over the ranks, and the gradient used is
grad / divisor; ``lr`` is a rank-0 float; ``step`` is the rank-0 int64 number of this update, 1 for the first; parameters,
gradients and state have one shape, possibly that of a flat buffer of several parameters (named by the attribute ``bucket``);
the gradient of a float32 parameter may have half precision.
Scalars that depend on the step are computed in float64, as PyTorch does in Python. With ``clip_value`` above 0 each element
of grad / divisor is first limited to ±clip_value (``torch.nn.utils.clip_grad_value_``). If the rank-0 bool ``skip`` is given
and true, parameters and state stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.ir.builder import Builder
from graphc.ir.declare import Decomposition, InferFunction, Role, Spec, declare, declare_primitive, same_as, spec_of
from graphc.ir.facts import static_dims

LOW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
"""Gradient types allowed for a float32 parameter; the update converts them to float32."""


def like_parameter(outputs: int, *same: int, low: tuple[int, ...] = ()) -> InferFunction:
    """Inference of an update: ``outputs`` tensors like input 0; the inputs ``same``, if given, must match it too.

    The inputs ``low`` may have half precision.
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


def _optimizer(
    name: str,
    *,
    states: str = "",
    when: Mapping[str, str] | None = None,
    step: bool = False,
    decoupled: bool = False,
    **attributes: float,
) -> Callable[[Decomposition], Decomposition]:
    """Declare an optimizer whose formula is the decorated function ``(op, param, g, *states, step?, lr, **attributes)``.

    ``g`` is the gradient after divisor, limit and weight decay; a ``decoupled`` formula instead receives ``weight_decay``
    itself. The function returns the next parameter and the next value of every state. ``when`` names the attribute that
    enables an optional state.
    """
    kept = states.split()
    like = like_parameter(1 + len(kept), *range(1, 2 + len(kept)), low=(1,))
    inputs = ["param", "grad", *kept, *(["step"] if step else []), "lr", "divisor?", "skip?"]
    attributes = {**attributes, "weight_decay": attributes.get("weight_decay", 0.0)}

    def infer(given: Sequence[ir.Value | None], options: Mapping[str, Any]) -> Sequence[Spec]:
        for state, attribute in (when or {}).items():
            if bool(options[attribute]) != (given[inputs.index(f"{state}?")] is not None):
                raise ValueError(f"{state} must be given exactly when {attribute} is not 0")
        return like(given, options)

    def register(formula: Decomposition) -> Decomposition:
        def decompose(op: Builder, *given: Any, clip_value: float, weight_decay: float, **options: float) -> Any:
            operands: list[Any] = [*given, *[None] * (len(inputs) - len(given))]
            param, grad, *read, lr, divisor, skip = operands
            decay = {"weight_decay": weight_decay} if decoupled else {}
            g = _gradient(op, param, grad, divisor, 0.0 if decoupled else weight_decay, clip_value)
            found = formula(op, param, g, *read, lr, **options, **decay)
            old = (param, *read[: len(kept)])
            following: tuple[Any, ...] = found if isinstance(found, tuple) else (found,)
            return tuple(_unless(op, skip, a, b) if a is not None else None for a, b in zip(old, following, strict=True))

        declare_primitive(
            name,
            inputs=" ".join(inputs),
            outputs=" ".join(f"next_{state}" for state in ("param", *kept)),
            infer=infer,
            doc=formula.__doc__ or "",
            origin=formula.__module__,
            decompose=decompose,
            attributes={**attributes, "clip_value": 0.0},
            next_value={0: 0, **{1 + k: 2 + k for k in range(len(kept))}},
            gradient=1,
            elementwise=True,
        )
        return formula

    return register


@_optimizer("SGD")
def sgd(op: Builder, param: ir.Value, g: ir.Value, lr: ir.Value) -> ir.Value:
    """g = grad/divisor + weight_decay·param;  param' = param − lr·g"""
    return op.Sub(param, op.Mul(op.cast_like(lr, param), g))  # type: ignore[no-any-return]


@_optimizer("Momentum", states="momentum_buffer", step=True, momentum=0.9, dampening=0.0, nesterov=0)
def momentum_sgd(
    op: Builder, *operands: ir.Value, momentum: float, dampening: float, nesterov: int
) -> tuple[ir.Value, ir.Value]:
    """``torch.optim.SGD`` with momentum.

    g = grad/divisor + weight_decay·param;  b' = g at step 1, else momentum·b + (1 − dampening)·g
    param' = param − lr·b', or with Nesterov param − lr·(g + momentum·b')
    """
    param, g, old, step, lr = operands
    buffer = op.Add(op.Mul(old, momentum), op.Mul(g, 1.0 - dampening) if dampening else g)
    if dampening:  # without it a buffer of zeros already gives g at step 1
        buffer = op.Where(op.Equal(step, 1), g, buffer)
    direction = op.Add(g, op.Mul(buffer, momentum)) if nesterov else buffer
    return op.Sub(param, op.Mul(op.cast_like(lr, param), direction)), buffer


@_optimizer("Adam", states="exp_avg exp_avg_sq", step=True, beta1=0.9, beta2=0.999, eps=1e-8)
def adam(op: Builder, *operands: ir.Value, beta1: float, beta2: float, eps: float) -> tuple[ir.Value, ir.Value, ir.Value]:
    """``torch.optim.Adam`` (Kingma and Ba 2015, algorithm 1, with L2 regularisation).

    g = grad/divisor + weight_decay·param;  m' = β1·m + (1 − β1)·g;  v' = β2·v + (1 − β2)·g²
    param' = param − lr/(1 − β1ᵗ) · m' / (√v'/√(1 − β2ᵗ) + eps)
    """
    param, g, exp_avg, exp_avg_sq, step, lr = operands
    first = op.Add(exp_avg, op.Mul(op.Sub(g, exp_avg), 1.0 - beta1))
    second = op.Add(op.Mul(exp_avg_sq, beta2), op.Mul(op.Mul(g, g), 1.0 - beta2))
    count = _double(op, step)
    size = op.Div(_double(op, lr), op.Sub(1.0, op.Pow(np.float64(beta1), count)))
    root = op.Sqrt(op.Sub(1.0, op.Pow(np.float64(beta2), count)))
    denominator = op.Add(op.Div(op.Sqrt(second), op.cast_like(root, param)), eps)
    return op.Sub(param, op.Mul(op.cast_like(size, param), op.Div(first, denominator))), first, second


@_optimizer(
    "AdamW", states="exp_avg exp_avg_sq", step=True, decoupled=True, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=1e-2
)
def adamw(
    op: Builder, param: ir.Value, *operands: ir.Value, weight_decay: float, **betas: float
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """``torch.optim.AdamW`` (Loshchilov and Hutter 2019): Adam on (1 − lr·weight_decay)·param, without decay in g."""
    if weight_decay:
        keep = op.Sub(1.0, op.Mul(_double(op, operands[-1]), weight_decay))
        param = op.Mul(param, op.cast_like(keep, param))
    return adam(op, param, *operands, **betas)  # type: ignore[return-value]


@_optimizer("Adagrad", states="sum", step=True, lr_decay=0.0, eps=1e-10)
def adagrad(
    op: Builder, param: ir.Value, g: ir.Value, old: ir.Value, step: ir.Value, lr: ir.Value, *, lr_decay: float, eps: float
) -> tuple[ir.Value, ir.Value]:
    """``torch.optim.Adagrad`` (Duchi, Hazan and Singer 2011).

    g = grad/divisor + weight_decay·param;  s' = s + g²;  param' = param − lr/(1 + (t − 1)·lr_decay) · g / (√s' + eps)
    """
    total = op.Add(old, op.Mul(g, g))
    size = _double(op, lr)
    if lr_decay:
        size = op.Div(size, op.Add(op.Mul(op.Sub(_double(op, step), 1.0), lr_decay), 1.0))
    change = op.Div(g, op.Add(op.Sqrt(total), eps))
    return op.Sub(param, op.Mul(op.cast_like(size, param), change)), total


@_optimizer(
    "RMSprop", states="square_avg grad_avg? momentum_buffer?", when={"grad_avg": "centered", "momentum_buffer": "momentum"},
    alpha=0.99, eps=1e-8, momentum=0.0, centered=0,
)  # fmt: skip
def rmsprop(
    op: Builder, *operands: ir.Value, alpha: float, eps: float, momentum: float, centered: int
) -> tuple[ir.Value | None, ...]:
    """``torch.optim.RMSprop`` (Tieleman and Hinton 2012; centered: Graves 2013).

    g = grad/divisor + weight_decay·param;  s' = α·s + (1 − α)·g²
    ``centered`` (needs grad_avg): a' = α·a + (1 − α)·g and s' − a'² in place of s' below
    ``momentum`` (needs momentum_buffer): b' = momentum·b + g/(√s' + eps);  param' = param − lr·b'
    otherwise param' = param − lr·g/(√s' + eps).  An output whose state is left out is unused.
    """
    param, g, square_avg, grad_avg, momentum_buffer, lr = operands
    square = op.Add(op.Mul(square_avg, alpha), op.Mul(op.Mul(g, g), 1.0 - alpha))
    average, variance = None, square
    if grad_avg is not None:
        average = op.Add(grad_avg, op.Mul(op.Sub(g, grad_avg), 1.0 - alpha))
        variance = op.Sub(square, op.Mul(average, average))
    change = op.Div(g, op.Add(op.Sqrt(variance), eps))
    if momentum_buffer is not None:
        change = op.Add(op.Mul(momentum_buffer, momentum), change)
    return op.Sub(param, op.Mul(op.cast_like(lr, param), change)), square, average, change


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
    op: Builder, running: ir.Value, batch: ir.Value, count: ir.Value, skip: ir.Value | None = None, *, momentum: float
) -> ir.Value:
    """running' = momentum·running + (1 − momentum)·batch/count: ONNX's meaning of ``momentum`` (PyTorch's is one minus it).

    ``batch`` is a statistic times its number of samples, and ``count`` (a scalar) is that number. Both are summed over the
    ranks, so that each sample weighs the same however the batch is divided.
    """
    share = op.Div(op.scalar(1.0 - momentum, running), op.cast_like(count, running))
    return _unless(op, skip, running, op.Add(op.Mul(running, momentum), op.Mul(batch, share)))


@declare(
    "BufferValue",
    inputs="stored current",
    outputs="value",
    attributes={"updates": 0},
    infer=same_as(0),
    roles={0: Role.STATISTIC},
)
def buffer_value(op: Builder, stored: ir.Value, current: ir.Value, *, updates: int) -> ir.Value:
    """A buffer that a PyTorch module changes while it trains: in training ``current``, in inference ``stored``.

    With ``updates`` the current value is the one that stays: ``train_mode`` makes an update of it.
    """
    return op.Identity(stored)  # type: ignore[no-any-return]


@declare(
    "Narrow",
    inputs="copy wide skip?",
    outputs="next_copy",
    infer=same_as(0),
    next_value={0: 0},
    source=1,
    roles={0: Role.COPY},
    elementwise=True,
)
def narrow(op: Builder, copy: ir.Value, wide: ir.Value, skip: ir.Value | None = None) -> ir.Value:
    """copy' = the new parameter rounded to the type of ``copy``, for the products of the next step.

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
    """The new state, or the old one in a skipped step."""
    return new if skip is None else op.Where(skip, old, new)


def _double(op: Builder, value: ir.Value) -> ir.Value:
    return value if value.dtype == ir.DataType.DOUBLE else op.Cast(value, to=int(ir.DataType.DOUBLE))
