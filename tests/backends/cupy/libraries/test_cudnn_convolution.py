"""Convolutions by library, against onnxruntime: what cuDNN is asked for, evaluated on the host; on a GPU, the library."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from graphc.backends.cupy.segment.program import NodeCall
from graphc.ir.decomposition import decompose_graph
from graphc.passes.optimize.simplify import simplify_graph
from tests.backends.host_kernels import HostDevice, run_segment
from tests.backends.library_cases import CONVOLUTIONS, convolutions

pytestmark = pytest.mark.full


def check_convolution(name: str, last: bool, device: Any, dtype: ir.DataType, tolerance: float) -> None:
    model = convolutions(name, last, dtype)
    rng = np.random.default_rng(0)
    feeds = {v.name: rng.standard_normal(v.shape.numpy()).astype(dtype.numpy()) for v in model.graph.inputs}
    results, segment = run_segment(ir.to_proto(model), feeds, device)
    libraries = [call for call in segment.calls if isinstance(call, NodeCall) and call.library is not None]
    assert len(libraries) == 3
    assert not segment.fallbacks
    single = convolutions(name, last)
    decompose_graph(single.graph, lambda node: False)
    simplify_graph(single.graph)
    session = ort.InferenceSession(ir.to_proto(single).SerializeToString(), providers=["CPUExecutionProvider"])
    expected = session.run(["y", "dx", "dw"], {n: a.astype(np.float32) for n, a in feeds.items()})
    for key, value in zip(("y", "dx", "dw"), expected, strict=True):
        scale = float(np.abs(value).max())
        np.testing.assert_allclose(results[key].astype(np.float32) / scale, value / scale, rtol=0, atol=tolerance, err_msg=key)


@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_cudnn_is_told_the_right_convolution(name: str, last: bool) -> None:
    check_convolution(name, last, HostDevice(), ir.DataType.FLOAT, 1e-5)


def test_half_precision_is_summed_in_single() -> None:
    check_convolution("plain", True, HostDevice(), ir.DataType.BFLOAT16, 8e-3)


@pytest.fixture(scope="module")
def gpu() -> Any:
    from graphc.backends.cupy.device.cuda_device import CudaDevice

    return CudaDevice(0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16], ids=lambda t: np.dtype(t).name)
@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_cudnn_computes_what_onnxruntime_does(name: str, last: bool, dtype: Any, gpu: Any) -> None:
    tolerance = {np.float32: 2e-3, np.float64: 1e-5, np.float16: 2e-3}.get(dtype, 1.2e-2)  # float32 is TF32 here
    check_convolution(name, last, gpu, ir.DataType.from_numpy(np.dtype(dtype)), tolerance)
