"""What several loops over a row want is computed by the first one, and kept for the others."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from graphc.backends.host.compiler import Compiler
from graphc.backends.host.segment import compile_segment
from graphc.training.inference import run_model

MODEL = """<ir_version: 10, opset_import: ["": 21]>
g (TYPE[SHAPE] x) => (TYPE[SHAPE] y) {
    axes = Constant <value_ints = [AXES]> ()
    a = Tanh(x)
    m = ReduceMax(a, axes)
    e0 = Sub(a, m)
    e = Exp(e0)
    s = ReduceSum(e, axes)
    y = Div(e, s)
}"""

WALKS = {
    "rows": ((40, 600), [1]),
    "rows of two axes": ((6, 5, 30, 8), [2, 3]),
    "axes apart": ((12, 9, 20), [0, 2]),
    "columns": ((300, 40), [0]),
    "rows that are too long": ((3, 5000), [1]),
}


def model_of(name: str, dtype: str = "float") -> ir.Model:
    shape, axes = WALKS[name]
    text = MODEL.replace("TYPE", dtype).replace("SHAPE", ", ".join(map(str, shape))).replace("AXES", ", ".join(map(str, axes)))
    return ir.from_proto(onnx.parser.parse_model(text))


@pytest.mark.parametrize("dtype", ["float", "double", "float16"])
@pytest.mark.parametrize("name", WALKS)
def test_a_softmax_of_computed_scores_is_exact(name: str, dtype: str) -> None:
    shape, axes = WALKS[name]
    kind = {"float": np.float32, "double": np.float64, "float16": np.float16}[dtype]
    x = np.random.default_rng(0).standard_normal(shape).astype(kind)
    (y,) = run_model(model_of(name, dtype), {"x": x}, backend="onnxruntime").values()
    wide = np.exp(np.tanh(x.astype(np.float64)))
    tolerance = {"float": 1e-6, "double": 1e-12, "float16": 4e-3}[dtype]
    np.testing.assert_allclose(y, wide / wide.sum(tuple(axes), keepdims=True), rtol=tolerance)


@pytest.mark.parametrize(("name", "times"), [("rows", 1), ("rows of two axes", 1), ("rows that are too long", 2)])
def test_an_exponential_is_computed_once(name: str, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    compile_as_before = Compiler.compile

    def compiled(self: Compiler, source, loops, **options):  # type: ignore[no-untyped-def]
        texts.append(source.body)
        return compile_as_before(self, source, loops, **options)

    monkeypatch.setattr(Compiler, "compile", compiled)
    compile_segment(ir.to_proto(model_of(name)))
    assert "".join(texts).count("expf(") == times


def test_a_softmax_of_recomputed_scores_is_one_kernel() -> None:
    """Its scores are cheap to compute from operands that are small, so that no large operand joins the loops of a row."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
    g (float[8,300,1] s, float[8,1,300] t, float[300,300] seen) => (float[8,300,300] y) {
        zero = Constant <value_float = 0.0> ()
        low = Constant <value_float = -9e16> ()
        e = Add(s, t)
        shown = Greater(seen, zero)
        w = Where(shown, e, low)
        y = Softmax <axis = -1> (w)
    }""")
    assert len(compile_segment(model).parts) == 1
