"""Shapes that depend on what is fed: a GPU trains such models, each size with a plan of its own, as the CPU does."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import graphc

pytestmark = pytest.mark.gpu

GRAPH = """<ir_version: 10, opset_import: ["": 21]> g (float[10,8] x, int64[2,30] edges, int64[10] part) => (float[K,4] y)
<float[8,4] w> {
  zero = Constant <value = int64[1] {0}> ()  one = Constant <value = int64[1] {1}> ()  four = Constant <value = int64[1] {4}> ()
  sources = Gather <axis = 0> (edges, zero)  targets = Gather <axis = 0> (edges, one)
  same = Equal (sources, targets)  differ = Not (same)  flat = Squeeze (differ, zero)  at = NonZero (flat)
  places = Squeeze (at, zero)
  s = Squeeze (sources, zero)  t = Squeeze (targets, zero)  from = Gather (s, places)  to = Gather (t, places)
  h = MatMul (x, w)  messages = Gather (h, from)
  column = Unsqueeze (to, one)  size = Shape (messages)  wide = Expand (column, size)
  empty = Sub (h, h)  sums = ScatterElements <axis = 0, reduction = "add"> (empty, wide, messages)
  last = ReduceMax <keepdims = 1> (part)  count = Add (last, one)  whole = Concat <axis = 0> (count, four)
  none = ConstantOfShape (whole)  rows = Unsqueeze (part, one)  all = Shape (sums)  spread = Expand (rows, all)
  y = ScatterElements <axis = 0, reduction = "add"> (none, spread, sums)
}"""


@pytest.mark.parametrize("on_device", [False, True])
def test_edges_without_loops_and_sums_of_each_part(on_device: bool) -> None:
    import cupy

    model, generator = onnx.parser.parse_model(GRAPH), np.random.default_rng(0)
    model.graph.ClearField("initializer")
    model.graph.initializer.append(onnx.numpy_helper.from_array(generator.standard_normal((8, 4)).astype(np.float32), "w"))
    batches = []
    for parts in (3, 3, 5):
        part, edges = np.arange(10) % parts, generator.integers(0, 10, (2, 30))
        x, label = (generator.standard_normal(shape).astype(np.float32) for shape in ((10, 8), (parts, 4)))
        batches.append({"x": x, "edges": edges, "part": part, "label": label})
    losses = {}
    for backend in ("cupy", "numpy"):
        program = graphc.compile(model, loss=graphc.losses.MSE(), optimizer=graphc.optim.SGD(lr=0.01), backend=backend)
        with graphc.Trainer(program, threads=1) as trainer:
            moved = on_device and backend == "cupy"
            fed = [{name: cupy.asarray(a) if moved else a for name, a in batch.items()} for batch in batches]
            losses[backend] = [trainer.step(batch)["loss"] for batch in fed]
    np.testing.assert_allclose(losses["cupy"], losses["numpy"], rtol=1e-5)
