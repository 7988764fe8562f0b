"""What trains, against ``named_parameters()`` and AdamW of PyTorch."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import graphc
from graphc import frontends
from graphc.ir.parameters import DECISIONS, Decision
from graphc.pipeline import Context, PassCall, run

STEPS = 8


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


def exported(module: nn.Module, x: torch.Tensor, exporter: str) -> onnx.ModelProto:
    """The file that PyTorch's exporter writes by default."""
    module.eval()
    if exporter == "dynamo":
        program: Any = torch.onnx.export(module, (x,), dynamo=True, verbose=False)
        return program.model_proto
    buffer = io.BytesIO()
    torch.onnx.export(module, (x,), buffer, dynamo=False)  # type: ignore[arg-type]
    return onnx.load_from_string(buffer.getvalue())


def decisions(model: Any, train: list[str] | None = None) -> dict[str, Decision]:
    working, ctx = frontends.load(model).clone(), Context()
    run(working, [PassCall("legalize", {"train": train})], ctx)
    return {decision.name: decision for decision in ctx.values[DECISIONS]}


def trained(model: Any) -> set[str]:
    return {name for name, decision in decisions(model).items() if decision.trains}


def losses(model: Any, x: torch.Tensor, **options: Any) -> list[float]:
    program = graphc.compile(model, loss=graphc.losses.MSE(), optimizer=graphc.optim.AdamW(lr=0.01), **options)
    (name, label) = (v.name for v in program.model.graph.inputs)
    shape = tuple(int(d) for d in program.original.graph.outputs[0].shape or ())
    with graphc.Trainer(program, threads=1) as trainer:
        return [trainer.step({name: x.numpy(), label: np.ones(shape, np.float32)})["loss"] for _ in range(STEPS)]


def reference(module: nn.Module, x: torch.Tensor) -> list[float]:
    found, optimizer = [], torch.optim.AdamW(module.parameters(), lr=0.01)
    for _ in range(STEPS):
        loss = (module(x) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


class Norms(nn.Module):
    """A class token, GroupNorm, a norm without parameters, LayerScale, a scalar, buffers, and two fresh LayerNorms."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.group, self.plain = nn.Conv2d(2, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.InstanceNorm2d(8)
        self.scale = nn.Parameter(torch.full((8, 1, 1), 1e-2))
        self.token, self.place = nn.Parameter(torch.zeros(1, 1, 8)), nn.Parameter(torch.randn(1, 17, 8))
        self.first, self.second, self.slope, self.head = nn.LayerNorm(8), nn.LayerNorm(8), nn.PReLU(), nn.Linear(8, 3)
        self.logit_scale = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("mean", torch.tensor([0.4, 0.6]).view(1, 2, 1, 1))
        self.register_buffer("grid", torch.linspace(-1, 1, 17).view(1, 17, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.plain(self.group(self.conv((x - self.mean) / 0.25))) * self.scale + 0.5
        y = torch.cat([self.token.expand(x.shape[0], -1, -1), y.flatten(2).transpose(1, 2)], 1) + self.place + self.grid
        return self.head(self.slope(self.second(self.first(y))).mean(1)) * self.logit_scale.exp()


@pytest.mark.full
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_a_default_export_of_a_fresh_model_trains_as_in_pytorch(exporter: str) -> None:
    torch.manual_seed(0)
    module, x = Norms(), torch.randn(3, 2, 4, 4)
    np.testing.assert_allclose(losses(exported(module, x, exporter), x), reference(module, x), rtol=2e-5)


@pytest.mark.full
def test_a_module_trains_its_parameters_and_nothing_else() -> None:
    torch.manual_seed(0)
    module, x = Norms(), torch.randn(3, 2, 4, 4)
    model = frontends.export(module, (x,), dynamic_batch=False)
    assert trained(model) == {name for name, _ in module.named_parameters()}
    np.testing.assert_allclose(losses(model, x), reference(module.train(), x), rtol=2e-5)


class Tied(nn.Module):
    """Two layers of one weight, and the bias of zeros of a product that an exporter drops."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix = nn.Linear(6, 4, bias=False), nn.MultiheadAttention(4, 2, batch_first=True)
        self.back = nn.Linear(6, 4)
        self.back.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.words(x)
        return self.back(self.mix(y, y, y)[0] @ self.words.weight)


@pytest.mark.full
def test_tied_weights_and_dropped_biases_train_as_in_pytorch() -> None:
    torch.manual_seed(0)
    module, x = Tied(), torch.randn(3, 5, 6)
    np.testing.assert_allclose(losses(exported(module, x, "dynamo"), x), reference(module, x), rtol=2e-5)


class Sinc(nn.Module):
    """Filters computed from two parameters and fixed ramps and windows, in front of a fixed Fourier basis."""

    def __init__(self) -> None:
        super().__init__()
        self.low_hz_ = nn.Parameter(torch.linspace(0.1, 0.4, 9).view(9, 1))
        self.register_buffer("n_", 2 * torch.pi * torch.arange(-12.0, 0).view(1, 12))
        self.register_buffer("window_", torch.hamming_window(24)[:12])
        k = torch.arange(9)[:, None] * torch.arange(16)
        turns = 2 * torch.pi * k / 16
        self.register_buffer("fourier", torch.cat([torch.cos(turns), torch.sin(turns)])[:, None])
        self.mix = nn.Conv1d(18, 9, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        filters = torch.sin(torch.matmul(self.low_hz_.abs() + 0.01, self.n_)) * self.window_
        y = self.mix(torch.nn.functional.conv1d(x, self.fourier, stride=4))
        return torch.nn.functional.conv1d(y, filters[:, None], groups=9).mean(2)


def test_ramps_windows_and_fourier_bases_do_not_train() -> None:
    torch.manual_seed(0)
    module, x = Sinc(), torch.randn(2, 1, 80)
    model = exported(module, x, "torchscript")
    assert trained(model) == {"low_hz_", "mix.weight", "mix.bias"}
    np.testing.assert_allclose(losses(model, x), reference(module, x), rtol=2e-5)


def proto(nodes: list[Any], weights: dict[str, np.ndarray], *, producer: str = "", out: list[Any]) -> onnx.ModelProto:
    """A model of one input ``x`` [2, 4] and one output ``y``."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, out)],
        [numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8, producer_name=producer)


def scaled(name: str, producer: str = "pytorch") -> onnx.ModelProto:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Mul", ["h", name], ["y"])]
    return proto(nodes, {"w": np.eye(4), name: np.array(2.0)}, producer=producer, out=[2, 4])


@pytest.mark.parametrize(
    ("name", "producer", "trains"),
    [
        ("logit_scale", "pytorch", True),
        ("blocks.0.alpha", "pytorch", True),
        ("head.temperature", "", True),
        ("onnx::Mul_12", "pytorch", False),
        ("val_3", "pytorch", False),
        ("exp", "pytorch", False),
        ("norm.eps", "pytorch", False),
        ("model/mul/y:0", "tf2onnx", False),
        ("two", "", False),
        ("helper.constant.8", "", False),
        ("Mul.3", "", False),
    ],
)
def test_a_scalar_trains_if_its_name_tells(name: str, producer: str, trains: bool) -> None:
    assert decisions(scaled(name, producer))[name].trains is trains


@pytest.mark.parametrize(("op", "number", "trains"), [("Pow", 2.0, False), ("Pow", 2.7, True), ("Add", 1e-5, False)])
def test_an_exponent_or_an_epsilon_is_no_parameter(op: str, number: float, trains: bool) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node(op, ["h", "block.n"], ["y"])]
    model = proto(nodes, {"w": np.eye(4), "block.n": np.array(number)}, out=[2, 4])
    assert decisions(model)["block.n"].trains is trains


def test_train_trains_any_constant_and_gets_its_gradient(tmp_path: Path) -> None:
    model = scaled("two", "")
    assert decisions(model)["two"].doubtful, "a scalar that is left out is reported"
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    program = graphc.compile(model, loss=graphc.losses.MSE(), optimizer=graphc.optim.SGD(lr=0.1), train=["two"], freeze=["w"])
    with graphc.Trainer(program, threads=1) as trainer:
        trainer.step({"x": x, "label": np.zeros((2, 4), np.float32)})
        scale = trainer.trained_values()["two"]
        assert scale == pytest.approx(2.0 - 0.1 * (2 * 2.0 * x * x).mean(), rel=1e-6)
        trainer.export(tmp_path / "trained.onnx")
    written = ir.load(tmp_path / "trained.onnx")
    assert written.graph.initializers["two"].const_value.numpy() == scale


TABLES = {
    "sinusoids": np.sin(np.outer(np.arange(32), 1 / 100 ** (np.arange(4) / 4))),
    "rotary": np.cos(np.outer(np.arange(32), [1.0, 0.5, 1.0, 0.5])),
    "grid": np.stack([np.arange(32.0) + 0.5, np.arange(32.0) * 2, np.arange(32.0), np.arange(32.0)], 1),
    "mask": np.triu(np.full((32, 4), -1e9), 1),
}


@pytest.mark.parametrize("table", TABLES)
def test_a_table_that_a_formula_makes_does_not_train(table: str) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "weight"], ["h"]),
        helper.make_node("Unsqueeze", ["h", "axis"], ["u"]),
        helper.make_node("Add", ["u", "enc.table"], ["y"]),
    ]
    weights = {"weight": np.random.default_rng(0).standard_normal((4, 4)), "enc.table": TABLES[table]}
    model = proto(nodes, weights, producer="pytorch", out=[2, 32, 4])
    model.graph.initializer.append(numpy_helper.from_array(np.array([1]), "axis"))
    assert trained(model) == {"weight"}
    model.graph.initializer[1].CopyFrom(
        numpy_helper.from_array(np.random.default_rng(0).standard_normal((32, 4)).astype(np.float32), "enc.table")
    )
    assert trained(model) == {"weight", "enc.table"}


def test_mel_filters_anchors_and_strides_do_not_train() -> None:
    edges = np.linspace(0, 20, 8)
    mel = np.maximum(0, 1 - np.abs(np.arange(20)[:, None] - edges[None, 1:-1]) / (edges[1] - edges[0]))
    strides, anchors = np.repeat(np.float32([8, 16, 32]), 2), np.array([10, 13, 16, 30, 33, 23])
    nodes = [
        helper.make_node("MatMul", ["x", "weight"], ["h"]),
        helper.make_node("MatMul", ["h", "mel"], ["m"]),
        helper.make_node("Mul", ["m", "detect.anchors"], ["a"]),
        helper.make_node("Constant", [], ["/detect/Constant_output_0"], value=numpy_helper.from_array(strides)),
        helper.make_node("Mul", ["a", "/detect/Constant_output_0"], ["y"]),
    ]
    weights = {"weight": np.random.default_rng(0).standard_normal((4, 20)), "mel": mel, "detect.anchors": anchors}
    assert trained(proto(nodes, weights, producer="pytorch", out=[2, 6])) == {"weight"}


def test_fresh_uniform_weights_train() -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "onnx::MatMul_7"], ["h"]),
        helper.make_node("LayerNormalization", ["h", "norm.weight", "norm.bias"], ["n"]),
        helper.make_node("Mul", ["n", "layer_scale"], ["s"]),
        helper.make_node("Gemm", ["s", "zero.weight", "zero.bias"], ["y"]),
    ]
    zeros, ones = np.zeros(4), np.ones(4)
    weights = {"onnx::MatMul_7": np.zeros((4, 4)), "norm.weight": ones, "norm.bias": zeros, "layer_scale": 1e-6 * ones}
    weights |= {"zero.weight": np.zeros((4, 4)), "zero.bias": zeros}
    assert trained(proto(nodes, weights, producer="pytorch", out=[2, 4])) == set(weights)


def branch(name: str, weight: np.ndarray) -> onnx.GraphProto:
    held = helper.make_node("Constant", [], ["w"], value=numpy_helper.from_array(weight))
    nodes = [held, helper.make_node("MatMul", ["x", "w"], [f"y_{name}"])]
    return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(f"y_{name}", TensorProto.FLOAT, [2, 3])])


def test_weights_that_are_constants_inside_branches_train_and_are_written_back(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    first, second = (rng.standard_normal((4, 3)).astype(np.float32) for _ in range(2))
    node = helper.make_node("If", ["c"], ["y"], then_branch=branch("t", first), else_branch=branch("e", second))
    model = proto([node], {}, out=[2, 3])
    model.graph.input.append(helper.make_tensor_value_info("c", TensorProto.BOOL, []))
    program = graphc.compile(model, loss=graphc.losses.MSE(), optimizer=graphc.optim.SGD(lr=0.1))
    x, label = rng.standard_normal((2, 4)).astype(np.float32), np.zeros((2, 3), np.float32)
    with graphc.Trainer(program, threads=1) as trainer:
        trainer.step({"x": x, "c": np.array(True), "label": label})
        trainer.export(tmp_path / "trained.onnx")
    written = ir.load(tmp_path / "trained.onnx")
    (control,) = written.graph
    bodies = [control.attributes[name].as_graph() for name in ("then_branch", "else_branch")]
    held = [body[0].attributes["value"].as_tensor().numpy() for body in bodies]
    np.testing.assert_allclose(held[0], first - 0.1 * x.T @ (2 * (x @ first)) / 6, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(held[1], second)
    onnx.checker.check_model(ir.to_proto(written))
