"""The faults of the first attack on graphc, as models of a few nodes: each once crashed, hung or raised a bare exception."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper, numpy_helper, parser

from tests.fuzz.corpus import Finding
from tests.fuzz.seeds import Seed


def _finding(why: str, how: str, body: str, inputs: str = "float[2, 4] x", outputs: str = "float[2, 4] y") -> Finding:
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["": 20]> net ({inputs}) => ({outputs}) {{ {body} }}')
    return _of(why, how, model)


def _of(why: str, how: str, model: onnx.ModelProto) -> Finding:
    if not any(tensor.name == "w" for tensor in model.graph.initializer):
        model.graph.initializer.append(numpy_helper.from_array(np.ones((2, 4), np.float32), "w"))
    feeds = {}
    for value in model.graph.input:
        sizes = [d.dim_value if 0 < d.dim_value < 100 else 2 for d in value.type.tensor_type.shape.dim]
        dtype = {1: np.float32, 7: np.int64, 9: np.bool_}.get(value.type.tensor_type.elem_type)
        if dtype is not None:
            feeds[value.name] = np.ones(sizes, dtype)
    return Finding(why, how, model.SerializeToString(), Seed("", onnx.ModelProto(), feeds, "y"))


def _without_body() -> onnx.ModelProto:
    node = helper.make_node("If", ["c"], ["y"])
    inputs = [helper.make_tensor_value_info("c", 9, [])]
    graph = helper.make_graph([node], "net", inputs, [helper.make_tensor_value_info("y", 1, [2, 4])])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def _undefined_type() -> onnx.ModelProto:
    model = onnx.ModelProto.FromString(_finding("", "", "y = Add (x, w)").content)
    model.graph.initializer[0].data_type = 0
    return model


def _location_with_nul() -> onnx.ModelProto:
    model = onnx.ModelProto.FromString(_finding("", "", "y = Add (x, w)").content)
    model.graph.initializer[0].ClearField("raw_data")
    model.graph.initializer[0].data_location = onnx.TensorProto.EXTERNAL
    model.graph.initializer[0].external_data.add(key="location", value="a\0b")
    return model


def _recursion() -> onnx.ModelProto:
    return parser.parse_model("""
        <ir_version: 10, opset_import: ["": 20, "own": 1]>
        net (float[2, 4] x) => (float[2, 4] y) { y = own.f (x) }
        <domain: "own", opset_import: ["": 20, "own": 1]> f (a) => (b) { b = own.g (a) }
        <domain: "own", opset_import: ["": 20, "own": 1]> g (a) => (b) { b = own.f (a) }""")


PAST: dict[str, Finding] = {
    "M2 Split": _finding("num_outputs below the outputs: SIGABRT in ONNX's inference", "train",
                         "y, z = Split <axis = 1, num_outputs = 1> (w)", outputs="float[2, 2] y"),
    "M2 GatherND": _finding("batch_dims of -3: SIGSEGV in ONNX's inference", "check",
                            "y = GatherND <batch_dims = -3> (x, i)", "float[2, 4] x, int64[2, 1] i"),
    "M3 Slice": _finding("axes of 2**40 elements: 11 GB and 20 s", "train",
                         "s = Slice (w, a, a, a)  y = Add (x, s)", f"float[2, 4] x, int64[{2**40}] a"),
    "M10 no body": _of("an If without bodies: KeyError", "train", _without_body()),
    "M10 undefined type": _of("an initializer of element type 0: TypeError", "inspect", _undefined_type()),
    "M10 NUL": _of("a NUL in an external location: ValueError", "run", _location_with_nul()),
    "M10 missing input": _finding("Gather without indices: IndexError", "train", "y = Gather (w)"),
    "M10 wrong attribute": _finding("a list where a number belongs: TypeError", "train",
                                    "h = Add (x, w)  y = Softmax <axis = [0, 1]> (h)"),
    "M10 Celu": _finding("alpha of 0: ZeroDivisionError in the gradient", "train",
                         "h = Add (x, w)  y = Celu <alpha = 0.0> (h)"),
    "M10 heads": _finding("no head: ZeroDivisionError in the gradient", "train",
                          "h = Unsqueeze (w, zero)  y = Attention <q_num_heads = 0, kv_num_heads = 0> (h, h, h)",
                          "float[2, 4] x, int64[1] zero"),
    "recursive functions": _of("functions that call each other", "train", _recursion()),
}  # fmt: skip
