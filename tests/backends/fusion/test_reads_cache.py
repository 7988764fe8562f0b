"""Kernels that are alike are generated once while a segment is grouped, and each still reads its own operands."""

from __future__ import annotations

import subprocess
import sys

import onnx
import onnx_ir as ir
import pytest

from graphc.backends.fusion.generator import Generator
from graphc.backends.fusion.kernel_source import KernelSpec
from graphc.backends.fusion.reads_cache import Reads
from graphc.ir.facts import shape_of
from graphc.ir.infer import propagate

TWO_LAYERS = """<ir_version: 10, opset_import: ["": 26]> g
(float[8,4] a, float[8,4] b, float[4] s, float[4] t) => (float[8,4] y, float[8,4] z, float[8,4] w) {
  two = Constant<value_float=2.0>()  three = Constant<value_float=3.0>()
  a1 = Mul(a, s)  a2 = Add(a1, two)  y = Exp(a2)
  b1 = Mul(b, t)  b2 = Add(b1, two)  z = Exp(b2)
  c1 = Mul(b, b)  c2 = Add(c1, three)  w = Exp(c2)
}"""

SLICED = """<ir_version: 10, opset_import: ["": 26]> g
(float[4] a, float[4] b) => (float[4] y, float[4] z, float[4] w) {
  c = Concat<axis=0>(a, b)  axes = Constant<value_ints=[0]>()
  n0 = Constant<value_ints=[0]>()  n2 = Constant<value_ints=[2]>()  n4 = Constant<value_ints=[4]>()
  n6 = Constant<value_ints=[6]>()  n8 = Constant<value_ints=[8]>()
  p = Slice(c, n0, n4, axes)  y = Neg(p)
  q = Slice(c, n2, n6, axes)  z = Neg(q)
  r = Slice(c, n4, n8, axes)  w = Neg(r)
}"""


@pytest.mark.parametrize(("text", "kinds"), [(TWO_LAYERS, 2), (SLICED, 3)])
def test_what_kernels_read_is_what_their_generated_sources_read(text: str, kinds: int) -> None:
    graph = ir.from_proto(onnx.parser.parse_model(text)).graph
    propagate(graph)
    reads = Reads()
    for out in graph.outputs:
        spec, inputs = KernelSpec(shape_of(out), (), (), (out,)), set(graph.inputs)
        source = Generator(spec, inputs.__contains__).source()
        found = reads.of(spec, inputs.__contains__)
        assert found is not None
        assert found[0] == source.operands[: source.reads]
    assert len(reads._known) == kinds, "the same computation is generated once, another one anew"


@pytest.mark.full
def test_one_backend_costs_only_its_own_modules() -> None:
    code = "import sys; from graphc.backend import BACKENDS; BACKENDS['cupy']; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "graphc.backends.cupy" in loaded
    assert not {"numba", "onnxruntime", "graphc.backends.onnxruntime"} & set(loaded)
