"""Loops over independent slices are computed at once; loops whose iterations differ stay, and compute what they did."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from graphc.frontends import load
from graphc.pipeline import run as run_pipeline
from tests.frontends.zoo import run

FLOAT, INT, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def bags(ends: list[int]) -> onnx.ModelProto:
    """Means over x[0 : ends[0]], x[ends[0] : ends[1]], …, as an exporter writes EmbeddingBag."""
    constants = {
        "starts": np.array([0, *ends[:-1]]),
        "ends": np.array(ends),
        "count": np.array(len(ends)),
        "zero": np.array([0]),
        "yes": np.array(True),
    }
    body = helper.make_graph(
        [
            helper.make_node("Gather", ["starts", "k"], ["s0"]),
            helper.make_node("Gather", ["ends", "k"], ["e0"]),
            helper.make_node("Unsqueeze", ["s0", "zero"], ["s"]),
            helper.make_node("Unsqueeze", ["e0", "zero"], ["e"]),
            helper.make_node("Slice", ["x", "s", "e", "zero"], ["rows"]),
            helper.make_node("ReduceMean", ["rows", "zero"], ["mean"], keepdims=0),
            helper.make_node("Identity", ["go"], ["more"]),
        ],
        "body",
        [helper.make_tensor_value_info("k", INT, []), helper.make_tensor_value_info("go", BOOL, [])],
        [helper.make_tensor_value_info("more", BOOL, []), helper.make_tensor_value_info("mean", FLOAT, [3])],
    )
    graph = helper.make_graph(
        [helper.make_node("Loop", ["count", "yes"], ["y"], body=body)],
        "bags",
        [helper.make_tensor_value_info("x", FLOAT, [ends[-1], 3])],
        [helper.make_tensor_value_info("y", FLOAT, [len(ends), 3])],
        [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@pytest.mark.parametrize(("ends", "at_once"), [([2, 4, 6, 8], True), ([4], True), ([1, 4, 6, 8], False)])
def test_means_of_equal_and_of_unequal_bags(ends: list[int], at_once: bool) -> None:
    model = load(bags(ends))
    run_pipeline(model, "legalize")
    assert ("Loop" not in {node.op_type for node in model.graph}) == at_once
    x = np.random.default_rng(0).standard_normal((ends[-1], 3)).astype(np.float32)
    (have,) = run(model, {"x": x})
    want = [x[start:end].mean(0) for start, end in zip([0, *ends], ends, strict=False)]
    np.testing.assert_allclose(have, want, rtol=1e-6)
