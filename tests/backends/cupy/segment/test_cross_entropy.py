"""A cross-entropy reads its logits once: one kernel has the loss of each row, and writes the gradient in their place."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
import pytest
import torch
from torch.nn.functional import cross_entropy

import graphc
from graphc.backends import cupy
from graphc.backends.cupy.segment.compile import compile_segment
from graphc.backends.cupy.segment.program import KernelCall, Segment
from graphc.ir.facts import size_of
from graphc.losses import Output, SoftmaxCrossEntropy
from tests.backends.host_kernels import EmulatedDevice, cupy_on, run_segment

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
    model = onnx.parser.parse_model(TEXT.replace("[R", f"[{rows}").replace("C]", f"{columns}]"))
    model = onnx.shape_inference.infer_shapes(model)
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((rows, 1), dtype=np.float32), rng.standard_normal((1, columns), dtype=np.float32)
    label = rng.integers(0, columns, (rows, 1))
    results, segment = run_segment(model, {"a": a, "b": b, "label": label}, EmulatedDevice(2))
    weight = torch.tensor(b, requires_grad=True)
    loss = cross_entropy(torch.tensor(a) @ weight, torch.tensor(label[:, 0]), reduction="sum")
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


ROWS, WIDTH, CLASSES = 140, 8, 512
WEIGHTS = tuple(0.25 + (7 * c % 11) / 8 for c in range(CLASSES))

FORMS: dict[str, tuple[Any, Callable[..., Any]]] = {
    "mean": (SoftmaxCrossEntropy(), lambda z, y: cross_entropy(z, y)),
    "ignored labels": (SoftmaxCrossEntropy(ignore_index=3), lambda z, y: cross_entropy(z, y, ignore_index=3)),
    "class weights": (
        SoftmaxCrossEntropy(class_weight=WEIGHTS, ignore_index=3),
        lambda z, y: cross_entropy(z, y, torch.tensor(WEIGHTS, dtype=z.dtype), ignore_index=3),
    ),
    "smoothed": (SoftmaxCrossEntropy(label_smoothing=0.1), lambda z, y: cross_entropy(z, y, label_smoothing=0.1)),
    "smoothed, ignored labels": (
        SoftmaxCrossEntropy(label_smoothing=0.1, ignore_index=3),
        lambda z, y: cross_entropy(z, y, label_smoothing=0.1, ignore_index=3),
    ),
    "loss of each row": (
        Output("loss"),
        lambda z, y: (cross_entropy(z, y, reduction="none") * torch.arange(len(y)) / len(y)).sum(),
    ),
}
"""A loss of graphc, and PyTorch's of scores and labels."""

LINEAR = f"""<ir_version: 10, opset_import: ["": 21]>
g (float[N,{WIDTH}] x, int64[N] label) => (float[N,{CLASSES}] scores) <float[{WIDTH},{CLASSES}] w = {{}}> {{
  scores = MatMul(x, w)
}}"""

BY_ROW = f"""<ir_version: 10, opset_import: ["": 21]>
g (float[{ROWS},{WIDTH}] x, int64[{ROWS}] label) => (float loss)
<float[{WIDTH},{CLASSES}] w = {{}}, float[{ROWS}] row = {{}}> {{
  scores = MatMul(x, w)  each = SoftmaxCrossEntropyLoss<reduction="none">(scores, label)  scaled = Mul(each, row)
  loss = ReduceSum<keepdims=0>(scaled)
}}"""


def linear(form: str, weight: Any) -> onnx.ModelProto:
    """A linear classifier of the weight."""
    text = (BY_ROW if form == "loss of each row" else LINEAR).replace("{}", "{0}")
    model = onnx.parser.parse_model(text)
    values = {"w": weight, "row": np.arange(ROWS, dtype=np.float32) / ROWS}
    names = [t.name for t in model.graph.initializer]
    del model.graph.initializer[:]
    model.graph.initializer.extend(onnx.numpy_helper.from_array(values[name], name) for name in names)
    return model


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Segment]:
    """The segments that the backend compiles, in their order."""
    found: list[Segment] = []

    def watched(*args: Any, **options: Any) -> Segment:
        found.append(compile_segment(*args, **options))
        return found[-1]

    monkeypatch.setattr(cupy, "compile_segment", watched)
    return found


@pytest.mark.full
@pytest.mark.parametrize("precision", [None, "bf16", pytest.param("fp16", marks=pytest.mark.large)])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_loss_follows_pytorch(
    form: str, precision: str | None, compiled: list[Segment], register_backend: Callable[..., None]
) -> None:
    """A step on a linear classifier, so long that the gradient can be read from it; the scores have the type of the products.

    A gradient's sum is that of float32 to 16 bits, since each score's gradient is rounded.
    """
    rng = np.random.default_rng(0)
    # Multiples of 1/8 and 1/16 keep the products exact in 16 bits, so scores are the same in all three precisions.
    x = (rng.integers(-4, 5, (ROWS, WIDTH)) / 8).astype(np.float32)
    weight = (rng.integers(-8, 9, (WIDTH, CLASSES)) / 16).astype(np.float32)
    label = rng.integers(0, CLASSES, ROWS)
    label[::7] = 3
    feeds = {"x": x, "label": label}

    def step() -> tuple[float, Any]:
        program = graphc.compile(
            linear(form, weight),
            loss=FORMS[form][0],
            optimizer=graphc.optim.SGD(lr=4096.0),
            precision=precision,
            backend="emulated",
        )
        with graphc.Trainer(program, threads=1) as trainer:
            return float(trainer.step(feeds)["loss"]), np.asarray(trainer.trained_values()["w"])

    register_backend("emulated", lambda **_: cupy_on(EmulatedDevice(2)))
    loss, trained = step()
    wanted = torch.tensor(weight, dtype=torch.float64, requires_grad=True)
    total = FORMS[form][1](torch.tensor(x, dtype=torch.float64) @ wanted, torch.tensor(label))
    total.backward()
    gradient = wanted.grad.numpy()
    rounding = {None: 1e-6, "bf16": 2.0**-8, "fp16": 2.0**-11}[precision]
    np.testing.assert_allclose(loss, total.item(), rtol=1e-5)
    np.testing.assert_allclose((weight - trained) / 4096, gradient, rtol=10 * rounding, atol=rounding * np.abs(gradient).max())

    large = {v for s in compiled for c in kernels(s) for v in c.source.operands if size_of(v) == ROWS * CLASSES}
    # ONNX's own loss with a value per row and its gradient are a kernel each.
    wanted_kernels = 2 if form == "loss of each row" else 1
    assert sum(1 for s in compiled for c in kernels(s) if large & set(c.source.operands)) == wanted_kernels

    again = step()
    assert again[0] == loss
    np.testing.assert_array_equal(again[1], trained)


def kernels(segment: Segment) -> list[KernelCall]:
    return [call for call in segment.calls if isinstance(call, KernelCall)]
