"""The gradient of a layer normalisation behind a residual sum, in mixed precision."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from graphc.ir.facts import static_dims
from graphc.plan.specialise import prepare

TEXT = """<ir_version: 10, opset_import: ["" : 26, "graphc" : 1]>
g (float[{rows},{columns}] x, bfloat16[{rows},{columns}] g, float[{rows},{columns}] after, float[{columns}] s,
   float[{columns}] b)
  => (bfloat16[{rows},{columns}] y, float[{rows},{columns}] dx, float[{columns}] ds, float[{columns}] db) {{
  yf, mean, inv = LayerNormalization<axis=-1, epsilon=1e-5>(x, s, b)
  y = Cast<to=16>(yf)
  dy = Cast<to=1>(g)
  d, ds, db = graphc.LayerNormalizationGrad<axis=-1>(dy, x, s, mean, inv)
  dx = Add(d, after)
}}"""


def model(rows: int, columns: int, *, bias: bool = False) -> onnx.ModelProto:
    """``bias``: dx goes on in bfloat16, and its sum is the gradient of a bias before the normalisation."""
    text = TEXT
    if bias:
        text = text.replace("float[{rows},{columns}] dx,", "bfloat16[{rows},{columns}] low, float[{columns}] bias,").replace(
            "dx = Add(d, after)",
            "dx = Add(d, after)\n  low = Cast<to=16>(dx)\n  wide = Cast<to=1>(low)\n  a = Constant<value_ints=[0]>()\n"
            "  bias = ReduceSum<keepdims=0>(wide, a)",
        )
    found = ir.from_proto(onnx.parser.parse_model(text.format(rows=rows, columns=columns)))
    shapes = {v.name or "": list(static_dims(v) or ()) for v in found.graph.inputs}
    return ir.to_proto(prepare(found, shapes))
