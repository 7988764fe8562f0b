"""Straight-through gradients against PyTorch's fake quantisation, and gradients that ONNX's own cases cannot test."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from graphc.ir.builder import Builder
from graphc.passes.gradients.reverse_mode import differentiate
from tests.gradient_check import Run, check_gradient, distinct, gradients, new_model, on_onnxruntime, standard_model

Array = np.ndarray[Any, Any]
SCALE, ZERO = 0.1, 3


def signal(*shape: int) -> Array:
    """Values of which some saturate in 8 bits with a scale of 0.1."""
    return (np.random.default_rng(3).standard_normal(shape) * 9).astype(np.float32)


def weights(*shape: int) -> Array:
    return np.random.default_rng(5).standard_normal(shape).astype(np.float32)


def quantised(
    x: Array, scale: Array, zero: Array, *, axis: int = 1, between: str = ""
) -> tuple[ir.Model, list[ir.Value], ir.Value]:
    """Σ c · dequantise(quantise(x)), with a move of the integers in between."""
    model, values = new_model({"x": x, "scale": scale})
    op = Builder(model.graph)
    q = op.QuantizeLinear(*values, op.const(zero), axis=axis)
    if between == "Transpose":
        q = op.Transpose(op.Transpose(q, perm=[1, 0]), perm=[1, 0])
    elif between == "Reshape":
        q = op.Reshape(op.Flatten(op.Unsqueeze(q, [0])), list(x.shape))
    y = op.DequantizeLinear(q, values[1], op.const(zero), axis=axis)
    return model, values, op.Mul(y, op.const(weights(*x.shape)))


@pytest.mark.parametrize("between", ["", "Transpose", "Reshape"])
def test_per_tensor_like_pytorch(between: str) -> None:
    x, scale, zero = signal(4, 6), np.float32(SCALE), np.uint8(ZERO)
    model, values, y = quantised(x, np.asarray(scale), np.asarray(zero), between=between)
    found = gradients(model, {"x": x, "scale": np.asarray(scale)}, [y], values, compile_with=on_onnxruntime)
    a, s = torch.tensor(x, requires_grad=True), torch.tensor([scale], requires_grad=True)
    fake = torch._fake_quantize_learnable_per_tensor_affine(a, s, torch.tensor([float(zero)]), 0, 255, 1.0)
    (fake * torch.tensor(weights(4, 6))).sum().backward()
    assert (a.grad == 0).any(), "some values saturate"
    np.testing.assert_allclose(found[0], a.grad.numpy(), rtol=1e-5)
    np.testing.assert_allclose(found[1], s.grad.numpy()[0], rtol=1e-4)


@pytest.mark.parametrize("axis", [0, 1])
def test_per_axis_like_pytorch(axis: int) -> None:
    x = signal(4, 6)
    count = x.shape[axis]
    scale = np.linspace(0.05, 0.2, count).astype(np.float32)
    zero = (np.arange(count) - 2).astype(np.int8)
    model, values, y = quantised(x, scale, zero, axis=axis)
    found = gradients(model, {"x": x, "scale": scale}, [y], values, compile_with=on_onnxruntime)
    a, s = torch.tensor(x, requires_grad=True), torch.tensor(scale, requires_grad=True)
    fake = torch._fake_quantize_learnable_per_channel_affine(a, s, torch.tensor(zero.astype(np.float32)), axis, -128, 127, 1.0)
    (fake * torch.tensor(weights(4, 6))).sum().backward()
    np.testing.assert_allclose(found[0], a.grad.numpy(), rtol=1e-5)
    np.testing.assert_allclose(found[1], s.grad.numpy(), rtol=1e-4, atol=1e-5)


def test_blocks_are_slices_with_a_scale_each() -> None:
    """Two blocks of three columns give what quantising the two halves gives."""
    x, scale, zero = signal(4, 6), np.linspace(0.05, 0.3, 8).reshape(4, 2).astype(np.float32), np.zeros((4, 2), np.int8)
    model, values = new_model({"x": x, "scale": scale})
    op = Builder(model.graph)
    q = op.QuantizeLinear(*values, op.const(zero), axis=1, block_size=3)
    y = op.Mul(op.DequantizeLinear(q, values[1], op.const(zero), axis=1, block_size=3), op.const(weights(4, 6)))
    found = gradients(model, {"x": x, "scale": scale}, [y], values, compile_with=on_onnxruntime)
    for k in (0, 1):
        part = slice(3 * k, 3 * k + 3)
        a, s = torch.tensor(x[:, part], requires_grad=True), torch.tensor(scale[:, k].copy(), requires_grad=True)
        fake = torch._fake_quantize_learnable_per_channel_affine(a, s, torch.zeros(4), 0, -128, 127, 1.0)
        (fake * torch.tensor(weights(4, 6)[:, part])).sum().backward()
        np.testing.assert_allclose(found[0][:, part], a.grad.numpy(), rtol=1e-5)
        np.testing.assert_allclose(found[1][:, k], s.grad.numpy(), rtol=1e-4, atol=1e-5)


def test_dynamic_quantisation_passes_the_gradient_on() -> None:
    """Away from the extremes, which set the scale, x comes back as it was but for rounding: ∂x = c."""
    x = signal(5, 7)
    model, (value,) = new_model({"x": x})
    op = Builder(model.graph)
    q, scale, zero = op.DynamicQuantizeLinear(value, _outputs=3)
    y = op.Mul(op.DequantizeLinear(q, scale, zero), op.const(weights(5, 7)))
    (found,) = gradients(model, {"x": x}, [y], [value], compile_with=on_onnxruntime)
    inner = (x > x.min()) & (x < x.max())
    np.testing.assert_allclose(found[inner], weights(5, 7)[inner], rtol=1e-5)


def test_integers_that_were_never_floats_take_no_gradient() -> None:
    model, (x, scale) = new_model({"x": np.arange(6, dtype=np.int8).reshape(2, 3), "scale": np.asarray(np.float32(0.5))})
    y = Builder(model.graph).DequantizeLinear(x, scale)
    found = differentiate(model.graph, [y], [scale])
    assert set(found) == {scale}


def at_opset_21(model: ir.Model) -> Run:
    """onnxruntime has MaxRoiPool up to opset 21, in float32."""
    proto = standard_model(model)
    proto.opset_import[0].version = 21
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [v.name for v in session.get_outputs()]
    return lambda feeds: dict(zip(names, session.run(names, dict(feeds)), strict=True))


def test_max_roi_pool() -> None:
    """No two operands are closer than the step."""
    rois = np.array([[0, 0, 0, 7, 5], [1, 2, 1, 5, 6], [0, 4, 4, 30, 30], [1, 3, 3, 3, 3]], dtype=np.float32)
    x = distinct(2, 2, 6, 8).value.astype(np.float32)
    model, (value,) = new_model({"x": x})
    op = Builder(model.graph)
    model.graph.outputs.append(op.MaxRoiPool(value, op.const(rois), pooled_shape=[2, 3], spatial_scale=0.9))
    check_gradient(model, {"x": x}, compile_with=at_opset_21, tolerance=2e-3, step=1e-2)
