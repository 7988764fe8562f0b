"""Transforms, determinants, running products, scatters with reductions, caches and the forms of Attention and Einsum."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from graphc.ir.builder import Builder
from tests.gradient_check import Operand, Variable, check_op, distinct, gradients, new_model, on_onnxruntime

Array = np.ndarray[Any, Any]
Case = tuple[str, list[Operand], dict[str, Any]]

ZEROS = np.array([[1.0, 0, 2, 0.5], [2, 3, 0, 0], [1, 2, 3, 4]])
SQUARE = np.random.default_rng(3).standard_normal((2, 4, 4)) + 2 * np.eye(4)
SINGULAR = np.array([[1.0, 2, 3], [2, 4, 6], [1, 0, 1]])
QKV: list[Operand] = [(2, 3, 4, 5), (2, 3, 6, 5), (2, 3, 6, 7)]
PAST: list[Operand] = [(2, 3, 2, 5), (2, 3, 2, 7)]


def i64(values: Any) -> Array:
    return np.array(values, dtype=np.int64)


def c(op_type: str, *inputs: Operand, **attributes: Any) -> Case:
    return op_type, list(inputs), attributes


CASES = [
    *(
        c("CumProd", x, i64(1), exclusive=e, reverse=r)
        for x, e, r in itertools.product(((3, 4), Variable(ZEROS)), (0, 1), (0, 1))
    ),
    *(c("RunningProduct", x, axis=1, domain="graphc") for x in ((3, 4), Variable(ZEROS))),
    *(c("Det", (2, n, n), symbolic=1) for n in (1, 2, 4)),
    c("Det", (3, 3), symbolic=0),
    c("Det", Variable(SINGULAR), symbolic=0),
    *(c("Solve", Variable(SQUARE), (2, 4, 3), transposed=t, domain="graphc", symbolic=1) for t in (0, 1)),
    *(
        c("TriangularSolve", Variable(SQUARE), (2, 4, 3), transposed=t, upper=u, domain="graphc", symbolic=1)
        for t, u in itertools.product((0, 1), (0, 1))
    ),
    c("Cholesky", Variable(SQUARE @ SQUARE.transpose(0, 2, 1)), domain="graphc", symbolic=1),
    c("LogDeterminant", Variable(SQUARE), domain="graphc", symbolic=1, outputs=2),
    *(c("Cofactors", (2, n, n), domain="graphc", symbolic=1) for n in (1, 3)),
    c("DFT", (2, 5, 1)),
    c("DFT", (2, 5, 2)),
    c("DFT", (2, 5, 1), i64(8), symbolic=1),
    c("DFT", (2, 5, 2), i64(3), symbolic=1),
    c("DFT", (2, 5, 3, 2), None, i64(1), symbolic=1),
    c("DFT", (2, 5, 2), inverse=1),
    c("DFT", (2, 5, 1), inverse=1, symbolic=2),
    c("DFT", (2, 5, 1), onesided=1, symbolic=1),
    c("DFT", (2, 6, 1), i64(9), onesided=1, symbolic=1),
    *(c("DFT", (2, 4, 2), n, onesided=1, inverse=1, symbolic=1) for n in (None, i64(4), i64(7), i64(12))),
    c("STFT", (2, 16, 1), i64(4), (8,), symbolic=1),
    c("STFT", (2, 16, 1), i64(4), (8,), i64(8), onesided=0, symbolic=1),
    c("STFT", (2, 17, 2), i64(3), (8,), onesided=0, symbolic=1),
    c("STFT", (1, 16, 1), i64(5), None, i64(7), symbolic=1),
    *(c("ScatterElements", (3, 3), i64([[0, 2, 1], [0, 1, 1]]), (2, 3), reduction=r) for r in ("mul", "max", "min")),
    *(c("ScatterND", (4, 3), i64([[1], [1], [0]]), (3, 3), reduction=r) for r in ("mul", "max", "min")),
    c("TensorScatter", (2, 3, 5, 4), (2, 3, 2, 4), i64([1, 2])),
    c("TensorScatter", (2, 3, 5, 4), (2, 3, 2, 4), i64([4, 2]), mode="circular"),
    c("TensorScatter", (2, 5, 4), (2, 2, 4), axis=1),
    c("Unique", distinct(2, 3), outputs=4, symbolic=0),
    c("Unique", distinct(2, 3), axis=1, outputs=2, symbolic=0),
    *(
        c("Einsum", *operands, equation=equation)
        for equation, operands in {
            "ii->i": [(3, 3)],
            "ii": [(3, 3)],
            "iii->i": [(3, 3, 3)],
            "iij,jk->ik": [(3, 3, 2), (2, 4)],
            "...ii->...i": [(2, 3, 3)],
            "iij->j": [(3, 3, 2)],
            "i...,i...": [(3, 2), (3, 2)],
            "b...i,bi->b...": [(2, 4, 3), (2, 3)],
        }.items()
    ),
    c("Attention", *QKV, None, *PAST, outputs=3),
    c("Attention", *QKV, (4, 8), *PAST, outputs=4, is_causal=1, symbolic=1),
    *(
        c("Attention", *QKV, (4, 6), outputs=4, qk_matmul_output_mode=mode, softcap=1.5 if mode else 0.0, symbolic=1)
        for mode in range(4)
    ),
    c("Attention", *QKV, None, None, None, i64([6, 4]), symbolic=0),
    c("Attention", *QKV, None, None, None, i64([6, 4]), is_causal=1, symbolic=0),
    c("Attention", *QKV, left_window_size=1, right_window_size=1),
    c("Attention", *QKV, None, *PAST, left_window_size=1, outputs=3),
    c("Attention", *QKV, (4, 4), symbolic=0),
    c("Range", Variable(np.array(1.0)), np.array(5.7), Variable(np.array(1.3)), symbolic=0),
]


def label(case: Case) -> str:
    shapes = [x.value.shape if isinstance(x, Variable) else x.shape if isinstance(x, np.ndarray) else x for x in case[1]]
    return f"{case[0]}({','.join(map(str, [*shapes, *case[2].values()]))})"


@pytest.mark.parametrize("symbolic", [pytest.param(False, marks=pytest.mark.large), True], ids=["static", "symbolic"])
@pytest.mark.parametrize("case", CASES, ids=label)
def test_rule_agrees_with_differences(case: Case, symbolic: bool) -> None:
    op_type, inputs, attributes = case
    most = attributes.get("symbolic", 9)
    check_op(op_type, inputs, **{**attributes, "symbolic": most if symbolic else 0})


def runs_on_onnxruntime(case: Case) -> bool:
    """It does not know the windows of Attention (``legalize`` takes them apart) nor masks for the first keys only, and fills
    no spectrum up with zeros in the inverse of one side."""
    op_type, inputs, attributes = case
    if op_type == "Attention":
        return "left_window_size" not in attributes and inputs[3:] != [(4, 4)]
    return not (op_type == "DFT" and "inverse" in attributes and "onesided" in attributes and np.all(inputs[1:] == [i64(12)]))


@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in CASES if runs_on_onnxruntime(case)], ids=label)
def test_backward_graph_runs_on_onnxruntime(case: Case) -> None:
    op_type, inputs, attributes = case
    single = [x.astype(np.float32) if isinstance(x, np.ndarray) and x.dtype == np.float64 else x for x in inputs]
    options = {"dtype": np.float32, "tolerance": 2e-2, "step": 1e-2, "symbolic": 0, "compile_with": on_onnxruntime}
    check_op(op_type, single, **{**attributes, **options})


@pytest.mark.parametrize(("reduction", "peer"), [("mul", "prod"), ("max", "amax"), ("min", "amin")])
def test_ties_and_zeros_of_a_scatter_are_those_of_pytorch(reduction: str, peer: str) -> None:
    x = np.array([[1.0, 0.0, 2.0, 5.0]])
    index, updates = i64([[0, 0, 1, 2, 2, 0]]), np.array([[1.0, 1.0, 3.0, 0.0, 0.0, -2.0]])
    model, values = new_model({"x": x, "u": updates})
    op = Builder(model.graph)
    y = op.ScatterElements(values[0], op.const(index), values[1], axis=1, reduction=reduction)
    y = op.Mul(y, op.const(np.array([[1.0, 2.0, 3.0, 4.0]])))
    found = gradients(model, {"x": x, "u": updates}, [y], values)
    a, u = torch.tensor(x, requires_grad=True), torch.tensor(updates, requires_grad=True)
    (a.scatter_reduce(1, torch.tensor(index), u, peer) * torch.tensor([[1.0, 2.0, 3.0, 4.0]])).sum().backward()
    np.testing.assert_allclose(found[0], a.grad.numpy(), rtol=1e-12)
    np.testing.assert_allclose(found[1], u.grad.numpy(), rtol=1e-12)


def test_cumulative_product_with_zeros_like_pytorch() -> None:
    model, (value,) = new_model({"x": ZEROS})
    op = Builder(model.graph)
    weight = np.random.default_rng(2).standard_normal(ZEROS.shape)
    y = op.Mul(op.CumProd(value, op.const(i64(1))), op.const(weight))
    (found,) = gradients(model, {"x": ZEROS}, [y], [value])
    x = torch.tensor(ZEROS, requires_grad=True)
    (x.cumprod(1) * torch.tensor(weight)).sum().backward()
    np.testing.assert_allclose(found, x.grad.numpy(), rtol=1e-12)


@pytest.mark.parametrize("op_type", ["Acos", "Asin", "Atanh"])
def test_the_ends_of_the_range(op_type: str) -> None:
    """In float32, one step from ±1: as good as the float64 value rounded at the end."""
    x = np.float32([1 - 2**-24, -1 + 2**-24, 1 - 2**-20, 0.999, -0.9999])
    model, (value,) = new_model({"x": x})
    (found,) = gradients(model, {"x": x}, Builder(model.graph).emit(op_type, [value]), [value])
    exact = torch.tensor(x.astype(np.float64), requires_grad=True)
    getattr(torch, op_type.lower())(exact).sum().backward()
    np.testing.assert_allclose(found, exact.grad.numpy(), rtol=1e-6)


def test_empty_tensors_keep_their_shape() -> None:
    """A zero in the shape to go back to is a size, not "as in the input"."""
    x = np.zeros((0, 3, 4))
    model, (value,) = new_model({"x": x})
    op = Builder(model.graph)
    y: ir.Value = op.Reshape(value, i64([3, 4, 0]), allowzero=1)
    (found,) = gradients(model, {"x": x}, [y], [value])
    assert found.shape == (0, 3, 4)
