"""STFT as exporters write it: signals of two axes, of any length, with a window or a frame length."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper

import graphc
from graphc.training.inference import run_model
from tests.passes.legalize.legalize_cases import build, normal


@pytest.mark.parametrize("shape", [["n", "t"], [2, 20], ["n", "t", 1]], ids=["dynamic", "fixed", "three axes"])
@pytest.mark.parametrize("form", ["window", "length", "both"])
@pytest.mark.parametrize("lengths", [np.int64, pytest.param(np.int32, marks=pytest.mark.full)])
def test_the_gradient_of_a_spectrogram_is_that_of_pytorch(shape: list[int | str], form: str, lengths: Any) -> None:
    window = np.hanning(8).astype(np.float32) if form != "length" else np.ones(8, np.float32)
    weights: dict[str, np.ndarray] = {"step": np.array(3, lengths)}
    weights |= {"w": window} if form != "length" else {}
    weights |= {"length": np.array(8, lengths)} if form != "window" else {}
    operands = ["x", "step", "w" if form != "length" else "", *(["length"] if form != "window" else [])]
    nodes = [helper.make_node("STFT", operands, ["s"]), helper.make_node("Mul", ["s", "s"], ["y"])]
    model = build(nodes, {"x": shape}, ["y"], weights, opset=17, types={"x": TensorProto.FLOAT})
    x = normal(2, 20)
    wrt = ["x", *(["w"] if form != "length" else [])]
    got = run_model(graphc.grad(model, of="y", wrt=wrt), {"x": x.reshape(2, 20, *shape[2:])})
    signal, taper = (torch.tensor(a, requires_grad=True) for a in (x, window))
    spectrum = torch.stft(signal, 8, 3, window=taper, center=False, return_complex=True)
    y = torch.view_as_real(spectrum).transpose(1, 2) ** 2
    y.sum().backward()
    np.testing.assert_allclose(got["y"], y.detach().numpy(), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(got["x::grad"].reshape(2, 20), signal.grad.numpy(), rtol=1e-4, atol=1e-4)
    if form != "length":
        np.testing.assert_allclose(got["w::grad"], taper.grad.numpy(), rtol=1e-4, atol=1e-4)
