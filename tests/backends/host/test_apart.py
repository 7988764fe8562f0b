"""Neighbours that share nothing are segments of their own, so that what one reads is gone when the other writes."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from graphc.backend import make_backend
from graphc.plan.partition import Plan, make_plan

MODEL = """<ir_version: 10, opset_import: ["": 21]>
g (float[n,512] x) => (float[n,512] z, float[1,512] s) {
    axis = Constant<value_ints: ints = [0]>()
    a = Mul(x, x)
    b = MatMul(a, w)
    s = ReduceSum(a, axis)
    REST
}"""
APART = [["Mul"], ["ReduceSum"], ["Relu"]]
TOGETHER = [["Mul"], ["ReduceSum", "Relu"]]
OPERAND = [["Mul"], ["ReduceSum", "Sub", "Relu"]]
JOINED = [["Mul"], ["ReduceSum", "Relu", "Sub"]]


def plan_of(rest: str, rows: int, backend: str) -> Plan:
    model = onnx.parser.parse_model(MODEL.replace("REST", rest))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((512, 512), np.float32), "w"))
    made = make_backend(backend, threads=1)
    try:
        return make_plan(ir.from_proto(model), {"x": (rows, 512)}, made)
    finally:
        made.close()


@pytest.mark.parametrize(
    ("rest", "rows", "backend", "expected"),
    [
        pytest.param("z = Relu(b)", 64, "onnxruntime", APART, id="nothing shared"),
        pytest.param("z = Relu(b)", 4, "onnxruntime", TOGETHER, id="little memory"),
        pytest.param("z = Relu(b)", 64, "onnxruntime:fuse=false", TOGETHER, id="sessions"),
        pytest.param("c = Relu(b)  z = Sub(c, s)", 64, "onnxruntime", JOINED, id="joined later"),
        pytest.param("c = Sub(b, a)  z = Relu(c)", 64, "onnxruntime", OPERAND, id="one operand"),
    ],
)
def test_segments(rest: str, rows: int, backend: str, expected: list[list[str]]) -> None:
    steps = plan_of(rest, rows, backend).steps
    assert [[node.op_type for node in step.nodes] for step in steps if step.kind == "segment"] == expected


def test_the_result_takes_the_memory_of_what_was_summed() -> None:
    size = 64 * 512 * 4
    rest = "c = Relu(b)  z = MatMul(c, w)"
    arenas = [plan_of(rest, 64, backend).buffers["arena"] for backend in ("onnxruntime", "onnxruntime:fuse=false")]
    assert arenas == [2 * size, 3 * size]
