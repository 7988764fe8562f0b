"""Depthwise convolutions by graphc's own kernels, against onnxruntime: on the host, on the emulated GPU, and on a GPU."""

from __future__ import annotations

import functools
import platform
import shutil
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from graphc.backends.cupy.kernels import depthwise
from graphc.backends.cupy.segment.program import KernelCall
from graphc.ir.builder import Builder
from graphc.ir.decomposition import decompose_graph
from graphc.passes.optimize.simplify import simplify_graph
from tests.backends.host_kernels import EmulatedDevice, HostDevice, run_segment
from tests.backends.library_cases import empty_model, new_input

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        shutil.which("g++") is None or platform.machine() != "x86_64", reason="the emulation needs a C++ compiler on x86-64"
    ),
]

CASES: dict[str, dict[str, Any]] = {
    "same": {"x": (2, 8, 9, 13), "w": (3, 3), "pads": [1, 1, 1, 1]},
    "one result a line": {"x": (2, 4, 5, 3), "w": (3, 3)},
    "seven taps": {"x": (1, 6, 8, 16), "w": (7, 7), "pads": [3, 3, 3, 3]},
    "strided": {"x": (2, 12, 9, 11), "w": (3, 3), "pads": [1, 1, 1, 1], "strides": [2, 2]},
    "strided along lines": {"x": (1, 4, 6, 19), "w": (3, 5), "pads": [1, 2, 1, 2], "strides": [1, 3]},
    "dilated": {"x": (1, 5, 11, 14), "w": (3, 2), "dilations": [2, 3], "pads": [2, 1, 2, 1]},
    "dilated and strided": {"x": (1, 4, 11, 14), "w": (3, 3), "dilations": [1, 2], "strides": [2, 2], "pads": [1, 2, 1, 2]},
    "uneven padding": {"x": (2, 4, 8, 9), "w": (4, 4), "pads": [0, 1, 3, 2]},
    "one axis of many taps": {"x": (2, 4, 40), "w": (17,), "pads": [8, 8]},
    "three axes": {"x": (1, 4, 5, 6, 9), "w": (3, 2, 3), "pads": [1, 0, 1, 1, 1, 1], "strides": [1, 2, 1]},
}


@pytest.fixture(params=["host", "emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Any:
    if request.param == "gpu":
        from graphc.backends.cupy.device.cuda_device import CudaDevice

        return CudaDevice()
    return HostDevice() if request.param == "host" else EmulatedDevice(order=2)


def depthwise_model(name: str, dtype: ir.DataType) -> ir.Model:
    """y = Relu of the convolution with a bias, and dx, of one case as graph outputs, with channels last."""
    case = dict(CASES[name])
    batch, channels, *space = case.pop("x")
    kernel = case.pop("w")
    model = empty_model()
    op = Builder(model.graph)
    given = functools.partial(new_input, model, dtype=dtype)
    size = (batch, *space, channels)
    x, w, b = given("x", size), given("w", (channels, *kernel, 1)), given("b", (channels,))
    y = op.graphc.ChannelsLastConv(x, w, b, **case, group=channels, activation="relu")
    dy = given("dy", tuple(int(d) for d in y.shape.dims))
    dx = op.graphc.ChannelsLastConvGradInput(dy, w, list(size), **case, group=channels)
    for value, label in ((y, "y"), (dx, "dx")):
        value.name = label
        model.graph.outputs.append(value)
    return model


@pytest.mark.parametrize("busy", [0, depthwise.BUSY], ids=["several results a thread", "one result a thread"])
@pytest.mark.parametrize("name", CASES)
def test_a_depthwise_convolution_and_its_gradient(name: str, busy: int, device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depthwise, "BUSY", busy)
    check(name, ir.DataType.FLOAT, device, 1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(ir.DataType.BFLOAT16, 8e-3), (ir.DataType.FLOAT16, 1e-3)])
@pytest.mark.parametrize("name", ["same", "strided"])
def test_sums_are_in_single_precision(
    name: str, dtype: ir.DataType, tolerance: float, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(depthwise, "BUSY", 0)
    check(name, dtype, device, tolerance)


def check(name: str, dtype: ir.DataType, device: Any, tolerance: float) -> None:
    model = depthwise_model(name, dtype)
    rng = np.random.default_rng(0)
    feeds = {v.name: rng.standard_normal(v.shape.numpy()).astype(dtype.numpy()) for v in model.graph.inputs}
    results, segment = run_segment(ir.to_proto(model), feeds, device)
    assert not segment.fallbacks
    assert all(isinstance(call, KernelCall) for call in segment.calls)
    single = depthwise_model(name, ir.DataType.FLOAT)
    decompose_graph(single.graph, lambda node: False)
    simplify_graph(single.graph)
    session = ort.InferenceSession(ir.to_proto(single).SerializeToString(), providers=["CPUExecutionProvider"])
    expected = session.run(["y", "dx"], {n: a.astype(np.float32) for n, a in feeds.items()})
    for key, value in zip(("y", "dx"), expected, strict=True):
        scale = float(np.abs(value).max())
        np.testing.assert_allclose(results[key].astype(np.float32) / scale, value / scale, rtol=0, atol=tolerance, err_msg=key)
