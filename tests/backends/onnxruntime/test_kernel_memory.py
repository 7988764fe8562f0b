"""No native kernel touches memory beyond its operands, whatever these hold: every operand lies beside a closed page.

Each kernel runs in a child process, so that a SIGSEGV fails its test alone. A kernel without a case here fails the last test.
"""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from graphc.backend import KERNELS, Binding, native_kernel
from graphc.errors import ExecutionError, InternalError
from graphc.ir.declare import declaration_of
from graphc.ir.facts import dtype_of, shape_of
from tests.backends.guard_pages import guarded

pytest.importorskip("onnxruntime")

from graphc.backends.onnxruntime.pool import ThreadPool
from tests.backends.onnxruntime.node_cases import single_node

Array = np.ndarray[Any, Any]
rng = np.random.default_rng(11)


def f(*shape: int) -> Array:
    return rng.standard_normal(shape).astype(np.float32)


def d(*shape: int) -> Array:
    return rng.standard_normal(shape)


def i(*values: int) -> Array:
    return np.array(values, dtype=np.int64)


def taps(*shape: int) -> Array:
    """Any bytes: a gradient is right whatever they say."""
    return rng.integers(0, 256, shape).astype(np.uint8)


def one(value: float, dtype: Any = np.float32) -> Array:
    return np.array(value, dtype=dtype)


TILED = [f(4, 63, 30, 30), f(62, 63, 5, 5), f(4, 62, 30, 30)]
"""x, w and y of a convolution that matrix tiles compute where a processor has them."""
FIVE = {"kernel_shape": [5, 5], "pads": [2, 2, 2, 2]}
WINDOW = {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 1, 1, 0]}
WINOGRAD = [f(4, 59, 18, 17), f(61, 59, 3, 3), f(4, 61, 18, 17)]
"""x, w and y of a convolution that Winograd's algorithm computes."""
LAYOUT = "bhtd,bhtd,bhtd->bhtd"
HEADS = [f(2, 3, 5, 4), f(2, 3, 7, 4), f(2, 3, 7, 6)]
RATE = [one(0.1), one(2.0)]
STEP = one(3, np.int64)
"""The number of finished steps, which only a trainer writes; it keeps its value."""


LENGTHS = np.array([3, 1], np.int32)
CELLS = {"lstm": 4, "gru": 3, "gru_reset_after": 3, "tanh": 1, "relu": 1}
"""The cells of recurrent layers and the number of their gates."""


def steps(gates: int) -> list[Array]:
    """Outputs, gates and weights of three steps of two rows, five wide, in two directions."""
    return [f(3, 2, 2, 5), f(3, 2, 2 * gates * 5), f(2, gates * 5, 5)]


Case = tuple[Sequence[Array | None], Mapping[str, Any], Sequence[int]]


def c(*arrays: Array | None, constants: Sequence[int] = (), **attributes: Any) -> Case:
    return arrays, attributes, constants


def _losses(first: Sequence[Array], scores: Callable[..., Array]) -> list[Case]:
    """Every layout of the classes, with and without class weights, an ignored label and smoothing, for both index types."""
    shapes = [
        ((6, 5), 1, (6,)),
        ((2, 5, 3), 1, (2, 3)),
        ((2, 5, 3, 9), 1, (2, 3, 9)),
        ((2, 3, 5), -1, (2, 3)),
        ((5, 4), 0, (4,)),
    ]
    cases = []
    for (shape, axis, labels), dtype in itertools.product(shapes, (np.int64, np.int32)):
        label = rng.integers(0, 5, labels).astype(dtype)
        cases.append(c(*first, scores(*shape), label, axis=axis))
        cases.append(c(*first, scores(*shape), label, np.abs(f(5)), axis=axis, ignore_index=-100, label_smoothing=0.1))
    return cases


CASES: Mapping[str, Sequence[Case]] = {
    "graphc::ReluGrad": [c(f(3, 5), f(3, 5))],
    "Gelu": [c(f(3, 5)), c(f(3, 5), approximate="tanh")],
    "graphc::GeluGrad": [c(f(3, 5), f(3, 5)), c(f(3, 5), f(3, 5), approximate="tanh")],
    "Softmax": [c(f(3, 5), axis=-1)],
    "graphc::SoftmaxGrad": [c(f(3, 5), f(3, 5))],
    "graphc::ScaledDotProductAttention": [
        c(*HEADS, mask, scale=0.5, causal=causal, saves=saves)
        for mask, causal, saves in [
            (None, 1, "probabilities"), (f(2, 1, 5, 7), 0, "logsumexp"), (rng.random((5, 7)) > 0.3, 1, "logsumexp")
        ]
    ] + [c(*HEADS, None, f(2, 3, 5, 7), scale=0.5, saves=saves) for saves in ("probabilities", "logsumexp")],
    "graphc::ScaledDotProductAttentionGrad": [
        c(f(2, 3, 5, 6), *HEADS, None, f(2, 3, 5, 6), f(2, 3, 5, 7), scale=0.5, causal=1, layout=LAYOUT),
        c(f(2, 3, 5, 6), *HEADS, f(2, 1, 5, 7), f(2, 3, 5, 6), f(2, 3, 5), scale=0.5, saves="logsumexp", layout=LAYOUT),
        c(f(2, 3, 5, 6), *HEADS, None, f(2, 3, 5, 6), f(2, 3, 5, 7), f(2, 3, 5, 7), scale=0.5, layout=LAYOUT),
        c(f(2, 3, 5, 6), *HEADS, None, f(2, 3, 5, 6), f(2, 3, 5), f(2, 3, 5, 7), scale=0.5, saves="logsumexp", layout=LAYOUT),
    ],
    "Conv": [
        c(f(2, 4, 9, 7), f(6, 2, 3, 2), f(6), group=2, **WINDOW),
        c(f(2, 3, 17), f(5, 3, 4), strides=[3], pads=[2, 0]),
        c(f(2, 3, 17), f(3, 1, 6), f(3), group=3, dilations=[2], pads=[2, 9]),
        c(f(2, 3, 17), f(3, 1, 2), None, group=3, strides=[3], pads=[4, 5]),
        c(f(2, 3, 5, 6, 7), f(6, 1, 3, 2, 3), f(6), group=3, strides=[1, 2, 1], pads=[1, 0, 2] * 2),
        c(*WINOGRAD[:2], f(61), kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        c(*TILED[:2], f(62), **FIVE),
        c(f(2, 20, 37, 41), f(3, 20, 3, 3), f(3), kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        c(f(2, 24, 26, 33), f(24, 3, 5, 5), None, group=8, kernel_shape=[5, 5], strides=[2, 2], pads=[2, 2, 2, 2]),
        c(f(2, 12, 5, 7), f(9, 4, 1, 1), None, group=3),
        c(f(2, 12, 5, 7), f(9, 4, 1, 1), f(9), group=3),
        c(f(2, 3, 9, 37), f(3, 1, 3, 3), f(3), group=3, pads=[1, 1, 1, 1]),
        c(f(2, 60, 4, 7), f(250, 60, 3, 3), f(250), pads=[1, 1, 1, 1], strides=[2, 2]),
        c(f(2, 3, 10, 37), f(3, 1, 3, 3), None, group=3, pads=[1, 0, 0, 1], strides=[2, 2]),
        c(d(2, 4, 9, 7), d(6, 2, 3, 2), d(6), group=2, **WINDOW),
        c(d(1, 3, 300), d(70, 3, 50), None, dilations=[2], pads=[5, 99]),
        c(d(2, 3, 5, 6, 7), d(6, 1, 3, 2, 3), d(6), group=3, strides=[1, 2, 1], pads=[1, 0, 2] * 2),
    ],
    "graphc::FusedConv": [
        c(*WINOGRAD[:2], f(61), f(61), WINOGRAD[2], kernel_shape=[3, 3], pads=[1, 1, 1, 1], activation="relu"),
        c(f(2, 20, 37, 41), f(3, 20, 3, 3), f(3), f(3), f(2, 3, 37, 41), pads=[1, 1, 1, 1], activation="hard_swish"),
        c(f(2, 24, 9, 7), f(33, 24, 1, 1), f(33), f(33)),
        c(f(2, 24, 3, 7), f(24, 1, 3, 3), f(24), f(24), group=24, pads=[1, 1, 1, 1]),
        c(f(2, 3, 9, 37), f(3, 1, 3, 3), f(3), f(3), f(2, 3, 9, 37), group=3, pads=[1, 1, 1, 1], activation="leaky_relu"),
        c(f(2, 12, 5, 7), f(9, 4, 1, 1), None, f(9), group=3),
    ],
    "ConvTranspose": [
        c(f(2, 6, 5, 7), f(6, 2, 3, 2), f(4), group=2, **WINDOW),
        c(d(2, 6, 5, 7), d(6, 2, 3, 2), d(4), group=2, **WINDOW),
    ],
    "graphc::ConvGradInput": [
        c(f(2, 6, 5, 7), f(6, 2, 3, 2), i(2, 4, 9, 7), constants=(2,), group=2, **WINDOW),
        c(f(2, 3, 18), f(3, 1, 6), i(2, 3, 17), constants=(2,), group=3, dilations=[2], pads=[2, 9]),
        c(f(2, 3, 9), f(3, 1, 2), i(2, 3, 17), constants=(2,), group=3, strides=[3], pads=[4, 5]),
        c(f(2, 6, 5, 3, 9), f(6, 1, 3, 2, 3), i(2, 3, 5, 6, 7), constants=(2,), group=3, strides=[1, 2, 1], pads=[1, 0, 2] * 2),
        c(WINOGRAD[2], WINOGRAD[1], i(4, 59, 18, 17), constants=(2,), kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        c(TILED[2], TILED[1], i(4, 63, 30, 30), constants=(2,), **FIVE),
        c(f(2, 7, 9, 8), f(7, 6, 3, 2), i(2, 6, 9, 7), constants=(2,), kernel_shape=[3, 2], pads=[1, 1, 1, 1]),
        c(f(2, 3, 37, 41), f(3, 20, 3, 3), i(2, 20, 37, 41), constants=(2,), kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        c(f(2, 9, 5, 7), f(9, 4, 1, 1), i(2, 12, 5, 7), constants=(2,), group=3),
        c(f(2, 3, 9, 37), f(3, 1, 3, 3), i(2, 3, 9, 37), constants=(2,), group=3, pads=[1, 1, 1, 1]),
        c(f(2, 500, 2, 4), f(500, 60, 3, 3), i(2, 60, 4, 7), constants=(2,), pads=[1, 1, 1, 1], strides=[2, 2]),
        c(f(2, 3, 5, 18), f(3, 1, 5, 5), i(2, 3, 9, 35), constants=(2,), group=3, pads=[2, 2, 2, 2], strides=[2, 2]),
        c(d(2, 6, 5, 7), d(6, 2, 3, 2), i(2, 4, 9, 7), constants=(2,), group=2, **WINDOW),
        c(d(1, 70, 306), d(70, 3, 50), i(1, 3, 300), constants=(2,), dilations=[2], pads=[5, 99]),
        c(d(2, 6, 5, 3, 9), d(6, 1, 3, 2, 3), i(2, 3, 5, 6, 7), constants=(2,), group=3, strides=[1, 2, 1], pads=[1, 0, 2] * 2),
    ],
    "graphc::ConvGradWeight": [
        c(f(2, 4, 9, 7), f(2, 6, 5, 7), i(6, 2, 3, 2), constants=(2,), group=2, **WINDOW),
        c(f(2, 2, 9, 7), f(2, 4, 4, 3), i(4, 1, 5, 3), constants=(2,), group=2, strides=[2, 3], pads=[2, 1, 1, 2]),
        c(WINOGRAD[0], WINOGRAD[2], i(61, 59, 3, 3), constants=(2,), kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        c(TILED[0], TILED[2], i(62, 63, 5, 5), constants=(2,), **FIVE),
        c(f(5, 250, 7, 7), f(5, 257, 7, 7), i(257, 250, 1, 1), constants=(2,), kernel_shape=[1, 1]),
        c(f(3, 37, 21, 20), f(3, 70, 21, 20), i(70, 37, 1, 1), constants=(2,), kernel_shape=[1, 1]),
        c(f(2, 20, 37, 41), f(2, 3, 37, 41), i(3, 20, 3, 3), constants=(2,), kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        c(f(2, 3, 9, 37), f(2, 3, 9, 37), i(3, 1, 3, 3), constants=(2,), group=3, pads=[1, 1, 1, 1]),
        c(f(2, 60, 4, 7), f(2, 250, 2, 4), i(250, 60, 3, 3), constants=(2,), pads=[1, 1, 1, 1], strides=[2, 2]),
        c(f(2, 3, 9, 35), f(2, 3, 5, 18), i(3, 1, 5, 5), constants=(2,), group=3, pads=[2, 2, 2, 2], strides=[2, 2]),
        c(f(2, 16, 301), f(2, 12, 301), i(12, 16, 31), constants=(2,), kernel_shape=[31], pads=[15, 15]),
        c(d(2, 4, 9, 7), d(2, 6, 5, 7), i(6, 2, 3, 2), constants=(2,), group=2, **WINDOW),
        c(d(1, 3, 300), d(1, 70, 306), i(70, 3, 50), constants=(2,), dilations=[2], pads=[5, 99]),
    ],
    "Gemm": [
        c(d(65, 130), d(130, 129), d(129)),
        c(d(130, 65), d(129, 130), transA=1, transB=1),
        c(f(65, 130), f(130, 129), f(129)),
        c(f(130, 65), f(129, 130), transA=1, transB=1),
        c(f(9, 1024), f(9, 130), transA=1),
        c(f(499, 601), f(601, 517), f(517)),
        c(f(601, 499), f(517, 601), transA=1, transB=1),
    ],
    "MatMul": [
        *(c(f(3, 65, 130), f(130, 129)), c(f(2, 3, 65, 130), f(2, 3, 130, 33)), c(f(2, 499, 601), f(2, 601, 517))),
        c(f(65, 130), f(2, 3, 130, 33)),
        *(c(d(3, 65, 130), d(130, 129)), c(d(2, 3, 65, 130), d(2, 3, 130, 33)), c(d(65, 130), d(2, 3, 130, 33))),
    ],
    "graphc::PermutedMatMul": [
        c(d(2, 65, 3, 130), d(2, 3, 37, 130), permA=(0, 2, 1, 3), permB=(0, 1, 3, 2), permY=(0, 2, 1, 3)),
        c(f(2, 65, 3, 130), f(2, 3, 37, 130), permA=(0, 2, 1, 3), permB=(0, 1, 3, 2), permY=(0, 2, 1, 3)),
        c(f(2, 499, 2, 601), f(2, 2, 601, 517), permA=(0, 2, 1, 3), permB=(0, 1, 2, 3), permY=(0, 1, 2, 3)),
    ],
    "graphc::Solve": [c(x(2, n, n), x(2, n, 3), transposed=t) for x in (f, d) for n in (7, 131) for t in (0, 1)],
    "graphc::TriangularSolve": [
        c(x(2, n, n), x(2, n, 3), transposed=t, upper=u) for x in (f, d) for n in (7, 131) for t in (0, 1) for u in (0, 1)
    ],
    "graphc::Cholesky": [c(f(2, 7, 7)), c(d(7, 7)), c(f(131, 131))],
    "graphc::LogDeterminant": [c(f(2, 7, 7)), c(d(7, 7)), c(f(131, 131))],
    "Det": [c(f(2, 7, 7)), c(d(7, 7)), c(f(131, 131)), c(np.full((3, 3), np.nan, np.float32))],
    "graphc::Cofactors": [c(f(2, 7, 7)), c(d(7, 7)), c(f(1, 1)), c(np.zeros((3, 3))), c(np.full((3, 3), np.nan, np.float32))],
    "graphc::GroupedMatMul": [
        c(f(300, 270), f(*w), rng.integers(-1, 6, 300), transB=transposed)
        for w, transposed in (((5, 270, 37), 0), ((5, 550, 270), 1))
    ],
    "graphc::GroupedMatMulGradWeight": [
        c(f(600, depth), f(600, width), rng.integers(-1, 3, 600), i(4, depth, width), constants=(3,))
        for depth, width in ((101, 37), (7, 530))
    ],
    "graphc::GatherGrad": [
        c(f(2, 2, 4099), np.array([[0, 4], [-5, 4]], kind), i(5, 4099), constants=(2,)) for kind in (np.int64, np.int32)
    ],
    "ScatterND": [
        c(f(5, 4099), np.array([[0], [4], [-5], [4]]), f(4, 4099), reduction=reduction)
        for reduction in ("none", "add", "mul", "max", "min")
    ],
    "graphc::GatherElementsGrad": [
        c(f(*dy), rng.integers(-9, 9, dy).astype(kind), i(*shape), constants=(2,), axis=axis)
        for dy, shape, axis in (((40, 50, 11), (40, 50, 9), 2), ((5, 50, 77), (5, 9, 77), -2))
        for kind in (np.int64, np.int32)
    ],
    "graphc::SoftmaxCrossEntropy": _losses((), f),
    "graphc::SoftmaxCrossEntropyGrad": _losses((one(1.0),), lambda *shape: -np.abs(f(*shape))),
    "graphc::CTCLoss": [
        c(f(*shape), rng.integers(1, 5, (3, 4)).astype(kind), lengths, time_axis=axis, blank=blank)
        for shape, axis, lengths, blank in (
            ((9, 3, 5), 0, None, 0),
            ((3, 9, 5), 1, np.array([9, 5, 3]), 4),
            ((3, 1, 5), 1, np.array([1, 0, 1], np.int32), 0),
        )
        for kind in (np.int64, np.int32)
    ],
    "graphc::BatchNormalizationTraining": [c(f(3, 5, *more), f(5), f(5)) for more in ((), (2,), (9,))],
    "graphc::BatchNormalizationTrainingGrad": [c(*(f(3, 5, *d) for _ in "yx"), f(5), f(5), f(5)) for d in ((), (2,), (9,))],
    "graphc::FusedBatchNormalization": [
        c(f(3, 5, 9), f(5), f(5), *other, activation=name, alpha=-1.0, beta=1.0)
        for other in ((), (f(3, 5, 9),))
        for name in ("clip", "silu")
    ],
    "graphc::FusedBatchNormalizationGrad": [
        c(f(3, 5, 9), f(3, 5, 9), f(5), f(5), f(5), f(5), activation=name, alpha=-1.0, beta=1.0)
        for name in ("clip", "hard_swish", "silu")
    ],
    "LayerNormalization": [c(f(3, 4, 5), f(5), f(5)), c(f(3, 4, 5), f(4, 5), axis=1)],
    "graphc::LayerNormalizationGrad": [c(f(3, 4, 5), f(3, 4, 5), f(5), f(3, 4, 1), f(3, 4, 1))],
    "graphc::LRNGrad": [c(f(2, 5, 3, 3), f(2, 5, 3, 3), f(2, 5, 3, 3), size=3), c(f(2, 2, 9), f(2, 2, 9), f(2, 2, 9), size=7)],
    "MaxPool": [
        c(f(2, 3, 9, 7), **WINDOW),
        c(f(2, 3, 9), kernel_shape=[3], strides=[2]),
        c(f(2, 3, 5, 6, 39), kernel_shape=[3, 2, 3], strides=[2, 2, 2], ceil_mode=1),
        c(f(2, 3, 5, 35), kernel_shape=[2, 5], strides=[1, 3]),
    ],
    "graphc::MaxPoolGrad": [
        c(f(2, 3, 5, 7), f(2, 3, 9, 7), f(2, 3, 5, 7), **WINDOW),
        c(f(2, 3, 4), f(2, 3, 9), f(2, 3, 4), kernel_shape=[3], strides=[2]),
        c(f(2, 3, 2, 3, 4), f(2, 3, 5, 6, 9), f(2, 3, 2, 3, 4), kernel_shape=[3, 2, 3], strides=[2, 2, 2]),
        c(f(2, 3, 2, 17), f(2, 3, 5, 35), f(2, 3, 2, 17), kernel_shape=[2, 2], strides=[2, 2]),
        c(f(2, 3, 2, 3, 4), f(2, 3, 5, 6, 9), f(2, 3, 2, 3, 4), kernel_shape=[2, 2, 2], strides=[2, 2, 2]),
        c(f(2, 3, 2, 3), f(2, 3, 6, 25), f(2, 3, 2, 3), kernel_shape=[3, 9], strides=[3, 9], pads=[1, 2, 1, 2]),
    ],
    "graphc::MaxPoolTaps": [
        c(f(2, 3, 9, 7), **WINDOW),
        c(f(2, 3, 9), kernel_shape=[3], strides=[2]),
        c(f(2, 3, 5, 6, 39), kernel_shape=[3, 2, 3], strides=[2, 2, 2], ceil_mode=1),
        c(f(2, 3, 5, 35) * np.float32(np.nan), kernel_shape=[2, 5], strides=[1, 3], pads=[1, 2, 1, 2]),
    ],
    "graphc::MaxPoolTapsGrad": [
        c(f(2, 3, 5, 7), taps(2, 3, 5, 7), i(2, 3, 9, 7), constants=(2,), **WINDOW),
        c(f(2, 3, 4), taps(2, 3, 4), i(2, 3, 9), constants=(2,), kernel_shape=[3], strides=[2]),
        c(
            f(2, 3, 2, 3, 20),
            taps(2, 3, 2, 3, 20),
            i(2, 3, 5, 6, 39),
            constants=(2,),
            kernel_shape=[3, 2, 3],
            strides=[2, 2, 2],
            ceil_mode=1,
        ),
        c(f(2, 3, 5, 9), taps(2, 3, 5, 9), i(2, 3, 6, 29), constants=(2,), kernel_shape=[2, 5], strides=[1, 3]),
    ],
    "GridSample": [
        c(f(2, 3, 4, 5), f(2, 20, 15, 2), padding_mode=padding, mode=mode)
        for padding in ("zeros", "border", "reflection")
        for mode in ("linear", "nearest")
    ],
    "Col2Im": [
        c(f(2, 18, 24), i(4, 6), i(3, 3), constants=(1, 2), pads=[1, 1, 1, 1]),
        c(f(1, 4, 6), i(4, 7), i(2, 2), constants=(1, 2), strides=[2, 2]),
    ],
    "Resize": [
        c(f(2, 3, 9, 7), None, None, i(2, 3, 20, 5), constants=(3,), mode="linear"),
        c(f(3, 3, 25), None, np.array([1, 1, 2.1], np.float32), None, constants=(2,), mode="cubic"),
    ],
    "graphc::ResizeGrad": [
        c(f(2, 3, 20, 5), i(2, 3, 9, 7), None, None, i(2, 3, 20, 5), constants=(1, 4), mode="linear"),
        c(f(2, 3, 4, 21), i(2, 3, 3, 35), None, None, i(2, 3, 4, 21), constants=(1, 4), mode="nearest"),
    ],
    "CumProd": [
        c(x(*shape), i(axis), constants=(1,), exclusive=e, reverse=r)
        for x, shape, axis in ((f, (3, 7), 1), (d, (7, 3), 0), (f, (2, 5, 130), -2))
        for e, r in itertools.product((0, 1), (0, 1))
    ],
    "graphc::RunningProduct": [c(f(3, 7), axis=1), c(d(7, 3), axis=0), c(f(2, 5, 130), axis=1)],
    "graphc::RunningProductGrad": [
        c(x(*shape), np.round(x(*shape)), x(*shape), i(axis), constants=(3,))
        for x, shape, axis in ((f, (3, 7), 1), (d, (7, 3), 0), (f, (2, 5, 130), -2))
    ],
    "CumSum": [
        c(f(*shape), i(axis), constants=(1,), exclusive=e, reverse=r)
        for shape, axis in (((3, 7), 1), ((7, 3), 0), ((2, 5, 130), -2))
        for e, r in itertools.product((0, 1), (0, 1))
    ],
    "DFT": [
        c(f(3, points, inner, parts), None, one(1, np.int64), constants=(2,), **attributes)
        for points, inner in ((12, 1), (35, 3))
        for parts, attributes in ((1, {"onesided": 1}), (1, {}), (2, {}), (2, {"inverse": 1}))
    ],
    "TopK": [
        *(c(f(3, 99, 2), i(k), constants=(1,), axis=1, largest=largest) for largest in (0, 1) for k in (99, 70, 4)),
        c(f(33, 21, 3), i(5), constants=(1,), axis=1),
    ],
    "STFT": [
        c(f(2, 100, 1), one(7, np.int64), f(32), one(32, np.int64), constants=(1, 3)),
        c(f(2, 32, 2), one(5, np.int64), None, one(32, np.int64), constants=(1, 3), onesided=0),
    ],
    "AveragePool": [
        c(f(2, 3, 11), kernel_shape=[4], strides=[3], pads=[2, 3], ceil_mode=1),
        c(f(2, 3, 11), kernel_shape=[5]),
        c(f(2, 3, 9, 7), kernel_shape=[3, 1], strides=[2, 1], pads=[1, 0, 1, 0]),
        c(f(2, 1, 6, 3, 5), kernel_shape=[5, 1, 1], pads=[2, 0, 0, 2, 0, 0], strides=[1, 1, 1]),
        c(f(2, 1, 6, 3, 25), kernel_shape=[3, 2, 3], pads=[1, 1, 2, 1, 0, 1], strides=[2, 1, 2]),
        c(f(2, 1, 3, 25), kernel_shape=[2, 18], pads=[1, 9, 0, 5]),
    ],
    "graphc::AveragePoolGrad": [
        c(f(2, 3, 5, 7), i(2, 3, 9, 7), constants=(1,), **WINDOW),
        c(f(2, 1, 6, 3, 5), i(2, 1, 6, 3, 5), constants=(1,), kernel_shape=[5, 1, 1], pads=[2, 0, 0, 2, 0, 0]),
        c(f(2, 1, 3, 2, 3), i(2, 1, 6, 3, 6), constants=(1,), kernel_shape=[2, 2, 2], strides=[2, 1, 2]),
        c(f(2, 1, 3, 8), i(2, 1, 3, 25), constants=(1,), kernel_shape=[1, 18]),
    ],
    "graphc::DropoutMask": [
        c(i(3, 7), one(5, np.int64), STEP, one(offset, np.int64), constants=(0,), ratio=0.3, tag="t") for offset in (0, 5, -3)
    ],
    "graphc::Uniform": [
        c(i(3, 7), one(5, np.int64), STEP, one(offset, np.int64), constants=(0,), tag="t") for offset in (0, 5, -3)
    ],
    "graphc::BatchMoments": [c(f(3, 5, 7), one(1.0))],
    "graphc::BatchStatistics": [c(one(9.0, np.float64), np.abs(f(5)).astype(np.float64), np.abs(f(5)).astype(np.float64))],
    "graphc::SharedNormalization": [c(f(3, 5, 7), f(5), f(5), f(5), f(5), one(9.0, np.float64), one(1.0), tag="t")],
    "graphc::SharedNormalizationSums": [c(f(3, 5, 7), f(3, 5, 7), f(5), f(5))],
    "graphc::SharedNormalizationGrad": [
        c(f(3, 5, 7), f(3, 5, 7), f(5), f(5), f(5), one(9.0, np.float64), *np.ones((2, 5)), one(1.0))
    ],
    "graphc::RecurrentTraining": [
        c(f(3, 2, 2 * gates * 5), f(2, gates * 5, 5), None, None, LENGTHS, cell=cell, direction="bidirectional")
        for cell, gates in CELLS.items()
    ],
    "graphc::RecurrentTrainingGrad": [
        c(*steps(gates), None if gates == 1 else f(3, 2, 10), LENGTHS, cell=cell, direction="bidirectional")
        for cell, gates in CELLS.items()
    ],
    "graphc::SumOfSquares": [c(f(3, 5), f(7))],
    "graphc::RoundTo": [c(f(3, 5), f(7), to=10), c(f(3, 5), to=16)],
    "graphc::Widen": [c(f(3, 5).astype(np.float16)), c(f(7).astype(ml_dtypes.bfloat16))],
    "graphc::Narrow": [c(f(7).astype(np.float16), f(7)), c(f(7).astype(ml_dtypes.bfloat16), f(7))],
    "graphc::Orthogonalize": [c(f(7, 3))],
    "graphc::KeepLargest": [c(f(3, 7), count=count) for count in (1, 4, 21, 1000)],
    "graphc::Assign": [c(f(5), f(5))],
    "graphc::Residual": [c(f(5), f(5))],
    "graphc::SGD": [c(f(5), f(5), *RATE), c(d(5), d(5), *RATE), c(f(5), f(5).astype(np.float16), *RATE)],
    "graphc::Momentum": [c(f(5), f(5), f(5), STEP, *RATE), c(d(5), d(5), d(5), STEP, *RATE)],
    "graphc::Adam": [c(f(5), f(5), f(5), f(5), STEP, *RATE), c(d(5), d(5), d(5), d(5), STEP, *RATE)],
    "graphc::AdamW": [c(f(5), f(5), f(5), f(5), STEP, *RATE)],
    "graphc::Adagrad": [c(f(5), f(5), f(5), STEP, *RATE)],
    "graphc::RMSprop": [
        c(f(5), f(5), f(5), f(5), f(5), *RATE, momentum=0.9, centered=1), c(f(5), f(5), f(5), None, None, *RATE)
    ],
    "graphc::RunningAverage": [c(f(5), f(5), one(2.0))],
    "graphc::Increment": [c(STEP)],
    "graphc::AnyNonFinite": [c(f(5), f(3, 3)), c(f(5).astype(np.float16))],
}  # fmt: skip

INTEGERS = (-1, -6, -5000, 5, 5000, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63))
"""Labels beyond both ends of five classes, near and far."""

FLOATS = (np.nan, np.inf, -np.inf, 3e38, 0.0)


def variants(arrays: Sequence[Array | None], constants: Sequence[int]) -> list[Sequence[Array | None]]:
    """The operands as they are, and with bad values in all of an operand, or in its last element alone."""
    found = [arrays]
    for k, array in enumerate(arrays):
        if array is None or array is STEP or k in constants or array.dtype.kind == "b":
            continue
        bad: Sequence[float] = FLOATS
        if array.dtype.kind in "iu":
            bad = [v for v in INTEGERS if np.iinfo(array.dtype).min <= v <= np.iinfo(array.dtype).max]
        for value, whole in itertools.product(bad, (True, False)):
            changed = array.copy()
            changed.reshape(-1)[slice(None) if whole else slice(-1, None)] = value
            found.append([changed if n == k else a for n, a in enumerate(arrays)])
    return found


def run_all(op: str) -> None:
    """Run every case of a kernel with every variant of its operands, at either side of a closed page, with 1 and 2 threads."""
    pools = [ThreadPool(1), ThreadPool(2)]
    for arrays, attributes, constants in CASES[op]:
        node = next(n for n in single_node(op, arrays, attributes, constants).graph if n.op_type != "Constant")
        kernel = native_kernel("onnxruntime", node)
        assert kernel is not None, f"the kernel does not take {arrays}"
        declaration = declaration_of(node)
        values = declaration.attribute_values(node) if declaration else {k: a.value for k, a in node.attributes.items()}
        for number, operands in enumerate(variants(arrays, constants)):
            for side in ("before", "behind"):
                inputs = [None if a is None else guarded(a, side) for a in operands]
                outputs = [guarded(np.zeros(shape_of(v), dtype_of(v).numpy()), side) for v in node.outputs]
                with np.errstate(all="ignore"), contextlib.suppress(ExecutionError):  # which names an index outside
                    kernel.bind(Binding(node, inputs, outputs, values, pools[number % 2], {}))()
                labels = [a for a in operands if a is not None and a.dtype.kind == "i"] if op in LOSSES else []
                counted = [int(v) for a in labels for v in a.reshape(-1) if v != values["ignore_index"]]
                if any(not 0 <= label < 5 for label in counted):
                    assert np.isnan(outputs[0]).any(), f"label outside the classes gave {outputs[0]}"


LOSSES = ("graphc::SoftmaxCrossEntropy", "graphc::SoftmaxCrossEntropyGrad")


def may_run(op: str) -> bool:
    """Whether the kernel is there: some need oneDNN."""
    from graphc.backends.onnxruntime.kernels.onednn import binding

    return binding.library() is not None or op not in ("Conv", "graphc::FusedConv", "graphc::ConvGradInput", "Gemm", "MatMul")


def run_each(ops: Sequence[str]) -> None:
    """Run all cases of ``ops``, and print each when it is done."""
    for op in ops:
        run_all(op)
        print(op, flush=True)


SCRIPT = f"import sys; from {__name__} import run_each; run_each(sys.argv[1:])"


@pytest.fixture(scope="module")
def faults() -> Mapping[str, str]:
    """Op → how its run ended, where it did not end well.

    The runs share a fresh process: a forked one has none of the threads that oneDNN thinks it has. One that dies is followed
    by another for the ops that are left.
    """
    left, found = [op for op in sorted(CASES) if may_run(op)], dict[str, str]()
    while left:
        run = subprocess.run([sys.executable, "-c", SCRIPT, *left], capture_output=True, text=True, timeout=240)
        left = left[len(run.stdout.split()) :]
        if left:
            found[left.pop(0)] = f"exit code {run.returncode}: {run.stderr[-600:]}"
    return found


@pytest.mark.full
@pytest.mark.parametrize("op", sorted(CASES))
def test_a_kernel_stays_within_its_operands(op: str, faults: Mapping[str, str]) -> None:
    if not may_run(op):
        pytest.skip("needs oneDNN")
    assert op not in faults, faults[op]


@pytest.mark.parametrize("op", LOSSES)
def test_a_loss_refuses_operands_of_other_sizes_when_it_is_bound(op: str) -> None:
    first = [one(1.0)] if op.endswith("Grad") else []
    pool = ThreadPool(1)
    good = [*first, f(6, 5), np.zeros(6, np.int64), np.abs(f(5))]
    node = next(n for n in single_node(op, good, {"axis": 1}, ()).graph if n.op_type != "Constant")
    kernel = native_kernel("onnxruntime", node)
    assert kernel is not None
    outputs = [np.zeros(shape_of(v), dtype_of(v).numpy()) for v in node.outputs]
    values = {"axis": 1, "ignore_index": None, "label_smoothing": 0.0}
    for label, weight in ((np.zeros(5, np.int64), good[-1]), (np.zeros(6, np.int64), np.abs(f(2)))):
        with pytest.raises(InternalError, match=r"6 positions of 5 classes"):
            kernel.bind(Binding(node, [*first, f(6, 5), label, weight], outputs, values, pool, {}))


def test_every_kernel_has_a_case() -> None:
    assert {op for backend, op in KERNELS if backend == "onnxruntime" and op.split("::")[0] in ("graphc", op)} == set(CASES)
