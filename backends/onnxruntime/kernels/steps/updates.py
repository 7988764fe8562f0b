"""Optimizer updates as one in-place sweep over flat buffers.

The declarations in ``graphc/ir/ops/updates.py`` give formulas and sources. Whatever depends only on the step, the learning
rate and the divisor is computed once a step in float64, by a function of its own, and passed to the loops as a few coefficients
of the parameters' type. Loops run from 0 over slices: an index that might be negative would be wrapped around, which prevents
vectorisation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.backend import Binding, kernel
from graphc.backends.onnxruntime.kernels.common.arrays import given, optional
from graphc.backends.onnxruntime.kernels.common.jit import exact, jit
from graphc.backends.onnxruntime.kernels.steps.transforms import widening
from graphc.device import Array, Run, in_order
from graphc.ir.declare import OPS

TYPES = (ir.DataType.FLOAT, ir.DataType.DOUBLE)

GRAIN = 16384
"""Smallest range, in elements, that is worth handing to another thread: about ten microseconds of work."""

PIECE = 1 << 18
"""Half-precision gradients converted to float32 at a time: 1 MB, which stays in cache."""


def _in_place(op: str) -> Mapping[int, int]:
    """Every next value may be written over the state that it replaces."""
    return OPS[op].next_value


def _state(k: Binding, op: str) -> tuple[list[Array], list[Run]]:
    """The outputs as vectors, and what copies the old state into them first, where the plan did not alias the two.

    Loops then read and write the state through one name, so that the compiler sees no overlap and vectorises. State that
    is left out becomes an empty vector.
    """
    vectors: list[Array] = []
    copies: list[Run] = []
    for output, index in sorted(OPS[op].next_value.items()):
        new, old = optional(k.outputs, output), optional(k.inputs, index)
        if new is None or old is None:
            vectors.append(np.empty(0, dtype=vectors[0].dtype))
            continue
        vectors.append(new.reshape(-1))
        if new.ctypes.data != old.ctypes.data:
            copies.append(partial(np.copyto, new, old))
    return vectors, copies


def _number(k: Binding, index: int) -> Array:
    """The scalar input ``index`` as a vector; 1 where it is left out."""
    array = optional(k.inputs, index)
    return np.ones(1, dtype=np.float32) if array is None else array.reshape(1)


def _skip(k: Binding) -> Array:
    """The skip flag as a vector of a byte; 0 where the node has none."""
    index = next(i for i, formal in enumerate(OPS[k.node.op_type].inputs) if formal.name == "skip")
    array = optional(k.inputs, index)
    return np.zeros(1, dtype=np.uint8) if array is None else array.reshape(1).view(np.uint8)


@exact
def _inverse(value):
    return 1.0 / value if value != 0.0 else math.inf


LIMIT, SKIP = 9, 10
"""Places of two coefficients: the largest element of a gradient, and whether the update is skipped."""


def _update(k: Binding, loop: Any, arrays: list[Array], copies: list[Run], write: Any, *numbers: Array | float) -> Run:
    """Copies, then ``write(numbers, coefficients)``, then the sweep."""
    coefficients = np.zeros(11, dtype=arrays[0].dtype)
    coefficients[LIMIT] = k.attributes.get("clip_value") or math.inf
    bind = k.pool.bind
    runs = [*copies, bind(_note_skip, (_skip(k), coefficients), 1), bind(write, (*numbers, coefficients), 1)]
    if arrays[1].dtype.itemsize == 2:
        for widen, low, wide, piece in _widened(arrays):
            runs.append(bind(widen, (low, wide), low.size, GRAIN))
            runs.append(bind(loop, (*piece, coefficients), low.size, GRAIN))
    else:
        runs.append(bind(loop, (*arrays, coefficients), arrays[0].size, GRAIN))
    return in_order(runs)


@exact
def _note_skip(skip, c, start, stop):
    c[SKIP] = skip[0]


def _widened(arrays: Sequence[Array]) -> list[tuple[Callable[..., None], Array, Array, list[Array]]]:
    """Cut the arrays into pieces, each with the loop that converts its half-precision gradients into a scratch array."""
    gradient, size = arrays[1], arrays[0].size
    widen, seen = widening(gradient.dtype)
    scratch = np.zeros(min(size, PIECE), dtype=np.float32)
    found = []
    for start in range(0, size, PIECE):
        stop = min(size, start + PIECE)
        wide = scratch[: stop - start]
        piece = [wide if k == 1 else array[start:stop] for k, array in enumerate(arrays)]
        found.append((widen, gradient[start:stop].view(np.uint16), wide.view(seen), piece))
    return found


@kernel("onnxruntime", "graphc::SGD", dtypes=TYPES, inplace=_in_place("SGD"))
def sgd(k: Binding) -> Run:
    (param,), copies = _state(k, "SGD")
    numbers = _number(k, 2), _number(k, 3), float(k.attributes["weight_decay"])
    return _update(k, _sgd, [param, given(k.inputs, 2)[1].reshape(-1)], copies, _sgd_coefficients, *numbers)


@exact
def _sgd_coefficients(lr, divisor, decay, c, start, stop):
    c[0], c[1], c[2] = _inverse(np.float64(divisor[0])), decay, lr[0]


@jit
def _limited(g, limit):
    """``g`` within ±limit; NaN stays NaN."""
    g = limit if g > limit else g
    return -limit if g < -limit else g


@jit
def _sgd(param, grad, c, start, stop):
    if c[SKIP] != 0.0:
        return
    param, grad = param[start:stop], grad[start:stop]
    scale, decay, lr, limit = c[0], c[1], c[2], c[LIMIT]
    for i in range(param.size):
        param[i] -= lr * (_limited(grad[i] * scale, limit) + decay * param[i])


@kernel("onnxruntime", "graphc::Momentum", dtypes=TYPES, inplace=_in_place("Momentum"))
def momentum_sgd(k: Binding) -> Run:
    (param, buffer), copies = _state(k, "Momentum")
    a = k.attributes
    own = tuple(float(a[name]) for name in ("momentum", "dampening", "weight_decay", "nesterov"))
    arrays = [param, given(k.inputs, 2)[1].reshape(-1), buffer]
    return _update(k, _momentum, arrays, copies, _momentum_coefficients, _number(k, 3), _number(k, 4), _number(k, 5), *own)


@exact
def _momentum_coefficients(step, lr, divisor, momentum, dampening, decay, nesterov, c, start, stop):
    first = dampening != 0.0 and step[0] == 1
    size = np.float64(lr[0])
    c[0], c[1] = _inverse(np.float64(divisor[0])), decay
    c[2], c[3] = (0.0, 1.0) if first else (momentum, 1.0 - dampening)
    c[4], c[5] = (size, size * momentum) if nesterov != 0.0 else (0.0, size)


@jit
def _momentum(param, grad, buffer, c, start, stop):
    if c[SKIP] != 0.0:
        return
    param, grad, buffer = param[start:stop], grad[start:stop], buffer[start:stop]
    scale, decay, keep, take, of_gradient, of_buffer, limit = c[0], c[1], c[2], c[3], c[4], c[5], c[LIMIT]
    for i in range(param.size):
        g = _limited(grad[i] * scale, limit) + decay * param[i]
        b = keep * buffer[i] + take * g
        buffer[i] = b
        param[i] -= of_gradient * g + of_buffer * b


@kernel("onnxruntime", "graphc::Adam", dtypes=TYPES, inplace=_in_place("Adam"))
def adam(k: Binding) -> Run:
    return _bind_adam(k, "Adam", decoupled=False)


@kernel("onnxruntime", "graphc::AdamW", dtypes=TYPES, inplace=_in_place("AdamW"))
def adamw(k: Binding) -> Run:
    return _bind_adam(k, "AdamW", decoupled=True)


def _bind_adam(k: Binding, op: str, *, decoupled: bool) -> Run:
    (param, first, second), copies = _state(k, op)
    a = k.attributes
    own = tuple(float(a[name]) for name in ("beta1", "beta2", "eps", "weight_decay"))
    arrays, scalars = [param, given(k.inputs, 2)[1].reshape(-1), first, second], (_number(k, 4), _number(k, 5), _number(k, 6))
    return _update(k, _adam, arrays, copies, _adam_coefficients, *scalars, *own, float(decoupled))


@exact
def _adam_coefficients(step, lr, divisor, beta1, beta2, eps, decay, decoupled, c, start, stop):
    count, size = np.float64(step[0]), np.float64(lr[0])
    c[0], c[1] = _inverse(np.float64(divisor[0])), 0.0 if decoupled != 0.0 else decay
    c[2], c[3], c[4] = 1.0 - beta1, beta2, 1.0 - beta2
    c[5], c[6], c[7] = size * _inverse(1.0 - beta1**count), _inverse(math.sqrt(1.0 - beta2**count)), eps
    c[8] = 1.0 - size * decay if decoupled != 0.0 else 1.0


@jit
def _adam(param, grad, first, second, c, start, stop):
    if c[SKIP] != 0.0:
        return
    param, grad, first, second = param[start:stop], grad[start:stop], first[start:stop], second[start:stop]
    scale, decay, step1, keep2, step2, size, correction = c[0], c[1], c[2], c[3], c[4], c[5], c[6]
    eps, shrink, limit = c[7], c[8], c[LIMIT]
    for i in range(param.size):
        p = param[i]
        g = _limited(grad[i] * scale, limit) + decay * p
        m = first[i] + (g - first[i]) * step1
        v = second[i] * keep2 + g * g * step2
        first[i] = m
        second[i] = v
        param[i] = p * shrink - size * (m / (np.sqrt(v) * correction + eps))


@kernel("onnxruntime", "graphc::Adagrad", dtypes=TYPES, inplace=_in_place("Adagrad"))
def adagrad(k: Binding) -> Run:
    (param, total), copies = _state(k, "Adagrad")
    own = tuple(float(k.attributes[name]) for name in ("lr_decay", "eps", "weight_decay"))
    arrays = [param, given(k.inputs, 2)[1].reshape(-1), total]
    return _update(k, _adagrad, arrays, copies, _adagrad_coefficients, _number(k, 3), _number(k, 4), _number(k, 5), *own)


@exact
def _adagrad_coefficients(step, lr, divisor, lr_decay, eps, decay, c, start, stop):
    size = np.float64(lr[0]) / (1.0 + (np.float64(step[0]) - 1.0) * lr_decay)
    c[0], c[1], c[2], c[3] = _inverse(np.float64(divisor[0])), decay, size, eps


@jit
def _adagrad(param, grad, total, c, start, stop):
    if c[SKIP] != 0.0:
        return
    param, grad, total = param[start:stop], grad[start:stop], total[start:stop]
    scale, decay, size, eps, limit = c[0], c[1], c[2], c[3], c[LIMIT]
    for i in range(param.size):
        g = _limited(grad[i] * scale, limit) + decay * param[i]
        s = total[i] + g * g
        total[i] = s
        param[i] -= size * (g / (np.sqrt(s) + eps))


@kernel("onnxruntime", "graphc::RMSprop", dtypes=TYPES, inplace=_in_place("RMSprop"))
def rmsprop(k: Binding) -> Run:
    state, copies = _state(k, "RMSprop")
    own = tuple(float(k.attributes[name]) for name in ("alpha", "eps", "momentum", "weight_decay"))
    arrays = [state[0], given(k.inputs, 2)[1].reshape(-1), *state[1:]]
    return _update(k, _rmsprop, arrays, copies, _rmsprop_coefficients, _number(k, 5), _number(k, 6), *own)


@exact
def _rmsprop_coefficients(lr, divisor, alpha, eps, momentum, decay, c, start, stop):
    c[0], c[1], c[2], c[3] = _inverse(np.float64(divisor[0])), decay, alpha, 1.0 - alpha
    c[4], c[5], c[6] = eps, momentum, lr[0]


@jit
def _rmsprop(param, grad, square, average, buffer, c, start, stop):
    if c[SKIP] != 0.0:
        return
    scale, decay, keep, take, eps, momentum, lr, limit = c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[LIMIT]
    centered, heavy = average.size > 0, buffer.size > 0
    param, grad, square = param[start:stop], grad[start:stop], square[start:stop]
    average, buffer = average[start:stop], buffer[start:stop]
    for i in range(param.size):
        g = _limited(grad[i] * scale, limit) + decay * param[i]
        s = square[i] * keep + g * g * take
        square[i] = s
        if centered:
            a = average[i] + (g - average[i]) * take
            average[i] = a
            s -= a * a
        change = g / (np.sqrt(s) + eps)
        if heavy:
            change += buffer[i] * momentum
            buffer[i] = change
        param[i] -= lr * change


@kernel("onnxruntime", "graphc::RunningAverage", dtypes=TYPES, inplace=_in_place("RunningAverage"))
def running_average(k: Binding) -> Run:
    (running,), copies = _state(k, "RunningAverage")
    numbers, arrays = (_number(k, 2), float(k.attributes["momentum"])), [running, given(k.inputs, 2)[1].reshape(-1)]
    return _update(k, _running_average, arrays, copies, _running_average_coefficients, *numbers)


@exact
def _running_average_coefficients(count, momentum, c, start, stop):
    c[0], c[1] = momentum, (1.0 - momentum) * _inverse(np.float64(count[0]))


@jit
def _running_average(running, batch, c, start, stop):
    if c[SKIP] != 0.0:
        return
    running, batch = running[start:stop], batch[start:stop]
    keep, take = c[0], c[1]
    for i in range(running.size):
        running[i] = running[i] * keep + batch[i] * take


@kernel("onnxruntime", "graphc::Increment", dtypes=(ir.DataType.INT64,), inplace=_in_place("Increment"))
def increment(k: Binding) -> Run:
    (step,), (next_step,) = given(k.inputs, 1), given(k.outputs, 1)
    return k.pool.bind(_increment, (step.reshape(-1), _skip(k), next_step.reshape(-1)), 1)


@exact
def _increment(step, skip, next_step, start, stop):
    for i in range(step.size):  # a buffer has padding behind the one element
        next_step[i] = step[i] if skip[0] else step[i] + 1
