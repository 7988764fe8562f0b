"""Kernels, products, convolutions and attention on the GPU: queued, captured, replayed, and compared with numpy."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from graphc.backends.cupy.device.cuda_device import CudaDevice
from graphc.backends.cupy.device.protocol import CudaOptions
from graphc.backends.cupy.libraries import cudnn_attention, cudnn_convolution
from graphc.backends.cupy.libraries.cublaslt import Products
from graphc.backends.cupy.libraries.cudnn import Tensor
from graphc.backends.cupy.libraries.gemm import DOMAIN, PRODUCT, call_of
from graphc.backends.cupy.segment.bind import BoundSegment, SegmentScratch
from graphc.backends.cupy.segment.compile import compile_segment
from graphc.backends.cupy.smoke import reference
from graphc.device import Run
from graphc.ir.facts import shape_of

Note = Callable[[str], None]
Results = dict[str, Any]

HALF = {ir.DataType.FLOAT16: 2**-8, ir.DataType.BFLOAT16: 2**-6}
"""Most error relative to the largest element."""

SEGMENT = """<ir_version: 10, opset_import: ["": 22]> net (float[96, 80] x, float[80] b) => (float[96, 80] y, float[80] total) {
  s = Add(x, b)  y = Softmax<axis=1>(s)  axis = Constant<value_ints=[0]>()  total = ReduceSum<keepdims=0>(s, axis)
}"""


def kernel(note: Note) -> Results:
    """Compile generated kernels with NVRTC and run them."""
    note("device")
    device = CudaDevice()
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal((96, 80), dtype=np.float32), "b": rng.standard_normal(80, dtype=np.float32)}
    segment = compile_segment(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(SEGMENT)))
    inputs = {name: device.put(value) for name, value in feeds.items()}
    outputs = {v.name or "": _zeros(device, shape_of(v), ir.DataType.FLOAT) for v in segment.graph.outputs}
    note("compile")
    bound = BoundSegment(segment, device, SegmentScratch(device), inputs, outputs)
    _thrice(note, "generated kernels", device, bound)
    s = feeds["x"].astype(np.float64) + feeds["b"]
    probabilities = np.exp(s - s.max(1, keepdims=True))
    _compare("Softmax", device.fetch(outputs["y"]), probabilities / probabilities.sum(1, keepdims=True), 1e-5)
    _compare("ReduceSum", device.fetch(outputs["total"]), s.sum(0), 1e-5)
    return {"detail": f"{len(segment.calls)} generated kernels on {device.name}, captured and replayed"}


def products(note: Note) -> Results:
    """Run every epilogue of cuBLASLt in every precision; one that the library lacks is listed, and never used in training."""
    lacking, tried = [], 0
    for name, dtype, result, tf32, tolerance in (
        ("fp32", ir.DataType.FLOAT, ir.DataType.FLOAT, False, 1e-5),
        ("tf32", ir.DataType.FLOAT, ir.DataType.FLOAT, True, 4e-3),
        ("bf16", ir.DataType.BFLOAT16, ir.DataType.BFLOAT16, False, HALF[ir.DataType.BFLOAT16]),
        ("bf16 to fp32", ir.DataType.BFLOAT16, ir.DataType.FLOAT, False, 1e-3),
        ("fp16", ir.DataType.FLOAT16, ir.DataType.FLOAT16, False, HALF[ir.DataType.FLOAT16]),
    ):
        note(f"cuBLASLt, {name}")
        device = CudaDevice(options=CudaOptions(tf32=tf32))
        library = device.library(Products)
        for product in reference.products(dtype, result):
            call = f"{call_of(product).epilogue} in {name}"
            note(call)
            if math.isinf(library.seconds(product)):
                assert not product.plain, f"cuBLASLt has no algorithm for a plain product ({call})"
                lacking.append(call)
                continue
            inputs, expected = reference.operands(product)
            given = [None if value is None else device.put(value) for value in inputs]
            results = [_zeros(device, value.shape, ir.DataType.from_numpy(value.dtype)) for value, _ in expected]
            node = ir.Node(DOMAIN, "Product", [], num_outputs=len(expected), name=call)
            node.meta[PRODUCT] = product
            _thrice(note, call, device, library.bind(node, given, results))
            for got, (value, exact) in zip(results, expected, strict=True):
                _compare(call, device.fetch(got), value, 0 if exact else tolerance)
            tried += 1
    none = f"; without an algorithm, so separate kernels run these: {', '.join(lacking)}" if lacking else ""
    return {"lacking": lacking, "detail": f"{tried} products with their epilogues{none}"}


def convolution(note: Note) -> Results:
    """Run a convolution and both gradients, channels last, in bfloat16 and float32."""
    device = CudaDevice()
    order, dims = cudnn_convolution.last_memory_order(4), {"x": (4, 16, 12, 12), "w": (32, 16, 3, 3), "y": (4, 32, 12, 12)}
    rng = np.random.default_rng(0)
    for dtype, tolerance in ((ir.DataType.BFLOAT16, HALF[ir.DataType.BFLOAT16]), (ir.DataType.FLOAT, 1e-5)):
        forms = {name: Tensor.dense(size, dtype, order) for name, size in dims.items()}
        values = {name: rng.standard_normal(size).astype(dtype.numpy()) for name, size in dims.items()}
        x, w, dy = (values[name].astype(np.float64) for name in ("x", "w", "y"))
        kinds = (cudnn_convolution.FORWARD, cudnn_convolution.INPUT, cudnn_convolution.WEIGHT)
        wanted = dict(zip(kinds, reference.convolution(x, w, dy), strict=True))
        for kind, expected in wanted.items():
            one = (1, 1)  # pixel of border, step and dilation on every axis
            call = cudnn_convolution.Convolution(kind, forms["x"], forms["w"], forms["y"], one, one, one, one)
            source = {"x": "x", "w": "w", "dy": "y"}
            _cudnn(note, f"{kind} in {dtype.name}", device, cudnn_convolution, call,
                   {name: values[source[name]].transpose(order) for name in call.operands},
                   {cudnn_convolution.RESULT[kind]: expected.transpose(order)}, tolerance)  # fmt: skip
    return _told(device, cudnn_convolution, "a convolution and its gradients in bf16 and fp32")


def attention(note: Note) -> Results:
    """Run causal attention and its gradient in bfloat16."""
    device = CudaDevice()
    size, dtype = (2, 2, 64, 64), ir.DataType.BFLOAT16
    rng = np.random.default_rng(0)
    form = Tensor.dense(size, dtype)
    q, k, v, dy = (rng.standard_normal(size).astype(dtype.numpy()) for _ in range(4))
    exact_q, exact_k, exact_v, exact_dy = (array.astype(np.float64) for array in (q, k, v, dy))
    y, saved, gradients = reference.attention(exact_q, exact_k, exact_v, exact_dy, size[-1] ** -0.5)
    call = cudnn_attention.Attention(form, form, form, form, None, size[-1] ** -0.5, True)
    given, expected = {"q": q, "k": k, "v": v}, {"y": y, "saved": saved}
    results = _cudnn(note, "attention", device, cudnn_attention, call, given, expected, 2**-6)
    back = cudnn_attention.Attention(form, form, form, form, None, size[-1] ** -0.5, True, backward=True)
    expected = dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    _cudnn(note, "the gradient of attention", device, cudnn_attention, back, {"dy": dy, **given, **results}, expected, 2**-5)
    return _told(device, cudnn_attention, "causal attention and its gradient in bf16")


def stored_plans(note: Note) -> Results:
    """The calls of the two stages before, with the plans that these have left on disk."""
    found = [stage(note) for stage in (convolution, attention)]
    read = sum(result["plans_read"] for result in found)
    return {"plans_read": read, "detail": f"{read} plans read from disk, executed, captured and replayed"}


def _cudnn(
    note: Note, what: str, device: CudaDevice, module: Any, call: Any,
    given: Mapping[str, Any], expected: Mapping[str, Any], tolerance: float,
) -> dict[str, Any]:  # fmt: skip
    """Run a described call and compare; returns its results on the host."""
    note(f"{what}: plan")
    arrays = {name: device.put(np.ascontiguousarray(value)) for name, value in given.items()}
    arrays |= {name: _zeros(device, value.shape, call.tensors[name].dtype) for name, value in expected.items()}
    with warnings.catch_warnings(action="ignore"):
        run = device.library(module.Dnn).bind(call, arrays)
    _thrice(note, what, device, run)
    results = {name: device.fetch(arrays[name]) for name in expected}
    for name, value in expected.items():
        _compare(f"{what}, {name}", results[name], value, tolerance)
    return results


def _told(device: CudaDevice, module: Any, what: str) -> Results:
    read = getattr(device.library(module.Dnn), "plans_read", 0)  # absent where cuDNN is made up
    return {"plans_read": read, "detail": f"{what}, executed, captured and replayed"}


def _thrice(note: Note, what: str, device: CudaDevice, run: Run) -> None:
    """Queue, capture and replay a call."""
    recorded: Any = device.record([run])
    for how in ("executed", "captured", "replayed"):
        note(f"{what}: {how}")
        recorded()
        device.synchronize()
        assert not recorded.refusal, f"{what} is not captured: {recorded.refusal}"


def _zeros(device: CudaDevice, shape: Sequence[int], dtype: ir.DataType) -> Any:
    kind = np.dtype(dtype.numpy())
    return device.zeros(int(np.prod(shape)) * kind.itemsize).view(kind).reshape(tuple(shape))


def _compare(what: str, got: Any, expected: Any, tolerance: float) -> None:
    """Compare with what numpy computes.

    Raises:
        AssertionError: an element is off by more than ``tolerance`` times the largest.
    """
    scale = float(np.abs(expected.astype(np.float64)).max()) or 1.0
    error = float(np.abs(got.astype(np.float64) - expected.astype(np.float64)).max()) / scale
    assert error <= tolerance, f"{what} is off by {error:.1e} of the largest element, at most {tolerance:.1e} is expected"
