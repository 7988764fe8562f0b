"""channels_last: networks compute the same with channels last, and next to nothing is transposed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import nn

import graphc
from graphc.backend import BACKENDS, Capabilities
from graphc.bench.specs import SPECS
from graphc.ir.builder import Builder
from graphc.ir.declare import is_update
from graphc.ir.decomposition import decompose_graph
from graphc.pipeline import Context, run
from graphc.plan.specialise import prepare
from tests.gradient_check import new_model
from tests.passes.optimize.channels_last_cases import Residual
from tests.tiers import params


class Squeeze(nn.Module):
    """The parts of SqueezeNet: biases, concatenation, an unpadded pool, a classifier that is a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2)
        self.narrow, self.one, self.three = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1), nn.Conv2d(4, 8, 3, padding=1)
        self.classifier = nn.Conv2d(16, 10, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.max_pool2d(torch.relu(self.stem(x)), 3, 2, ceil_mode=True)
        x = torch.relu(self.narrow(x))
        x = torch.cat([torch.relu(self.one(x)), torch.relu(self.three(x))], 1)
        return torch.relu(self.classifier(x)).mean((2, 3))


class Shuffle(nn.Module):
    """The parts of ShuffleNet: grouped and depthwise convolutions, channels cut and shuffled, an average pool beside."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 3, padding=1)
        self.grouped, self.depth = nn.Conv2d(12, 12, 1, groups=3, bias=False), nn.Conv2d(12, 12, 3, 2, 1, groups=12, bias=False)
        self.norm, self.wide = nn.BatchNorm2d(12), nn.Conv2d(12, 12, 1, groups=3)
        self.point = nn.Conv2d(12, 12, 1)
        self.head = nn.Linear(24, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(x))
        y = self.grouped(x)
        n, c, h, w = y.shape
        y = y.view(n, 3, c // 3, h, w).transpose(1, 2).reshape(n, c, h, w)
        y = torch.cat([self.wide(self.norm(self.depth(y))), nn.functional.avg_pool2d(x, 3, 2, 1)], 1)
        left, right = torch.relu(y).chunk(2, 1)
        return self.head(torch.cat([left, self.point(right) * torch.sigmoid(right)], 1).mean((2, 3)))  # type: ignore[no-any-return]


class Holding(Capabilities):
    """A backend for convolutions and pools in either order."""

    def __init__(self, rewrites: str) -> None:
        self.rewrites = rewrites

    def holds(self, node: ir.Node) -> bool:
        return node.op_type.removeprefix("ChannelsLast").startswith(("Conv", "MaxPool", "AveragePool"))

    def computes_halves(self, node: ir.Node) -> bool:
        return True


def turned(model: ir.Model) -> list[str]:
    """Shapes of the transposed values, but for weights and their gradients, which are as small as the parameters."""
    found = []
    weights = {tuple(v.shape.numpy()) for v in model.graph.initializers.values() if v.shape is not None}
    for node in model.graph:
        if node.op_type == "Transpose" and tuple(node.outputs[0].shape.numpy()) not in weights:
            source = node.inputs[0]
            if not (source.is_initializer() or tuple(source.shape.numpy()) in weights):
                found.append(f"{source.name} {source.shape}")
    return found


def without_updates(model: ir.Model) -> ir.Model:
    """Gradients and batch statistics as outputs in place of updates; standard ops."""
    graph = model.graph
    updates = [n for n in graph if is_update(n)]
    wanted = [n.inputs[1] for n in updates if n.op_type in ("SGD", "RunningAverage")]
    for node in reversed(updates):
        for out in node.outputs:
            out.replace_all_uses_with(node.inputs[0], replace_graph_outputs=True)
        graph.remove(node, safe=True)
    graph.outputs.extend(v for v in dict.fromkeys(wanted) if v is not None and not v.is_graph_output())
    decompose_graph(graph, lambda node: False)
    return model


def results(model: ir.Model, feeds: dict[str, Any]) -> dict[str, Any]:
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    used = {v.name for v in session.get_inputs()}
    names = [v.name for v in session.get_outputs()]
    return dict(zip(names, session.run(None, {n: a for n, a in feeds.items() if n in used}), strict=True))


@pytest.fixture(scope="module")
def programs() -> Callable[[str], tuple[graphc.compiler.Program, dict[str, Any]]]:
    made: dict[str, Any] = {}

    def get(name: str) -> tuple[graphc.compiler.Program, dict[str, Any]]:
        if name not in made:
            torch.manual_seed(0)
            module = {"Residual": Residual, "Squeeze": Squeeze, "Shuffle": Shuffle}[name]().train()
            rng = np.random.default_rng(0)
            x = rng.standard_normal((4, 3, 33, 32)).astype(np.float32)
            program = graphc.compile(
                module,
                example_inputs=(torch.from_numpy(x),),
                loss=graphc.losses.SoftmaxCrossEntropy(),
                optimizer=graphc.optim.SGD(lr=0.1),
            )
            feed = next(v.name for v in program.model.graph.inputs if v.name != "label")
            made[name] = program, {feed: x, "label": rng.integers(0, 10, 4)}
        return made[name]  # type: ignore[no-any-return]

    return get


TURNED = {"Residual": 1, "Squeeze": 1, "Shuffle": 3}
"""The input; ShuffleNet's shuffle and its gradient move elements in any order of axes."""


@pytest.mark.full
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("name", params(TURNED, large=["Squeeze"]))
def test_networks_compute_the_same_with_channels_last(name: str, training: bool, programs: Callable[[str], Any]) -> None:
    program, feeds = programs(name)
    model = program.model if training else program.inference
    shapes = {n: a.shape for n, a in feeds.items()}
    plain, last = (prepare(model, shapes, Holding(rewrites)) for rewrites in ("", "channels_last"))
    assert not [n.op_type for n in last.graph if n.op_type.startswith(("Conv", "MaxPool", "AveragePool"))]
    moved = turned(last)
    assert len(moved) == (TURNED[name] if training or name != "Shuffle" else 2), moved
    expected, found = results(without_updates(plain), feeds), results(without_updates(last), feeds)
    assert list(found) == list(expected), "names and order of what the graph returns"
    for key, value in expected.items():
        scale = max(float(np.abs(value).max()), 1e-12)
        assert found[key].shape == value.shape
        np.testing.assert_allclose(found[key] / scale, value / scale, rtol=0, atol=2e-5, err_msg=key)


ALONE = {
    "transposed": (
        "ConvTranspose",
        (2, 5, 6, 5),
        (5, 3, 3, 2),
        {"strides": [2, 2], "pads": [0, 1, 1, 0], "output_padding": [1, 0]},
    ),
    "transposed in groups": ("ConvTranspose", (2, 6, 5, 5), (6, 2, 3, 3), {"group": 3, "strides": [1, 2], "dilations": [2, 1]}),
    "transposed to a shape": ("ConvTranspose", (2, 4, 5, 4), (4, 3, 3, 3), {"strides": [2, 3], "output_shape": [10, 13]}),
    "transposed, as wide": ("ConvTranspose", (2, 4, 5, 4), (4, 3, 4, 3), {"strides": [2, 2], "auto_pad": "SAME_LOWER"}),
    "cut short": ("ConvTranspose", (1, 4, 4, 4), (4, 3, 2, 2), {"strides": [1, 1], "pads": [2, 0, 1, 1]}),
    "one axis": ("Conv", (2, 4, 13), (6, 4, 4), {"pads": [2, 1], "strides": [2]}),
    "three axes": ("Conv", (2, 3, 5, 6, 4), (4, 3, 3, 2, 3), {"auto_pad": "SAME_UPPER", "strides": [1, 2, 1]}),
}


@pytest.mark.parametrize("name", ALONE)
def test_single_convolutions_compute_the_same(name: str) -> None:
    """With a sum over channels behind it, which reads what the convolution writes."""
    kind, x_shape, w_shape, attributes = ALONE[name]
    rng = np.random.default_rng(0)
    feeds = {n: rng.standard_normal(s).astype(np.float32) for n, s in (("x", x_shape), ("w", w_shape))}
    outputs = w_shape[1] * attributes.get("group", 1) if kind == "ConvTranspose" else w_shape[0]
    feeds["b"] = rng.standard_normal(outputs).astype(np.float32)
    model, (x, w, b) = new_model(feeds)
    op = Builder(model.graph)
    y = op.emit(kind, [x, w, b], attributes)[0]
    for k, value in enumerate((y, op.ReduceSum(op.Mul(y, y), [1], keepdims=0))):
        value.name = f"y{k}"
        model.graph.outputs.append(value)
    expected = results(model, feeds)
    run(model, "layout", Context())
    kinds = {n.op_type for n in model.graph}
    assert kind not in kinds
    assert any(k.startswith("ChannelsLast") for k in kinds)
    decompose_graph(model.graph, lambda node: False)
    found = results(model, feeds)
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-5, atol=1e-5, err_msg=key)


BLOCKED: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "ResNet-50": ((1, 3, 12, 10), (3, 3, 7, 7), {"strides": [2, 2], "pads": [3, 3, 3, 3]}),
    "odd sizes": ((2, 3, 11, 9), (4, 3, 3, 3), {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "same": ((1, 2, 8, 7), (4, 2, 3, 4), {"strides": [2, 2], "auto_pad": "SAME_LOWER"}),
    "patches": ((2, 3, 11, 10), (4, 3, 4, 4), {"strides": [4, 4]}),
    "AlexNet": ((1, 4, 19, 17), (2, 4, 11, 11), {"strides": [4, 4], "pads": [2, 2, 2, 2]}),
    "along one axis": ((2, 1, 8, 9), (5, 1, 3, 5), {"strides": [1, 2], "pads": [0, 1, 2, 0]}),
    "sound": ((2, 1, 30), (6, 1, 10), {"strides": [4], "pads": [3, 4]}),
    "video": ((1, 3, 5, 6, 7), (4, 3, 3, 3, 2), {"strides": [1, 2, 2], "pads": [1, 1, 0, 1, 1, 1]}),
}
"""Strided convolutions over few channels: x, w and attributes."""


def blocked(name: str, dtype: ir.DataType) -> tuple[ir.Model, dict[str, Any]]:
    """y = Relu(Conv(x, w, b)) and the gradient of w for an adjoint, over whole numbers: no sum is rounded in half precision."""
    x_shape, w_shape, attributes = BLOCKED[name]
    rng = np.random.default_rng(0)
    model, _ = new_model({})
    op = Builder(model.graph)

    def given(name: str, shape: tuple[int, ...]) -> ir.Value:
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(list(shape)))
        model.graph.inputs.append(value)
        feeds[name] = rng.integers(-1, 2, shape).astype(dtype.numpy())
        return value

    feeds: dict[str, Any] = {}
    x, w, b = given("x", x_shape), given("w", w_shape), given("b", w_shape[:1])
    y = op.Conv(x, w, b, **attributes)
    dy = given("dy", tuple(int(d) for d in y.shape.dims))
    for key, value in {"y": op.Relu(y), "dw": op.graphc.ConvGradWeight(x, dy, list(w_shape), **attributes)}.items():
        value.name = key
        model.graph.outputs.append(value)
    return model, feeds


def of_pytorch(name: str, feeds: dict[str, Any]) -> dict[str, Any]:
    """The same in float32."""
    attributes = BLOCKED[name][2]
    x, w, b, dy = (torch.from_numpy(feeds[key].astype(np.float32)) for key in ("x", "w", "b", "dy"))
    count, strides = x.dim() - 2, attributes["strides"]
    pads = attributes.get("pads", [0] * (2 * count))
    if "auto_pad" in attributes:
        sides = zip(x.shape[2:], w.shape[2:], strides, strict=True)
        totals = [max((-(-n // s) - 1) * s + k - n, 0) for n, k, s in sides]
        pads = [t - t // 2 for t in totals] + [t // 2 for t in totals]
    around = [side for axis in reversed(range(count)) for side in (pads[axis], pads[count + axis])]
    convolution = {1: nn.functional.conv1d, 2: nn.functional.conv2d, 3: nn.functional.conv3d}[count]
    w.requires_grad_()
    y = convolution(nn.functional.pad(x, around), w, b, strides)
    (dw,) = torch.autograd.grad(y, w, dy)
    return {"y": torch.relu(y).detach().numpy(), "dw": dw.numpy()}


@pytest.mark.parametrize("name", BLOCKED)
def test_strided_convolutions_of_few_channels_are_computed_over_blocks(name: str) -> None:
    model, feeds = blocked(name, ir.DataType.FLOAT16)
    run(model, "layout", Context())
    taken = [n for n in model.graph if n.op_type.startswith("ChannelsLastConv")]
    assert [n.op_type for n in taken] == ["ChannelsLastConv", "ChannelsLastConvGradWeight"]
    assert all(set(n.attributes["strides"].as_ints()) == {1} and not any(n.attributes["pads"].as_ints()) for n in taken)
    assert all(n.inputs[0].shape[-1] % 8 == 0 for n in taken), "16 bytes of channels"
    decompose_graph(model.graph, lambda node: False)
    found = BACKENDS["numpy"](threads=1).bind_whole(ir.to_proto(model))(feeds)
    for key, value in of_pytorch(name, feeds).items():
        assert float(np.abs(value).max()) < 2048, "a whole number of half precision"
        np.testing.assert_array_equal(found[key].astype(np.float32), value, err_msg=key)


@pytest.mark.parametrize(
    "change",
    [{"group": 3}, {"dilations": [2, 2]}, {"strides": [1, 1]}, {"dtype": ir.DataType.FLOAT}, {"kernel": 1}, {"channels": 6}],
    ids=lambda change: next(iter(change)),
)
def test_other_convolutions_are_not_cut_into_blocks(change: dict[str, Any]) -> None:
    """Groups, dilation, steps of one pixel, single precision, windows that skip pixels, and channels enough."""
    attributes = dict(change)
    channels, kernel = attributes.pop("channels", 3), attributes.pop("kernel", 3)
    dtype = attributes.pop("dtype", ir.DataType.FLOAT16)
    model, _ = new_model({})
    shapes = ((1, channels, 12, 12), (6, channels // attributes.get("group", 1), kernel, kernel))
    given = [ir.Value(name=n, type=ir.TensorType(dtype), shape=ir.Shape(list(s))) for n, s in zip("xw", shapes, strict=True)]
    model.graph.inputs.extend(given)
    y = Builder(model.graph).Conv(*given, **{"strides": [2, 2], **attributes})
    model.graph.outputs.append(y)
    run(model, "layout", Context())
    (found,) = [n for n in model.graph if n.op_type == "ChannelsLastConv"]
    assert list(found.attributes["strides"].as_ints()) == attributes.get("strides", [2, 2])


@pytest.mark.large
def test_resnet50_turns_only_its_input(exported: Callable[[str], str]) -> None:
    program = graphc.compile(
        exported("resnet50"), loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=graphc.optim.SGD(lr=0.1), precision="bf16"
    )
    shapes = {"input": (256, *SPECS["resnet50"].inputs), "label": (256,)}
    model = prepare(program.model, shapes, Holding("layout"))
    large = [n.inputs[0] for n in model.graph if n.op_type == "Transpose" and np.prod(n.inputs[0].shape.numpy()) > 2**22]
    assert [tuple(v.shape) for v in large] == [(256, 4, 115, 2, 115, 2)], "the image in blocks"
    turns = [n for n in model.graph if n.op_type == "Transpose"]
    assert len(turns) == 1 + 17 + 17, "16 kernels of 3 x 3 and the stem, and their gradients; 1 x 1 needs none"
