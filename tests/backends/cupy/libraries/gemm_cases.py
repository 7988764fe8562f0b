"""Products of training graphs and their expected numbers, for every way of computing a product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import torch
from onnx import TensorProto, helper, numpy_helper

import graphc
from graphc.backends.cupy.segment.program import KernelCall
from graphc.ir.declare import is_update
from graphc.plan.specialise import prepare
from tests.backends.host_kernels import HostDevice, cupy_on, run_segment

BATCH, TOKENS, WIDTH, INNER, CLASSES = 2, 8, 16, 32, 8
RNG = np.random.default_rng(7)
WEIGHTS = {
    "w0": (WIDTH, WIDTH), "b0": (WIDTH,), "w1": (WIDTH, INNER), "b1": (INNER,), "w2": (WIDTH, INNER), "b2": (WIDTH,),
    "w3": (WIDTH, CLASSES), "b3": (CLASSES,),
}  # fmt: skip
PARAMETERS = {name: (RNG.standard_normal(shape) * 0.4).astype(np.float32) for name, shape in WEIGHTS.items()}
FEEDS = {
    "input": RNG.standard_normal((BATCH, TOKENS, WIDTH)).astype(np.float32),
    "label": RNG.integers(0, CLASSES, (BATCH,)).astype(np.int64),
}


def network(activation: str, approximate: str = "tanh") -> onnx.ModelProto:
    """h = x·w0 + b0;  y = h + act(h·w1 + b1)·w2ᵀ + b2;  logits = mean(y)·w3 + b3"""
    act = helper.make_node(activation, ["u"], ["a"], **({"approximate": approximate} if activation == "Gelu" else {}))
    nodes = [
        helper.make_node("MatMul", ["input", "w0"], ["h0"]),
        helper.make_node("Add", ["h0", "b0"], ["h"]),
        helper.make_node("MatMul", ["h", "w1"], ["u0"]),
        helper.make_node("Add", ["u0", "b1"], ["u"]),
        act,
        helper.make_node("Transpose", ["w2"], ["w2t"], perm=[1, 0]),
        helper.make_node("MatMul", ["a", "w2t"], ["v0"]),
        helper.make_node("Add", ["v0", "b2"], ["v"]),
        helper.make_node("Add", ["h", "v"], ["y"]),
        helper.make_node("ReduceMean", ["y", "axis"], ["m"], keepdims=0),
        helper.make_node("Gemm", ["m", "w3", "b3"], ["logits"]),
    ]
    tensors = [numpy_helper.from_array(value, name) for name, value in PARAMETERS.items()]
    tensors.append(numpy_helper.from_array(np.array([1]), "axis"))
    graph = helper.make_graph(
        nodes,
        "network",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, [BATCH, TOKENS, WIDTH])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [BATCH, CLASSES])],
        tensors,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)


def gradients_segment(model: onnx.ModelProto, precision: str | None) -> onnx.ModelProto:
    """Forward and backward as the plan for the cupy backend leaves them; outputs: loss, and the gradient of each parameter."""
    program = graphc.compile(
        model, loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=graphc.optim.SGD(lr=0.1), precision=precision
    )
    shapes = {name: array.shape for name, array in FEEDS.items()}
    graph = prepare(program.model, shapes, cupy_on(HostDevice())).graph
    updates = [n for n in graph if is_update(n)]
    gradients = {n.inputs[0].name: n.inputs[1] for n in updates if n.op_type == "SGD"}
    for node in reversed(updates):
        for out in node.outputs:
            out.replace_all_uses_with(node.inputs[0], replace_graph_outputs=True)
        graph.remove(node, safe=True)
    for name, value in gradients.items():
        value.name = f"d{name}"
        graph.outputs.append(value)
    return ir.to_proto(ir.Model(graph, ir_version=10))


def by_torch(activation: Callable[[Any], Any], dtype: torch.dtype) -> dict[str, Any]:
    """Loss and gradients; products in ``dtype``, as autocast does them."""
    p = {name: torch.tensor(value, requires_grad=True) for name, value in PARAMETERS.items()}
    x, label = torch.tensor(FEEDS["input"]), torch.tensor(FEEDS["label"])
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        h = torch.nn.functional.linear(x, p["w0"].T, p["b0"])
        a = activation(torch.nn.functional.linear(h, p["w1"].T, p["b1"]))
        y = h + torch.nn.functional.linear(a, p["w2"], p["b2"])
        logits = torch.nn.functional.linear(y.mean(1), p["w3"].T, p["b3"])
    loss = torch.nn.functional.cross_entropy(logits.float(), label)
    loss.backward()
    return {"loss": loss.detach().numpy(), **{f"d{n}": v.grad.numpy() * BATCH for n, v in p.items()}}


TORCH = {
    "relu": torch.relu,
    "tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "none": torch.nn.functional.gelu,
}


HEAD = '<ir_version: 10, opset_import: ["": 22]> g '
HEADS = """
  (float[2,6,48] qkv) => (float[2,6,16] y, float[2,4,6,6] p) {
    q, k, v = Split<axis=2, num_outputs=3>(qkv)
    shape = Constant<value_ints=[2, 6, 4, 4]>()  flat = Constant<value_ints=[2, 6, 16]>()
    half = Constant<value=float[1] {0.5}>()
    qh = Reshape(q, shape)  kh = Reshape(k, shape)  vh = Reshape(v, shape)
    qt = Transpose<perm=[0, 2, 1, 3]>(qh)  kt = Transpose<perm=[0, 2, 3, 1]>(kh)  vt = Transpose<perm=[0, 2, 1, 3]>(vh)
    qs = Mul(qt, half)
    s = MatMul(qs, kt)
    p = Softmax(s)
    o = MatMul(p, vt)
    ot = Transpose<perm=[0, 2, 1, 3]>(o)
    y = Reshape(ot, flat)
  }"""
CASES = {
    "the heads of packed queries, keys and values are read where they lie": (HEADS, 1),
    "a weight gradient is written transposed": (
        "(float[4,6,8] x, float[4,6,5] dy) => (float[5,8] y) {"
        " a = Flatten<axis=2>(x)  b = Flatten<axis=2>(dy)  g = Gemm<transA=1>(a, b)  y = Transpose<perm=[1, 0]>(g) }", 0),
    "an operand of one row is turned with its result": (
        "(float[48,1] x, float[1,5] w) => (float[5,48] y) { g = MatMul(x, w)  y = Transpose<perm=[1, 0]>(g) }", 0),
    "one weight for all of a batch is one product": (
        "(float[4,6,8] x, float[8,5] w) => (float[4,6,5] y) { y = MatMul(x, w) }", 0),
    "a sum of two products goes through C": (
        "(float[4,8] a, float[8,5] b, float[4,3] c, float[3,5] d) => (float[4,5] y) {"
        " s = MatMul(a, b)  t = MatMul(c, d)  y = Add(s, t) }", 0),
    "factors become alpha": (
        "(float[4,8] a, float[8,5] b) => (float[4,5] y) {"
        " two = Constant<value=float[1] {2.0}>()  four = Constant<value=float {4.0}>()"
        " t = Div(a, four)  m = MatMul(t, b)  y = Mul(m, two) }", 0),
    "a chosen row of a stack of matrices": (
        "(float[3,4,8] a, float[8,5] b) => (float[4,5] y) {"
        " one = Constant<value=int64 {1}>()  m = Gather<axis=0>(a, one)  y = MatMul(m, b) }", 0),
    "vectors": ("(float[8] a, float[3,8,5] b, float[5] c) => (float[3] y) { t = MatMul(a, b)  y = MatMul(t, c) }", 0),
    "a product by itself turned": ("(float[4,8] a) => (float[4,4] y) { t = Transpose<perm=[1, 0]>(a)  y = MatMul(a, t) }", 0),
    "a batch that no single stride describes is done in rounds": (
        "(float[2,3,4,6] a, float[3,2,6,5] b) => (float[3,2,4,5] y) {"
        " t = Transpose<perm=[1, 0, 2, 3]>(a)  y = MatMul(t, b) }", 0),
    "what has no strides is copied": (
        "(float[4,6] a, float[6,5] b) => (float[4,5] y) {"
        " s = Constant<value_ints=[-1]>()  e = Constant<value_ints=[-7]>()  x = Constant<value_ints=[1]>()"
        " t = Slice(a, s, e, x, s)  y = MatMul(t, b) }", 1),
    "a Gemm with all its attributes": (
        "(float[7,5] a, float[3,7] b, float[5,1] c) => (float[5,3] y)"
        "{ y = Gemm<transA=1, transB=1, alpha=0.5, beta=2.0>(a, b, c) }", 1),
    "an activation without anybody else": (
        "(float[4,8] a, float[8,16] b, float[16] c) => (float[4,16] y) { m = Gemm(a, b, c)  y = Relu(m) }", 0),
}  # fmt: skip


def check_case(name: str, device: Any, tolerance: float) -> None:
    """The case's numbers are onnxruntime's, and its kernels beside products are as many as it says."""
    text, kernels = CASES[name]
    model = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(HEAD + text))
    feeds = {
        v.name: np.random.default_rng(0).standard_normal([d.dim_value for d in v.type.tensor_type.shape.dim]).astype(np.float32)
        for v in model.graph.input
    }
    names = [v.name for v in model.graph.output]
    expected = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(names, feeds)
    results, segment = run_segment(model, feeds, device)
    if not device.writes_cuda:  # a GPU takes what is faster
        assert sum(isinstance(call, KernelCall) for call in segment.calls) == kernels
    assert not segment.fallbacks
    for output, value in zip(names, expected, strict=True):
        np.testing.assert_allclose(results[output], value, rtol=0, atol=tolerance * max(1.0, float(np.abs(value).max())))
