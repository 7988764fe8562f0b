"""Weights that files hold as integers, in forms that no one exporter writes all of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import graphc
from graphc import losses

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(0)


def model(nodes: list[Any], shape: list[Any], held: dict[str, Array], *, kind: int = TensorProto.FLOAT) -> onnx.ModelProto:
    """A model of ``x`` and ``y`` over constants."""
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", kind, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(np.asarray(array), name) for name, array in held.items()],
    )
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def run(proto: onnx.ModelProto, x: Array) -> Array:
    return np.asarray(ort.InferenceSession(proto.SerializeToString()).run(None, {"x": x})[0])


def trained(
    proto: onnx.ModelProto, x: Array, label: Array, lr: float, out: Path | None = None, steps: int = 1
) -> dict[str, Array]:
    """Parameters after steps of SGD on Σ (y - label)² / 2."""
    program = graphc.compile(proto, loss=losses.MSE(reduction="sum"), optimizer=graphc.optim.SGD(lr=lr / 2))
    with graphc.Trainer(program, threads=1) as trainer:
        for _ in range(steps):
            trainer.step({"x": x, "label": label})
        if out is not None:
            trainer.export(out)
        return {name: np.array(value) for name, value in trainer.trained_values().items()}


W = RNG.integers(-100, 100, (6, 4)).astype(np.int8)
COLUMNS = np.array([0.01, 0.02, 0.03, 0.04], np.float32)
X = RNG.standard_normal((5, 6)).astype(np.float32)
PACKED = RNG.integers(0, 256, (8, 2, 8)).astype(np.uint8)
node = helper.make_node

FORMS: dict[str, tuple[list[Any], dict[str, Array], str, Array]] = {
    "columns": (
        [node("DequantizeLinear", ["W", "s", "z"], ["w"], axis=1), node("MatMul", ["x", "w"], ["y"])],
        {"W": W, "s": COLUMNS, "z": np.array([0, 3, -5, 7], np.int8)},
        "W",
        (W.astype(np.float32) - [0, 3, -5, 7]) * COLUMNS,
    ),
    "blocks": (
        [node("DequantizeLinear", ["W", "s"], ["w"], axis=0, block_size=3), node("MatMul", ["x", "w"], ["y"])],
        {"W": W, "s": np.array([COLUMNS, COLUMNS * 2])},
        "W",
        W * np.repeat([COLUMNS, COLUMNS * 2], 3, axis=0),
    ),
    "moved": (
        [
            node("Transpose", ["W"], ["v"]),
            node("Reshape", ["v", "shape"], ["u"]),
            node("DequantizeLinear", ["u", "s"], ["w"]),
            node("MatMul", ["x", "w"], ["y"]),
        ],
        {"W": np.ascontiguousarray(W.T), "s": np.float32(0.02), "shape": np.array([6, 4])},
        "W",
        W.T * np.float32(0.02),
    ),
    "cast": (
        [
            node("Cast", ["W"], ["c"], to=TensorProto.FLOAT),
            node("Sub", ["c", "z"], ["d"]),
            node("Mul", ["d", "s"], ["w"]),
            node("MatMul", ["x", "w"], ["y"]),
        ],
        {"W": W, "s": COLUMNS, "z": np.float32(3)},
        "W",
        (W - np.float32(3)) * COLUMNS,
    ),
    "scales in turn": (
        [
            node("DynamicQuantizeLinear", ["x"], ["q", "a", "b"]),
            node("MatMulInteger", ["q", "W", "b"], ["i"]),
            node("Cast", ["i"], ["f"], to=TensorProto.FLOAT),
            node("Mul", ["f", "s"], ["g"]),
            node("Mul", ["g", "a"], ["h"]),
            node("Mul", ["h", "half"], ["y"]),
        ],
        {"W": W, "s": COLUMNS, "half": np.float32(0.5)},
        "W",
        W * COLUMNS,
    ),
    "four bits": (
        [node("MatMulNBits", ["x", "W", "s"], ["y"], domain="com.microsoft", K=24, N=8, bits=4, block_size=16)],
        {"W": PACKED, "s": np.abs(RNG.standard_normal(16)).astype(np.float32)},
        "W",
        np.zeros(0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_integers_train_as_the_floats_they_stand_for(form: str, tmp_path: Path) -> None:
    nodes, held, name, real = FORMS[form]
    x = RNG.standard_normal((5, 24)).astype(np.float32) if form == "four bits" else X
    proto = model(nodes, ["n", x.shape[1]], held)
    y = run(proto, x)
    label = y / 4
    before, after = (trained(proto, x, label, lr)[name] for lr in (0.0, 1e-2))
    if real.size:
        np.testing.assert_allclose(before, real, rtol=1e-6, atol=1e-7)
        factor, transposed = (0.5 if form == "scales in turn" else 1.0), form == "moved"
        gradient = factor * x.T @ (factor * x @ (real.T if transposed else real) - label)
        gradient = gradient.T if transposed else gradient
        np.testing.assert_allclose((before - after) / 1e-2, gradient, rtol=2e-3, atol=2e-3)
    out = tmp_path / "trained.onnx"
    trained(proto, x, label, 1e-2, out, steps=100)
    written = onnx.load(out)
    assert {t.name: (t.data_type, list(t.dims)) for t in written.graph.initializer} == {
        t.name: (t.data_type, list(t.dims)) for t in proto.graph.initializer
    }
    assert ((run(written, x) - label) ** 2).sum() < ((y - label) ** 2).sum() / 3


def test_scales_widen_with_the_weights_and_biases_follow(tmp_path: Path) -> None:
    """A convolution in the form that runtimes fuse: the scale of its bias is that of the input times that of the weight."""
    w, b = RNG.integers(-127, 128, (2, 3, 1, 1)).astype(np.int8), np.array([100, -50], np.int32)
    ws, xs = np.array([0.001, 0.002], np.float32), np.float32(0.05)
    held = {"W": w, "ws": ws, "B": b, "bs": ws * xs, "xs": xs, "xz": np.uint8(128), "wz": np.zeros(2, np.int8)}
    nodes = [
        node("QuantizeLinear", ["x", "xs", "xz"], ["q"]),
        node("DequantizeLinear", ["q", "xs", "xz"], ["r"]),
        node("DequantizeLinear", ["W", "ws", "wz"], ["w"], axis=0),
        node("DequantizeLinear", ["B", "bs"], ["b"], axis=0),
        node("Conv", ["r", "w", "b"], ["y"]),
    ]
    proto = model(nodes, ["n", 3, 2, 2], held)
    x = RNG.standard_normal((4, 3, 2, 2)).astype(np.float32)
    label = np.stack([2 * x[:, 0] - x[:, 1] + 1, run(proto, x)[:, 1]], axis=1).astype(np.float32)
    out = tmp_path / "trained.onnx"
    values = trained(proto, x, label, 2e-2, out, steps=200)
    made = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(out).graph.initializer}
    np.testing.assert_allclose(made["W"] * made["ws"][:, None, None, None], values["W"], atol=float(made["ws"][0]))
    assert made["ws"][0] > 5 * ws[0]
    assert made["ws"][1] == ws[1]
    np.testing.assert_allclose(made["bs"], made["ws"] * xs, rtol=1e-6)
    np.testing.assert_allclose(made["B"] * made["bs"], values["B"], atol=float(made["bs"][0]))
    assert np.abs(run(onnx.load(out), x) - label).max() < 0.1


def test_an_asymmetric_range_reaches_to_the_other_side_of_zero(tmp_path: Path) -> None:
    held = {"W": np.array([[10], [200]], np.uint8), "s": np.float32(0.01), "z": np.uint8(0)}
    proto = model([node("DequantizeLinear", ["W", "s", "z"], ["w"]), node("MatMul", ["x", "w"], ["y"])], ["n", 2], held)
    x = RNG.standard_normal((16, 2)).astype(np.float32)
    out = tmp_path / "trained.onnx"
    trained(proto, x, x @ np.array([[-1.0], [3.0]], np.float32), 5e-2, out, steps=200)
    assert run(onnx.load(out), np.eye(2, dtype=np.float32)).reshape(-1) == pytest.approx([-1, 3], abs=0.02)


def test_weights_are_cut_off_aloud_where_their_scale_serves_others(tmp_path: Path) -> None:
    held = {"W": np.array([[100], [100]], np.int8), "s": np.float32(0.01), "z": np.int8(0)}
    nodes = [
        node("DequantizeLinear", ["W", "s"], ["w"]),
        node("MatMul", ["x", "w"], ["v"]),
        node("QuantizeLinear", ["v", "s", "z"], ["q"]),
        node("DequantizeLinear", ["q", "s", "z"], ["r"]),
        node("Add", ["r", "v"], ["y"]),
    ]
    x = RNG.standard_normal((16, 2)).astype(np.float32)
    with pytest.warns(UserWarning, match="1 parameter left the range of their integers and are cut off: 'W'"):
        trained(model(nodes, ["n", 2], held), x, 8 * x[:, :1], 5e-2, tmp_path / "out.onnx", steps=100)


def test_a_quantised_embedding_trains() -> None:
    table = RNG.integers(0, 256, (10, 4)).astype(np.uint8)
    held = {"W": table, "s": np.float32(0.01), "z": np.uint8(128)}
    nodes = [node("Gather", ["W", "x"], ["q"]), node("DequantizeLinear", ["q", "s", "z"], ["y"])]
    proto = model(nodes, ["n"], held, kind=TensorProto.INT64)
    ids = np.array([3, 3, 7])
    before, after = (trained(proto, ids, np.zeros((3, 4), np.float32), lr)["W"] for lr in (0.0, 0.1))
    np.testing.assert_allclose(before, (table.astype(np.float32) - 128) * 0.01, rtol=1e-5)
    gradient = np.zeros((10, 4), np.float32)
    np.add.at(gradient, ids, before[ids])
    np.testing.assert_allclose((before - after) / 0.1, gradient, rtol=1e-4, atol=1e-5)


def test_scales_of_activations_train_only_when_named() -> None:
    held = {"w": RNG.standard_normal((6, 4)).astype(np.float32), "s": COLUMNS, "z": np.zeros(4, np.uint8)}
    nodes = [
        node("MatMul", ["x", "w"], ["a"]),
        node("QuantizeLinear", ["a", "s", "z"], ["q"], axis=1),
        node("DequantizeLinear", ["q", "s", "z"], ["y"], axis=1),
    ]
    proto = model(nodes, ["n", 6], held)
    for train, expected in ((None, {"w"}), (["s"], {"w", "s"})):
        program = graphc.compile(proto, loss=losses.MSE(), optimizer=graphc.optim.SGD(lr=0.1), train=train)
        updates = {n.inputs[0].name for n in program.model.graph if n.op_type == "SGD" and n.inputs[0] is not None}
        assert updates == expected


def test_a_product_of_integers_without_a_scale_trains_with_a_warning() -> None:
    nodes = [node("MatMulInteger", ["x", "W"], ["i"]), node("Cast", ["i"], ["y"], to=TensorProto.FLOAT)]
    proto = model(nodes, ["n", 6], {"W": W}, kind=TensorProto.UINT8)
    program = graphc.compile(proto, loss=losses.MSE(), optimizer=graphc.optim.SGD(lr=0.1))
    assert "no scale found for 'W'" in "\n".join(program.log)
