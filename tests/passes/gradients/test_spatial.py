"""Gradients of pooling, unpooling, Col2Im, CenterCropPad, Pad, DeformConv and RoiAlign: differences, PyTorch, onnxruntime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from graphc.errors import UnsupportedOpError
from graphc.ir.builder import Builder
from graphc.ir.names import GRADIENT_OF
from graphc.passes.gradients.reverse_mode import differentiate
from graphc.pipeline import PassCall, run
from graphc.training.inference import run_model
from tests.gradient_check import (
    Array,
    Variable,
    check_gradient,
    check_op,
    distinct,
    gradients,
    new_model,
    normal,
    on_onnxruntime,
    positive,
    uniform,
)

SINGLE: dict[str, Any] = {"dtype": np.float32, "compile_with": on_onnxruntime, "tolerance": 2e-3, "step": 1e-2}


def i64(*values: int) -> Array:
    return np.array(values, dtype=np.int64)


WINDOWS: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((2, 3, 9), {"kernel_shape": [3]}),
    ((2, 3, 7, 6), {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 2, 1]}),
    ((1, 2, 8, 9), {"kernel_shape": [2, 3], "dilations": [2, 2], "strides": [1, 3]}),
    ((1, 2, 8, 8), {"kernel_shape": [3, 3], "strides": [3, 3], "ceil_mode": 1, "pads": [1, 1, 0, 0]}),
    ((1, 2, 7, 8), {"kernel_shape": [3, 2], "strides": [2, 3], "auto_pad": "SAME_UPPER"}),
    ((1, 2, 7, 8), {"kernel_shape": [2, 3], "strides": [2, 3], "auto_pad": "SAME_LOWER"}),
    ((1, 2, 6, 6), {"kernel_shape": [3, 3], "auto_pad": "VALID"}),
    ((1, 2, 4, 5, 4), {"kernel_shape": [2, 3, 2], "strides": [1, 2, 2], "pads": [1, 1, 0, 0, 1, 1]}),
]


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize(("shape", "attributes"), WINDOWS, ids=str)
def test_lp_pool(shape: tuple[int, ...], attributes: dict[str, Any], p: int) -> None:
    for symbolic in (0, len(shape)):
        check_op("LpPool", [shape], p=p, symbolic=symbolic, **attributes)


def test_lp_pool_like_pytorch() -> None:
    x = torch.rand(2, 3, 8, 9, dtype=torch.float64) + 0.5
    x.requires_grad_()
    F.lp_pool2d(x, 3, (2, 3), (2, 3)).sum().backward()
    model, (value,) = new_model({"x": x.detach().numpy()})
    y = Builder(model.graph).LpPool(value, p=3, kernel_shape=[2, 3], strides=[2, 3])
    (found,) = gradients(model, {"x": x.detach().numpy()}, [y], [value])
    assert x.grad is not None
    np.testing.assert_allclose(found, x.grad.numpy(), rtol=1e-10)


def test_lp_pool_of_nothing_but_zeros() -> None:
    """The norm has no slope at zero; PyTorch's rule and ours say 0."""
    model, (value,) = new_model({"x": np.zeros((1, 1, 4))})
    y = Builder(model.graph).LpPool(value, p=2, kernel_shape=[2])
    (found,) = gradients(model, {"x": np.zeros((1, 1, 4))}, [y], [value])
    assert (found == 0).all()


def test_gradient_of_a_gradient_of_lp_pool() -> None:
    feeds = {"x": normal(1, 2, 5, 6).value}
    model, (x,) = new_model(feeds)
    op = Builder(model.graph)
    y = op.LpPool(x, p=3, kernel_shape=[2, 3], pads=[1, 0, 0, 1])
    model.graph.outputs.append(differentiate(model.graph, [op.Mul(y, y)], [x])[x])
    check_gradient(model, feeds)


@pytest.mark.parametrize("symbolic", [0, 4])
@pytest.mark.parametrize("p", [1, 2, 3])
def test_global_lp_pool(p: int, symbolic: int) -> None:
    check_op("GlobalLpPool", [(2, 3, 4, 5)], p=p, symbolic=symbolic)


@pytest.mark.parametrize("symbolic", [0, 4])
@pytest.mark.parametrize("p", [1, 2, 3])
def test_a_legal_graph_has_other_ops_for_global_lp_pool(p: int, symbolic: int) -> None:
    """No runtime has the op; what stands for it has the gradient of PyTorch's norm."""
    x = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    torch.linalg.vector_norm(x, p, dim=(2, 3)).sum().backward()
    feeds = {"x": x.detach().numpy()}
    model, (value,) = new_model(feeds, symbolic=symbolic)
    model.graph.outputs.append(Builder(model.graph).GlobalLpPool(value, p=p))
    run(model, "legalize,verify")
    (found,) = gradients(model, feeds, model.graph.outputs, [value], compile_with=on_onnxruntime)
    assert x.grad is not None
    np.testing.assert_allclose(found, x.grad.numpy(), rtol=1e-4, atol=1e-6)


AVERAGES: list[dict[str, Any]] = [
    *({**w, "count_include_pad": c} for _, w in WINDOWS[1:4] for c in (0, 1)),
    {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [2, 2, 2, 2], "ceil_mode": 1, "count_include_pad": 1},
    {"kernel_shape": [4, 4], "strides": [5, 5], "ceil_mode": 1},
]


@pytest.mark.parametrize("attributes", AVERAGES, ids=str)
def test_average_pool(attributes: dict[str, Any]) -> None:
    for symbolic in (0, 4):
        check_op("AveragePool", [(1, 2, 9, 8)], symbolic=symbolic, **attributes)


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize(("shape", "attributes"), WINDOWS, ids=str)
def test_max_pool_with_indices(shape: tuple[int, ...], attributes: dict[str, Any], order: int) -> None:
    check_op("MaxPool", [distinct(*shape)], outputs=2, storage_order=order, **attributes)


def test_ties_have_one_winner() -> None:
    """As in PyTorch, the whole gradient goes to the first of equal maxima."""
    x = np.ones((1, 2, 3, 4), dtype=np.float32)
    for op_type, attributes in (("GlobalMaxPool", {}), ("MaxPool", {"kernel_shape": [3, 4]})):
        model, (value,) = new_model({"x": x})
        (y,) = Builder(model.graph).emit(op_type, [value], attributes, outputs=1)
        (found,) = gradients(model, {"x": x}, [y], [value], compile_with=on_onnxruntime)
        expected = np.zeros_like(x)
        expected[:, :, 0, 0] = 1
        np.testing.assert_array_equal(found, expected)


UNPOOLED: list[tuple[tuple[int, ...], dict[str, Any], tuple[int, ...] | None]] = [
    ((2, 3, 8), {"kernel_shape": [2], "strides": [2]}, None),
    ((2, 3, 6, 8), {"kernel_shape": [2, 2], "strides": [2, 2]}, None),
    ((1, 2, 6, 9), {"kernel_shape": [3, 3], "strides": [3, 3]}, (1, 2, 7, 10)),
    ((1, 2, 4, 4, 6), {"kernel_shape": [2, 2, 2], "strides": [2, 2, 2]}, None),
]


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize(("shape", "window", "target"), UNPOOLED, ids=str)
def test_max_unpool(shape: tuple[int, ...], window: dict[str, Any], target: tuple[int, ...] | None, symbolic: bool) -> None:
    pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(shape) - 3]
    kernel = tuple(window["kernel_shape"])
    _, inner = pool(torch.tensor(distinct(*shape).value), kernel, return_indices=True)  # type: ignore[operator]
    size = int(np.prod(shape[2:]))
    planes = np.arange(shape[0] * shape[1]).reshape(shape[0], shape[1], *[1] * (len(shape) - 2))
    indices = inner.numpy() + planes * size  # PyTorch counts in each channel, ONNX in the whole tensor
    output = None if target is None else i64(*target)
    check_op("MaxUnpool", [tuple(indices.shape), indices, output], symbolic=len(shape) if symbolic else 0, **window)


FOLDS: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((5, 6), (2, 3), {}),
    ((5, 6), (2, 3), {"pads": [1, 0, 1, 2], "strides": [2, 1], "dilations": [1, 2]}),
    ((7,), (3,), {"strides": [2]}),
    ((4, 5, 3), (2, 2, 2), {"pads": [0, 1, 0, 1, 0, 1]}),
]


@pytest.mark.parametrize("symbolic", [0, 1])
@pytest.mark.parametrize(("image", "block", "attributes"), FOLDS, ids=str)
def test_col2im(image: tuple[int, ...], block: tuple[int, ...], attributes: dict[str, Any], symbolic: int) -> None:
    n = len(image)
    pads, strides, dilations = (
        attributes.get(k, [v] * c) for k, v, c in (("pads", 0, 2 * n), ("strides", 1, n), ("dilations", 1, n))
    )
    blocks = [(image[k] + pads[k] + pads[n + k] - dilations[k] * (block[k] - 1) - 1) // strides[k] + 1 for k in range(n)]
    x = (2, 3 * int(np.prod(block)), int(np.prod(blocks)))
    check_op("Col2Im", [x, i64(*image), i64(*block)], symbolic=symbolic, **attributes)


def test_col2im_of_unknown_blocks_is_refused() -> None:
    model, (x,) = new_model({"x": np.zeros((1, 4, 4))})
    block = ir.Value(name="block", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([2]))
    model.graph.inputs.append(block)
    y = Builder(model.graph).Col2Im(x, i64(3, 3), block)
    with pytest.raises(UnsupportedOpError, match="block shape must be a constant"):
        differentiate(model.graph, [y], [x])


@pytest.mark.parametrize("symbolic", [0, 3])
@pytest.mark.parametrize(
    ("shape", "target", "axes"),
    [
        ((5, 6, 7), (8, 3, 7), None),
        ((5, 6, 7), (2, 9, 4), None),
        ((6, 4, 5), (3, 8), [-1, 0]),
        ((4, 5, 4), (7,), [1]),
    ],
    ids=str,
)
def test_center_crop_pad(shape: tuple[int, ...], target: tuple[int, ...], axes: list[int] | None, symbolic: int) -> None:
    check_op("CenterCropPad", [shape, i64(*target)], axes=axes, symbolic=symbolic)


PADS: list[tuple[str, list[int], list[int] | None]] = [
    ("constant", [1, -1, 0, 2, -2, 1], None),
    ("constant", [-1, -2, -1, -1], [2, 0]),
    *((mode, [1, 2, 0, 2, 1, 3], None) for mode in ("reflect", "edge", "wrap")),
    *((mode, [2, 3], [-1]) for mode in ("reflect", "edge", "wrap")),
    *((mode, [0, -1, 0, 0, 2, -2], None) for mode in ("reflect", "edge")),
]


@pytest.mark.parametrize("symbolic", [0, 3])
@pytest.mark.parametrize(("mode", "pads", "axes"), PADS, ids=str)
def test_pad(mode: str, pads: list[int], axes: list[int] | None, symbolic: int) -> None:
    """On onnxruntime, for ``numpy.pad`` refuses negative margins."""
    fill = [uniform(0.5, 1.0)] if mode == "constant" else [None]
    check_op(
        "Pad", [(4, 5, 6), i64(*pads), *fill, None if axes is None else i64(*axes)], mode=mode, symbolic=symbolic, **SINGLE
    )


@pytest.mark.parametrize("mode", ["reflect", "edge", "wrap"])
def test_a_margin_of_axes_that_a_feed_names(mode: str) -> None:
    """The axis comes at run time: elements are added where they came from, one by one."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]> g (float[3,4] x, int64[1] axis) => (float[] loss)
        {{ pads = Constant <value = int64[2] {{1, 2}}> ()  y = Pad <mode = "{mode}"> (x, pads, , axis)
           z = Mul (y, y)  loss = ReduceSum <keepdims = 0> (z) }}"""
    )
    converted = ir.from_proto(model)
    run(converted, [PassCall("legalize"), PassCall("autodiff", {"of": ["loss"], "wrt": ["x"]})])
    (slope,) = (v for n in converted.graph for v in n.outputs if v.metadata_props.get(GRADIENT_OF) == "x")
    converted.graph.outputs.append(slope)
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    found = run_model(converted, {"x": x, "axis": np.array([1])})[slope.name or ""]
    places = np.pad(np.arange(12).reshape(3, 4), ((0, 0), (1, 2)), mode=mode)
    np.testing.assert_allclose(found, (2 * x.ravel() * np.bincount(places.ravel(), minlength=12)).reshape(3, 4))


TRANSPOSED: dict[str, dict[str, Any]] = {
    "output padding": {"strides": [3, 2], "output_padding": [2, 1], "pads": [1, 0, 1, 1]},
    "output shape": {"strides": [2, 3], "output_shape": [10, 14]},
    "a larger output shape": {"strides": [3, 3], "output_shape": [13, 17]},
    "same upper": {"strides": [2, 2], "auto_pad": "SAME_UPPER"},
    "same lower": {"strides": [2, 3], "auto_pad": "SAME_LOWER"},
    "valid, groups and dilations": {"auto_pad": "VALID", "group": 2, "dilations": [2, 1]},
}


@pytest.mark.parametrize("case", TRANSPOSED)
def test_conv_transpose(case: str) -> None:
    attributes = TRANSPOSED[case]
    weight = (4, 2, 3, 3)
    check_op("ConvTranspose", [(2, 4, 4, 5), weight, (2 * attributes.get("group", 1),)], **attributes, **SINGLE)


@pytest.mark.parametrize("axes", [None, [0, 2, 3], [1], [-1]], ids=str)
def test_mean_variance_normalization(axes: list[int] | None) -> None:
    shape, where = (3, 4, 4, 5), tuple(axes or (0, 2, 3))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), requires_grad=True)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    mean, variance = x.mean(where, keepdim=True), x.var(where, correction=0, keepdim=True)
    ((x - mean) / (variance.sqrt() + 1e-9) * weight).sum().backward()
    feeds = {"x": x.detach().numpy(), "w": weight.numpy()}
    model, values = new_model(feeds)
    op = Builder(model.graph)
    y = op.Mul(op.MeanVarianceNormalization(values[0], axes=axes), values[1])
    (found,) = gradients(model, feeds, [y], values[:1], compile_with=on_onnxruntime)
    assert x.grad is not None
    np.testing.assert_allclose(found, x.grad.numpy(), rtol=1e-4, atol=1e-4)


# Reading between elements ----------------------------------------------------------------------------------------------

Deformed = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], dict[str, Any]]

DEFORMED: dict[str, Deformed] = {
    "plain": ((2, 3, 5, 6), (4, 3, 2, 3), (4, 4), {}),
    "all attributes": (
        (2, 4, 6, 7),
        (6, 2, 3, 2),
        (3, 4),
        {"strides": [2, 2], "pads": [1, 0, 1, 2], "dilations": [1, 2], "group": 2, "offset_group": 2},
    ),
    "more offset groups than groups": ((1, 4, 5, 5), (2, 4, 2, 2), (4, 4), {"offset_group": 4}),
    "line": ((2, 2, 7), (3, 2, 3), (4,), {"strides": [2], "pads": [1, 1]}),
    "volume": ((1, 2, 3, 4, 3), (2, 1, 2, 2, 2), (2, 3, 2), {"group": 2}),
}


@pytest.mark.parametrize("symbolic", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("case", DEFORMED)
def test_deform_conv(case: str, symbolic: bool) -> None:
    x, w, out, attributes = DEFORMED[case]
    n, taps, parts = len(out), int(np.prod(w[2:])), attributes.get("offset_group", 1)
    offset = uniform(-1.3, 1.3, x[0], parts * taps * n, *out, seed=5)
    mask = positive(x[0], parts * taps, *out)
    for operands in ([x, w, offset], [x, w, offset, (w[0],), mask], [x, w, offset, None, mask]):
        check_op("DeformConv", operands, symbolic=1 if symbolic else 0, tolerance=2e-6, **attributes)


def test_deform_conv_without_offsets_is_conv() -> None:
    arrays = [normal(2, 4, 6, 6).value, normal(4, 2, 3, 3).value, np.zeros((2, 18, 4, 4))]
    x, w = (torch.tensor(a, requires_grad=True) for a in arrays[:2])
    (F.conv2d(x, w, groups=2) ** 2).sum().backward()
    feeds = dict(zip(("x", "w", "offset"), arrays, strict=True))
    model, values = new_model(feeds)
    op = Builder(model.graph)
    y = op.DeformConv(*values, group=2)
    for tensor, found in zip((x, w), gradients(model, feeds, [op.Mul(y, y)], values[:2]), strict=True):
        assert tensor.grad is not None
        np.testing.assert_allclose(found, tensor.grad.numpy(), rtol=1e-9, atol=1e-9)


REGIONS = np.array(
    [[0.3, 0.7, 6.1, 5.2], [2.2, 1.1, 4.4, 8.3], [-2.4, -1.3, 3.3, 2.9], [4.1, 3.2, 4.6, 3.9], [5.2, 4.3, 9.7, 11.4]]
)


@pytest.mark.full
@pytest.mark.parametrize("symbolic", [0, 1])
@pytest.mark.parametrize("ratio", [0, 2])
@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.parametrize("place", ["half_pixel", "output_half_pixel"])
def test_roi_align(place: str, mode: str, ratio: int, symbolic: int) -> None:
    operands = [distinct(2, 3, 7, 8), REGIONS, i64(0, 1, 1, 0, 1)]
    check_op(
        "RoiAlign",
        operands,
        coordinate_transformation_mode=place,
        mode=mode,
        sampling_ratio=ratio,
        output_height=2,
        output_width=3,
        spatial_scale=0.8,
        symbolic=symbolic,
    )


def test_roi_align_moves_regions() -> None:
    attributes = {"output_height": 2, "output_width": 2, "sampling_ratio": 2}
    check_op("RoiAlign", [normal(2, 2, 7, 8), Variable(REGIONS), i64(0, 1, 1, 0, 1)], **attributes)


def test_roi_align_of_a_region_without_extent() -> None:
    feeds = {"x": normal(1, 1, 4, 4).value, "rois": np.array([[1.0, 1.0, 1.0, 1.0]])}
    for mode in ("avg", "max"):
        model, values = new_model(feeds)
        y = Builder(model.graph).RoiAlign(*values, i64(0), mode=mode)
        (found,) = gradients(model, feeds, [y], values[:1])
        assert (found == 0).all()


@pytest.mark.parametrize(
    "gradient_of",
    [lambda op, x: op.CenterCropPad(x, i64(3, 7)), lambda op, x: op.Col2Im(op.Unsqueeze(x, [0]), i64(3, 3), i64(2, 2))],
)
def test_linear_ops_twice(gradient_of: Callable[[Builder, ir.Value], Any]) -> None:
    feeds = {"x": normal(4, 4).value}
    model, (x,) = new_model(feeds)
    op = Builder(model.graph)
    y = gradient_of(op, x)
    first = differentiate(model.graph, [op.Mul(y, op.Mul(y, y))], [x])[x]
    model.graph.outputs.append(first)
    check_gradient(model, feeds)
