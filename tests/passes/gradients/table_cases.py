"""One line for each case of a gradient rule."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from tests.gradient_check import (
    Operand,
    Variable,
    distinct,
    normal,
    positive,
    uniform,
)

Case = tuple[str, list[Operand], dict[str, Any]]


def i64(*values: Any) -> np.ndarray[Any, Any]:
    return np.array(values if len(values) != 1 else values[0], dtype=np.int64)


def c(op_type: str, *inputs: Operand, **attributes: Any) -> Case:
    return op_type, list(inputs), attributes


X = (2, 3)
INDEX = i64([[0, 2, 1], [1, 1, -1]])

ELEMENTWISE = [
    *(c(name, X, X) for name in ("Add", "Sub", "Mul", "Sum", "Mean")),
    c("Div", X, positive(3)),
    c("Mod", positive(2, 3), uniform(0.3, 0.4, 3), fmod=1),
    c("Sum", X),
    c("Sum", X, (3,), (2, 1)),
    c("Mean", X, (3,), (2, 1)),
    c("Max", X, normal(3, seed=9)),
    c("Max", X, normal(2, 3, seed=4), normal(2, 1, seed=5)),
    c("Min", X, normal(2, 3, seed=4), normal(2, 1, seed=5)),
    c("Max", X),
    *(c("Pow", positive(2, 3), np.array(e)) for e in (0.0, 1.0, 2.0, 3.0, 0.5, -1.0, 2.5)),
    c("Pow", X, np.array(2, dtype=np.int64)),
    c("Pow", X, np.array([2, 0, 3], dtype=np.int64)),
    c("Pow", positive(2, 3), uniform(-2, 2, 3)),
    *(c(name, X) for name in ("Neg", "Abs", "Exp", "Erf", "Sin", "Cos", "Atan", "Sinh", "Cosh", "Asinh", "Identity")),
    *(c(name, positive(2, 3)) for name in ("Sqrt", "Log", "Reciprocal")),
    *(c(name, uniform(-0.9, 0.9, 2, 3)) for name in ("Tan", "Asin", "Acos", "Atanh")),
    c("Acosh", uniform(1.2, 3, 2, 3)),
    c("Where", np.array([[True, False, True]]), X, (3,)),
    c("Clip", X),
    c("Clip", X, np.array(-0.5), np.array(0.5)),
    c("Clip", X, np.array(-0.5)),
    c("Clip", X, None, np.array(0.5)),
    c("Clip", X, uniform(-0.6, -0.5), uniform(0.5, 0.6)),
    c("Cast", X, to=11),
    c("CastLike", X, np.zeros(1)),
    c("Dropout", X, np.array(0.5, dtype=np.float32)),
    c("Dropout", X, np.array(0.5, dtype=np.float32), np.array(False)),
]

SINGLE = {"dtype": np.float32, "tolerance": 2e-3, "step": 1e-2}  # ONNX has the op in float32 only

ACTIVATIONS = [
    *(c(name, X) for name in ("Relu", "LeakyRelu", "Elu", "Selu", "Sigmoid", "Tanh", "Softplus", "Softsign")),
    *(c(name, normal(4, 5)) for name in ("Mish", "HardSigmoid", "HardSwish", "Swish", "Shrink")),
    c("ThresholdedRelu", distinct(5, 6)),
    c("Gelu", normal(4, 5), tolerance=1e-3, step=1e-2),  # onnx.reference has its erf in float32
    c("Gelu", X, approximate="tanh"),
    c("graphc::GeluGrad", X, X),
    c("LeakyRelu", X, alpha=0.3),
    c("PRelu", X, X),
    c("PRelu", X, (3,)),
    c("PRelu", X, (1,)),
    c("Elu", X, alpha=0.7),
    c("Selu", X, alpha=1.5, gamma=0.8),
    c("Celu", X, **SINGLE),
    c("Celu", X, alpha=0.7, **SINGLE),
    c("HardSigmoid", X, alpha=0.4, beta=0.45),
    c("HardSwish", uniform(-5, 5, 4, 5)),
    c("Swish", X, alpha=1.7),
    c("ThresholdedRelu", distinct(4, 5), alpha=0.3),
    c("Shrink", X, lambd=0.4, bias=0.1),
    c("graphc::ReluGrad", X, X),
    c("graphc::GeluGrad", X, X, approximate="tanh"),
]

LINEAR = [
    c("MatMul", (2, 3), (3, 4)),
    c("MatMul", (3,), (3,)),
    c("MatMul", (3,), (3, 4)),
    c("MatMul", (3,), (2, 3, 4)),
    c("MatMul", (2, 3), (3,)),
    c("MatMul", (5, 2, 3), (3,)),
    c("MatMul", (5, 2, 3), (3, 4)),
    c("MatMul", (2, 3), (5, 3, 4)),
    c("MatMul", (5, 2, 3), (5, 3, 4)),
    c("MatMul", (5, 1, 2, 3), (6, 3, 4)),
    *(c("graphc::GroupedMatMul", (5, 3), (2, 3, 4), i64([1, 0, owner, 1, 1]), gathers=int(owner == 0)) for owner in (0, 7)),
    c("graphc::GroupedMatMul", (5, 3), (2, 4, 3), i64([1, 0, 0, 1, 1]), transB=1),
    *(
        c("graphc::GroupedMatMulGradWeight", (5, 3), (5, 4), i64([1, 0, owner, 1, 1]), i64([3, 3, 4]), gathers=int(owner == 0))
        for owner in (0, 7)
    ),
    *(
        c("Gemm", (3, 2) if ta else (2, 3), (4, 3) if tb else (3, 4), (4,), transA=ta, transB=tb, alpha=0.5, beta=2.0)
        for ta, tb in itertools.product((0, 1), (0, 1))
    ),
    c("Gemm", (2, 3), (3, 4)),
    c("Gemm", (2, 3), (3, 4), (2, 1)),
    c("Gemm", (2, 3), (3, 4), ()),
    *(
        c("Einsum", *operands, equation=equation)
        for equation, operands in {
            "ij,jk->ik": [(2, 3), (3, 4)],
            "bij, bjk -> bik": [(5, 2, 3), (5, 3, 4)],
            "bhid,bhjd->bhij": [(2, 3, 4, 5), (2, 3, 6, 5)],
            "ij->ji": [(2, 3)],
            "ij->i": [(2, 3)],
            "ij->": [(2, 3)],
            "i,j->ij": [(2,), (3,)],
            "i,i->": [(3,), (3,)],
            "ij,jk,kl->il": [(2, 3), (3, 4), (4, 5)],
            "ij,k->i": [(2, 3), (4,)],
            "...ij,...jk->...ik": [(5, 2, 3), (1, 3, 4)],
            "...i->...": [(2, 3, 4)],
            "ij,jk": [(2, 3), (3, 4)],
            "ba": [(2, 3)],
        }.items()
    ),
]

SUMS = ("ReduceSum", "ReduceMean", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp")
EXTREMA = ("ReduceMax", "ReduceMin", "ReduceSumSquare")

REDUCTIONS = [
    *(
        c(name, positive(2, 3, 4), axes, keepdims=keep)
        for name in SUMS
        for axes in (i64([1]), i64([0, -1]), None)
        for keep in (0, 1)
    ),
    *(
        c(name, distinct(2, 3, 4), axes, keepdims=keep)
        for name in EXTREMA
        for axes in (i64([1]), i64([0, -1]), None)
        for keep in (0, 1)
    ),
    *(c(name, positive(2, 3), noop_with_empty_axes=1) for name in SUMS + EXTREMA),
    c("ReduceSum", X, np.zeros(0, dtype=np.int64)),
    c("CumSum", X, np.array(1)),
    *(c("CumSum", X, np.array(-1), exclusive=e, reverse=r) for e, r in itertools.product((0, 1), (0, 1))),
    *(c(name, (2, 3, 4), axis=axis) for name in ("Softmax", "LogSoftmax") for axis in (-1, 1, 0)),
    c("Softmax", X),
    c("TopK", distinct(2, 5), i64([3]), outputs=2),
    c("TopK", distinct(5, 2), i64([2]), axis=0, largest=0, outputs=2),
]

SHAPES = [
    c("Reshape", (2, 6), i64([3, 4])),
    c("Reshape", (2, 6), i64([0, 3, -1])),
    c("Flatten", (2, 3, 4), axis=1),
    c("Flatten", (2, 3, 4), axis=-1),
    c("Squeeze", (2, 1, 3), i64([1])),
    c("Squeeze", (2, 1, 3, 1), i64([-1, 1])),
    c("Unsqueeze", (2, 3), i64([0, -1])),
    c("Transpose", (2, 3, 4)),
    c("Transpose", (2, 3, 4), perm=[1, 2, 0]),
    c("Expand", (3, 1), i64([2, 1, 4])),
    c("Tile", (2, 3), i64([1, 1])),
    c("Tile", (2, 3), i64([2, 3])),
    c("Tile", (2, 3, 4), i64([1, 2, 1])),
    c("Concat", (2, 3), (2, 1), (2, 2), axis=1),
    c("Concat", (2, 3), (4, 3), axis=-2),
    c("Concat", (2, 3), axis=0),
    c("Concat", (2, 3), np.ones((1, 3)), axis=0),
    c("Split", (2, 6), axis=1, num_outputs=3, outputs=3),
    c("Split", (2, 7), axis=-1, num_outputs=3, outputs=3),
    c("Split", (5, 2), i64([1, 4]), outputs=2),
    c("Slice", (5, 6), i64([1]), i64([4])),
    c("Slice", (5, 6), i64([1, -4]), i64([100, -1])),
    c("Slice", (5, 6), i64([-4]), i64([-1]), i64([-1])),
    c("Slice", (5, 6), i64([0, 1]), i64([5, 6]), i64([0, 1]), i64([1, 2])),
    c("Slice", (3, 7, 4), i64([1]), i64([100]), i64([1]), i64([2])),
    c("Slice", (3, 7, 4), i64([1, 0]), i64([6, 4]), i64([1, -1]), i64([3, 2])),
    c("Slice", (3, 7, 4), i64([-1, 100]), i64([-100, 0]), i64([1, 2]), i64([-1, -2])),
    c("Slice", (3, 7, 4), i64([5]), i64([1]), i64([-2]), i64([-3])),
    c("Slice", (3, 7, 4), i64([6]), i64([5]), i64([1]), i64([-4])),
    c("Slice", (5, 6), i64([-1, 0]), i64([-100, 5]), i64([1, 0]), i64([-1, 2]), symbolic=1),
    c("Slice", (5, 6), i64([-1]), i64([-(2**63) + 1]), i64([0]), i64([-1]), symbolic=1),
    c("Slice", (5, 6), i64([2**31 - 1, 1]), i64([-(2**31), 4]), i64([0, 1]), i64([-1, 1]), symbolic=1),
    c("Slice", (5, 6), i64([-1, 0]), i64([-100, 6]), i64([1, 0]), i64([-2, 1])),
    c("Pad", (2, 3), i64([1, 0, 2, 3])),
    c("Pad", (2, 3), i64([1, 0, 2, 3]), uniform(0, 1)),
    c("Pad", (2, 3), i64([2, 1]), np.array(1.5), i64([-1])),
    *(c("Pad", (3, 4), i64([1, 2, 2, 1]), mode=mode) for mode in ("reflect", "edge", "wrap")),
    c("DepthToSpace", (2, 8, 2, 3), blocksize=2),
    c("DepthToSpace", (2, 8, 2, 3), blocksize=2, mode="CRD"),
    c("SpaceToDepth", (2, 2, 4, 6), blocksize=2),
    c("Trilu", (2, 3, 4)),
    c("Trilu", (3, 4), np.array(1), upper=0),
    c("ReverseSequence", (4, 3), i64([1, 2, 4])),
    c("ReverseSequence", (3, 4), i64([1, 2, 4]), batch_axis=0, time_axis=1),
    c("Compress", (3, 4), np.array([True, False, True]), axis=0),
    c("Compress", (2, 3), np.array([True, False, True, True])),
    c("graphc::ReduceSumTo", (2, 3, 4), i64([3, 1])),
    c("graphc::MatchShape", (2, 3), np.ones((2, 3))),
]

INDEXING = [
    c("Gather", (5, 3), i64([[0, 2], [2, -1]])),
    c("Gather", (5, 3), i64(1)),
    c("Gather", (5, 3), i64([-2]), axis=1),
    c("Gather", (2, 5, 3), i64(0), axis=1),
    c("Gather", (2, 5, 3), i64(-1), axis=1),
    c("Gather", (2, 5, 3), i64([[0, 3, 3], [1, 0, -1]]), axis=1),
    c("Gather", (2, 5, 3), i64([2, 2]), axis=-1),
    c("graphc::GatherElementsGrad", (2, 3), i64([[0, 2, -1], [2, 0, 2]]), i64([3, 3]), axis=0),
    c("graphc::GatherGrad", (2, 2, 3), i64([[0, 2], [2, -1]]), i64([5, 3])),
    c("GatherElements", (3, 3), INDEX),
    c("GatherElements", (2, 3), INDEX, axis=1),
    c("GatherND", (3, 4), i64([[0, 1], [2, 3], [2, 3]])),
    c("GatherND", (3, 4), i64([[1], [-1], [1]])),
    c("GatherND", (2, 3, 4), i64([[1, 0], [2, -1]]), batch_dims=1),
    c("ScatterElements", (3, 3), INDEX[:1], (1, 3)),
    c("ScatterElements", (2, 3), i64([[0, 2], [1, -1]]), (2, 2), axis=1),
    c("ScatterElements", (3, 3), INDEX, (2, 3), reduction="add"),
    c("ScatterND", (4, 3), i64([[1], [3]]), (2, 3)),
    c("ScatterND", (4, 3), i64([[1, 0], [1, 0]]), (2,), reduction="add"),
    c("OneHot", i64([0, 2, 1]), i64(4), (2,)),
    c("OneHot", i64([0, 2, 1]), i64(4), (2,), axis=0),
]

LOWER = np.tril(np.ones((4, 4), dtype=bool))

ATTENTION = [
    c("Attention", (2, 3, 4, 5), (2, 3, 6, 5), (2, 3, 6, 7)),
    c("Attention", (2, 3, 4, 5), (2, 3, 6, 5), (2, 3, 6, 7), scale=0.3),
    c("Attention", (2, 3, 4, 5), (2, 3, 4, 5), (2, 3, 4, 5), is_causal=1),
    c("Attention", (2, 3, 4, 5), (2, 3, 6, 5), (2, 3, 6, 5), is_causal=1, softcap=1.5),
    c("Attention", (2, 3, 4, 5), (2, 3, 4, 5), (2, 3, 4, 5), LOWER),
    c("Attention", (2, 3, 4, 5), (2, 3, 4, 5), (2, 3, 4, 5), LOWER & (np.arange(4) != 0)),
    c("Attention", (2, 3, 4, 5), (2, 3, 4, 5), (2, 3, 4, 5), (4, 4)),
    c("Attention", (2, 3, 4, 5), (2, 3, 4, 5), (2, 3, 4, 5), (2, 1, 4, 4), is_causal=1),
    c("Attention", (2, 4, 5, 3), (2, 2, 6, 3), (2, 2, 6, 3), symbolic=1),
    c("Attention", (2, 4, 6), (2, 5, 6), (2, 5, 9), q_num_heads=3, kv_num_heads=3, symbolic=2),
    c("Attention", (2, 4, 12), (2, 5, 6), (2, 5, 6), q_num_heads=4, kv_num_heads=2, is_causal=1, symbolic=2),
    c("graphc::ScaledDotProductAttention", (2, 4, 4, 5), (2, 2, 6, 5), (2, 2, 6, 7), (4, 6), scale=0.5, causal=1, symbolic=1),
    c("graphc::ScaledDotProductAttention", (2, 4, 5), (2, 6, 5), (2, 6, 7), scale=0.5, layout="btd,btd,btd->tbd", symbolic=1),
    c("graphc::ScaledDotProductAttention", (2, 3, 4, 5), (2, 3, 6, 5), (2, 3, 6, 7), scale=0.5, saves="logsumexp"),
]

CASES = [*ELEMENTWISE, *ACTIVATIONS, *LINEAR, *REDUCTIONS, *SHAPES, *INDEXING, *ATTENTION]


def label(case: Case) -> str:
    op_type, inputs, attributes = case
    shapes = [x.value.shape if isinstance(x, Variable) else x.shape if isinstance(x, np.ndarray) else x for x in inputs]
    operands = ["-" if shape is None else "x".join(map(str, shape)) for shape in shapes]
    return f"{op_type}({','.join([*operands, *(f'{k}={v}' for k, v in attributes.items() if k not in SINGLE)])})"


NO_KERNEL = {"Swish"}  # onnxruntime 1.31 has none on the CPU
