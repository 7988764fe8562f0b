"""Sums of many numbers are as exact as float32 can give them, and long rows are the work of kernels as short ones are."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

from graphc.backends.host.segment import compile_segment
from graphc.backends.host.segment_code import KernelPart
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


BESIDE = """<ir_version: 10, opset_import: ["": 21]>
g (TYPE[SHAPE] x) => (y, d, m) {
    axes = Constant <value_ints = [AXES]> ()
    two = Constant <value_float = 2.0> ()
    factor = CastLike(two, x)
    d = Mul(x, factor)
    squares = Mul(d, x)
    s = ReduceSum<keepdims = 0>(squares, axes)
    y = Sqrt(s)
    m = ReduceMax<keepdims = 0>(x, axes)
}"""


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float", "double", "float16"])
@pytest.mark.parametrize("name", SUMS)
def test_few_long_rows_are_shared_by_threads_in_the_same_parts(name: str, dtype: str) -> None:
    """Beside the reductions a value of the whole shape is stored, and one that follows from a total."""
    shape, axes = SUMS[name]
    kind = {"float": np.float32, "double": np.float64, "float16": np.float16}[dtype]
    x = (np.random.default_rng(0).standard_normal(shape) / 64).astype(kind)
    text = BESIDE.replace("TYPE", dtype).replace("SHAPE", ", ".join(map(str, shape))).replace("AXES", ", ".join(map(str, axes)))
    found = [
        run_model(ir.from_proto(onnx.parser.parse_model(text)), {"x": x}, backend="onnxruntime", threads=threads)
        for threads in (1, 2, 5)
    ]
    for other in found[1:]:
        for key in found[0]:
            np.testing.assert_array_equal(found[0][key], other[key])
    y, d, m = found[0].values()
    wide = x.astype(np.float64)
    np.testing.assert_allclose(y, np.sqrt((2 * wide * wide).sum(tuple(axes))), rtol=5e-3 if dtype == "float16" else 3e-7)
    np.testing.assert_array_equal(d, 2 * x)
    np.testing.assert_array_equal(m, x.max(tuple(axes)))


@pytest.mark.parametrize("name", SUMS)
def test_few_long_rows_are_work_for_many_threads(name: str) -> None:
    shape, axes = SUMS[name]
    parts = compile_segment(ir.to_proto(model_of(shape, axes))).parts
    assert max(part.units for part in parts if isinstance(part, KernelPart)) >= 4


SOFTMAX = """<ir_version: 10, opset_import: ["": 21]>
g (float[ROWS, COLUMNS] x, float scale) => (y, z) {
    scaled = Mul(x, scale)
    y = LogSoftmax<axis = 1>(scaled)
    z = Softmax<axis = 1>(scaled)
}"""


@pytest.mark.parametrize(("rows", "columns"), [(4, 20_000), (70, 33_001), (3, 16_385)])
def test_a_softmax_of_long_rows_is_computed_by_kernels_alone(rows: int, columns: int) -> None:
    model = ir.from_proto(onnx.parser.parse_model(SOFTMAX.replace("ROWS", str(rows)).replace("COLUMNS", str(columns))))
    parts = compile_segment(ir.to_proto(model)).parts
    assert parts
    assert all(isinstance(part, KernelPart) for part in parts)
    x = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)
    y, z = run_model(model, {"x": x, "scale": np.float32(3)}, backend="onnxruntime", threads=2).values()
    wide = torch.from_numpy(x).double() * 3
    np.testing.assert_allclose(y, wide.log_softmax(1), rtol=1e-6)
    np.testing.assert_allclose(z, wide.softmax(1), rtol=5e-6, atol=1e-12)


ROWS = """<ir_version: 10, opset_import: ["": 21]>
g (float[37, COLUMNS] x, float scale) => (most, least, total, soft) {
    axes = Constant <value_ints = [1]> ()
    scaled = Mul(x, scale)
    most = ReduceMax<keepdims = 0>(scaled, axes)
    least = ReduceMin<keepdims = 0>(scaled, axes)
    total = ReduceSum<keepdims = 0>(scaled, axes)
    soft = LogSoftmax<axis = 1>(scaled)
}"""


@pytest.mark.parametrize("columns", [2, 3, 7, 8, 15, 16, 17, 33, 50, 64, 77, 100, 197, 255, 256, 300])
def test_rows_of_every_length_and_what_is_not_a_number_in_one(columns: int) -> None:
    """The loops of short rows are written out, those that fill no vectors end with part of one."""
    model = ir.from_proto(onnx.parser.parse_model(ROWS.replace("COLUMNS", str(columns))))
    x = np.random.default_rng(columns).standard_normal((37, columns)).astype(np.float32)
    x[3, columns - 1], x[5, 0], x[7] = np.nan, np.nan, -np.inf
    x[9, columns // 2] = np.inf
    got = run_model(model, {"x": x, "scale": np.float32(2)}, backend="onnxruntime", threads=2)
    wide = torch.from_numpy(x).double() * 2
    wanted = {"most": wide.amax(1), "least": wide.amin(1), "total": wide.sum(1), "soft": wide.log_softmax(1)}
    for name, value in wanted.items():
        atol = 1e-7 * 2 * columns if name == "total" else 2e-6  # numbers of both signs: a sum may be far below its parts
        np.testing.assert_allclose(got[name], value, rtol=2e-6, atol=atol, err_msg=name)
