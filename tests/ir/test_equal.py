"""Structural equality: what must not matter, and that everything else is found and named."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from graphc.ir.equal import assert_equal, difference
from graphc.ir.text import from_text

BASE = """<ir_version: 11, opset_import: ["" : 26, "graphc" : 1], metadata_props: ["graphc.mesh": "data=2"]>
g (float[N,2] x, float[N,2] z) => (float[N,2] y)
  <float[2] w = {1, 2}, float[2] v = {1, 2}>
{
   c = Constant <value: tensor = float[2] {1, 2}> ()
   [first] a = Add (x, w)
   [leak] b = LeakyRelu <alpha: float = 0.5> (a)   #@ {"b": {"graphc.gradient_of": "a"}}
   [mul] d = Mul (b, c)
   [clip] e = Clip (d, "", "")
   [sum] y = graphc.AllReduce <tag: string = "t"> (e)
}
"""


def test_names_of_intermediates_and_nodes_do_not_matter():
    renamed = BASE.replace(" a = ", ' "other/a" = ').replace("(a)", '("other/a")').replace('"a"', '"other/a"')
    renamed = renamed.replace("[mul]", "[times]").replace("[leak]", "")
    assert difference(from_text(BASE), from_text(renamed)) is None
    assert_equal(from_text(BASE), from_text(renamed))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("data=2", "data=4", "model metadata"),
        ('"graphc" : 1', '"graphc" : 1, "ai.onnx.ml" : 3', "opset imports"),
        ("float[N,2] z", "float[M,2] z", "graph inputs"),
        ("float[N,2] z)", "float[N,2] u)", "only the first model has ['z']"),
        ("w = {1, 2}", "w = {1, 3}", "initializer 'w': 1 of 2 elements differ, first [1]: 2.0 and 3.0"),
        ("float[2] v = {1, 2}", "double[2] v = {1, 2}", "initializer 'v'"),
        (", float[2] v = {1, 2}", "", "only the first model has ['v']"),
        ("{1, 2}> ()", "{1, -2}> ()", "node 0: attribute 'value'"),
        ("Add (x, w)", "Add (z, w)", "node 1: input 0"),
        ("Add (x, w)", "Add (x, v)", "node 1: input 1"),
        ("Add (x, w)", "Sub (x, w)", "different ops"),
        ("<alpha: float = 0.5>", "<alpha: float = 0.25>", "attribute 'alpha': 0.5 and 0.25"),
        ("<alpha: float = 0.5> ", "", "attribute 'alpha' is only on the first"),
        ('"graphc.gradient_of": "a"', '"graphc.gradient_of": "x"', "metadata"),
        ('(d, "", "")', "(d)", "3 and 1 inputs"),
        ('"t"', '"s"', "attribute 'tag'"),
        ("   [sum]", "   f = Exp (x)\n   [sum]", "different ops"),
        ("(e)\n}", "(e)\n   f = Exp (x)\n}", "the second model goes on with"),
    ],
)
def test_a_difference_is_named(old, new, words):
    assert old in BASE
    found = difference(from_text(BASE), from_text(BASE.replace(old, new)))
    assert found is not None
    assert words in found
    assert difference(from_text(BASE.replace(old, new)), from_text(BASE)) is not None


def test_which_value_is_the_output_matters():
    text = '<ir_version: 11, opset_import: ["" : 26]> g (float[2] x) => (float[2] y) { %s = Exp (x) %s = Exp (x) }'
    found = difference(from_text(text % ("y", "other")), from_text(text % ("other", "y")))
    assert found is not None
    assert "graph output 'y' is made by different nodes" in found


def test_nan_equals_itself_and_long_tensors_may_be_left_out():
    nan = '<ir_version: 11, opset_import: ["" : 26]> g (float[1] x) => (float[1] y) <float[1] w = {nan}> { y = Add (x, w) }'
    assert difference(from_text(nan), from_text(nan)) is None
    long = '<ir_version: 11, opset_import: ["" : 26]> g (float[20] x) => (float[20] y) <float[20] w = {}> { y = Add (x, w) }'
    other = from_text(long)

    other.graph.initializers["w"].const_value = ir.tensor(np.ones(20, np.float32), name="w")
    assert difference(from_text(long), other) is not None
    assert difference(from_text(long), other, weights=False) is None
