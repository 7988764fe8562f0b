"""Convolutions by library, against onnxruntime: what cuDNN is asked for, evaluated on the host; on a GPU, the library."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from graphc.backends.cupy.segment import NodeCall
from graphc.ir.builder import Builder
from graphc.ir.decomposition import decompose_graph
from graphc.passes.simplify import simplify_graph
from tests.backends.host_kernels import HostDevice, run_segment
from tests.gradient_check import new_model

CASES: dict[str, dict[str, Any]] = {
    "plain": {"x": (2, 6, 9, 8), "w": (4, 6, 3, 3), "pads": [1, 1, 1, 1]},
    "one by one": {"x": (2, 6, 5, 4), "w": (3, 6, 1, 1)},
    "strided": {"x": (2, 3, 11, 9), "w": (4, 3, 3, 3), "pads": [1, 1, 1, 1], "strides": [2, 2]},
    "left over": {"x": (1, 3, 10, 9), "w": (4, 3, 3, 2), "strides": [3, 2]},
    "asymmetric": {"x": (2, 3, 8, 7), "w": (5, 3, 3, 3), "pads": [0, 1, 2, 0], "strides": [1, 2]},
    "dilated": {"x": (1, 2, 11, 12), "w": (3, 2, 3, 2), "dilations": [2, 3], "pads": [2, 1, 2, 1]},
    "grouped": {"x": (2, 6, 6, 5), "w": (9, 2, 3, 3), "group": 3, "pads": [1, 1, 1, 1]},
    "depthwise": {"x": (2, 5, 6, 6), "w": (10, 1, 3, 3), "group": 5, "strides": [2, 1]},
    "same upper": {"x": (2, 3, 8, 7), "w": (4, 3, 3, 4), "auto_pad": "SAME_UPPER", "strides": [2, 2]},
    "same lower": {"x": (2, 3, 8, 7), "w": (4, 3, 3, 4), "auto_pad": "SAME_LOWER", "strides": [1, 2]},
    "one axis": {"x": (2, 4, 13), "w": (6, 4, 4), "pads": [2, 1], "strides": [2], "dilations": [2]},
    "three axes": {"x": (2, 3, 5, 6, 4), "w": (4, 3, 3, 2, 3), "pads": [1, 0, 1, 1, 1, 0], "strides": [1, 2, 1]},
}


def model_of(name: str, last: bool, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Model:
    """y, dx and dw of one convolution as graph outputs."""
    case = dict(CASES[name])
    x_shape, w_shape = case.pop("x"), case.pop("w")
    model, _ = new_model({})
    op = Builder(model.graph)

    def given(name: str, shape: tuple[int, ...]) -> ir.Value:
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(list(shape)))
        model.graph.inputs.append(value)
        return value

    turn = (lambda s: (s[0], *s[2:], s[1])) if last else (lambda s: s)
    x, w, b = given("x", turn(x_shape)), given("w", turn(w_shape)), given("b", (w_shape[0],))
    domain, prefix = (op.graphc, "ChannelsLast") if last else (op.graphc, "")
    if last:
        y = domain.ChannelsLastConv(x, w, b, **case, activation="relu")
    else:
        y = op.Conv(x, w, b, **case)
    dy = given("dy", tuple(int(d) for d in y.shape.dims))
    dx = getattr(domain, f"{prefix}ConvGradInput")(dy, w, list(turn(x_shape)), **case)
    dw = getattr(domain, f"{prefix}ConvGradWeight")(x, dy, list(turn(w_shape)), **case)
    for value, name in ((y, "y"), (dx, "dx"), (dw, "dw")):
        value.name = name
        model.graph.outputs.append(value)
    return model


def check_convolution(name: str, last: bool, device: Any, dtype: ir.DataType, tolerance: float) -> None:
    model = model_of(name, last, dtype)
    rng = np.random.default_rng(0)
    feeds = {v.name: rng.standard_normal(v.shape.numpy()).astype(dtype.numpy()) for v in model.graph.inputs}
    results, segment = run_segment(ir.to_proto(model), feeds, device)
    libraries = [call for call in segment.calls if isinstance(call, NodeCall) and call.library is not None]
    assert len(libraries) == 3
    assert not segment.fallbacks
    single = model_of(name, last)
    decompose_graph(single.graph, lambda node: False)
    simplify_graph(single.graph)
    session = ort.InferenceSession(ir.to_proto(single).SerializeToString(), providers=["CPUExecutionProvider"])
    expected = session.run(["y", "dx", "dw"], {n: a.astype(np.float32) for n, a in feeds.items()})
    for key, value in zip(("y", "dx", "dw"), expected, strict=True):
        scale = float(np.abs(value).max())
        np.testing.assert_allclose(results[key].astype(np.float32) / scale, value / scale, rtol=0, atol=tolerance, err_msg=key)


@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("name", CASES)
def test_cudnn_is_told_the_right_convolution(name: str, last: bool) -> None:
    check_convolution(name, last, HostDevice(), ir.DataType.FLOAT, 1e-5)


def test_half_precision_is_summed_in_single() -> None:
    check_convolution("plain", True, HostDevice(), ir.DataType.BFLOAT16, 8e-3)


@pytest.fixture(scope="module")
def gpu() -> Any:
    from graphc.backends.cupy.cuda import CudaDevice

    return CudaDevice(0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16], ids=lambda t: np.dtype(t).name)
@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("name", CASES)
def test_cudnn_computes_what_onnxruntime_does(name: str, last: bool, dtype: Any, gpu: Any) -> None:
    tolerance = {np.float32: 2e-3, np.float64: 1e-5, np.float16: 2e-3}.get(dtype, 1.2e-2)  # float32 is TF32 here
    check_convolution(name, last, gpu, ir.DataType.from_numpy(np.dtype(dtype)), tolerance)
