"""A cross-entropy reads its logits once: one kernel has the loss of each row, and writes the gradient in their place."""

from __future__ import annotations

import shutil

import numpy as np
import onnx
import pytest

from graphc.backends.cupy.segment.program import KernelCall
from graphc.ir.facts import size_of
from tests.backends.host_kernels import EmulatedDevice, run_segment

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")

TEXT = """<ir_version: 10, opset_import: ["": 26]>
g (float[R,1] a, float[1,C] b, int64[R,1] label) => (float loss, float[1,C] db) {
  axis = Constant<value_ints=[1]>()  one = Constant<value_float=1.0>()  p = MatMul(a, b)
  l = LogSoftmax<axis=1>(p)  k = GatherElements<axis=1>(l, label)  t = ReduceSum<keepdims=0>(k)  loss = Neg(t)
  s = Exp(l)  at = GatherElements<axis=1>(s, label)  less = Sub(at, one)  d = ScatterElements<axis=1>(s, label, less)
  turned = Transpose<perm=[1, 0]>(a)  db = MatMul(turned, d)
}"""


@pytest.mark.parametrize(("rows", "columns"), [(140, 512), pytest.param(132, 22000, marks=pytest.mark.large)])
def test_loss_and_gradient_take_one_kernel_over_the_logits(rows: int, columns: int) -> None:
    torch = pytest.importorskip("torch")
    model = onnx.parser.parse_model(TEXT.replace("[R", f"[{rows}").replace("C]", f"{columns}]"))
    model = onnx.shape_inference.infer_shapes(model)
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((rows, 1), dtype=np.float32), rng.standard_normal((1, columns), dtype=np.float32)
    label = rng.integers(0, columns, (rows, 1))
    results, segment = run_segment(model, {"a": a, "b": b, "label": label}, EmulatedDevice(2))
    weight = torch.tensor(b, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(torch.tensor(a) @ weight, torch.tensor(label[:, 0]), reduction="sum")
    loss.backward()
    np.testing.assert_allclose(results["loss"], loss.item(), rtol=1e-5)
    np.testing.assert_allclose(results["db"], weight.grad.numpy(), rtol=1e-5, atol=1e-5)
    large = [
        v
        for call in segment.calls
        if isinstance(call, KernelCall)
        for v in call.source.operands
        if size_of(v) == rows * columns
    ]
    assert len(large) == 2, "one kernel reads the logits and writes their gradient"
    assert segment.aliases[large[1]] is large[0]
