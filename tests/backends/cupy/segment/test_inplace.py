"""Results of kernels in the memory of their operands: where that saves memory, and where it would be wrong."""

from __future__ import annotations

import shutil

import numpy as np
import onnx
import pytest

from graphc.backends.cupy.predict.cost_model import scratch_of
from tests.backends.host_kernels import EmulatedDevice, HostDevice, run_segment

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")

HEAD = '<ir_version: 10, opset_import: ["": 26]> g (float[N,N] a, float[N,N] b, int64[N,1] label) => (float[N,N] y)'

CASES = {
    "elements": ("{ p = MatMul(a, b)  e = Exp(p)  y = MatMul(e, b) }", 1),
    "read-again-later": ("{ p = MatMul(a, b)  e = Exp(p)  q = MatMul(e, b)  y = Sub(q, p) }", 3),
    "others-elements": ("{ p = MatMul(a, b)  t = Transpose<perm=[1, 0]>(p)  e = Mul(t, p)  y = MatMul(e, b) }", 2),
    "chosen-elements": ("{ p = MatMul(a, b)  t = Gather<axis=0>(p, row)  s = Sub(p, t)  y = MatMul(s, b) }", 2),
    "rows": ("{ p = MatMul(a, b)  s = Softmax(p)  y = MatMul(s, b) }", 1),
    "columns": ("{ p = MatMul(a, b)  s = Softmax<axis=0>(p)  y = MatMul(s, b) }", 1),
    "columns-of-few": ("{ p = MatMul(a, b)  s = Softmax<axis=0>(p)  y = MatMul(s, b) }", None),
    "row-sums": ("{ p = MatMul(a, b)  s = ReduceMax(p, one)  y = Sub(b, s) }", 1),
    "cross-entropy": (
        "{ p = MatMul(a, b)  s = Softmax(p)  k = GatherElements<axis=1>(s, label)  l = Sub(k, unit)"
        "  d = ScatterElements<axis=1>(s, label, l)  y = MatMul(d, b) }",
        1,
    ),
}
"""Case → its nodes, and how many matrices lie in memory beside operands and result; None: not asked."""


def reference(name: str, a: np.ndarray, b: np.ndarray, label: np.ndarray) -> np.ndarray:
    p = a @ b

    def softmax(axis: int) -> np.ndarray:
        e = np.exp(p - p.max(axis, keepdims=True))
        return e / e.sum(axis, keepdims=True)

    middle = {
        "elements": lambda: np.exp(p),
        "read-again-later": lambda: np.exp(p),
        "others-elements": lambda: p.T * p,
        "chosen-elements": lambda: p - p[[7]],
        "rows": lambda: softmax(1),
        "columns": lambda: softmax(0),
        "columns-of-few": lambda: softmax(0),
        "row-sums": lambda: b - p.max(1, keepdims=True),
        "cross-entropy": lambda: softmax(1) - np.eye(len(p))[label[:, 0]],
    }[name]()
    if name == "row-sums":
        return middle
    return middle @ b - (p if name == "read-again-later" else 0)


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_a_result_lies_where_its_operand_lay_unless_somebody_still_reads_that(name: str) -> None:
    nodes, matrices = CASES[name]
    constants = "row = Constant<value_ints=[7]>()  one = Constant<value_ints=[1]>()  unit = Constant<value_float=1.0>()"
    size = 96 if name.endswith("few") else 128
    text = HEAD.replace("N", str(size)) + nodes.replace("{", "{ " + constants, 1)
    model = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text))
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((size, size), dtype=np.float32) / 5 for _ in range(2))
    label = rng.integers(0, size, (size, 1))
    expected = reference(name, a, b, label)
    for device in (HostDevice(), EmulatedDevice(2)):
        results, segment = run_segment(model, {"a": a, "b": b, "label": label}, device)
        np.testing.assert_allclose(results["y"], expected, rtol=1e-4, atol=1e-4)
        if matrices is not None:
            assert scratch_of(segment) // (4 * size * size) == matrices, "small totals aside"
