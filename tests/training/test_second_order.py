"""Gradients of gradients: Hessian-vector products of whole networks against PyTorch's double backward, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch.nn import functional as F  # noqa: N812

import graphc
from graphc.ir.builder import Builder
from graphc.ir.verify import verify_model
from graphc.passes.gradients.reverse_mode import differentiate
from graphc.training.inference import run_model
from tests.gradient_check import Run, new_model, on_onnxruntime, reference
from tests.tiers import thinned

Values = dict[str, Any]
LABELS = np.array([0, 2, 1, 2])


@dataclass(frozen=True)
class Network:
    """A network twice: as a formula of the builder and as PyTorch; ``x`` is its input, all other tensors are parameters."""

    ours: Callable[[Any, Values], ir.Value]
    theirs: Callable[[Values], torch.Tensor]
    shapes: dict[str, tuple[int, ...]]
    positive: frozenset[str] = field(default_factory=frozenset)

    def arrays(self, seed: int = 0) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        made = {n: rng.standard_normal(s) * (1.0 if n == "x" else 0.5) for n, s in self.shapes.items()}
        return {n: np.abs(a) + 0.5 if n in self.positive else a for n, a in made.items()}


def cross_entropy(op: Any, logits: ir.Value) -> ir.Value:
    total, *_ = op.graphc.SoftmaxCrossEntropy(logits, op.const(LABELS))
    return total  # type: ignore[no-any-return]


def torch_cross_entropy(logits: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, torch.from_numpy(LABELS), reduction="sum")


def mlp(activation: str, theirs: Callable[[torch.Tensor], torch.Tensor]) -> Network:
    def ours(op: Any, v: Values) -> ir.Value:
        return cross_entropy(op, op.Gemm(op.emit(activation, [op.Gemm(v["x"], v["w1"], v["b1"])])[0], v["w2"], v["b2"]))

    def other(v: Values) -> torch.Tensor:
        return torch_cross_entropy(theirs(v["x"] @ v["w1"] + v["b1"]) @ v["w2"] + v["b2"])

    return Network(ours, other, {"x": (4, 5), "w1": (5, 6), "b1": (6,), "w2": (6, 3), "b2": (3,)})


def convolutional(norm: str, pool: str, **conv: int) -> Network:
    """Convolution, normalisation, a smooth activation, pooling, convolution, global average, linear."""
    stride, group = conv.get("stride", 1), conv.get("group", 1)

    def ours(op: Any, v: Values) -> ir.Value:
        y = op.Conv(v["x"], v["w"], v["b"], pads=[1, 1, 1, 1], strides=[stride, stride], group=group)
        if norm == "training":
            y = op.BatchNormalization(y, v["scale"], v["bias"], v["mean"], v["var"], training_mode=1, _outputs=3)[0]
        elif norm == "graphc":
            y = op.graphc.BatchNormalizationTraining(y, v["scale"], v["bias"])[0]
        elif norm == "inference":
            y = op.BatchNormalization(y, v["scale"], v["bias"], v["mean"], v["var"])
        y = op.Tanh(y)
        window = {"kernel_shape": [2, 2], "strides": [2, 2], "pads": [0, 0, 1, 1]}
        y = op.MaxPool(y, **window) if pool == "max" else op.AveragePool(y, **window, count_include_pad=1)
        return cross_entropy(op, op.MatMul(op.Flatten(op.GlobalAveragePool(op.Mul(y, y))), v["head"]))

    def theirs(v: Values) -> torch.Tensor:
        y = F.conv2d(v["x"], v["w"], v["b"], padding=1, stride=stride, groups=group)
        if norm in ("training", "graphc"):
            y = F.batch_norm(y, None, None, v["scale"], v["bias"], training=True)
        elif norm == "inference":
            mean, var, scale, bias = (v[n].reshape(-1, 1, 1) for n in ("mean", "var", "scale", "bias"))
            y = (y - mean) / torch.sqrt(var + 1e-5) * scale + bias  # F.batch_norm differentiates no running statistics
        y = torch.tanh(y)
        if pool == "max":
            y = F.max_pool2d(F.pad(y, (0, 1, 0, 1), value=float("-inf")), 2)
        else:
            y = F.avg_pool2d(F.pad(y, (0, 1, 0, 1)), 2)
        return torch_cross_entropy((y * y).mean(dim=(2, 3)) @ v["head"])

    shapes = {"x": (4, 2, 5, 5), "w": (4, 2 // group, 3, 3), "b": (4,), "scale": (4,), "bias": (4,), "head": (4, 3)}
    if norm in ("inference", "training"):
        shapes.update(mean=(4,), var=(4,))
    if norm == "none":
        shapes = {n: s for n, s in shapes.items() if n not in ("scale", "bias")}
    return Network(ours, theirs, shapes, frozenset({"var"}))


def transformer(approximate: str) -> Network:
    """A pre-norm block of two heads, then the mean over the sequence and a linear layer."""
    sizes = {"x": (4, 3, 4), "s1": (4,), "o1": (4,), "wq": (4, 4), "wk": (4, 4), "wv": (4, 4), "wo": (4, 4)}
    sizes.update(s2=(4,), o2=(4,), up=(4, 8), bu=(8,), down=(8, 4), head=(4, 3))

    def ours(op: Any, v: Values) -> ir.Value:
        def heads(y: ir.Value) -> ir.Value:
            return op.Transpose(op.Reshape(y, [0, 0, 2, 2]), perm=[0, 2, 1, 3])  # type: ignore[no-any-return]

        y = op.LayerNormalization(v["x"], v["s1"], v["o1"], axis=-1)
        q, k, w = (heads(op.MatMul(y, v[n])) for n in ("wq", "wk", "wv"))
        scores = op.Softmax(op.Mul(op.MatMul(q, op.Transpose(k, perm=[0, 1, 3, 2])), 2.0**-0.5), axis=-1)
        mixed = op.Reshape(op.Transpose(op.MatMul(scores, w), perm=[0, 2, 1, 3]), [0, 0, 4])
        y = op.Add(v["x"], op.MatMul(mixed, v["wo"]))
        z = op.LayerNormalization(y, v["s2"], v["o2"], axis=-1)
        z = op.MatMul(op.Gelu(op.Add(op.MatMul(z, v["up"]), v["bu"]), approximate=approximate), v["down"])
        return cross_entropy(op, op.MatMul(op.ReduceMean(op.Add(y, z), [1], keepdims=0), v["head"]))

    def theirs(v: Values) -> torch.Tensor:
        def heads(y: torch.Tensor) -> torch.Tensor:
            return y.reshape(4, 3, 2, 2).transpose(1, 2)

        y = F.layer_norm(v["x"], (4,), v["s1"], v["o1"])
        q, k, w = (heads(y @ v[n]) for n in ("wq", "wk", "wv"))
        mixed = (torch.softmax(q @ k.transpose(2, 3) * 2.0**-0.5, -1) @ w).transpose(1, 2).reshape(4, 3, 4)
        y = v["x"] + mixed @ v["wo"]
        z = F.layer_norm(y, (4,), v["s2"], v["o2"])
        z = F.gelu(z @ v["up"] + v["bu"], approximate=approximate) @ v["down"]
        return torch_cross_entropy((y + z).mean(1) @ v["head"])

    return Network(ours, theirs, sizes)


def attention(saves: str) -> Network:
    """The fused op over a packed projection, with a bias that trains."""
    sizes = {"x": (4, 3, 4), "w": (4, 12), "bias": (2, 3, 3), "head": (4, 3)}

    def ours(op: Any, v: Values) -> ir.Value:
        packed = op.Reshape(op.MatMul(v["x"], v["w"]), [0, 0, 3, 2, 2])
        layout = "bt0hd,bt1hd,bt2hd->bthd"
        y, _ = op.graphc.ScaledDotProductAttention(packed, packed, packed, v["bias"], scale=0.7, layout=layout, saves=saves)
        return cross_entropy(op, op.MatMul(op.ReduceMean(op.Reshape(y, [0, 0, 4]), [1], keepdims=0), v["head"]))

    def theirs(v: Values) -> torch.Tensor:
        q, k, w = (v["x"] @ v["w"]).reshape(4, 3, 3, 2, 2).permute(2, 0, 3, 1, 4)
        y = torch.softmax(q @ k.transpose(2, 3) * 0.7 + v["bias"], -1) @ w
        return torch_cross_entropy(y.transpose(1, 2).reshape(4, 3, 4).mean(1) @ v["head"])

    return Network(ours, theirs, sizes)


NETWORKS = {
    "mlp-tanh": mlp("Tanh", torch.tanh),
    "mlp-relu": mlp("Relu", torch.relu),
    "mlp-sigmoid": mlp("Sigmoid", torch.sigmoid),
    "mlp-softplus": mlp("Softplus", F.softplus),
    "mlp-elu": mlp("Elu", F.elu),
    "mlp-gelu": mlp("Gelu", F.gelu),
    "mlp-mish": mlp("Mish", F.mish),
    "cnn": convolutional("none", "max"),
    "cnn-strided": convolutional("none", "average", stride=2),
    "cnn-grouped": convolutional("none", "max", group=2),
    "cnn-batchnorm-inference": convolutional("inference", "max"),
    "cnn-batchnorm-training": convolutional("training", "average"),
    "cnn-batchnorm-graphc": convolutional("graphc", "max"),
    "transformer": transformer("none"),
    "transformer-tanh": transformer("tanh"),
    "attention": attention("probabilities"),
    "attention-logsumexp": attention("logsumexp"),
}


def hessian_product(
    network: Network, symbolic: int, dtype: Any, compile_with: Callable[[ir.Model], Run]
) -> dict[str, np.ndarray]:
    """∂/∂w of Σ gradient·direction for every tensor of the network, its input too."""
    arrays = network.arrays()
    directions = {f"{n}.v": a for n, a in network.arrays(seed=1).items()}
    feeds = {n: a.astype(dtype) for n, a in {**arrays, **directions}.items()}
    model, values = new_model(feeds)
    if symbolic:
        for value in (values[0], values[len(arrays)]):
            value.shape = ir.Shape(["batch", *list(value.shape or ())[1:]])
    by_name = {v.name or "": v for v in values}
    op = Builder(model.graph)
    loss = network.ours(op, by_name)
    sources = [by_name[n] for n in arrays]
    first = differentiate(model.graph, [loss], sources)
    op = Builder(model.graph)
    parts = [op.ReduceSum(op.Mul(g, by_name[f"{v.name}.v"]), keepdims=0) for v, g in first.items()]
    second = differentiate(model.graph, [op.Sum(*parts)], sources)
    model.graph.outputs.extend(second.values())
    verify_model(model)
    outputs = compile_with(model)(feeds)
    return {source.name or "": outputs[value.name or ""] for source, value in second.items()}


def torch_product(network: Network) -> dict[str, np.ndarray]:
    arrays, directions = network.arrays(), network.arrays(seed=1)
    leaves = {n: torch.tensor(a, requires_grad=True) for n, a in arrays.items()}
    first = torch.autograd.grad(network.theirs(leaves), list(leaves.values()), create_graph=True, allow_unused=True)
    dot = sum((g * torch.from_numpy(directions[n])).sum() for n, g in zip(leaves, first, strict=True) if g is not None)
    second = torch.autograd.grad(dot, list(leaves.values()), allow_unused=True)
    return {n: g.numpy() for n, g in zip(leaves, second, strict=True) if g is not None}


def assert_close(got: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float) -> None:
    assert expected
    assert max(np.abs(value).max() for value in expected.values()) > 1e-2
    for name, value in expected.items():
        scale = max(np.abs(value).max(), 1e-3)
        found = got.get(name, np.zeros_like(value))  # what the gradient does not depend on
        np.testing.assert_allclose(found, value, rtol=0, atol=tolerance * scale, err_msg=name)
    for name in got.keys() - expected.keys():
        assert not got[name].any(), name


@pytest.mark.full
@pytest.mark.parametrize("symbolic", [pytest.param(0, id="static", marks=pytest.mark.large), pytest.param(1, id="symbolic")])
@pytest.mark.parametrize("name", NETWORKS)
def test_hessian_vector_products_match_pytorch(name: str, symbolic: int) -> None:
    network = NETWORKS[name]
    assert_close(hessian_product(network, symbolic, np.float64, reference), torch_product(network), 1e-6)


@pytest.mark.full
@pytest.mark.parametrize("name", thinned(list(NETWORKS), 2))
def test_hessian_vector_products_in_float32_on_onnxruntime(name: str) -> None:
    network = NETWORKS[name]
    assert_close(hessian_product(network, 0, np.float32, on_onnxruntime), torch_product(network), 1e-3)


def test_grad_of_grad_is_a_second_derivative() -> None:
    """``graphc.grad`` of what ``graphc.grad`` made: d²/dx² of x³ is 6·x; the third derivative is 6."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]>
        cube (float[3] x) => (float y) { s = Mul (x, x)  c = Mul (s, x)  y = ReduceSum <keepdims: int = 0> (c) }"""
    )
    x = np.array([1.0, -2.0, 0.5], np.float32)
    first = graphc.grad(model, of="y", wrt=["x"])
    second = graphc.grad(first, of="x::grad", wrt=["x"])
    names = [v.name for v in second.graph.outputs]
    assert names == ["y", "x::grad", "x::grad.1"]
    third = graphc.grad(second, of="x::grad.1", wrt=["x"])
    found = run_model(third, {"x": x})
    np.testing.assert_allclose(found["x::grad"], 3 * x * x, rtol=1e-6)
    np.testing.assert_allclose(found["x::grad.1"], 6 * x, rtol=1e-6)
    np.testing.assert_allclose(found["x::grad.2"], np.full(3, 6.0), rtol=1e-6)
