"""Times this backend beside oneDNN's primitives: why it leaves some of them out.

    python scripts/against_onednn.py --threads 2

oneDNN's primitives work in the layouts that they choose, and no copy to or from these is counted: the times are those of a
program whose layout pass were perfect. This backend runs the nodes as a plan does, over arrays as ONNX has them.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.backend import Backend, Pool, make_backend
from graphc.backends.onnxruntime.kernels.common.scratch import on_lines
from graphc.backends.onnxruntime.kernels.onednn.binding import Handle, OneDNN, library
from graphc.backends.onnxruntime.kernels.onednn.primitives import MatmulPrimitive, Primitive
from graphc.backends.onnxruntime.pool import ThreadPool
from graphc.device import Run
from graphc.distributed.world import available_cores
from graphc.ir import IR_VERSION, OPSET
from graphc.ir.builder import Builder
from graphc.ir.facts import static_dims
from graphc.plan.partition import make_plan
from graphc.runtime.executor import Executor
from graphc.runtime.state import State

# values of the C enumerations in dnnl_types.h
_TRAINING, _BACKWARD, _DIRECT, _SCALE_AND_SHIFT = 64, 128, 1, 6
_SRC, _DST, _WEIGHTS, _BIAS, _MEAN, _VARIANCE, _SCALE, _SHIFT, _WORKSPACE = 1, 17, 33, 41, 49, 50, 51, 52, 64
_DIFF_SRC, _DIFF_DST, _DIFF_WEIGHTS, _DIFF_BIAS, _DIFF_SCALE, _DIFF_SHIFT = 129, 145, 161, 169, 255, 256
_OF_STEPS = 1  # added to the weights of a recurrent layer: those that the states meet
_LAYOUT_OF_OPERAND = 255
_ROLES = {"src": _SRC, "dst": _DST, "scale": _SCALE, "shift": _SHIFT, "diff_dst": _DIFF_DST, "diff_shift": _DIFF_SHIFT}
_RESIDUAL = 32768 | 2
_POOLS, _GELU, _ADD = {"MaxPool": 0x1FF, "AveragePool": 0x3FF}, 49, 0x1FFF0
_DECONVOLUTION, _TANH, _FROM_FIRST = 0xA, 0x21, 1
_GATES = {"lstm": (4, 4), "lbr_gru": (3, 4), "vanilla_rnn": (1, 1)}
"""Cells, and the gates and biases of a layer."""
_EPSILON = ctypes.c_float(1e-5)
_Dims = ctypes.c_int64 * 12


class Bare(Primitive):
    """Primitives over memory of their own, in layouts that they choose."""

    def __init__(self, lib: OneDNN, pool: Pool, operands: dict[tuple[int, int], Any]) -> None:
        super().__init__(lib, [], pool)
        self._operands = operands

    def described(self, kind: str, *arguments: Any) -> Handle:
        """The description of a primitive: of convolutions, pooling or norms, forward or backward."""
        return self._create(f"dnnl_{kind}_primitive_desc_create", self._lib.engine, *arguments)

    def run(self, description: Handle, *roles: int, own: Mapping[int, int] = MappingProxyType({})) -> Run:
        """Bind a primitive over memory for its operands.

        Args:
            roles: operands whose layouts the description knows.
            own: operands that are vectors, and how many numbers they hold.
        """
        arguments = []
        for role in (*roles, *own):
            wanted = self._plain((own[role],)) if role in own else self.layout(description, role)
            count = -(-int(self._lib.size(wanted)) // 4)
            array = self._operands.get((role, count))
            if array is None:
                numbers = np.random.default_rng(role).standard_normal(count)
                array = self._operands[role, count] = _aligned(count)
                array[:] = np.abs(numbers) if role == _VARIANCE else numbers
            arguments.append((role, self._memory(wanted, array.ctypes.data)))
        self._call(description, arguments)
        self._scratch.reserve(self._used)
        return self.runner()

    def layout(self, description: Handle, role: int) -> Handle:
        """The layout that a described primitive has chosen for an operand; it lives as long as the description."""
        return ctypes.c_void_p(self._lib.query(description, _LAYOUT_OF_OPERAND, role))


class Primitives:
    """oneDNN's side of the cases."""

    def __init__(self, lib: OneDNN, pool: Pool) -> None:
        self._lib, self._pool = lib, pool
        lib.use_threads(pool.threads)  # primitives divide their work when they are made
        self._operands: dict[tuple[int, int], Any] = {}  # gradients read what the forward pass reads
        self._about = self._bare()  # holds descriptions for others

    def _bare(self) -> Bare:
        return Bare(self._lib, self._pool, self._operands)

    def operand(self, name: str, count: int) -> Any:
        """The numbers of an operand, of which there are ``count``: ``src``, ``diff_dst``, ``scale`` and so on."""
        return self._operands[_ROLES[name], count]

    def convolution(self, x: Sequence[int], w: Sequence[int]) -> tuple[list[Run], Handle]:
        """The forward pass and both gradients of a convolution that keeps the size of images, and its results' layout.

        ``w`` begins with the number of groups where there are any.
        """
        return self._windows("convolution", _DIRECT, x, w, (x[0], math.prod(w[:-3]), *x[2:]), 1, w[-1] // 2)

    def deconvolution(self, x: Sequence[int], w: Sequence[int], step: int, pad: int) -> list[Run]:
        """The forward pass and both gradients of a deconvolution; ``w`` begins with the channels of its results."""
        y = (x[0], w[0], *((n - 1) * step - 2 * pad + w[-1] for n in x[2:]))
        return self._windows("deconvolution", _DECONVOLUTION, x, w, y, step, pad)[0]

    def _windows(
        self, kind: str, way: int, x: Sequence[int], w: Sequence[int], y: Sequence[int], step: int, pad: int
    ) -> tuple[list[Run], Handle]:
        about, attributes = self._about, self._lib.attributes[False]
        layouts = src, weights, dst = [about._free_choice(shape) for shape in (x, w, y)]
        geometry = (_Dims(step, step), _Dims(0, 0), _Dims(pad, pad), _Dims(pad, pad))
        forward = about.described(f"{kind}_forward", _TRAINING, way, src, weights, None, dst, *geometry, attributes)
        back = about.described(f"{kind}_backward_data", way, *layouts, *geometry, forward, attributes)
        sums = about.described(f"{kind}_backward_weights", way, src, weights, None, dst, *geometry, forward, attributes)
        runs = [
            self._bare().run(forward, _SRC, _WEIGHTS, _DST),
            self._bare().run(back, _DIFF_SRC, _WEIGHTS, _DIFF_DST),
            self._bare().run(sums, _SRC, _DIFF_WEIGHTS, _DIFF_DST),
        ]
        return runs, about.layout(forward, _DST)

    def norm(self, kind: str, layout: Handle, width: int, statistics: int) -> list[Run]:
        """Both directions of a norm over arrays of a layout.

        Args:
            width, statistics: numbers in the scale, and in the mean.
        """
        about, attributes = self._about, self._lib.attributes[False]
        means = [about._plain((statistics,))] if kind == "layer_normalization" else []
        tail = (*means, _EPSILON, _SCALE_AND_SHIFT)
        forward = about.described(f"{kind}_forward", _TRAINING, layout, layout, *tail, attributes)
        back = about.described(f"{kind}_backward", _BACKWARD, layout, layout, layout, *tail, forward, attributes)
        own = {_SCALE: width, _MEAN: statistics, _VARIANCE: statistics}
        shift = {_SHIFT: width}
        sums = {_DIFF_SCALE: width, _DIFF_SHIFT: width, **(shift if means else {})}  # as version 3.2 asks for
        return [
            self._bare().run(forward, _SRC, _DST, own=own | shift),
            self._bare().run(back, _SRC, _DIFF_DST, _DIFF_SRC, own=own | sums),
        ]

    def plain(self, *shape: int) -> Handle:
        """The layout of an array as numpy has it."""
        return self._about._plain(shape)

    def pool(self, op: str, x: Sequence[int], side: int, step: int, pad: int) -> list[Run]:
        """Both directions of a pool, over arrays in the layout of a convolution's results."""
        about, attributes = self._about, self._lib.attributes[False]
        _, layout = self.convolution(x, (x[1], x[1], 3, 3))
        y = (*x[:2], *((n + 2 * pad - side) // step + 1 for n in x[2:]))
        window = (_Dims(step, step), _Dims(side, side), _Dims(0, 0), _Dims(pad, pad), _Dims(pad, pad))
        to = about._free_choice(y)
        forward = about.described("pooling_forward", _TRAINING, _POOLS[op], layout, to, *window, attributes)
        back = about.described(
            "pooling_backward", _POOLS[op], layout, about.layout(forward, _DST), *window, forward, attributes
        )
        taps = [_WORKSPACE] if op == "MaxPool" else []
        return [
            self._bare().run(forward, _SRC, _DST, *taps),
            self._bare().run(back, _DIFF_SRC, _DIFF_DST, *taps),
        ]

    def recurrent(self, cell: str, time: int, batch: int, features: int, hidden: int) -> list[Run]:
        """Both directions of a layer from states of zeros. The forward pass keeps its workspace for the gradients."""
        about, attributes, (gates, biases) = self._about, self._lib.attributes[False], _GATES[cell]
        shapes = (time, batch, features), (1, 1, features, gates, hidden), (1, 1, hidden, gates, hidden), (1, 1, biases, hidden)
        x, of_inputs, of_states, bias = (about._free_choice(shape) for shape in shapes)
        y = about._free_choice((time, batch, hidden))
        cells, others = ([None], [None, None]) if cell == "lstm" else ([], [])  # no initial cells, peepholes and projection
        before, after = ([_TANH], [0, ctypes.c_float(0), ctypes.c_float(0)]) if cell == "vanilla_rnn" else ([], [0])
        operands = [x, None, *cells, of_inputs, of_states, *others, bias, y, None, *cells]
        forward = about.described(f"{cell}_forward", _TRAINING, *before, _FROM_FIRST, *operands, *after, attributes)
        back = about.described(
            f"{cell}_backward", _BACKWARD, *before, _FROM_FIRST, *operands, *operands, *after, forward, attributes
        )
        read = _SRC, _WEIGHTS, _WEIGHTS + _OF_STEPS, _BIAS, _DST, _WORKSPACE
        written = _DIFF_SRC, _DIFF_WEIGHTS, _DIFF_WEIGHTS + _OF_STEPS, _DIFF_BIAS
        return [self._bare().run(forward, *read), self._bare().run(back, *read, _DIFF_DST, *written)]

    def product(self, rows: int, depth: int, columns: int, *, residual: bool) -> list[Run]:
        """A product with its bias, and what follows in the same primitive: a residual, or Gelu."""
        shapes = ((rows, depth), (depth, columns), (rows, columns), (rows, columns), (columns,))
        a, b, c, other, bias = (_aligned(*shape) for shape in shapes)
        for operand in (a, b, other, bias):
            operand[:] = 1
        return [Followed(self._lib, a, b, c, bias, other if residual else None, self._pool).runner()]


class Followed(MatmulPrimitive):
    """A product that adds a residual, or applies Gelu, before it writes its results."""

    def __init__(self, lib: OneDNN, a: Any, b: Any, c: Any, bias: Any, residual: Any, pool: Pool) -> None:
        self._residual = residual
        super().__init__(lib, a, b, c, bias, shift=bias, pool=pool)  # a shift asks for attributes, which are those below

    def _scaled(self, scale: Any, shift: Any, vector: Sequence[int]) -> tuple[Handle, list[tuple[int, Handle]]]:
        lib, attributes, steps = self._lib, self._create("dnnl_primitive_attr_create"), self._create("dnnl_post_ops_create")
        lib.set_modes(attributes, low=False)
        operands = []
        if self._residual is None:
            lib.call("dnnl_post_ops_append_eltwise", steps, _GELU, ctypes.c_float(0), ctypes.c_float(0))
        else:
            layout = self._plain(self._residual.shape)
            lib.call("dnnl_post_ops_append_binary", steps, _ADD, layout)
            operands.append((_RESIDUAL, self._memory(layout, self._residual.ctypes.data)))
            self._alive.append(self._residual)
        lib.call("dnnl_primitive_attr_set_post_ops", attributes, steps)
        return attributes, operands


class Nodes:
    """This backend's side: nodes, planned and bound as a step's."""

    def __init__(self) -> None:
        graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET, "graphc": 1}, name="case")
        self.model, self.op = ir.Model(graph, ir_version=IR_VERSION), Builder(graph)

    def input(self, *shape: int) -> ir.Value:
        """A float32 input."""
        graph = self.model.graph
        value = ir.Value(name=f"x{len(graph.inputs)}", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(shape))
        graph.inputs.append(value)
        return value

    def give(self, *values: ir.Value) -> None:
        """Make values results."""
        self.model.graph.outputs.extend(values)

    def bound(self, backend: Backend) -> list[Run]:
        """The steps of a plan of these nodes, with numbers in their operands."""
        steps: list[Run] = []

        def kept(kind: str, name: str, run: Run) -> Run:
            steps.append(run)
            return run

        shapes = {value.name or "": static_dims(value) or () for value in self.model.graph.inputs}
        plan, state = make_plan(self.model, shapes, backend), State(self.model, memory=backend.memory)
        self._executor = Executor(plan, state, backend, check=False, wrap=kept)
        rng = np.random.default_rng(0)
        self._executor.run({name: np.abs(rng.standard_normal(shape, dtype=np.float32)) for name, shape in shapes.items()})
        return steps


Sides = tuple[Nodes, list[Run]]
_OURS = {"lstm": ("lstm", 5, "pytorch"), "lbr_gru": ("gru_reset_after", 4, "pytorch"), "vanilla_rnn": ("tanh", 3, "onnx")}
"""oneDNN's cells here: the name, the outputs that a gradient reads and the order of the gates."""


def _convolution(lib: Primitives, channels: int, side: int, results: int, window: int, groups: int = 1) -> Sides:
    x, w, nodes = (8, channels, side, side), (results, channels // groups, window, window), Nodes()
    attributes = {"kernel_shape": [window] * 2, "pads": [window // 2] * 4, "group": groups}
    a, b, dy = nodes.input(*x), nodes.input(*w), nodes.input(8, results, side, side)
    shapes = (np.array(shape, dtype=np.int64) for shape in (x, w))
    nodes.give(
        nodes.op.Conv(a, b, **attributes),
        nodes.op.graphc.ConvGradInput(dy, b, next(shapes), **attributes),
        nodes.op.graphc.ConvGradWeight(a, dy, next(shapes), **attributes),
    )
    return nodes, lib.convolution(x, w if groups == 1 else (groups, results // groups, *w[1:]))[0]


def _deconvolution(lib: Primitives, channels: int, side: int, results: int) -> Sides:
    x, w, y, nodes = (8, channels, side, side), (channels, results, 4, 4), (8, results, 2 * side, 2 * side), Nodes()
    attributes = {"kernel_shape": [4] * 2, "pads": [1] * 4, "strides": [2] * 2}
    a, b, dy = nodes.input(*x), nodes.input(*w), nodes.input(*y)
    nodes.give(
        nodes.op.ConvTranspose(a, b, **attributes),
        nodes.op.Conv(dy, b, **attributes),
        nodes.op.graphc.ConvGradWeight(dy, a, np.array(w, dtype=np.int64), **attributes),
    )
    return nodes, lib.deconvolution(x, (results, channels, 4, 4), 2, 1)


def _recurrent(lib: Primitives, cell: str, time: int, batch: int, features: int, hidden: int) -> Sides:
    nodes, (gates, _), (kind, outputs, order) = Nodes(), _GATES[cell], _OURS[cell]
    wide, op = gates * hidden, nodes.op
    x, dy = nodes.input(time * batch, features), nodes.input(time, 1, batch, hidden)
    w, r, bias = nodes.input(wide, features), nodes.input(1, wide, hidden), nodes.input(1, wide)
    of_new = nodes.input(1, hidden) if cell == "lbr_gru" else None
    attributes = {"cell": kind, "direction": "forward", "order": order}
    projected = op.Reshape(op.Gemm(x, w, transB=1), [time, batch, wide])
    made = op.emit("RecurrentTraining", [projected, r, bias, of_new], attributes, domain="graphc", outputs=outputs)
    y, _, kept, cells, _ = [*made, None, None][:5]
    operands = [y, kept, r, cells, None, None, None, dy]
    count = 5 if cell == "lstm" or of_new is not None else 4
    backward = op.emit("RecurrentTrainingGrad", operands, attributes, domain="graphc", outputs=count)
    slopes = op.Reshape(backward[0], [-1, wide])
    nodes.give(y, backward[1], backward[3], op.Gemm(slopes, w), op.Gemm(slopes, x, transA=1))
    return nodes, lib.recurrent(cell, time, batch, features, hidden)


def _batch_norm(lib: Primitives, shape: tuple[int, ...]) -> Sides:
    nodes, channels = Nodes(), shape[1]
    x, dy = nodes.input(*shape), nodes.input(*shape)
    scale, shift, mean, inverse = (nodes.input(channels) for _ in range(4))
    nodes.give(
        *nodes.op.graphc.BatchNormalizationTraining(x, scale, shift, epsilon=1e-5, _outputs=4),
        *nodes.op.graphc.BatchNormalizationTrainingGrad(dy, x, scale, mean, inverse, _outputs=3),
    )
    _, layout = lib.convolution(shape, (channels, channels, 3, 3))
    return nodes, lib.norm("batch_normalization", layout, channels, channels)


def _layer_norm(lib: Primitives, rows: int, width: int) -> Sides:
    nodes = Nodes()
    x, dy, scale, shift = nodes.input(rows, width), nodes.input(rows, width), nodes.input(width), nodes.input(width)
    y, mean, inverse = nodes.op.LayerNormalization(x, scale, shift, _outputs=3)
    nodes.give(y, *nodes.op.graphc.LayerNormalizationGrad(dy, x, scale, mean, inverse, _outputs=3))
    return nodes, lib.norm("layer_normalization", lib.plain(rows, width), width, rows)


def _pool(lib: Primitives, op: str, x: tuple[int, ...], side: int, step: int, pad: int) -> Sides:
    nodes = Nodes()
    attributes = {"kernel_shape": [side] * 2, "strides": [step] * 2, "pads": [pad] * 4}
    y = (*x[:2], *((n + 2 * pad - side) // step + 1 for n in x[2:]))
    source, dy, shape = nodes.input(*x), nodes.input(*y), np.array(x, dtype=np.int64)
    if op == "MaxPool":
        maxima, taps = nodes.op.graphc.MaxPoolTaps(source, **attributes, _outputs=2)
        nodes.give(maxima, nodes.op.graphc.MaxPoolTapsGrad(dy, taps, shape, **attributes))
    else:
        nodes.give(nodes.op.AveragePool(source, **attributes), nodes.op.graphc.AveragePoolGrad(dy, shape, **attributes))
    return nodes, lib.pool(op, x, side, step, pad)


def _product(lib: Primitives, rows: int, depth: int, columns: int, *, residual: bool) -> Sides:
    nodes = Nodes()
    a, b, bias, other = nodes.input(rows, depth), nodes.input(depth, columns), nodes.input(columns), nodes.input(rows, columns)
    c = nodes.op.Gemm(a, b, bias)
    nodes.give(nodes.op.Add(c, other) if residual else nodes.op.Gelu(c))
    return nodes, lib.product(rows, depth, columns, residual=residual)


def main() -> None:
    """Print the times of both."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cases", nargs="*", help="parts of the names of cases; all, when none is named")
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--seconds", type=float, default=0.5, help="for each side of a case")
    arguments = parser.parse_args()
    lib = library()
    if lib is None:
        raise SystemExit("oneDNN is not installed here; it comes with 'pip install graphc[cpu]' on Linux")
    backend = make_backend("onnxruntime", threads=arguments.threads)
    primitives = Primitives(lib, ThreadPool(arguments.threads))
    print(f"{'forward and backward':<52}{'graphc ms':>10}{'oneDNN ms':>11}{'oneDNN / graphc':>17}")
    for name, build in cases():
        if arguments.cases and not any(part in name for part in arguments.cases):
            continue
        nodes, runs = build(primitives)
        ours, theirs = (_times(side, arguments.seconds) for side in (nodes.bound(backend), runs))
        print(f"{name:<52}{ours * 1e3:>10.3f}{theirs * 1e3:>11.3f}{theirs / ours:>17.2f}", flush=True)
    backend.close()


def cases() -> Iterator[tuple[str, Callable[[Primitives], Sides]]]:
    """Names of all cases, and what makes both sides."""
    for channels, side, results, window in (
        (64, 56, 64, 3),
        (128, 28, 128, 3),
        (256, 14, 256, 3),
        (512, 7, 512, 3),
        (256, 56, 64, 1),
        (1024, 14, 256, 1),
    ):
        name = f"convolution {window} × {window}, {channels} channels to {results}, 8 × {side} × {side}"
        yield name, partial(_convolution, channels=channels, side=side, results=results, window=window)
    for channels, side, window in ((144, 56, 3), (384, 14, 3), (96, 28, 7)):
        name = f"depthwise convolution {window} × {window}, 8 × {channels} × {side} × {side}"
        yield name, partial(_convolution, channels=channels, side=side, results=channels, window=window, groups=channels)
    for channels, side, results in ((256, 14, 128), (64, 56, 32)):
        name = f"deconvolution 4 × 4, stride 2, {channels} channels to {results}, 8 × {side} × {side}"
        yield name, partial(_deconvolution, channels=channels, side=side, results=results)
    for cell, name in (("lstm", "LSTM"), ("lbr_gru", "GRU"), ("vanilla_rnn", "RNN")):
        for steps, batch, features, hidden in ((64, 32, 256, 256), (32, 64, 64, 128)):
            of = partial(_recurrent, cell=cell, time=steps, batch=batch, features=features, hidden=hidden)
            yield f"{name}, {steps} steps, {batch} × {features} to {hidden}", of
    for shape in ((8, 64, 56, 56), (8, 256, 56, 56), (8, 256, 14, 14), (16, 512, 7, 7)):
        yield f"batch norm, {_by(shape)}", partial(_batch_norm, shape=shape)
    for rows, width in ((4096, 256), (1024, 768), (16384, 64)):
        yield f"layer norm, {rows} × {width}", partial(_layer_norm, rows=rows, width=width)
    for op, shape, side, step, pad in (
        ("MaxPool", (8, 64, 112, 112), 3, 2, 1),
        ("MaxPool", (8, 128, 28, 28), 3, 1, 1),
        ("AveragePool", (8, 64, 56, 56), 2, 2, 0),
        ("AveragePool", (8, 128, 28, 28), 3, 1, 1),
    ):
        yield (
            f"{op} {side} × {side}, stride {step}, {_by(shape)}",
            partial(_pool, op=op, x=shape, side=side, step=step, pad=pad),
        )
    for residual, what in ((True, "residual"), (False, "Gelu")):
        for rows, depth, columns in ((1024, 256, 1024), (1024, 768, 3072), (8192, 512, 512)):
            name = f"product with bias and {what}, {rows} × {depth} × {columns}"
            yield name, partial(_product, rows=rows, depth=depth, columns=columns, residual=residual)


def _aligned(*shape: int) -> Any:
    """Zeros that begin where a line of the cache does, as a plan's memory does."""
    size = math.prod(shape)
    return on_lines((size,))[:size].reshape(shape)


def _by(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape))


def _times(runs: Sequence[Run], seconds: float) -> float:
    """The sum of the least times of runs, in seconds; they run in turn, as the steps of a plan do."""
    least, end = [math.inf] * len(runs), time.perf_counter() + seconds
    while time.perf_counter() < end:
        for k, run in enumerate(runs):
            start = time.perf_counter()
            run()
            least[k] = min(least[k], time.perf_counter() - start)
    return sum(least)


if __name__ == "__main__":
    main()
