"""initialize: distributions by use, independence of order, and what it leaves alone."""

from __future__ import annotations

import os

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from graphc.errors import UsageError
from graphc.ir.text import from_text
from graphc.passes.legalize.initialize import fans
from graphc.pipeline import Context, run

LIGHT = os.path.join(os.path.dirname(onnx.__file__), "backend", "test", "data", "light")

NET = """<ir_version: 11, opset_import: ["" : 26]>
g (float[N,8,9,9] x, int64[N] token, float[N,2,3] q) => (y, z, p)
  <float[64,8,3,3] conv_w = {}, float[64] conv_b = {}, float[64] scale = {}, float[64] shift = {}, float[64] mean = {},
   float[64] var = {}, float[64,300] fc_w = {}, float[300] fc_b = {}, float[10,300] head_w = {}, float[10] head_b = {},
   float[500,32] table = {}, float[8,4,5,5] up_w = {}, float[200,64] left = {}, float[4,1,1] slope = {}, float[64] gain = {}>
{
   c = Conv (x, conv_w, conv_b)
   n = BatchNormalization (c, scale, shift, mean, var)
   m = GlobalAveragePool (n)
   f = Flatten (m)
   gained = Mul (f, gain)
   h = MatMul (gained, fc_w)
   hb = Add (h, fc_b)
   y = Gemm <transB: int = 1> (hb, head_w, head_b)
   e = Gather (table, token)
   u = ConvTranspose (x, up_w)
   z0 = PRelu (u, slope)
   z = Concat <axis: int = 0> (e)
   t = Transpose <perm: ints = [1, 0]> (left)
   p = MatMul (f, t)
}
"""


def initialized(options="", text=NET):
    model = from_text(text)
    ctx = Context()
    run(model, f"initialize{{{options}}}" if options else "initialize", ctx)
    return {name: value.const_value.numpy() for name, value in model.graph.initializers.items()}, ctx


def test_fans_follow_the_use():
    graph = from_text(NET).graph
    found = {name: fans(graph.initializers[name]) for name in ("conv_w", "fc_w", "head_w", "up_w", "left")}
    assert found == {
        "conv_w": (8 * 9, 64 * 9),
        "fc_w": (64, 300),
        "head_w": (300, 10),
        "up_w": (8 * 25, 4 * 25),
        "left": (64, 200),
    }


@pytest.mark.parametrize(
    ("method", "std", "bound"),
    [
        ("he", lambda i, o: (2 / i) ** 0.5, None),
        ("glorot", lambda i, o: (2 / (i + o)) ** 0.5, lambda i, o: (6 / (i + o)) ** 0.5),
        ("uniform", lambda i, o: (1 / (3 * i)) ** 0.5, lambda i, o: i**-0.5),
        ("normal", lambda i, o: 0.02, None),
    ],
)
def test_weights_have_the_moments_of_the_method(method, std, bound):
    values, _ = initialized(f"method={method}")
    for name, (fan_in, fan_out) in (("conv_w", (72, 576)), ("fc_w", (64, 300)), ("head_w", (300, 10)), ("left", (64, 200))):
        weight = values[name].astype(np.float64)
        assert abs(weight.std() / std(fan_in, fan_out) - 1) < 0.05, name
        assert abs(weight.mean()) < 4 * std(fan_in, fan_out) / weight.size**0.5, name
        if bound is not None:
            assert np.abs(weight).max() <= bound(fan_in, fan_out) * (1 + 1e-6)


def test_everything_else_gets_the_constant_of_its_role():
    values, ctx = initialized()
    for name, constant in {
        "conv_b": 0, "scale": 1, "shift": 0, "mean": 0, "var": 1, "fc_b": 0, "head_b": 0, "slope": 0.25, "gain": 1,
    }.items():  # fmt: skip
        assert np.all(values[name] == constant), name
    assert abs(values["table"].std() - 0.02) < 0.001
    assert ctx.log == ["initialize: he, seed 0: 1 embedding, 3 one, 1 slope, 5 weight, 5 zero of 15 parameters"]


def test_zeros():
    values, _ = initialized("method=zeros")
    assert not values["conv_w"].any()
    assert np.all(values["scale"] == 1)


def test_the_same_seed_gives_the_same_numbers_whatever_else_is_there():
    values, _ = initialized("seed=5")
    again, _ = initialized("seed=5")
    other, _ = initialized("seed=6")
    assert all(np.array_equal(values[n], again[n]) for n in values)
    assert not np.array_equal(values["fc_w"], other["fc_w"])
    only, _ = initialized("seed=5,only=fc_*")
    assert np.array_equal(only["fc_w"], values["fc_w"])
    assert not only["conv_w"].any()
    assert not np.array_equal(values["left"].reshape(-1)[:500], values["fc_w"].reshape(-1)[:500])


def test_a_large_tensor_is_the_same_from_any_number_of_threads(monkeypatch):
    text = """<ir_version: 11, opset_import: ["" : 26]>
    g (float[2,2500] x) => (y) <float[2500,2000] w = {}> { y = MatMul (x, w) }"""
    values, _ = initialized(text=text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0}, raising=False)
    again, _ = initialized(text=text)
    assert np.array_equal(values["w"], again["w"])
    chunks = values["w"].reshape(-1)
    assert abs(chunks.std() / (2 / 2500) ** 0.5 - 1) < 0.01
    assert not np.array_equal(chunks[:1000], chunks[1 << 21 : (1 << 21) + 1000])


TRAINED = """<ir_version: 11, opset_import: ["" : 26]>
g (float[2,2] x) => (y)
  <float[2,2] trained = {1, 2, 3, 4}, float[2,2] filled = {0.02, 0.02, 0.02, 0.02}, float[2] bias = {5, 5}>
{ a = MatMul (x, trained)  b = MatMul (a, filled)  y = Add (b, bias) }"""


def test_trained_weights_stay_unless_overwritten():
    values, _ = initialized(text=TRAINED)
    assert values["trained"].tolist() == [[1, 2], [3, 4]]
    assert len(np.unique(values["filled"])) == 4
    assert values["bias"].tolist() == [5, 5]
    values, _ = initialized("overwrite=true", text=TRAINED)
    assert values["trained"].tolist() != [[1, 2], [3, 4]]
    assert values["bias"].tolist() == [0, 0]


def test_biases_and_statistics_of_weights_that_are_gone_are_replaced():
    """The models in the onnx package lost their large tensors and kept the small ones."""
    model = ir.load(os.path.join(LIGHT, "light_shufflenet.onnx"))
    run(model, "legalize,initialize,verify")
    for node in model.graph:
        if node.op_type == "BatchNormalization":
            assert [float(v.const_value.numpy().mean()) for v in node.inputs[1:]] == [1, 0, 0, 1]


@pytest.mark.parametrize(
    ("options", "words"), [("method=hee", "did you mean 'he'"), ("only=cnv*", "no parameter matches 'cnv")]
)
def test_mistakes_are_usage_errors(options, words):
    with pytest.raises(UsageError, match=words):
        initialized(options)


def test_half_precision_keeps_its_type():
    values, _ = initialized(text=TRAINED.replace("float[", "float16[").replace("0.02", "1").replace("{1, 2, 3, 4}", "{}"))
    assert values["filled"].dtype == np.float16
