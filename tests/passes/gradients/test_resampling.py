"""Gradients of Resize, GridSample, AffineGrid and Upsample: ONNX's own definition, PyTorch, and central differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from onnx.reference import ReferenceEvaluator

from graphc.errors import UnsupportedOpError
from graphc.ir import OPSET
from graphc.ir.builder import Builder
from graphc.ir.infer import propagate
from graphc.ir.ops.resampling import RESIZE, ResizedAxis, interpolation_matrix
from graphc.ir.parameters import select_trainable
from graphc.passes.gradients.reverse_mode import differentiate
from graphc.pipeline import run
from tests.gradient_check import (
    Array,
    Variable,
    check_gradient,
    check_op,
    gradients,
    new_model,
    normal,
    on_onnxruntime,
    uniform,
)

MODES: list[dict[str, Any]] = [
    *({"mode": "nearest", "nearest_mode": n} for n in ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")),
    {"mode": "linear"},
    {"mode": "cubic"},
    {"mode": "cubic", "cubic_coeff_a": -0.5},
    {"mode": "cubic", "exclude_outside": 1},
    {"mode": "linear", "antialias": 1},
    {"mode": "linear", "antialias": 1, "exclude_outside": 1},
    {"mode": "cubic", "antialias": 1},
]
PLACES = ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric", "tf_crop_and_resize")
SIZES = [(4, 8), (8, 4), (5, 3), (3, 7), (7, 1), (1, 4), (6, 6)]


def resized_identity(before: int, attributes: dict[str, Any], **operands: Array) -> Array:
    """What ``onnx.reference`` makes of the identity matrix: the matrix of the map along the first axis."""
    names = [name if name in operands else "" for name in ("x", "roi", "scales", "sizes")]
    node = onnx.helper.make_node("Resize", ["x", *names[1:]], ["y"], axes=[0], **attributes)
    feeds = {"x": np.eye(before), **operands}
    inputs = [
        onnx.helper.make_tensor_value_info(n, onnx.helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in feeds.items()
    ]
    outputs = [onnx.helper.make_empty_tensor_value_info("y")]
    graph = onnx.helper.make_graph([node], "resize", inputs, outputs)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", OPSET)])
    return np.asarray(ReferenceEvaluator(model).run(None, feeds)[0])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("given", MODES, ids=str)
def test_matrix_is_that_of_the_definition(given: dict[str, Any], place: str) -> None:
    attributes = {**given, "coordinate_transformation_mode": place}
    roi = np.array([0.2, 0.9]) if place == "tf_crop_and_resize" else np.array([])
    extra = {"roi": roi} if roi.size else {}
    for before, after in SIZES:
        if roi.size and before == 1:
            continue
        expected = resized_identity(before, attributes, sizes=np.array([after]), **extra)
        axis = ResizedAxis(before, after, after / before, *([(0.2, 0.9)] if roi.size else []))
        np.testing.assert_allclose(interpolation_matrix(axis, {**RESIZE, **attributes}), expected, atol=5e-6)
    for before, scale in ((5, 1.7), (8, 0.6), (7, 0.45)):
        factor = np.array([scale], dtype=np.float32)
        expected = resized_identity(before, attributes, scales=factor, **extra)
        axis = ResizedAxis(before, len(expected), float(factor[0]), *([(0.2, 0.9)] if roi.size else []))
        np.testing.assert_allclose(interpolation_matrix(axis, {**RESIZE, **attributes}), expected, atol=5e-6)


def i64(*values: int) -> Array:
    return np.array(values, dtype=np.int64)


def f32(*values: float) -> Array:
    return np.array(values, dtype=np.float32)


IMAGE = (2, 2, 4, 5)
RESIZES: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "nearest by whole numbers": ([IMAGE, None, f32(1, 1, 2, 3)], {}),
    "all axes": ([IMAGE, None, None, i64(3, 4, 6, 3)], {"mode": "linear"}),
    "one axis of many": ([(2, 3, 2, 4, 3)], {"mode": "cubic", "axes": [1], "sizes": i64(5)}),
    "axes in another order": ([IMAGE, None, None, i64(7, 3)], {"mode": "linear", "axes": [3, 2]}),
    "negative axes": (  # which onnx.reference does not know
        [IMAGE, None, f32(0.6, 2.5)],
        {
            "mode": "linear",
            "axes": [-1, -2],
            "dtype": np.float32,
            "compile_with": on_onnxruntime,
            "tolerance": 1e-3,
            "step": 0.01,
        },
    ),
    "not larger": ([IMAGE, None, None, i64(9, 8)], {"axes": [2, 3], "keep_aspect_ratio_policy": "not_larger"}),
    "not smaller": (
        [IMAGE, None, None, i64(3, 9)],
        {"mode": "cubic", "axes": [2, 3], "keep_aspect_ratio_policy": "not_smaller"},
    ),
    "crop": (
        [IMAGE, np.array([0.1, -0.3, 0.8, 1.2]), None, i64(3, 4)],
        {"mode": "linear", "axes": [2, 3], "coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 7.0},
    ),
    "antialias": ([IMAGE, None, None, i64(2, 3)], {"mode": "cubic", "axes": [2, 3], "antialias": 1}),
    "a vector": ([(6,), None, None, i64(4)], {"mode": "linear"}),
    "the same size": ([IMAGE, None, f32(1, 1, 1, 1)], {"mode": "cubic"}),
    "empty operands": ([IMAGE, np.array([]), f32(1, 1, 2, 2)], {}),
}


@pytest.mark.parametrize("case", RESIZES)
def test_resize(case: str) -> None:
    inputs, attributes = RESIZES[case]
    rest = dict(attributes)
    if "sizes" in rest:
        inputs = [*inputs, None, None, rest.pop("sizes")]
    check_op("Resize", inputs, **rest)


def test_gradient_of_a_gradient_of_resize() -> None:
    shape = i64(*IMAGE)
    check_op("ResizeGrad", [(2, 2, 8, 3), shape, None, None, i64(8, 3)], domain="graphc", mode="cubic", axes=[2, 3])
    crop = {"coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 3.0}
    roi = np.array([0.1, -0.3, 0.8, 1.2])
    check_op("ResizeGrad", [(2, 2, 8, 3), shape, roi, None, i64(8, 3)], domain="graphc", mode="linear", axes=[2, 3], **crop)


LIKE_TORCH: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nearest": ({"mode": "nearest"}, {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}),
    "linear": ({"mode": "bilinear"}, {"mode": "linear", "coordinate_transformation_mode": "pytorch_half_pixel"}),
    "corners": (
        {"mode": "bilinear", "align_corners": True},
        {"mode": "linear", "coordinate_transformation_mode": "align_corners"},
    ),
    "cubic": ({"mode": "bicubic"}, {"mode": "cubic", "coordinate_transformation_mode": "pytorch_half_pixel"}),
    "antialias": (
        {"mode": "bilinear", "antialias": True},
        {"mode": "linear", "antialias": 1, "exclude_outside": 1, "coordinate_transformation_mode": "pytorch_half_pixel"},
    ),
}


@pytest.mark.parametrize("size", [(8, 12), (3, 4)], ids=["larger", "smaller"])
@pytest.mark.parametrize("case", LIKE_TORCH)
def test_resize_of_symbolic_images_like_pytorch(case: str, size: tuple[int, int]) -> None:
    options, attributes = LIKE_TORCH[case]
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 6)).astype(np.float32)
    tensor = torch.tensor(x, requires_grad=True)
    y = F.interpolate(tensor, size, **options)
    dy = np.random.default_rng(1).standard_normal(y.shape).astype(np.float32)
    y.backward(torch.tensor(dy))
    assert tensor.grad is not None
    for specialise in (True, False):
        model, (image, weight) = new_model({"x": x, "dy": dy})
        image.shape, weight.shape = ir.Shape(["N", 3, "H", "W"]), ir.Shape([None] * 4)
        op = Builder(model.graph)
        resized = op.Resize(image, None, None, op.Concat(op.Shape(image, end=2), op.const(i64(*size)), axis=0), **attributes)
        found = differentiate(model.graph, [op.Mul(resized, weight)], [image])
        model.graph.outputs.append(found[image])
        if specialise:
            image.shape, weight.shape = ir.Shape(x.shape), ir.Shape(dy.shape)
            propagate(model.graph)
            assert found[image].shape == x.shape
        (result,) = on_onnxruntime(model)({"x": x, "dy": dy}).values()
        np.testing.assert_allclose(result, tensor.grad.numpy(), rtol=1e-5, atol=1e-5)


def test_a_kept_aspect_ratio_needs_static_sizes() -> None:
    model, (x,) = new_model({"x": np.zeros((1, 1, 4, 4))}, symbolic=0)
    x.shape = ir.Shape([1, 1, "H", "W"])
    op = Builder(model.graph)
    y = op.Resize(x, None, None, i64(3, 5), axes=[2, 3], keep_aspect_ratio_policy="not_larger")
    (found,) = differentiate(model.graph, [y], [x]).values()
    model.graph.outputs.append(found)
    with pytest.raises(UnsupportedOpError, match="keep_aspect_ratio_policy='not_larger' needs static sizes"):
        on_onnxruntime(model)


@pytest.mark.parametrize("opset", [7, 9, 10])
def test_scales_in_a_file_are_no_parameters(opset: int) -> None:
    """Upsample and the first Resize become Resize; their scales, an initializer in most files, do not train."""
    op_type = "Resize" if opset == 10 else "Upsample"
    scales = onnx.numpy_helper.from_array(f32(1, 1, 2, 3), "scales")
    operands, extra = (["x"], {"scales": [1.0, 1.0, 2.0, 3.0]}) if opset == 7 else (["x", "scales"], {})
    node = onnx.helper.make_node(op_type, operands, ["y"], mode="linear", **extra)
    x = np.random.default_rng(0).standard_normal((1, 2, 4, 5)).astype(np.float32)
    graph = onnx.helper.make_graph(
        [node],
        "old",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, x.shape)],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1, 2, 8, 15])],
        [] if opset == 7 else [scales],
    )
    proto = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=8)
    model = ir.from_proto(proto)
    run(model, "legalize,verify")
    assert select_trainable(model.graph) == []
    (found,) = gradients(model, {"x": x}, model.graph.outputs, model.graph.inputs, compile_with=on_onnxruntime)
    columns = [
        resized_identity(n, {"mode": "linear", "coordinate_transformation_mode": "asymmetric"}, scales=f32(s))
        for n, s in ((4, 2), (5, 3))
    ]
    expected = np.einsum("ab,cd->bd", *columns)
    np.testing.assert_allclose(found, np.broadcast_to(expected, x.shape), rtol=1e-5)


# GridSample ------------------------------------------------------------------------------------------------------------


def places(*shape: int) -> Variable:
    """Coordinates in and around the image, none of them on a kink by chance."""
    return uniform(-1.6, 1.6, *shape, seed=3)


@pytest.mark.parametrize("corners", [0, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize(
    ("x", "grid"),
    [
        ((2, 3, 4, 5), (2, 3, 4, 2)),
        ((2, 3, 6), (2, 9, 1)),
        pytest.param((1, 2, 3, 4, 5), (1, 2, 3, 2, 3), marks=pytest.mark.full),
    ],
    ids=["image", "line", "volume"],
)
def test_grid_sample(x: Any, grid: Any, mode: str, padding: str, corners: int) -> None:
    check_op("GridSample", [x, places(*grid)], mode=mode, padding_mode=padding, align_corners=corners, tolerance=2e-6)


SAMPLING = [
    *((mode, padding) for mode in ("nearest", "bilinear") for padding in ("zeros", "border", "reflection")),
    ("bicubic", "zeros"),  # beyond the border PyTorch moves the taps only, ONNX moves the place too
]


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize(("mode", "padding"), SAMPLING)
@pytest.mark.parametrize("symbolic", [False, pytest.param(True, marks=pytest.mark.full)])
def test_grid_sample_like_pytorch(mode: str, padding: str, corners: bool, symbolic: bool) -> None:
    rng = np.random.default_rng(2)
    arrays = [rng.standard_normal((2, 3, 4, 5)).astype(np.float32), rng.uniform(-1.5, 1.5, (2, 3, 4, 2)).astype(np.float32)]
    x, grid = (torch.tensor(a, requires_grad=True) for a in arrays)
    F.grid_sample(x, grid, mode, padding, corners).sum().backward()
    model, values = new_model(dict(zip(("x", "grid"), arrays, strict=True)), symbolic=4 if symbolic else 0)
    values[1].shape = ir.Shape([*list(values[1].shape or ())[:3], 2])
    onnx_mode = {"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode)
    y = Builder(model.graph).GridSample(*values, mode=onnx_mode, padding_mode=padding, align_corners=int(corners))
    wanted = values[:1] if mode == "nearest" else values
    found = gradients(model, dict(zip(("x", "grid"), arrays, strict=True)), [y], wanted, compile_with=on_onnxruntime)
    for tensor, result in zip((x, grid), found, strict=False):
        assert tensor.grad is not None
        np.testing.assert_allclose(result, tensor.grad.numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.full
def test_grid_sample_twice() -> None:
    """The gradient with respect to the grid, differentiated with respect to image and grid."""
    feeds = {"x": normal(1, 2, 3, 4).value, "grid": places(1, 2, 2, 2).value}
    model, (x, grid) = new_model(feeds)
    y = Builder(model.graph).GridSample(x, grid, mode="cubic", padding_mode="zeros")
    first = differentiate(model.graph, [Builder(model.graph).Mul(y, y)], [grid])[grid]
    model.graph.outputs.append(first)
    check_gradient(model, feeds)


@pytest.mark.parametrize("corners", [0, 1])
@pytest.mark.parametrize(
    ("theta", "size"), [((2, 2, 3), (2, 3, 4, 5)), ((2, 3, 4), (2, 1, 3, 2, 4)), ((1, 2, 3), (1, 1, 1, 3))], ids=str
)
def test_affine_grid(theta: Any, size: Any, corners: int) -> None:
    check_op("AffineGrid", [theta, i64(*size)], align_corners=corners)
    check_op("AffineGrid", [theta, i64(*size)], align_corners=corners, symbolic=1)
