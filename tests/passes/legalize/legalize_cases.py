"""Models of a few nodes, of any opset and dialect."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

F32 = np.float32


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(F32)


def build(
    nodes: Sequence[onnx.NodeProto],
    inputs: dict[str, Sequence[int | str]],
    outputs: Sequence[str] | dict[str, Sequence[int | str]],
    weights: dict[str, np.ndarray] | None = None,
    *,
    opset: int,
    ir_version: int = 8,
    functions: Sequence[onnx.FunctionProto] = (),
    domains: dict[str, int] | None = None,
    types: dict[str, int] | None = None,
) -> onnx.ModelProto:
    types = types or {}
    shapes = outputs if isinstance(outputs, dict) else {}
    graph = helper.make_graph(
        list(nodes),
        "test",
        [helper.make_tensor_value_info(n, types.get(n, TensorProto.FLOAT), s) for n, s in inputs.items()],
        [helper.make_tensor_value_info(n, types.get(n, TensorProto.FLOAT), shapes.get(n)) for n in outputs],
        [numpy_helper.from_array(a, n) for n, a in (weights or {}).items()],
    )
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, v) for d, v in (domains or {}).items())]
    return helper.make_model(graph, opset_imports=imports, ir_version=ir_version, functions=list(functions))
