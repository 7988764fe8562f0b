"""onnxruntime's quantised ops compute what onnxruntime computes, to the rounding of the result."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

from graphc.training.inference import run_model

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(0)


def u8(*shape: int) -> Array:
    return RNG.integers(0, 256, shape).astype(np.uint8)


def i8(*shape: int) -> Array:
    return RNG.integers(-127, 128, shape).astype(np.int8)


def f32(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


S, Z = np.float32(0.02), np.uint8(120)
OUT, OUT_Z = np.float32(0.05), np.uint8(128)

# Weights of seven bits (// 2) where onnxruntime's products of int8 saturate on CPUs without VNNI.
CASES: dict[str, tuple[list[Array | np.generic | None], dict[str, Any]]] = {
    "QLinearAdd": ([u8(2, 6), S, Z, u8(6), np.float32(0.03), np.uint8(9), OUT, OUT_Z], {}),
    "QLinearMul": ([u8(2, 6), S, Z, u8(2, 6), np.float32(0.03), np.uint8(9), OUT, OUT_Z], {}),
    "QLinearSigmoid": ([u8(2, 6), S, Z, np.float32(1 / 256), np.uint8(0)], {}),
    "QLinearLeakyRelu": ([u8(2, 6), S, Z, OUT, OUT_Z], {"alpha": 0.1}),
    "QLinearGlobalAveragePool": ([u8(2, 3, 4, 4), S, Z, S, Z], {}),
    "QLinearAveragePool": ([u8(2, 3, 4, 4), S, Z, S, Z], {"kernel_shape": [2, 2], "strides": [2, 2]}),
    "QLinearSoftmax": ([u8(2, 6), S, Z, np.float32(1 / 256), np.uint8(0)], {"axis": 1, "opset": 13}),
    "QLinearConcat": ([OUT, OUT_Z, u8(2, 3), S, Z, u8(2, 2), np.float32(0.01), np.uint8(3)], {"axis": 1}),
    "QLinearWhere": ([RNG.integers(0, 2, (2, 6)).astype(bool), u8(2, 6), S, Z, u8(2, 6), S, np.uint8(3), OUT, OUT_Z], {}),
    "QGemm": (
        [u8(2, 6), S, Z, i8(6, 4), np.full(4, 0.01, np.float32), np.zeros(4, np.int8), u8(4).astype(np.int32), OUT, OUT_Z],
        {},
    ),
    "QGemm float": ([u8(2, 6), S, Z, i8(4, 6) // 2, np.float32(0.01), np.int8(0)], {"transB": 1}),
    "MatMulIntegerToFloat": ([u8(2, 6), i8(6, 4), S, np.full(4, 0.01, np.float32), Z, np.zeros(4, np.int8), f32(4)], {}),
    "DynamicQuantizeMatMul": ([f32(2, 6), i8(6, 4), np.full(4, 0.01, np.float32), np.zeros(4, np.int8), f32(4)], {}),
    "MatMulNBits": ([f32(3, 40), u8(8, 3, 8), np.abs(f32(24)), u8(8 * 2)], {"K": 40, "N": 8, "bits": 4, "block_size": 16}),
    "MatMulNBits 8 bits": ([f32(3, 32), u8(8, 2, 16), np.abs(f32(16))], {"K": 32, "N": 8, "bits": 8, "block_size": 16}),
    "GatherBlockQuantized": (
        [u8(10, 16), np.array([[1, 9]]), np.abs(f32(10, 2)), u8(10, 1)],
        {"bits": 4, "block_size": 16, "quantize_axis": 1, "gather_axis": 0},
    ),
    "DynamicQuantizeLSTM": (
        [f32(5, 2, 4), i8(2, 4, 12) // 2, i8(2, 3, 12) // 2, f32(2, 24), None, None, None, None]
        + [np.full((2, 12), 0.01, np.float32), np.zeros((2, 12), np.int8)] * 2,
        {"hidden_size": 3, "direction": "bidirectional"},
    ),
    "DynamicQuantizeLSTM per direction": (
        [f32(5, 2, 4), i8(1, 4, 12) // 2, i8(1, 3, 12) // 2, f32(1, 24), None, None, None, None]
        + [np.full(1, 0.01, np.float32), np.zeros(1, np.int8)] * 2,
        {"hidden_size": 3},
    ),
}  # fmt: skip
LEVELS = {"QLinearSigmoid": 1, "QLinearSoftmax": 1, "QLinearAveragePool": 1, "QLinearGlobalAveragePool": 1}
"""Op → levels by which onnxruntime's own kernels, which use tables or round twice, may differ."""


@pytest.mark.parametrize("case", CASES)
def test_the_standard_form_computes_what_onnxruntime_does(case: str) -> None:
    op, (inputs, attributes) = case.split()[0], CASES[case]
    names = ["" if value is None else f"i{k}" for k, value in enumerate(inputs)]
    node = helper.make_node(op, names, ["y"], domain="com.microsoft", **attributes)
    held = [onnx.numpy_helper.from_array(np.asarray(v), n) for n, v in zip(names, inputs, strict=True) if v is not None]
    quantised = op.startswith("Q") and len(inputs) != 6
    result = helper.make_tensor_value_info("y", onnx.TensorProto.UINT8 if quantised else onnx.TensorProto.FLOAT, None)
    fed = {"QLinearConcat": 2, "QLinearWhere": 1}.get(op, 0)
    first = held.pop([tensor.name for tensor in held].index(names[fed]))
    shape = helper.make_tensor_value_info(first.name, first.data_type, list(first.dims))
    if op == "GatherBlockQuantized":  # data must be a constant there; its indices are fed
        held.append(first)
        first = held.pop([tensor.name for tensor in held].index("i1"))
        shape = helper.make_tensor_value_info(first.name, first.data_type, list(first.dims))
    graph = helper.make_graph([node], "net", [shape], [result], held)
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    feeds = {first.name: onnx.numpy_helper.to_array(first)}
    expected = ort.InferenceSession(model.SerializeToString()).run(None, feeds)[0]
    found = run_model(model, feeds)["y"]
    assert found.dtype == expected.dtype
    if quantised:
        assert np.abs(found.astype(int) - expected.astype(int)).max() <= LEVELS.get(op, 0)
    else:
        tolerance = 0.02 if op == "DynamicQuantizeLSTM" else 2e-5  # onnxruntime rounds what the LSTM reads
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())
