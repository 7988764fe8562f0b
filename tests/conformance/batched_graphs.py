"""Small random classifiers whose values all have the batch in front, for comparing strategies: micro-batches, workers, stages.

No op mixes samples, so that every strategy computes what one worker computes on the whole batch. Shapes below leave the batch
out. A graph holds parameters ``w0`` …, an input ``x``, and ends in a row of three scores ``y``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.data import share
from graphc.ir.text import from_text

MOST = 4_000
"""Elements of a sample of a value."""

UNARY = ("Relu", "Tanh", "Sigmoid", "Neg", "Abs", "Erf", "Softplus", "Gelu", "HardSwish", "Elu", "Mish", "Sin", "Softsign")
BINARY = ("Add", "Mul", "Sub", "Max", "Min", "Mean", "Sum")

Shape = tuple[int, ...]
Array = np.ndarray[Any, Any]


class BatchedGraph:
    """A graph that a seed determines.

    Attributes:
        model: with random parameters.
    """

    def __init__(self, seed: int) -> None:
        self._rng, self._seed = np.random.default_rng(seed), seed
        self._lines: list[str] = []
        self._parameters: dict[str, Shape] = {}
        self._base = tuple(int(n) for n in self._rng.choice([1, 2, 3, 4, 5, 8, 12], self._whole(1, 4)))
        self._values: list[tuple[str, Shape]] = [("x", self._base)]
        kinds: list[Callable[[str, Shape], None]] = [
            *(self._unary, self._binary, self._scaled, self._linear, self._product, self._transpose, self._reshape),
            *(self._reduce, self._softmax, self._norm, self._convolution, self._pool, self._concat, self._slice, self._split),
            *(self._pad, self._gather, self._expand, self._tile, self._sum, self._largest, self._embedding, self._picked),
            *(self._einsum, self._recurrent, self._resize, self._channels, self._dropout, self._loop, self._choice),
            *(self._counted, self._linear, self._scaled, self._convolution, self._binary),
        ]
        for _ in range(self._whole(4, 14)):
            recent = self._values[-6:]
            kinds[self._whole(0, len(kinds))](*recent[self._whole(0, len(recent))])
        last, shape = self._values[-1]
        self._lines.append(f"flat = Flatten <axis = 1> ({last})")
        self._lines.append(f"y = MatMul (flat, {self._parameter((int(np.prod(shape)), 3))})")
        held = ", ".join(f"float{list(shape)} {name} = {{}}" for name, shape in self._parameters.items())
        body = "\n".join(self._lines)
        self.text = (
            f'<ir_version: 10, opset_import: ["" : 21]> main ({self._type(self._base)} x) => (float[N,3] y) <{held}>'
            f" {{\n{body}\n}}"
        )
        self.model = from_text(self.text)
        for name, shape in self._parameters.items():
            fan = max(1, int(np.prod(shape[:-1])))
            array = (self._rng.standard_normal(shape) / np.sqrt(fan)).astype(np.float32)
            self.model.graph.initializers[name].const_value = ir.Tensor(array, name=name)

    def feeds(self, count: int) -> dict[str, Array]:
        """A batch of ``count`` samples."""
        rng = np.random.default_rng([self._seed, count])
        x = rng.standard_normal((count, *self._base)).astype(np.float32)
        return {"x": x, "label": rng.integers(0, 3, count)}

    # Making -----------------------------------------------------------------------------------------------------------

    def _whole(self, low: int, high: int) -> int:
        return int(self._rng.integers(low, high))

    def _type(self, shape: Shape) -> str:
        return f"float[{','.join(['N', *map(str, shape)])}]"

    def _parameter(self, shape: Shape) -> str:
        name = f"w{len(self._parameters)}"
        self._parameters[name] = shape
        return name

    def _const(self, value: Any, kind: str = "int64") -> str:
        array, name = np.asarray(value), f"c{len(self._lines)}"
        dims = f"[{','.join(map(str, array.shape))}]" if array.ndim else ""
        self._lines.append(f"{name} = Constant <value = {kind}{dims} {{{', '.join(map(str, array.reshape(-1).tolist()))}}}> ()")
        return name

    def _step(self, text: str) -> str:
        name = f"t{len(self._lines)}"
        self._lines.append(f"{name} = {text}")
        return name

    def _emit(self, shape: Any, text: str) -> None:
        name = f"v{len(self._lines)}"
        self._lines.append(f"{name} = {text}")
        self._values.append((name, tuple(int(n) for n in shape)))

    def _index(self, v: str, size: int) -> str:
        """Integers below ``size`` that depend on the values of ``v``."""
        scaled = self._step(f"Mul ({self._step(f'Abs ({v})')}, {self._const(2.0, 'float')})")
        return self._step(f"Min ({self._step(f'Cast <to = 7> ({scaled})')}, {self._const(size - 1)})")

    # Ops --------------------------------------------------------------------------------------------------------------

    def _unary(self, v: str, shape: Shape) -> None:
        self._emit(shape, f"{self._rng.choice(UNARY)} ({v})")

    def _binary(self, v: str, shape: Shape) -> None:
        fitting = []
        for name, other in self._values:
            if len(other) == len(shape) and all(a == b or 1 in (a, b) for a, b in zip(shape, other, strict=True)):
                fitting.append((name, np.broadcast_shapes(shape, other)))
        other, joined = fitting[self._whole(0, len(fitting))]
        if np.prod(joined) <= MOST:
            self._emit(joined, f"{self._rng.choice(BINARY)} ({v}, {other})")

    def _scaled(self, v: str, shape: Shape) -> None:
        own = tuple(n if self._rng.random() < 0.6 else 1 for n in shape[self._whole(0, len(shape)) :])
        self._emit(shape, f"{self._rng.choice(['Add', 'Mul', 'Sub', 'Max'])} ({v}, {self._parameter(own)})")

    def _linear(self, v: str, shape: Shape) -> None:
        width = self._whole(1, 9)
        if len(shape) == 1:
            weight, bias = self._parameter((shape[0], width)), self._parameter((width,))
            self._emit((width,), f"Gemm ({v}, {weight}, {bias})")
        else:
            self._emit((*shape[:-1], width), f"MatMul ({v}, {self._parameter((shape[-1], width))})")

    def _product(self, v: str, shape: Shape) -> None:
        if len(shape) > 1:
            perm = [*range(len(shape) - 1), len(shape), len(shape) - 1]
            scores = self._step(f"MatMul ({v}, {self._step(f'Transpose <perm = {perm}> ({v})')})")
            self._emit((*shape[:-1], shape[-2]), f"Mul ({scores}, {self._const(0.4, 'float')})")

    def _transpose(self, v: str, shape: Shape) -> None:
        perm = [int(k) for k in self._rng.permutation(len(shape))]
        self._emit([shape[k] for k in perm], f"Transpose <perm = {[0, *(k + 1 for k in perm)]}> ({v})")

    def _reshape(self, v: str, shape: Shape) -> None:
        size = int(np.prod(shape))
        first = int(self._rng.choice([d for d in (1, 2, 3, 4, 8) if size % d == 0]))
        target = [[0, first, size // first], [-1, first, size // first], [0, first, -1]][self._whole(0, 3)]
        self._emit((first, size // first), f"Reshape ({v}, {self._const(target)})")

    def _counted(self, v: str, shape: Shape) -> None:
        """Flattened to a shape that the graph computes."""
        batch = self._step(f"Gather ({self._step(f'Shape ({v})')}, {self._const([0])})")
        target = self._step(f"Concat <axis = 0> ({batch}, {self._const([-1])})")
        self._emit((np.prod(shape),), f"Reshape ({v}, {target})")

    def _reduce(self, v: str, shape: Shape) -> None:
        axis, keep = self._whole(0, len(shape)), self._whole(0, 2)
        left = [1 if k == axis else n for k, n in enumerate(shape) if keep or k != axis]
        if left:
            op = self._rng.choice(["ReduceMean", "ReduceSum", "ReduceMax", "ReduceLogSumExp", "ReduceSumSquare", "ReduceL1"])
            self._emit(left, f"{op} <keepdims = {keep}> ({v}, {self._const([axis + 1])})")

    def _softmax(self, v: str, shape: Shape) -> None:
        self._emit(shape, f"{self._rng.choice(['Softmax', 'LogSoftmax'])} <axis = {self._whole(1, len(shape) + 1)}> ({v})")

    def _norm(self, v: str, shape: Shape) -> None:
        if shape[-1] > 2:
            self._emit(shape, f"LayerNormalization <axis = -1> ({v}, {self._parameter((shape[-1],))})")

    def _convolution(self, v: str, shape: Shape) -> None:
        if len(shape) > 1:
            kernel = [self._whole(1, min(3, n) + 1) for n in shape[1:]]
            weight, bias = self._parameter((2, shape[0], *kernel)), self._parameter((2,))
            left = [n - k + 1 for n, k in zip(shape[1:], kernel, strict=True)]
            self._emit((2, *left), f"Conv ({v}, {weight}, {bias})")

    def _pool(self, v: str, shape: Shape) -> None:
        if len(shape) > 1:
            op = self._rng.choice(["GlobalAveragePool", "GlobalMaxPool"])
            self._emit((shape[0], *[1] * (len(shape) - 1)), f"{op} ({v})")

    def _concat(self, v: str, shape: Shape) -> None:
        axis = self._whole(0, len(shape))
        if np.prod(shape) * 2 <= MOST:
            self._emit([2 * n if k == axis else n for k, n in enumerate(shape)], f"Concat <axis = {axis + 1}> ({v}, {v})")

    def _slice(self, v: str, shape: Shape) -> None:
        axis = self._whole(0, len(shape))
        first = self._whole(0, shape[axis])
        operands = ", ".join(self._const([k]) for k in (first, shape[axis], axis + 1, 1))
        self._emit([n - first if k == axis else n for k, n in enumerate(shape)], f"Slice ({v}, {operands})")

    def _split(self, v: str, shape: Shape) -> None:
        if shape[-1] % 2 == 0:
            name, half = f"v{len(self._lines)}", (*shape[:-1], shape[-1] // 2)
            self._lines.append(f"{name}a, {name}b = Split <axis = -1, num_outputs = 2> ({v})")
            self._values += [(f"{name}a", half), (f"{name}b", half)]

    def _pad(self, v: str, shape: Shape) -> None:
        axis, pads = self._whole(0, len(shape)), [self._whole(0, 3), self._whole(0, 3)]
        target = [n + sum(pads) if k == axis else n for k, n in enumerate(shape)]
        mode = self._rng.choice(["constant", "edge"])
        self._emit(target, f'Pad <mode = "{mode}"> ({v}, {self._const(pads)}, , {self._const([axis + 1])})')

    def _gather(self, v: str, shape: Shape) -> None:
        axis, count = self._whole(0, len(shape)), self._whole(1, 5)
        places = self._const([self._whole(0, shape[axis]) for _ in range(count)])
        self._emit([count if k == axis else n for k, n in enumerate(shape)], f"Gather <axis = {axis + 1}> ({v}, {places})")

    def _expand(self, v: str, shape: Shape) -> None:
        if len(shape) < 3 and np.prod(shape) * 3 <= MOST:
            row = self._step(f"Unsqueeze ({v}, {self._const([1])})")
            self._emit((3, *shape), f"Expand ({row}, {self._const([1, 3, *[1] * len(shape)])})")

    def _tile(self, v: str, shape: Shape) -> None:
        times = [self._whole(1, 3) for _ in shape]
        if np.prod(shape) * np.prod(times) <= MOST:
            self._emit([a * b for a, b in zip(shape, times, strict=True)], f"Tile ({v}, {self._const([1, *times])})")

    def _sum(self, v: str, shape: Shape) -> None:
        self._emit(shape, f"CumSum ({v}, {self._const(self._whole(1, len(shape) + 1))})")

    def _largest(self, v: str, shape: Shape) -> None:
        axis = self._whole(0, len(shape))
        count, name = self._whole(1, shape[axis] + 1), f"v{len(self._lines)}"
        self._lines.append(f"{name}, {name}i = TopK <axis = {axis + 1}> ({v}, {self._const([count])})")
        self._values.append((name, tuple(count if k == axis else n for k, n in enumerate(shape))))

    def _embedding(self, v: str, shape: Shape) -> None:
        if len(shape) < 3 and np.prod(shape) * 3 <= MOST:
            index = self._index(v, 7)
            self._emit((*shape, 3), f"Gather ({self._parameter((7, 3))}, {index})")

    def _picked(self, v: str, shape: Shape) -> None:
        axis = self._whole(0, len(shape))
        index = self._index(v, shape[axis])
        if self._rng.random() < 0.5:
            self._emit(shape, f"GatherElements <axis = {axis + 1}> ({v}, {index})")
        else:
            bent = self._step(f"Sin ({v})")
            self._emit(shape, f'ScatterElements <axis = {axis + 1}, reduction = "add"> ({bent}, {index}, {v})')

    def _einsum(self, v: str, shape: Shape) -> None:
        letters, width, axis = "abc"[: len(shape)], self._whole(1, 5), self._whole(0, len(shape))
        sizes = {**dict(zip(letters, shape, strict=True)), "z": width}
        order = "".join(self._rng.permutation(list(letters.replace(letters[axis], "z"))))
        equation = f"n{letters},{letters[axis]}z->n{order}"
        weight = self._parameter((shape[axis], width))
        self._emit([sizes[k] for k in order], f'Einsum <equation = "{equation}"> ({v}, {weight})')

    def _recurrent(self, v: str, shape: Shape) -> None:
        if len(shape) == 2:
            op, gates = [("LSTM", 4), ("GRU", 3), ("RNN", 1)][self._whole(0, 3)]
            width = self._whole(1, 5)
            turned = self._step(f"Transpose <perm = [1, 0, 2]> ({v})")
            weights = [self._parameter((1, gates * width, n)) for n in (shape[1], width)]
            found = self._step(f"{op} <hidden_size = {width}> ({turned}, {', '.join(weights)})")
            found = self._step(f"Squeeze ({found}, {self._const([1])})")
            self._emit((shape[0], width), f"Transpose <perm = [1, 0, 2]> ({found})")

    def _resize(self, v: str, shape: Shape) -> None:
        if len(shape) == 3 and np.prod(shape) * 4 <= MOST:
            factors = self._const([1.0, 1.0, 2.0, 2.0], "float")
            mode = self._rng.choice(["nearest", "linear"])
            self._emit((shape[0], 2 * shape[1], 2 * shape[2]), f'Resize <mode = "{mode}"> ({v}, , {factors})')

    def _channels(self, v: str, shape: Shape) -> None:
        if len(shape) == 3 and shape[0] % 4 == 0:
            self._emit((shape[0] // 4, 2 * shape[1], 2 * shape[2]), f"DepthToSpace <blocksize = 2> ({v})")

    def _dropout(self, v: str, shape: Shape) -> None:
        on, ratio = self._const(1, "bool"), self._const(0.3, "float")
        self._emit(shape, f"Dropout <seed = {self._whole(0, 99)}> ({v}, {ratio}, {on})")

    def _loop(self, v: str, shape: Shape) -> None:
        k, weight, count = len(self._lines), self._parameter((shape[-1],)), self._const(self._whole(1, 4))
        body = (
            f"b{k} (int64 i{k}, bool k{k}, {self._type(shape)} s{k}) => (bool o{k}, {self._type(shape)} r{k})"
            f" {{ o{k} = Identity (k{k})\n m{k} = Mul (s{k}, {weight})\n r{k} = Tanh (m{k}) }}"
        )
        self._emit(shape, f"Loop <body = {body}> ({count}, , {v})")

    def _choice(self, v: str, shape: Shape) -> None:
        """An If whose condition is known: one of its branches goes."""
        k, weight = len(self._lines), self._parameter((shape[-1],))
        size = self._step(f"ReduceProd <keepdims = 0> ({self._step(f'Shape <start = 1> ({v})')})")
        large = self._step(f"Greater ({size}, {self._const(self._whole(0, 30))})")
        branches = [
            f"{name} = {label}{k} () => ({self._type(shape)} {label}y{k}) {{ {label}y{k} = {op} ({v}, {weight}) }}"
            for name, label, op in (("then_branch", "p", "Mul"), ("else_branch", "q", "Add"))
        ]
        self._emit(shape, f"If <{', '.join(branches)}> ({large})")


def cut(feeds: dict[str, Array], rank: int, size: int) -> tuple[dict[str, Array], int]:
    """The share of a worker, and the index of its first sample in the batch."""
    mine = share(len(feeds["x"]), rank, size)
    return {name: array[mine] for name, array in feeds.items()}, mine.start
