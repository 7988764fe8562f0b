"""Gradients of convolution and pooling against PyTorch (float32, onnxruntime) and central differences (float64)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from graphc.ir.builder import Builder
from graphc.ir.facts import static_dims
from graphc.ir.infer import propagate
from graphc.passes.gradients.reverse_mode import differentiate
from tests.gradient_check import Array, check_gradient, check_op, distinct, new_model, on_onnxruntime, reference
from tests.tiers import params

BATCH, NOTHING, SPACE = "batch", "nothing", "space"
"""What is symbolic while the gradient is emitted."""


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def gradients(
    op_type: str, arrays: Sequence[Array], dy: Array, symbolic: str, *, specialise: bool = True, **attributes: Any
) -> list[Array]:
    """Gradients of Σ dy·op(arrays) by onnxruntime; the first array is the image, whose sizes may be symbols."""
    feeds = {f"x{k}": array for k, array in enumerate(arrays)} | {"dy": dy}
    model, values = new_model(feeds)
    image = values[0]
    known = list(image.shape or ())
    if symbolic != NOTHING:
        image.shape = ir.Shape(
            ["N", *known[1:]] if symbolic == BATCH else ["N", known[1], *(f"s{k}" for k in range(len(known) - 2))]
        )
        values[-1].shape = ir.Shape([None] * dy.ndim)
    op = Builder(model.graph)
    total = op.Mul(op.emit(op_type, values[:-1], attributes)[0], values[-1])
    found = differentiate(model.graph, [total], values[:-1])
    model.graph.outputs.extend(found[v] for v in values[:-1])
    if specialise:
        image.shape, values[-1].shape = ir.Shape(known), ir.Shape(dy.shape)
        propagate(model.graph)
        for value, array in zip(values, arrays, strict=False):
            assert static_dims(found[value]) == array.shape
    return list(on_onnxruntime(model)(feeds).values())


def assert_like_torch(
    function: Callable[..., torch.Tensor], op_type: str, arrays: Sequence[Array], symbolic: str, **attributes: Any
) -> None:
    tensors = [torch.tensor(a, requires_grad=True) for a in arrays]
    y = function(*tensors)
    dy = normal(*y.shape, seed=9)
    y.backward(torch.tensor(dy))
    for specialise in (True, False):
        found = gradients(op_type, arrays, dy, symbolic, specialise=specialise, **attributes)
        for tensor, result in zip(tensors, found, strict=True):
            assert tensor.grad is not None
            scale = float(tensor.grad.abs().max())
            np.testing.assert_allclose(result, tensor.grad.numpy(), rtol=1e-5, atol=1e-5 * scale)


CONVOLUTIONS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "1d": ((2, 3, 9), (4, 3, 3), {}),
    "1d stride leaves a remainder": ((2, 3, 10), (4, 3, 3), {"strides": [3], "pads": [1, 1]}),
    "2d": ((2, 3, 7, 6), (4, 3, 3, 2), {"pads": [1, 0, 1, 0]}),
    "stride and remainder": ((2, 3, 8, 9), (4, 3, 3, 3), {"strides": [2, 3], "pads": [1, 1, 1, 1]}),
    "many channels": ((2, 8, 6, 7), (3, 8, 3, 2), {"pads": [1, 0, 1, 0]}),
    "many channels, stride and dilation": (
        (2, 9, 11, 12),
        (4, 9, 3, 2),
        {"strides": [2, 3], "dilations": [2, 1], "pads": [1, 2, 1, 2]},
    ),
    "many channels, 1d": ((2, 8, 10), (3, 8, 3), {"strides": [3], "pads": [1, 1]}),
    "many channels, 3d": ((1, 8, 4, 5, 6), (2, 8, 2, 3, 2), {"strides": [1, 2, 3], "pads": [0, 1, 1, 0, 1, 1]}),
    "dilation": ((2, 3, 9, 10), (4, 3, 3, 2), {"dilations": [2, 3], "pads": [2, 1, 2, 1]}),
    "stride, dilation and groups": (
        (2, 4, 11, 10),
        (6, 2, 3, 3),
        {"strides": [2, 3], "dilations": [2, 1], "group": 2, "pads": [2, 1, 2, 1]},
    ),
    "depthwise": ((2, 4, 6, 6), (4, 1, 3, 3), {"group": 4, "pads": [1, 1, 1, 1], "strides": [2, 2]}),
    "depthwise multiplier": ((2, 3, 6, 6), (6, 1, 3, 3), {"group": 3}),
    "1x1": ((3, 4, 5, 5), (6, 4, 1, 1), {}),
    "1x1 with stride": ((3, 4, 5, 6), (6, 4, 1, 1), {"strides": [2, 2]}),
    "1x1 in groups": ((3, 4, 5, 5), (6, 2, 1, 1), {"group": 2}),
    "stride beyond the kernel": ((2, 3, 11, 11), (4, 3, 2, 2), {"strides": [4, 4]}),
    "3d": ((2, 2, 5, 6, 7), (3, 2, 2, 3, 3), {"strides": [1, 2, 2], "pads": [0, 1, 1, 0, 1, 1]}),
    "3d in groups": ((2, 2, 5, 6, 4), (4, 1, 2, 3, 2), {"group": 2, "dilations": [1, 2, 1]}),
}


SIZES = params([SPACE, NOTHING, BATCH], full=[NOTHING, BATCH])
"""Which sizes are known: in the quick tier, the fewest."""


@pytest.mark.parametrize("symbolic", SIZES)
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_conv_like_pytorch(case: str, symbolic: str) -> None:
    x_shape, w_shape, attributes = CONVOLUTIONS[case]
    n = len(w_shape) - 2
    pads = attributes.get("pads", [0] * 2 * n)

    def forward(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        convolve = (F.conv1d, F.conv2d, F.conv3d)[n - 1]
        strides, dilations = attributes.get("strides", 1), attributes.get("dilations", 1)
        return convolve(x, w, b, strides, pads[:n], dilations, attributes.get("group", 1))

    arrays = [normal(*x_shape), normal(*w_shape, seed=1), normal(w_shape[0], seed=2)]
    assert_like_torch(forward, "Conv", arrays, symbolic, **attributes)


@pytest.mark.parametrize(
    ("shape", "attributes"),
    [
        ((2, 2, 5, 4), {"pads": [0, 2, 1, 0]}),
        ((2, 2, 5, 4), {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
        ((1, 2, 5, 4), {"auto_pad": "SAME_LOWER", "strides": [2, 3]}),
        ((1, 2, 5, 4), {"auto_pad": "VALID", "strides": [2, 2]}),
        ((1, 2, 5, 6), {"auto_pad": "SAME_UPPER", "dilations": [2, 2]}),
        ((1, 4, 5, 5), {"group": 2, "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ],
)
def test_conv_like_differences(shape: tuple[int, ...], attributes: dict[str, Any]) -> None:
    check_op("Conv", [shape, (4, shape[1] // attributes.get("group", 1), 3, 3), (4,)], **attributes)


@pytest.mark.parametrize("mode", ["SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize("symbolic", [NOTHING, BATCH, SPACE])
@pytest.mark.parametrize("strides", [[2, 3], [1, 1]])
def test_conv_with_same_padding(strides: list[int], symbolic: str, mode: str) -> None:
    x, w = normal(2, 3, 8, 7), normal(4, 3, 3, 4, seed=1)
    begin, end = [], []
    for size, k, s in zip(x.shape[2:], w.shape[2:], strides, strict=True):
        total = max((-(-size // s) - 1) * s + k - size, 0)
        begin.append(total // 2 if mode == "SAME_UPPER" else total - total // 2)
        end.append(total - begin[-1])

    def forward(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.conv2d(F.pad(x, (begin[1], end[1], begin[0], end[0])), w, None, strides)

    assert_like_torch(forward, "Conv", [x, w], symbolic, auto_pad=mode, strides=strides)


TRANSPOSED: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "1d": ((2, 3, 5), (3, 4, 3), {"strides": [2]}),
    "2d": ((2, 3, 4, 5), (3, 4, 3, 2), {"strides": [2, 3], "pads": [1, 0, 1, 0]}),
    "output padding": ((2, 3, 4, 5), (3, 4, 3, 3), {"strides": [2, 2], "pads": [1, 1, 1, 1], "output_padding": [1, 1]}),
    "groups": ((2, 4, 4, 5), (4, 3, 3, 2), {"strides": [2, 1], "group": 2}),
    "dilation": ((2, 4, 4, 5), (4, 3, 3, 2), {"dilations": [2, 1], "pads": [1, 1, 1, 1]}),
    "3d": ((1, 2, 3, 3, 4), (2, 3, 2, 2, 3), {"strides": [2, 1, 2]}),
}


@pytest.mark.parametrize("symbolic", [NOTHING, BATCH, SPACE])
@pytest.mark.parametrize("case", TRANSPOSED)
def test_conv_transpose_like_pytorch(case: str, symbolic: str) -> None:
    x_shape, w_shape, attributes = TRANSPOSED[case]
    n = len(w_shape) - 2

    def forward(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        convolve = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[n - 1]
        strides, pads = attributes.get("strides", 1), attributes.get("pads", [0] * 2 * n)[:n]
        group, dilations = attributes.get("group", 1), attributes.get("dilations", 1)
        return convolve(x, w, b, strides, pads, attributes.get("output_padding", 0), group, dilations)

    arrays = [normal(*x_shape), normal(*w_shape, seed=1), normal(w_shape[1] * attributes.get("group", 1), seed=2)]
    assert_like_torch(forward, "ConvTranspose", arrays, symbolic, **attributes)


@pytest.mark.parametrize(
    "attributes",
    [
        {"auto_pad": "SAME_UPPER", "strides": [2, 2]},
        {"auto_pad": "SAME_LOWER", "strides": [2, 2]},
        {"auto_pad": "SAME_UPPER", "strides": [4, 4]},
        {"output_shape": [8, 9], "strides": [2, 2]},
        {"output_shape": [10, 12], "strides": [3, 3]},
        {"output_shape": [10, 12], "strides": [2, 2]},
        {"output_shape": [7, 8], "strides": [2, 2], "auto_pad": "SAME_UPPER"},
        {"pads": [0, 1, 1, 0], "strides": [2, 2]},
    ],
)
def test_conv_transpose_with_derived_padding(attributes: dict[str, Any]) -> None:
    """onnxruntime's own forward decides what the padding is; float32, so the differences are coarse (the op is linear)."""
    w = (2, 3, 3, 3)
    check_op(
        "ConvTranspose",
        [(1, 2, 4, 5), w],
        dtype=np.float32,
        compile_with=on_onnxruntime,
        tolerance=1e-3,
        step=0.5,
        **attributes,
    )


POOLS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "1d": ((2, 3, 9), {"kernel_shape": [3], "strides": [2]}),
    "tiles": ((2, 3, 6, 8), {"kernel_shape": [2, 4], "strides": [2, 4]}),
    "tiles with a remainder": ((2, 3, 7, 9), {"kernel_shape": [2, 4], "strides": [2, 4]}),
    "overlap": ((2, 3, 7, 8), {"kernel_shape": [3, 3], "strides": [2, 1]}),
    "padding": ((2, 3, 7, 8), {"kernel_shape": [3, 3], "strides": [1, 2], "pads": [1, 1, 1, 1]}),
    "ceil": ((2, 3, 7, 8), {"kernel_shape": [3, 2], "strides": [2, 3], "ceil_mode": 1}),
    "ceil and padding": ((2, 3, 7, 8), {"kernel_shape": [3, 3], "strides": [3, 2], "pads": [1, 1, 1, 1], "ceil_mode": 1}),
    "3d": ((1, 2, 5, 6, 7), {"kernel_shape": [2, 3, 3], "strides": [1, 2, 2], "pads": [0, 1, 1, 0, 1, 1]}),
}


def pool_arguments(attributes: Mapping[str, Any]) -> dict[str, Any]:
    n = len(attributes["kernel_shape"])
    return {
        "kernel_size": attributes["kernel_shape"],
        "stride": attributes.get("strides", [1] * n),
        "padding": attributes.get("pads", [0] * 2 * n)[:n],
        "ceil_mode": bool(attributes.get("ceil_mode", 0)),
    }


@pytest.mark.parametrize("symbolic", SIZES)
@pytest.mark.parametrize("dilated", [False, True])
@pytest.mark.parametrize("case", POOLS)
def test_max_pool_like_pytorch(case: str, dilated: bool, symbolic: str) -> None:
    shape, attributes = POOLS[case]
    n = len(shape) - 2
    if dilated:
        attributes = {**attributes, "dilations": [2] * n}
    pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[n - 1]
    arguments = {**pool_arguments(attributes), "dilation": 2 if dilated else 1}
    x = np.round(normal(*shape) * 2)  # many ties: the first maximum gets the gradient
    assert_like_torch(lambda t: pool(t, **arguments), "MaxPool", [x], symbolic, **attributes)


@pytest.mark.parametrize("symbolic", SIZES)
@pytest.mark.parametrize("include", [0, 1])
@pytest.mark.parametrize("case", POOLS)
def test_average_pool_like_pytorch(case: str, include: int, symbolic: str) -> None:
    shape, attributes = POOLS[case]
    pool = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[len(shape) - 3]
    arguments = {**pool_arguments(attributes), "count_include_pad": bool(include)}
    x = normal(*shape)
    assert_like_torch(lambda t: pool(t, **arguments), "AveragePool", [x], symbolic, **attributes, count_include_pad=include)


@pytest.mark.parametrize("op_type", ["MaxPool", "AveragePool"])
@pytest.mark.parametrize(
    "attributes",
    [
        {"auto_pad": "SAME_UPPER", "strides": [2, 2]},
        {"auto_pad": "SAME_LOWER", "strides": [2, 2]},
        {"auto_pad": "VALID", "strides": [2, 1]},
        {"dilations": [2, 2], "pads": [1, 2, 0, 1]},
        {"pads": [1, 0, 0, 1], "strides": [2, 2]},
    ],
)
def test_pools_like_differences(op_type: str, attributes: dict[str, Any]) -> None:
    compile_with = on_onnxruntime if op_type == "MaxPool" else reference  # the reference's Indices are wrong in overlaps
    check_op(op_type, [distinct(2, 2, 6, 7)], kernel_shape=[2, 3], compile_with=compile_with, **attributes)


@pytest.mark.parametrize("mode", ["SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize("include", [0, 1])
def test_average_pool_with_same_padding_and_symbolic_sizes(include: int, mode: str) -> None:
    x, dy = normal(2, 2, 7, 8), normal(2, 2, 4, 3, seed=3)
    attributes = {"kernel_shape": [2, 4], "strides": [2, 3], "auto_pad": mode, "count_include_pad": include}
    known = gradients("AveragePool", [x], dy, NOTHING, **attributes)[0]
    late = gradients("AveragePool", [x], dy, SPACE, specialise=False, **attributes)[0]
    np.testing.assert_allclose(late, known, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("symbolic", [NOTHING, BATCH, SPACE])
@pytest.mark.parametrize("shape", [(2, 3, 5), (2, 3, 4, 5), (2, 3, 2, 3, 4)])
def test_global_pools_like_pytorch(shape: tuple[int, ...], symbolic: str) -> None:
    axes = list(range(2, len(shape)))
    x = np.round(normal(*shape) * 2)
    largest = (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d)[len(axes) - 1]
    assert_like_torch(lambda t: t.mean(axes, keepdim=True), "GlobalAveragePool", [x], symbolic)
    assert_like_torch(lambda t: largest(t, 1), "GlobalMaxPool", [x], symbolic)


@pytest.mark.parametrize("op_type", ["GlobalAveragePool", "GlobalMaxPool"])
def test_global_pools_like_differences(op_type: str) -> None:
    check_op(op_type, [distinct(2, 3, 4, 5)])


def test_gradients_of_gradients() -> None:
    """Differentiate Σ c·∂(Σ dy·y)/∂x once more: Conv, MaxPool and AveragePool through their own gradient ops."""
    feeds = {"x": distinct(2, 2, 6, 6).value, "w": normal(4, 2, 3, 3).astype(np.float64)}
    model, (x, w) = new_model(feeds)
    op = Builder(model.graph)
    y = op.Conv(x, w, pads=[1, 1, 1, 1], strides=[2, 2])
    z = op.Mul(y, y)
    first = differentiate(model.graph, [z], [x, w])
    model.graph.outputs.extend(first.values())
    check_gradient(model, feeds)

    for op_type, attributes, compile_with in (
        ("MaxPool", {"kernel_shape": [3, 3]}, on_onnxruntime),
        ("AveragePool", {"kernel_shape": [2, 3], "pads": [1, 1, 0, 0]}, reference),
    ):
        model, (x,) = new_model({"x": feeds["x"]})
        op = Builder(model.graph)
        (y,) = op.emit(op_type, [x], attributes)
        first = differentiate(model.graph, [op.Mul(y, y)], [x])
        model.graph.outputs.extend(first.values())
        check_gradient(model, {"x": feeds["x"]}, compile_with=compile_with)


def test_first_layer_gets_no_input_gradient() -> None:
    model, (_, _) = new_model({"x": normal(1, 2, 5, 5), "w": normal(3, 2, 3, 3)})
    x, w = model.graph.inputs
    y = Builder(model.graph).Conv(x, w)
    differentiate(model.graph, [y], [w])
    assert [n.op_type for n in model.graph if n.domain == "graphc"] == ["ConvGradWeight"]


@pytest.mark.parametrize(
    ("op_type", "weights", "attributes"),
    [
        ("Conv", [(4, 2, 3, 3), (4,)], {"group": 2, "strides": [2, 2]}),
        ("Conv", [(3, 4, 1, 1)], {}),
        ("ConvTranspose", [(4, 2, 3, 3)], {"strides": [2, 2]}),
        ("MaxPool", [], {"kernel_shape": [3, 3]}),
        ("AveragePool", [], {"kernel_shape": [3, 2]}),
        ("GlobalMaxPool", [], {}),
    ],
)
def test_half_precision(op_type: str, weights: list[tuple[int, ...]], attributes: dict[str, Any]) -> None:
    arrays = [distinct(2, 4, 7, 7).value / 20, *(normal(*shape) for shape in weights)]
    exact = {f"x{k}": a.astype(np.float32) for k, a in enumerate(arrays)}
    results = []
    for feeds in (exact, {k: a.astype(np.float16) for k, a in exact.items()}):
        model, values = new_model(feeds)
        y = Builder(model.graph).emit(op_type, values, attributes)[0]
        model.graph.outputs.extend(differentiate(model.graph, [y], values).values())
        results.append(on_onnxruntime(model)(feeds))
    for single, half in zip(results[0].values(), results[1].values(), strict=True):
        assert half.dtype == np.float16
        np.testing.assert_allclose(half, single, rtol=1e-2, atol=1e-2 * float(np.abs(single).max()))
