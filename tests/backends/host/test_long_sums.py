"""Sums of many numbers are as exact as float32 can give them."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from graphc.training.inference import run_model

MODEL = """<ir_version: 10, opset_import: ["": 21]>
g (float[SHAPE] x) => (y, z) {
    axes = Constant <value_ints = [AXES]> ()
    squares = Mul(x, x)
    y = ReduceSum<keepdims = 0>(squares, axes)
    r = Abs(x)
    z = ReduceMean<keepdims = 0>(r, axes)
}"""

SUMS = {
    "everything": ((2_000_003,), [0]),
    "everything of a matrix": ((3000, 1000), [0, 1]),
    "long rows": ((5, 700_001), [1]),
    "channels": ((6, 3, 300, 301), [0, 2, 3]),
    "columns": ((200_003, 12), [0]),
    "columns of a stack": ((3, 50_021, 8), [0, 1]),
    "columns, short last axis": ((4, 100_000, 3), [1]),
}


def model_of(shape: tuple[int, ...], axes: list[int]) -> ir.Model:
    text = MODEL.replace("SHAPE", ", ".join(map(str, shape))).replace("AXES", ", ".join(map(str, axes)))
    return ir.from_proto(onnx.parser.parse_model(text))


@pytest.mark.parametrize("name", SUMS)
def test_a_long_sum_is_exact_to_a_few_roundings(name: str) -> None:
    """Added one after the other the squares of a million numbers are off by 2e-6, of 32 million by 4e-4."""
    shape, axes = SUMS[name]
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    model = model_of(shape, axes)
    y, z = run_model(model, {"x": x}, backend="onnxruntime", threads=2).values()
    wide = x.astype(np.float64)
    np.testing.assert_allclose(y, (wide * wide).sum(tuple(axes)), rtol=3e-7)
    np.testing.assert_allclose(z, np.abs(wide).mean(tuple(axes)), rtol=3e-7)
