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


CROSS_ENTROPY = """(bfloat16[4096,8192] logits, int64[4096] label, float[] d) => (float[] total, bfloat16[4096,8192] dlogits) {
  x = Cast<to=1>(logits)
  total, weight, p = graphc.SoftmaxCrossEntropy<axis=1, label_smoothing=0.0>(x, label)
  g = graphc.SoftmaxCrossEntropyGrad<axis=1, label_smoothing=0.0>(d, p, label)
  dlogits = Cast<to=16>(g)
}"""

NORMALISED = """(bfloat16[64,28,28,256] x, float[256] s, float[256] b, bfloat16[64,28,28,256] g)
  => (bfloat16[64,28,28,256] z, bfloat16[64,28,28,256] dx, float[256] ds, float[256] db) {
  xf = Cast<to=1>(x)
  axes = Constant<value_ints=[0,1,2]>()
  m = ReduceMean<keepdims=0>(xf, axes)  q = Mul(xf, xf)  e = ReduceMean<keepdims=0>(q, axes)
  mm = Mul(m, m)  v = Sub(e, mm)  eps = Constant<value_float=1e-5>()  w = Add(v, eps)  r0 = Sqrt(w)  r = Reciprocal(r0)
  c = Sub(xf, m)  f = Mul(r, s)  n = Mul(c, f)  y0 = Add(n, b)  y = Cast<to=16>(y0)  z = Relu(y)
  gz = graphc.ReluGrad(g, z)  gf = Cast<to=1>(gz)
  db = ReduceSum<keepdims=0>(gf, axes)  gc = Mul(gf, c)  k0 = ReduceSum<keepdims=0>(gc, axes)  ds = Mul(k0, r)
  count = Constant<value_float=50176.0>()
  a1 = Div(db, count)  a2 = Div(ds, count)  a3 = Mul(a2, r)  d1 = Sub(gf, a1)  d2 = Mul(c, a3)  d3 = Sub(d1, d2)
  d4 = Mul(d3, f)  dx = Cast<to=16>(d4)
}"""
