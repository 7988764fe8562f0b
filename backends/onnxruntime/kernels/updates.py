"""Optimizer updates as one in-place sweep over flat buffers, and the test for non-finite values.

The declarations in ``graphc/ir/ops/updates.py`` give formulas and sources. Whatever depends only on the step, the learning
rate and the divisor is computed once a step in float64 and passed to the loops as a few float32 coefficients. Loops run from 0
over slices: an index that might be negative would be wrapped around, which prevents vectorisation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from graphc.backend import Binding, Pool, kernel
from graphc.backends.onnxruntime.kernels.arrays import given, optional
from graphc.backends.onnxruntime.kernels.jit import exact, jit
from graphc.backends.onnxruntime.kernels.transforms import widening
from graphc.device import Array, Run, in_order
from graphc.ir.declare import OPS

GRAIN = 16384
"""Smallest range, in elements, that is worth handing to another thread: about ten microseconds of work."""

PIECE = 1 << 18
"""Half-precision gradients converted to float32 at a time: 1 MB, which stays in cache."""


def _in_place(op: str) -> Mapping[int, int]:
    """Every next value may be written over the state that it replaces."""
    return OPS[op].next_value


def _state(k: Binding, op: str) -> tuple[list[Array], Run]:
    """The outputs as vectors, and a function that copies the old state into them where the plan did not alias the two.

    Loops then read and write the state through one name, so that the compiler sees no overlap and vectorises. State that
    is left out becomes an empty vector.
    """
    vectors, copies = [], []
    for output, index in sorted(OPS[op].next_value.items()):
        new, old = optional(k.outputs, output), optional(k.inputs, index)
        if new is None or old is None:
            vectors.append(np.empty(0, dtype=np.float32))
            continue
        vectors.append(new.reshape(-1))
        if new.ctypes.data != old.ctypes.data:
            copies.append((new, old))

    def settle() -> None:
        for new, old in copies:
            np.copyto(new, old)

    return vectors, settle


def _number(k: Binding, index: int) -> Callable[[], float]:
    """A function that reads the scalar input ``index`` at run time; 1 where it is left out."""
    array = optional(k.inputs, index)
    return (lambda: 1.0) if array is None else array.reshape(1).item


def _skipped(k: Binding) -> Callable[[], bool]:
    """A function that reads the skip flag; constant False where the node has none."""
    index = next(i for i, formal in enumerate(OPS[k.node.op_type].inputs) if formal.name == "skip")
    array = optional(k.inputs, index)
    return (lambda: False) if array is None else array.reshape(1).item


def _inverse(value: float) -> float:
    return 1.0 / value if value else math.inf


def _update(k: Binding, loop: Callable[..., None], arrays: list[Array], settle: Run, write: Callable[[Array], None]) -> Run:
    """A run: compute the coefficients, then sweep. The last coefficient limits the elements of the gradient."""
    coefficients = np.zeros(10, dtype=np.float32)
    coefficients[9] = k.attributes.get("clip_value") or math.inf
    skipped, bind = _skipped(k), k.pool.bind
    if arrays[1].dtype.itemsize == 2:
        sweeps: list[Run] = []
        for widen, low, wide, piece in _widened(arrays):
            sweeps.append(bind(widen, (low, wide), low.size, GRAIN))
            sweeps.append(bind(loop, (*piece, coefficients), low.size, GRAIN))
        sweep = in_order(sweeps)
    else:
        sweep = bind(loop, (*arrays, coefficients), arrays[0].size, GRAIN)

    def run() -> None:
        settle()
        if skipped():
            return
        write(coefficients)
        sweep()

    return run


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


@kernel("onnxruntime", "graphc::SGD", inplace=_in_place("SGD"))
def sgd(k: Binding) -> Run:
    (param,), settle = _state(k, "SGD")
    lr, divisor, decay = _number(k, 2), _number(k, 3), k.attributes["weight_decay"]

    def write(c: Array) -> None:
        c[0], c[1], c[2] = _inverse(divisor()), decay, lr()

    return _update(k, _sgd, [param, given(k.inputs, 2)[1].reshape(-1)], settle, write)


@jit
def _limited(g, limit):
    """``g`` within ±limit; NaN stays NaN."""
    g = limit if g > limit else g
    return -limit if g < -limit else g


@jit
def _sgd(param, grad, c, start, stop):
    param, grad = param[start:stop], grad[start:stop]
    scale, decay, lr, limit = c[0], c[1], c[2], c[9]
    for i in range(param.size):
        param[i] -= lr * (_limited(grad[i] * scale, limit) + decay * param[i])


@kernel("onnxruntime", "graphc::Momentum", inplace=_in_place("Momentum"))
def momentum_sgd(k: Binding) -> Run:
    (param, buffer), settle = _state(k, "Momentum")
    step, lr, divisor = _number(k, 3), _number(k, 4), _number(k, 5)
    a = k.attributes
    momentum, dampening, decay = a["momentum"], a["dampening"], a["weight_decay"]
    of_gradient, of_buffer = (1.0, momentum) if a["nesterov"] else (0.0, 1.0)

    def write(c: Array) -> None:
        first = dampening and step() == 1
        c[0], c[1] = _inverse(divisor()), decay
        c[2], c[3] = (0.0, 1.0) if first else (momentum, 1.0 - dampening)
        size = lr()
        c[4], c[5] = size * of_gradient, size * of_buffer

    return _update(k, _momentum, [param, given(k.inputs, 2)[1].reshape(-1), buffer], settle, write)


@jit
def _momentum(param, grad, buffer, c, start, stop):
    param, grad, buffer = param[start:stop], grad[start:stop], buffer[start:stop]
    scale, decay, keep, take, of_gradient, of_buffer, limit = c[0], c[1], c[2], c[3], c[4], c[5], c[9]
    for i in range(param.size):
        g = _limited(grad[i] * scale, limit) + decay * param[i]
        b = keep * buffer[i] + take * g
        buffer[i] = b
        param[i] -= of_gradient * g + of_buffer * b


@kernel("onnxruntime", "graphc::Adam", inplace=_in_place("Adam"))
def adam(k: Binding) -> Run:
    return _bind_adam(k, "Adam", decoupled=False)


@kernel("onnxruntime", "graphc::AdamW", inplace=_in_place("AdamW"))
def adamw(k: Binding) -> Run:
    return _bind_adam(k, "AdamW", decoupled=True)


def _bind_adam(k: Binding, op: str, *, decoupled: bool) -> Run:
    (param, first, second), settle = _state(k, op)
    step, lr, divisor = _number(k, 4), _number(k, 5), _number(k, 6)
    a = k.attributes
    beta1, beta2, eps, decay = a["beta1"], a["beta2"], a["eps"], a["weight_decay"]

    def write(c: Array) -> None:
        count, size = step(), lr()
        c[0], c[1] = _inverse(divisor()), 0.0 if decoupled else decay
        c[2], c[3], c[4] = 1.0 - beta1, beta2, 1.0 - beta2
        c[5], c[6], c[7] = size * _inverse(1.0 - beta1**count), _inverse(math.sqrt(1.0 - beta2**count)), eps
        c[8] = 1.0 - size * decay if decoupled else 1.0

    return _update(k, _adam, [param, given(k.inputs, 2)[1].reshape(-1), first, second], settle, write)


@jit
def _adam(param, grad, first, second, c, start, stop):
    param, grad, first, second = param[start:stop], grad[start:stop], first[start:stop], second[start:stop]
    scale, decay, step1, keep2, step2, size, correction = c[0], c[1], c[2], c[3], c[4], c[5], c[6]
    eps, shrink, limit = c[7], c[8], c[9]
    for i in range(param.size):
        p = param[i]
        g = _limited(grad[i] * scale, limit) + decay * p
        m = first[i] + (g - first[i]) * step1
        v = second[i] * keep2 + g * g * step2
        first[i] = m
        second[i] = v
        param[i] = p * shrink - size * (m / (np.sqrt(v) * correction + eps))


@kernel("onnxruntime", "graphc::Adagrad", inplace=_in_place("Adagrad"))
def adagrad(k: Binding) -> Run:
    (param, total), settle = _state(k, "Adagrad")
    step, lr, divisor = _number(k, 3), _number(k, 4), _number(k, 5)
    lr_decay, eps, decay = k.attributes["lr_decay"], k.attributes["eps"], k.attributes["weight_decay"]

    def write(c: Array) -> None:
        c[0], c[1], c[2], c[3] = _inverse(divisor()), decay, lr() / (1.0 + (step() - 1) * lr_decay), eps

    return _update(k, _adagrad, [param, given(k.inputs, 2)[1].reshape(-1), total], settle, write)


@jit
def _adagrad(param, grad, total, c, start, stop):
    param, grad, total = param[start:stop], grad[start:stop], total[start:stop]
    scale, decay, size, eps, limit = c[0], c[1], c[2], c[3], c[9]
    for i in range(param.size):
        g = _limited(grad[i] * scale, limit) + decay * param[i]
        s = total[i] + g * g
        total[i] = s
        param[i] -= size * (g / (np.sqrt(s) + eps))


@kernel("onnxruntime", "graphc::RMSprop", inplace=_in_place("RMSprop"))
def rmsprop(k: Binding) -> Run:
    state, settle = _state(k, "RMSprop")
    lr, divisor = _number(k, 5), _number(k, 6)
    a = k.attributes
    alpha, eps, momentum, decay = a["alpha"], a["eps"], a["momentum"], a["weight_decay"]

    def write(c: Array) -> None:
        c[0], c[1], c[2], c[3], c[4], c[5], c[6] = _inverse(divisor()), decay, alpha, 1.0 - alpha, eps, momentum, lr()

    return _update(k, _rmsprop, [state[0], given(k.inputs, 2)[1].reshape(-1), *state[1:]], settle, write)


@jit
def _rmsprop(param, grad, square, average, buffer, c, start, stop):
    scale, decay, keep, take, eps, momentum, lr, limit = c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[9]
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


@kernel("onnxruntime", "graphc::RunningAverage", inplace=_in_place("RunningAverage"))
def running_average(k: Binding) -> Run:
    (running,), settle = _state(k, "RunningAverage")
    momentum, count = k.attributes["momentum"], _number(k, 2)

    def write(c: Array) -> None:
        c[0], c[1] = momentum, (1.0 - momentum) * _inverse(count())

    return _update(k, _running_average, [running, given(k.inputs, 2)[1].reshape(-1)], settle, write)


@jit
def _running_average(running, batch, c, start, stop):
    running, batch = running[start:stop], batch[start:stop]
    keep, take = c[0], c[1]
    for i in range(running.size):
        running[i] = running[i] * keep + batch[i] * take


@kernel("onnxruntime", "graphc::Increment", dtypes=(ir.DataType.INT64,), inplace=_in_place("Increment"))
def increment(k: Binding) -> Run:
    (step,), (next_step,) = given(k.inputs, 1), given(k.outputs, 1)

    skipped = _skipped(k)

    def run() -> None:
        np.add(step, 0 if skipped() else 1, out=next_step)

    return run


@kernel("onnxruntime", "graphc::AnyNonFinite", dtypes=(ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16))
def any_non_finite(k: Binding) -> Run:
    (skip,) = given(k.outputs, 1)
    counts = [bind_nonfinite_count(array, k.pool) for array in given(k.inputs, len(k.inputs))]

    def run() -> None:
        skip[...] = any(count() for count in counts)

    return run


def bind_nonfinite_count(array: Array, pool: Pool) -> Callable[[], int]:
    """A function that counts the NaN and infinite elements of a C-contiguous float32, float16 or bfloat16 array."""
    if array.dtype.itemsize == 2:
        bits, exponent = array.reshape(-1).view(np.int16), 0x7C00 if array.dtype == np.float16 else 0x7F80
    else:
        bits, exponent = array.reshape(-1).view(np.int32), 0x7F800000
    counts = np.zeros(max(1, min(pool.threads, bits.size // GRAIN)), dtype=np.int64)
    count = pool.bind(_count_nonfinite_parts, (bits, np.array([exponent], bits.dtype), counts), counts.size)

    def run() -> int:
        count()
        return int(counts.sum())

    return run


@exact
def _count_nonfinite(bits, exponent):
    count = 0
    for i in range(bits.size):
        count += (bits[i] & exponent) == exponent
    return count


@exact
def _count_nonfinite_parts(bits, exponent, counts, start, stop):
    parts = counts.size
    for part in range(start, stop):
        counts[part] = _count_nonfinite(bits[bits.size * part // parts : bits.size * (part + 1) // parts], exponent[0])
