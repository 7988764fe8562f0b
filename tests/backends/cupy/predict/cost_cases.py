"""How often a compiled graph moves an array through memory."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from graphc.backends.cupy.predict.traffic import nbytes, traffic
from graphc.backends.cupy.segment.compile import compile_segment
from graphc.backends.cupy.segment.program import KernelCall
from graphc.ir.facts import static_dims
from graphc.plan.specialise import prepare

HEAD = '<ir_version: 10, opset_import: ["": 26, "graphc": 1]> g '


def passes(text: str, array: str) -> float:
    """Bytes that all kernels move, in sizes of one input."""
    model = ir.from_proto(onnx.parser.parse_model(HEAD + text))
    shapes = {v.name or "": list(static_dims(v) or ()) for v in model.graph.inputs}
    segment = compile_segment(ir.to_proto(prepare(model, shapes)))
    assert all(isinstance(call, KernelCall) for call in segment.calls), "every node is generated"
    size = next(nbytes(v) for v in segment.graph.inputs if v.name == array)
    return sum(traffic(call.source, call.parts) for call in segment.calls if isinstance(call, KernelCall)) / size
