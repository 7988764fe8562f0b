"""Arithmetic whose operands are stored anyway is repeated where its result is read, which then takes no memory."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from graphc.backend import make_backend
from graphc.plan.partition import Plan, make_plan
from graphc.training.inference import run_model

MODEL = """<ir_version: 10, opset_import: ["": 21]>
g (float[n,512] x) => (float[n,512] z) {
    n = MatMul(x, w)
    a = ARITHMETIC
    c = Add(a, shift)
    e = Sigmoid(c)
    y = MatMul(e, w)
    REST
}"""
FIRST = ["Mul", "Add", "Sigmoid"]
SIZE = 64 * 512 * 4


def model_of(rest: str, arithmetic: str = "Mul(n, scale)") -> ir.Model:
    model = onnx.parser.parse_model(MODEL.replace("REST", rest).replace("ARITHMETIC", arithmetic))
    rng = np.random.default_rng(0)
    for name, shape in {"w": (512, 512), "scale": (512,), "shift": (512,)}.items():
        array = rng.standard_normal(shape).astype(np.float32) / 16
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return ir.from_proto(model)


def plan_of(model: ir.Model, rows: int = 64, backend: str = "onnxruntime") -> Plan:
    made = make_backend(backend, threads=1)
    try:
        return make_plan(model, {"x": (rows, 512)}, made)
    finally:
        made.close()


def segments(plan: Plan) -> list[list[str]]:
    return [[node.op_type for node in step.nodes] for step in plan.steps if step.kind == "segment"]


def test_a_sum_is_repeated_and_takes_no_memory() -> None:
    model = model_of("p = Mul(y, c)  z = Sub(p, n)")
    plan = plan_of(model)
    assert segments(plan) == [FIRST, ["Mul", "Add", "Mul", "Sub"]]
    assert plan.buffers["arena"] == 3 * SIZE  # n, e and y
    assert plan_of(model, backend="onnxruntime:fuse=false").buffers["arena"] == 4 * SIZE
    x = np.random.default_rng(1).standard_normal((64, 512)).astype(np.float32)
    found, expected = (run_model(model, {"x": x}, backend=b)["z"] for b in ("onnxruntime", "numpy"))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("op", ["Exp", "Sigmoid", "Tanh", "Erf"])
def test_short_functions_are_repeated(op: str) -> None:
    model = model_of("p = Mul(y, c)  z = Sub(p, n)", f"{op}(n)")
    plan = plan_of(model)
    assert segments(plan)[-1][:2] == [op, "Add"]
    assert plan.buffers["arena"] == 3 * SIZE  # n, e and y
    x = np.random.default_rng(1).standard_normal((64, 512)).astype(np.float32)
    found, expected = (run_model(model, {"x": x}, backend=b)["z"] for b in ("onnxruntime", "numpy"))
    assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(expected)


def test_what_its_own_segment_does_not_read_is_computed_later_only() -> None:
    plan = plan_of(model_of("p = Mul(y, d)  z = Sub(p, n)", "Mul(n, scale)  d = Neg(a)"))
    assert segments(plan) == [FIRST, ["Mul", "Neg", "Mul", "Sub"]]


@pytest.mark.parametrize(
    ("rest", "arithmetic"),
    [
        pytest.param("z = Mul(y, c)", "Mul(n, scale)", id="operand not stored"),
        pytest.param("p = MatMul(c, w)  q = Mul(y, c)  r = Sub(q, p)  z = Sub(r, n)", "Mul(n, scale)", id="read by a product"),
        pytest.param("p = Mul(y, c)  z = Sub(p, n)", "Sin(n)", id="long function"),
    ],
)
def test_what_would_cost_more_is_stored(rest: str, arithmetic: str) -> None:
    plan = plan_of(model_of(rest, arithmetic))
    assert segments(plan)[-1].count("Add") == 0
    assert "c" in {value.name for step in plan.steps for value in step.outputs}


def test_little_memory_is_not_worth_it() -> None:
    plan = plan_of(model_of("p = Mul(y, c)  z = Sub(p, n)"), rows=4)
    assert segments(plan) == [FIRST, ["Mul", "Sub"]]


def test_what_follows_from_a_repeated_value_is_repeated_behind_it() -> None:
    model = model_of("p = Mul(y, c)  q = Sub(p, a)  z = Sub(q, n)")
    assert segments(plan_of(model)) == [FIRST, ["Mul", "Add", "Mul", "Sub", "Sub"]]
    x = np.random.default_rng(1).standard_normal((64, 512)).astype(np.float32)
    found, expected = (run_model(model, {"x": x}, backend=b)["z"] for b in ("onnxruntime", "numpy"))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
