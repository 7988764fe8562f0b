"""Small random graphs of shapes, products, reductions and activations, for comparing backends.

Rules and kernels are tested one by one; what fusion, index arithmetic and a runtime's graph optimisations make of their
neighbours is not. A graph holds parameters ``w0`` …, an input ``x``, and ends in a row of two scores ``y``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.ir.text import from_text

MOST = 20_000
"""Elements of a value."""

UNARY = ("Relu", "Tanh", "Sigmoid", "Neg", "Abs", "Erf", "Softplus", "Gelu", "HardSwish", "Elu", "Mish", "Identity")
BINARY = ("Add", "Mul", "Sub", "Max", "Min")


class RandomGraph:
    """A graph that a seed determines.

    Attributes:
        model: with random parameters.
        x: a feed.
    """

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._lines: list[str] = []
        self._parameters: dict[str, tuple[int, ...]] = {}
        self._values: list[tuple[str, tuple[int, ...]]] = []
        base = self._shape()
        for _ in range(self._whole(1, 4)):
            self._parameter(base if self._rng.random() < 0.5 else self._shape())
        self._values.append(("x", base))
        kinds: list[Callable[[str, tuple[int, ...]], None]] = [
            *(self._unary, self._binary, self._product, self._transpose, self._reshape, self._unsqueeze, self._reduce),
            *(self._softmax, self._concat, self._slice, self._gather, self._sum, self._pad, self._expand, self._norm),
            *(self._binary, self._product, self._slice, self._split, self._convolution, self._pool, self._where),
        ]
        for _ in range(self._whole(4, 14)):
            recent = self._values[max(0, len(self._values) - 6) :]
            kinds[self._whole(0, len(kinds))](*recent[self._whole(0, len(recent))])
        self._scores(self._values[-1][0])
        held = ", ".join(f"float{list(shape)} {name} = {{}}" for name, shape in self._parameters.items())
        body = "\n".join(self._lines)
        self.text = (
            f'<ir_version: 10, opset_import: ["" : 21]> main (float{list(base)} x) => (float[1,2] y) <{held}> {{\n{body}\n}}'
        )
        self.model = from_text(self.text)
        for name, shape in self._parameters.items():
            array = self._rng.standard_normal(shape).astype(np.float32)
            self.model.graph.initializers[name].const_value = ir.Tensor(array, name=name)
        self.x = self._rng.standard_normal(base).astype(np.float32)

    # Making -----------------------------------------------------------------------------------------------------------

    def _whole(self, low: int, high: int) -> int:
        return int(self._rng.integers(low, high))

    def _wholes(self, high: int, count: int) -> list[int]:
        return [int(k) for k in self._rng.integers(0, high, count)]

    def _shape(self) -> tuple[int, ...]:
        return tuple(int(n) for n in self._rng.choice([1, 2, 3, 4, 5, 8, 17], self._whole(1, 5)))

    def _parameter(self, shape: tuple[int, ...]) -> str:
        name = f"w{len(self._parameters)}"
        self._parameters[name] = shape
        self._values.append((name, shape))
        return name

    def _const(self, value: Any) -> str:
        array, name = np.asarray(value, dtype=np.int64), f"c{len(self._lines)}"
        dims = f"[{','.join(map(str, array.shape))}]" if array.ndim else ""
        numbers = ", ".join(map(str, array.reshape(-1)))
        self._lines.append(f"{name} = Constant <value = int64{dims} {{{numbers}}}> ()")
        return name

    def _emit(self, shape: Any, text: str) -> None:
        name = f"v{len(self._lines)}"
        self._lines.append(f"{name} = {text}")
        self._values.append((name, tuple(int(n) for n in shape)))

    def _scores(self, value: str) -> None:
        row, last = self._const([1, -1]), self._const([1])
        self._lines += [
            f"flat = Reshape ({value}, {row})",
            "bent = Sin (flat)",
            f"first = ReduceMean <keepdims = 1> (flat, {last})",
            f"second = ReduceMean <keepdims = 1> (bent, {last})",
            "y = Concat <axis = 1> (first, second)",
        ]

    # Ops --------------------------------------------------------------------------------------------------------------

    def _unary(self, v: str, shape: tuple[int, ...]) -> None:
        self._emit(shape, f"{self._rng.choice(UNARY)} ({v})")

    def _partners(self, join: Callable[[Any, Any], tuple[int, ...]], shape: tuple[int, ...]) -> list[tuple[str, Any]]:
        found = []
        for name, other in self._values:
            try:
                joined = join(shape, other)
            except ValueError:
                continue
            if joined and np.prod(joined) <= MOST:
                found.append((name, joined))
        return found

    def _binary(self, v: str, shape: tuple[int, ...]) -> None:
        found = self._partners(np.broadcast_shapes, shape)
        if found:
            other, joined = found[self._whole(0, len(found))]
            a, b = (v, other) if self._rng.random() < 0.5 else (other, v)
            self._emit(joined, f"{self._rng.choice(BINARY)} ({a}, {b})")

    def _product(self, v: str, shape: tuple[int, ...]) -> None:
        found = self._partners(lambda a, b: np.matmul(np.zeros(a), np.zeros(b)).shape, shape)
        if found:
            other, joined = found[self._whole(0, len(found))]
            self._emit(joined, f"MatMul ({v}, {other})")

    def _transpose(self, v: str, shape: tuple[int, ...]) -> None:
        perm = [int(k) for k in self._rng.permutation(len(shape))]
        self._emit([shape[k] for k in perm], f"Transpose <perm = {perm}> ({v})")

    def _reshape(self, v: str, shape: tuple[int, ...]) -> None:
        size = int(np.prod(shape))
        first = int(self._rng.choice([d for d in (1, 2, 3, 4, 8, 16) if size % d == 0]))
        self._emit((first, size // first), f"Reshape ({v}, {self._const([first, size // first])})")

    def _unsqueeze(self, v: str, shape: tuple[int, ...]) -> None:
        if len(shape) < 4:
            self._emit((1, *shape), f"Unsqueeze ({v}, {self._const([0])})")

    def _reduce(self, v: str, shape: tuple[int, ...]) -> None:
        axes, keep = sorted(set(self._wholes(len(shape), self._whole(1, 3)))), self._whole(0, 2)
        left = [1 if k in axes else n for k, n in enumerate(shape) if keep or k not in axes]
        if left:
            op = self._rng.choice(["ReduceMean", "ReduceSum", "ReduceMax", "ReduceLogSumExp"])
            self._emit(left, f"{op} <keepdims = {keep}> ({v}, {self._const(axes)})")

    def _softmax(self, v: str, shape: tuple[int, ...]) -> None:
        op = self._rng.choice(["Softmax", "LogSoftmax"])
        self._emit(shape, f"{op} <axis = {self._whole(0, len(shape))}> ({v})")

    def _concat(self, v: str, shape: tuple[int, ...]) -> None:
        axis = self._whole(0, len(shape))
        self._emit([2 * n if k == axis else n for k, n in enumerate(shape)], f"Concat <axis = {axis}> ({v}, {v})")

    def _slice(self, v: str, shape: tuple[int, ...]) -> None:
        axis = self._whole(0, len(shape))
        size, step = shape[axis], int(self._rng.choice([-2, -1, 1, 1, 2]))
        first, last = sorted(self._wholes(size, 2))
        begin, end = (first, last + 1) if step > 0 else (last, first - 1)
        count = len(range(begin, end, step))
        end = end if end >= 0 else -size - 1
        operands = ", ".join(self._const([k]) for k in (begin, end, axis, step))
        self._emit([count if k == axis else n for k, n in enumerate(shape)], f"Slice ({v}, {operands})")

    def _gather(self, v: str, shape: tuple[int, ...]) -> None:
        axis, count = self._whole(0, len(shape)), self._whole(1, 5)
        places = self._const(self._wholes(shape[axis], count))
        self._emit([count if k == axis else n for k, n in enumerate(shape)], f"Gather <axis = {axis}> ({v}, {places})")

    def _sum(self, v: str, shape: tuple[int, ...]) -> None:
        self._emit(shape, f"CumSum ({v}, {self._const(self._whole(0, len(shape)))})")

    def _pad(self, v: str, shape: tuple[int, ...]) -> None:
        axis, pads = self._whole(0, len(shape)), self._wholes(3, 2)
        target = [n + sum(pads) if k == axis else n for k, n in enumerate(shape)]
        self._emit(target, f"Pad ({v}, {self._const(pads)}, , {self._const([axis])})")

    def _expand(self, v: str, shape: tuple[int, ...]) -> None:
        if len(shape) < 4 and np.prod(shape) * 3 <= MOST:
            self._emit((3, *shape), f"Expand ({v}, {self._const((3, *shape))})")

    def _norm(self, v: str, shape: tuple[int, ...]) -> None:
        if shape[-1] > 2:
            self._emit(shape, f"LayerNormalization <axis = -1> ({v}, {self._parameter((shape[-1],))})")

    def _split(self, v: str, shape: tuple[int, ...]) -> None:
        if shape[-1] % 2 == 0:
            name, half = f"v{len(self._lines)}", (*shape[:-1], shape[-1] // 2)
            self._lines.append(f"{name}a, {name}b = Split <axis = -1, num_outputs = 2> ({v})")
            self._values += [(f"{name}a", half), (f"{name}b", half)]

    def _convolution(self, v: str, shape: tuple[int, ...]) -> None:
        if len(shape) == 4:
            kernel = [self._whole(1, min(3, n) + 1) for n in shape[2:]]
            weight = self._parameter((2, shape[1], *kernel))
            left = [n - k + 1 for n, k in zip(shape[2:], kernel, strict=True)]
            self._emit((shape[0], 2, *left), f"Conv ({v}, {weight})")

    def _pool(self, v: str, shape: tuple[int, ...]) -> None:
        if len(shape) == 4:
            kernel = [self._whole(1, min(3, n) + 1) for n in shape[2:]]
            left = [(n - k) // 2 + 1 for n, k in zip(shape[2:], kernel, strict=True)]
            op = self._rng.choice(["MaxPool", "AveragePool"])
            self._emit((*shape[:2], *left), f"{op} <kernel_shape = {kernel}, strides = [2, 2]> ({v})")

    def _where(self, v: str, shape: tuple[int, ...]) -> None:
        name = f"v{len(self._lines)}"
        self._lines += [f"{name}t = Tanh ({v})", f"{name}c = Greater ({v}, {name}t)"]
        self._emit(shape, f"Where ({name}c, {v}, {name}t)")
