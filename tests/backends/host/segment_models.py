"""Segments as text and their results, without an import of PyTorch: tests start processes that need them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from graphc.backends.host.segment import compile_segment
from graphc.backends.host.segment_code import KernelPart, SegmentCode
from graphc.device import aligned_zeros
from graphc.ir.facts import dtype_of, shape_of


def text(body: str, shape: str, out: str | None = None) -> onnx.ModelProto:
    head = f'<ir_version: 10, opset_import: ["": 21]> g (float[{shape}] x) => (float[{out or shape}] y)'
    return onnx.shape_inference.infer_shapes(onnx.parser.parse_model(f"{head} {{ {body} }}"))


def results_of(model: onnx.ModelProto, feeds: dict[str, np.ndarray], backend: Any) -> dict[str, np.ndarray]:
    """What a segment computes; every output is poisoned first."""
    graph = ir.from_proto(model).graph
    outputs = {v.name or "": np.full(shape_of(v), 77, dtype_of(v).numpy()) for v in graph.outputs}
    given = {name: np.ascontiguousarray(array) for name, array in feeds.items()}
    code = compile_segment(model)
    assert any(isinstance(part, KernelPart) for part in code.parts)
    code.bind(given, outputs, backend.pool, backend.bind_session, aligned_zeros, {})()
    read = SegmentCode.from_bytes(code.to_bytes())
    assert read is not None, "its kernels are on disk"
    again = {name: np.full_like(array, 78) for name, array in outputs.items()}
    read.bind(given, again, backend.pool, backend.bind_session, aligned_zeros, {})()
    for name, array in outputs.items():
        assert array.tobytes() == again[name].tobytes(), "code from disk computes the same bits"
    return outputs
