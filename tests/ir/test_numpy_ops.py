"""Constants computed by NumPy have the bits that ONNX's reference evaluator gives them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from graphc.ir import OPSET
from graphc.ir.numpy_ops import FORMULAS, compute_directly

F32, I64 = np.float32, np.int64
X = np.array([[1.5, -0.0, np.nan], [np.inf, -2.7, 3e-42]], F32)
N = np.array([[7, -7, 0], [3, 2**40, -1]], I64)

CASES: list[tuple[str, list[Any], dict[str, Any]]] = [
    ("Add", [X, X[0]], {}),
    ("Add", [N, np.array(3)], {}),
    ("Cast", [X], {"to": onnx.TensorProto.DOUBLE}),
    ("Cast", [np.array([1.5, -2.7, 3e9], F32)], {"to": onnx.TensorProto.INT64}),
    ("Cast", [N], {"to": onnx.TensorProto.FLOAT}),
    ("Cast", [X], {"to": onnx.TensorProto.BOOL}),
    ("Div", [X, np.array([3, 7, 2], F32)], {}),
    ("Equal", [X, X], {}),
    ("Equal", [N, np.array(7)], {}),
    ("Expand", [X, np.array([4, 1, 1])], {}),
    ("Expand", [np.array(True), np.array([2, 3])], {}),
    ("Expand", [np.array(2.5, F32), np.array([], I64)], {}),
    ("Mul", [X, X], {}),
    ("Range", [np.array(2), np.array(11), np.array(4)], {}),
    ("Range", [np.array(5), np.array(-3), np.array(-2)], {}),
    ("Range", [np.array(3), np.array(3), np.array(1)], {}),
    ("Sqrt", [np.abs(X)], {}),
    ("Sqrt", [np.array(64, np.float64)], {}),
    ("Squeeze", [X[None, :, None], np.array([0, -2])], {}),
    ("Squeeze", [X[None, :, None]], {}),
    ("Sub", [np.array([1, 2**31 - 1], np.int32), np.array([3, -1], np.int32)], {}),
    ("Trilu", [X], {}),
    ("Trilu", [np.ones((2, 3, 4), np.bool_), np.array(1)], {"upper": 0}),
    ("Unsqueeze", [X, np.array([0, -1])], {}),
    ("Where", [X > 0, X, np.array(0, F32)], {}),
]  # fmt: skip


def test_every_formula_has_a_case() -> None:
    assert {op for op, _, _ in CASES} == set(FORMULAS)


@pytest.mark.parametrize(("op", "arrays", "attributes"), CASES, ids=[f"{k}-{op}" for k, (op, _, _) in enumerate(CASES)])
def test_same_bits_as_the_reference(op: str, arrays: list[np.ndarray], attributes: dict[str, Any]) -> None:
    names = [f"i{k}" for k in range(len(arrays))]
    proto = onnx.helper.make_node(op, names, ["o"], **attributes)
    kinds = [
        onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for name, a in zip(names, arrays, strict=True)
    ]
    graph = onnx.helper.make_graph([proto], "one", kinds, [onnx.helper.make_empty_tensor_value_info("o")])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", OPSET)])
    with np.errstate(all="ignore"):
        wanted = np.asarray(ReferenceEvaluator(model).run(None, dict(zip(names, arrays, strict=True)))[0])
        found = compute_directly(ir.from_proto(proto), arrays)
    assert found is not None
    assert (found.dtype, found.shape, found.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes())


@pytest.mark.parametrize(
    ("op", "arrays"),
    [
        ("Add", [X, N]),  # of two types
        ("Add", [X, np.zeros((4, 5), F32)]),  # of shapes that do not fit
        ("Sqrt", [X.astype(np.float16)]),
        ("Squeeze", [X, np.array([0])]),
        ("Where", [N, X, X]),
        ("Range", [np.array(0.0, F32), np.array(1.0, F32), np.array(0.1, F32)]),
        ("Range", [np.array(0), np.array(5), np.array(0)]),  # with a step of 0
        ("Sin", [X]),
        ("Squeeze", [X[None], None]),
    ],
)
def test_the_rest_is_left_to_the_reference(op: str, arrays: list[np.ndarray | None]) -> None:
    proto = onnx.helper.make_node(op, ["" if a is None else f"i{k}" for k, a in enumerate(arrays)], ["o"])
    assert compute_directly(ir.from_proto(proto), arrays) is None
