"""Integer tensors whose elements are followed: what is said of lists of sizes does not hold for tables."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

from graphc.frontends.onnx import load
from graphc.pipeline import run as run_pipeline
from tests.frontends.zoo import run


@pytest.mark.parametrize("kind", [TensorProto.INT64, TensorProto.BOOL])
def test_a_column_of_a_table_has_all_its_rows(kind: int) -> None:
    table = np.array([[1, 0, 1], [0, 0, 1]]).astype(helper.tensor_dtype_to_np_dtype(kind))
    nodes = [
        helper.make_node("Gather", ["table", "last"], ["column"], axis=1),
        helper.make_node("Shape", ["column"], ["shape"]),
        helper.make_node("Expand", ["x", "shape"], ["wide"]),
        helper.make_node("Cast", ["column"], ["numbers"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["wide", "numbers"], ["y"]),
        helper.make_node("ReduceProd", ["table64"], ["products"], axes=[1], keepdims=0),
    ]
    initializers = {"table": table, "last": np.array(-1), "table64": np.array([[1, 2, 3], [4, 5, 6]])}
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])],
        [
            helper.make_tensor_value_info("y", TensorProto.FLOAT, [2]),
            helper.make_tensor_value_info("products", TensorProto.INT64, [2]),
        ],
        [
            helper.make_tensor(k, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape, v.flatten())
            for k, v in initializers.items()
        ],
    )
    model = load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
    run_pipeline(model, "legalize,simplify,verify")
    y, products = run(model, {"x": np.array([2.0], np.float32)})
    np.testing.assert_array_equal(y, [3, 3])
    np.testing.assert_array_equal(products, [6, 120])
