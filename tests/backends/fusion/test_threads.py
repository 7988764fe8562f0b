"""Generated kernels with the threads, vectors and barriers that they have on a GPU, against onnxruntime."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest

from graphc.backends.cupy.segment.compile import compile_segment
from graphc.backends.cupy.segment.program import KernelCall
from tests.backends.fusion.fusion_cases import LAYER_NORM_GRADIENT
from tests.backends.host_kernels import EmulatedDevice, run_segment

pytestmark = [pytest.mark.full, pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")]
HEAD = '<ir_version: 10, opset_import: ["": 26]> g '


CASES = {
    "elements": "(bfloat16[40,136] x, float[136] b) => (bfloat16[40,136] y)"
    "{ f = Cast<to=1>(x) a = Add(f, b) y = Cast<to=16>(a) }",
    "elements, no vectors": "(float[7,9] x, float[7,1] b) => (float[7,9] y) { y = Mul(x, b) }",
    "transpose": "(float[33,64] x) => (float[64,33] y) { e = Exp(x) y = Transpose<perm=[1,0]>(e) }",
    "short rows": "(float[100,10] x) => (float[100,10] y) { y = Softmax<axis=-1>(x) }",
    "rows of a part of a warp": "(float[70,48] x) => (float[70,48] y) { y = Softmax<axis=-1>(x) }",
    "rows of a warp": "(bfloat16[600,768] x) => (bfloat16[600,768] y)"
    "{ f = Cast<to=1>(x) s = Softmax<axis=-1>(f) y = Cast<to=16>(s) }",
    "rows of a block": "(float[5,5000] x) => (float[5,5000] y) { y = Softmax<axis=-1>(x) }",
    "rows that no vector divides": "(float[5,1001] x) => (float[5,1001] y) { y = LogSoftmax<axis=-1>(x) }",
    "long rows": "(float[140,16600] x) => (float[140,16600] y) { y = Softmax<axis=-1>(x) }",
    "few long rows": "(float[2,30000] x) => (float[2] y){ a = Constant<value_ints=[1]>() y = ReduceSum<keepdims=0>(x, a) }",
    "columns": "(bfloat16[1100,72] x) => (float[72] y, float[1100,72] z)"
    "{ a = Constant<value_ints=[0]>() z = Cast<to=1>(x) y = ReduceSum<keepdims=0>(z, a) }",
    "columns, no vectors": "(float[1100,7] x) => (float[7] y)"
    "{ a = Constant<value_ints=[0]>() y = ReduceMax<keepdims=0>(x, a) }",
    "columns of a picture": "(float[9,16,5,5] x) => (float[16] y)"
    "{ a = Constant<value_ints=[0,2,3]>() y = ReduceMean<keepdims=0>(x, a) }",
    "embedding": "(int64[30] i, float[50,64] t) => (float[30,64] y) { g = Gather(t, i) y = Softmax<axis=-1>(g) }",
    "packed heads": "(bfloat16[64,2,3,4,8] x) => (float[192] y)"
    "{ s = Constant<value_ints=[128,96]>() r = Reshape(x, s) f = Cast<to=1>(r) a = Constant<value_ints=[0]>()"
    " z = ReduceSum<keepdims=0>(f, a) t = Concat<axis=0>(z, z) y = Identity(t) }",
    "layer norm": "(bfloat16[500,256] g, bfloat16[500,256] x, float[256] s, float[500,256] o)"
    " => (float[500,256] dx, bfloat16[500,256] dl, float[256] ds, float[256] db)" + LAYER_NORM_GRADIENT,
}


def _feeds(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    feeds = {}
    for value in model.graph.input:
        shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
        kind = value.type.tensor_type.elem_type
        array = rng.standard_normal(shape) * 2
        if kind == onnx.TensorProto.INT64:
            array = rng.integers(0, 50, shape)
        feeds[value.name] = array.astype(onnx.helper.tensor_dtype_to_np_dtype(kind))
    return feeds


def _reference(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    binding, results = session.io_binding(), []
    for name, array in feeds.items():
        raw = array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array
        kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
        binding.bind_input(name, "cpu", 0, kind, array.shape, raw.ctypes.data)
    for output in model.graph.output:
        kind = output.type.tensor_type.elem_type
        shape = [d.dim_value for d in output.type.tensor_type.shape.dim]
        results.append(np.empty(shape, onnx.helper.tensor_dtype_to_np_dtype(kind)))
        binding.bind_output(output.name, "cpu", 0, kind, shape, results[-1].ctypes.data)
    session.run_with_iobinding(binding)
    return results


@pytest.mark.parametrize("name", CASES)
def test_kernels_compute_the_same_with_all_their_threads(name: str) -> None:
    check_kernels(name, EmulatedDevice(2, watched=name != "long rows"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_kernels_compute_the_same_on_a_gpu(name: str) -> None:
    from graphc.backends.cupy.device.cuda_device import CudaDevice

    check_kernels(name, CudaDevice())


def check_kernels(name: str, device: Any) -> None:
    """The kernels of a case give what onnxruntime gives."""
    model = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(HEAD + CASES[name]))
    feeds = _feeds(model)
    expected = _reference(model, feeds)
    results, _ = run_segment(model, feeds, device)
    for output, value in zip(model.graph.output, expected, strict=True):
        found = np.asarray(results[output.name], dtype=np.float32)
        step = 1e-2 if value.dtype == ml_dtypes.bfloat16 else 2e-5
        np.testing.assert_allclose(found, np.asarray(value, np.float32), rtol=step, atol=step * 5, err_msg=output.name)


def calls(text: str) -> list[KernelCall]:
    """The kernels of a model whose nodes are all generated."""
    model = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(HEAD + text))
    return [call for call in compile_segment(model).calls if isinstance(call, KernelCall)]


FORMS: dict[str, Callable[[KernelCall], bool]] = {
    "elements": lambda call: call.source.form.vector == 8,
    "short rows": lambda call: call.shape.lanes <= 8,
    "rows of a warp": lambda call: call.shape.lanes == 32 and bool(call.source.form.held),
    "long rows": lambda call: "add_exponentials<" in call.source.body,
    "columns": lambda call: call.source.form.strided and call.source.form.vector == 8 and call.shape.splits > 1,
    "packed heads": lambda call: "load_pack" in call.source.body and call.source.form.strided,
}


@pytest.mark.parametrize("name", FORMS)
def test_threads_are_dealt_as_the_data_lies(name: str) -> None:
    assert FORMS[name](calls(CASES[name])[0])
