"""Valid models that mutants are made of: ONNX's own single-op cases, and small models with bodies, functions and layers."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, parser

from tests.conformance.gradient_suite import collect, op_of
from tests.conformance.suite import SLOW

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Seed:
    """A valid model with what it is fed.

    Attributes:
        output: the floating-point output that the loss reads.
    """

    name: str
    model: onnx.ModelProto
    feeds: dict[str, Array]
    output: str


@cache
def seeds() -> tuple[Seed, ...]:
    """All seeds; of a single-op case, the first floating-point input is a parameter.

    ONNX's cases of pooling take 7 s to make, so small models pool in their place.
    """
    found = list(composed())
    package = importlib.import_module("onnx.backend.test.case.node")
    modules = [m.name for m in pkgutil.iter_modules(package.__path__) if m.name not in ("ai_onnx_ml", *SLOW)]
    for case in collect(*modules):
        if op_of(case).lower() in SLOW:  # of a module that something else in this process has imported
            continue
        graph = case.model.graph
        inputs, outputs = case.data_sets[0]
        arrays = [np.asarray(a) for a in inputs if isinstance(a, np.ndarray | np.generic)]
        floats = [k for k, a in enumerate(arrays) if a.dtype == np.float32]
        makes = [o.name for o, a in zip(graph.output, outputs, strict=False) if getattr(a, "dtype", None) == np.float32]
        small = sum(a.nbytes for a in arrays) < 200_000 and len(arrays) == len(inputs) == len(graph.input)
        if not floats or not makes or not small:
            continue
        model = onnx.ModelProto()
        model.CopyFrom(case.model)
        feeds = {i.name: a for i, a in zip(graph.input, arrays, strict=True)}
        trained = graph.input[floats[0]].name
        model.graph.initializer.append(numpy_helper.from_array(feeds.pop(trained), trained))
        for value in [i for i in model.graph.input if i.name == trained]:
            model.graph.input.remove(value)
        found.append(Seed(case.name, model, feeds, makes[0]))
    return tuple(found)


_TEXTS = {
    "layers": """
        <ir_version: 10, opset_import: ["": 20]>
        net (float[n, 4] x) => (float[n, 2] y)
        <float[4, 8] w, float[8] b, float[8] scale, float[8] bias, float[8, 2] v>
        {
            h = Gemm (x, w, b)
            s = Sigmoid (h)
            g = Mul (h, s)
            norm = LayerNormalization <axis = -1> (g, scale, bias)
            d = Dropout (norm)
            y = MatMul (d, v)
        }""",
    "convolutions": """
        <ir_version: 10, opset_import: ["": 18]>
        net (float[n, 3, 8, 8] x) => (float[n, 5] y)
        <float[6, 3, 3, 3] w, float[6] scale, float[6] bias, float[6] mean, float[6] var, float[5, 96] v, int64[2] to>
        {
            c = Conv <pads = [1, 1, 1, 1]> (x, w)
            n = BatchNormalization (c, scale, bias, mean, var)
            r = Relu (n)
            p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r)
            f = Reshape (p, to)
            y = Gemm <transB = 1> (f, v)
        }""",
    "average pool": """
        <ir_version: 10, opset_import: ["": 22]>
        net (float[n, 2, 6, 5] x) => (float[n, 2, 3, 2] y)
        <float[2, 1, 1] w>
        {
            p = AveragePool <kernel_shape = [3, 2], strides = [2, 2], pads = [1, 0, 1, 0], count_include_pad = 1> (x)
            y = Mul (p, w)
        }""",
    "lp pool": """
        <ir_version: 10, opset_import: ["": 22]>
        net (float[n, 2, 9] x) => (float[n, 2, 4] y)
        <float[2, 1] w>
        {
            p = LpPool <kernel_shape = [3], strides = [2], p = 2> (x)
            y = Mul (p, w)
        }""",
    "max pool": """
        <ir_version: 10, opset_import: ["": 22]>
        net (float[n, 2, 6, 5] x) => (float[n, 2, 5, 3] y)
        <float[2, 1, 1] w>
        {
            p, places = MaxPool <kernel_shape = [2, 2], strides = [1, 2], ceil_mode = 1> (x)
            y = Mul (p, w)
        }""",
    "shapes": """
        <ir_version: 10, opset_import: ["": 17]>
        net (float[n, 3, 4] x, int64[n] rows) => (float[n, 12] y)
        <float[10, 12] table, float[12] b, int64[1] zero, int64[1] one>
        {
            s = Shape (x)
            n = Slice (s, zero, one)
            minus = Constant <value = int64[1] {-1}> ()
            to = Concat <axis = 0> (n, minus)
            f = Reshape (x, to)
            e = Gather <axis = 0> (table, rows)
            a = Add (f, e)
            to2 = Shape (a)
            wide = Expand (b, to2)
            y = Add (a, wide)
        }""",
    "branches": """
        <ir_version: 10, opset_import: ["": 17]>
        net (float[2, 4] x, bool which) => (float[2, 3] y)
        <float[4, 3] w, float[4, 3] v>
        {
            y = If (which) <
                then_branch = one () => (float[2, 3] a) { h = MatMul (x, w) a = Relu (h) },
                else_branch = two () => (float[2, 3] c) { k = MatMul (x, v) c = Tanh (k) }
            >
        }""",
    "loops": """
        <ir_version: 10, opset_import: ["": 17]>
        net (float[2, 4] x) => (float[2, 4] y, float[3, 2, 4] all)
        <float[4, 4] w, int64 count, bool go>
        {
            y, all = Loop (count, go, x) <
                body = step (int64 i, bool c, float[2, 4] h) => (bool c2, float[2, 4] h2, float[2, 4] kept)
                { c2 = Identity (c)  m = MatMul (h, w)  h2 = Tanh (m)  kept = Identity (h2) }
            >
        }""",
    "functions": """
        <ir_version: 10, opset_import: ["": 18, "own": 1]>
        net (float[2, 4] x) => (float[2, 3] y)
        <float[4, 4] w, float[4, 3] v>
        {
            h = own.layer <alpha = 0.1> (x, w)
            k = own.layer <alpha = 0.2> (h, w)
            y = MatMul (k, v)
        }
        <domain: "own", opset_import: ["": 18]>
        layer <alpha> (a, b) => (c)
        {
            m = MatMul (a, b)
            c = LeakyRelu <alpha: float = @alpha> (m)
        }""",
    "recurrent": """
        <ir_version: 10, opset_import: ["": 17]>
        net (float[3, n, 2] x) => (float[3, 1, n, 4] y)
        <float[1, 16, 2] w, float[1, 16, 4] r, float[1, 32] b>
        {
            y, h, c = LSTM <hidden_size = 4> (x, w, r, b)
        }""",
    "attention": """
        <ir_version: 10, opset_import: ["": 17]>
        net (float[n, 3, 8] x) => (float[n, 3, 8] y)
        <float[8, 8] q, float[8, 8] k, float[8, 8] v, int64[4] heads, float root>
        {
            a = MatMul (x, q)
            b = MatMul (x, k)
            c = MatMul (x, v)
            ah = Reshape (a, heads)
            bh = Reshape (b, heads)
            ch = Reshape (c, heads)
            at = Transpose <perm = [0, 2, 1, 3]> (ah)
            bt = Transpose <perm = [0, 2, 3, 1]> (bh)
            ct = Transpose <perm = [0, 2, 1, 3]> (ch)
            s = MatMul (at, bt)
            scaled = Div (s, root)
            p = Softmax <axis = -1> (scaled)
            o = MatMul (p, ct)
            ot = Transpose <perm = [0, 2, 1, 3]> (o)
            to = Constant <value = int64[3] {0, 0, -1}> ()
            y = Reshape (ot, to)
        }""",
    "quantized": """
        <ir_version: 10, opset_import: ["": 17]>
        net (float[2, 4] x) => (float[2, 3] y)
        <float scale, uint8 zero, int8[4, 3] w, float[3] steps, int8[3] zeros>
        {
            q = QuantizeLinear (x, scale, zero)
            d = DequantizeLinear (q, scale, zero)
            wd = DequantizeLinear <axis = 1> (w, steps, zeros)
            y = MatMul (d, wd)
        }""",
}

_INTEGERS: dict[str, list[int]] = {"to": [-1, 96], "zero": [0], "one": [1], "heads": [0, 0, 2, 4], "count": [3], "go": [1]}
SIZE = 2
"""Of a symbolic dimension."""


def composed() -> list[Seed]:
    """The models of ``_TEXTS`` with values for initializers and feeds."""
    found = []
    for name, text in _TEXTS.items():
        model = parser.parse_model(text)
        graph, rng = model.graph, np.random.default_rng(0)
        for value in graph.value_info:  # what the parser makes of a declaration without a value
            kind = value.type.tensor_type
            shape = [d.dim_value for d in kind.shape.dim]
            given = _INTEGERS.get(value.name) if kind.elem_type in (TensorProto.INT64, TensorProto.BOOL) else None
            array = np.array(given) if given is not None else rng.uniform(0.5, 1.5, shape)
            dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
            graph.initializer.append(numpy_helper.from_array(array.astype(dtype).reshape(shape), value.name))
        del graph.value_info[:]
        feeds: dict[str, Array] = {}
        for value in graph.input:
            kind = value.type.tensor_type
            shape = [d.dim_value if d.HasField("dim_value") else SIZE for d in kind.shape.dim]
            feeds[value.name] = np.ones(shape, helper.tensor_dtype_to_np_dtype(kind.elem_type))
        found.append(Seed(name, model, feeds, "y"))
    return found
