"""Kernels written by hand and bodies of control flow: the host's version and the CUDA text on the emulated GPU, against numpy.

The ops that ONNX's suite has cases for are compared there (tests/conformance); here are sizes that it lacks: many updates of
one place, rows that several threads share, networks of more than one tile.
"""

from __future__ import annotations

import logging
import math
import platform
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest

import graphc
from graphc import pipeline
from graphc.backend import BACKENDS, COVERAGE, PLANNERS, make_backend
from graphc.backends.cupy.kernels import sorting
from graphc.backends.cupy.segment.compile import compile_segment
from graphc.backends.cupy.segment.program import Control, KernelCall, NodeCall
from graphc.ir import IR_VERSION, OPSET
from graphc.ir.builder import Builder
from graphc.ir.ops.random import dropout_scale, dropout_threshold, philox_words
from graphc.plan.partition import make_plan
from graphc.runtime.executor import Executor
from graphc.runtime.state import State
from graphc.training.inference import run_model
from tests.backends.host_kernels import EmulatedDevice, HostDevice, cupy_on, run_segment

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        shutil.which("g++") is None or platform.machine() != "x86_64", reason="the emulation needs a C++ compiler on x86-64"
    ),
]

rng = np.random.default_rng(5)
Arrays = Sequence["np.ndarray[Any, Any]"]


@pytest.fixture(params=["host", "emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Any:
    if request.param == "gpu":
        from graphc.backends.cupy.device.cuda_device import CudaDevice

        return CudaDevice()
    return HostDevice() if request.param == "host" else EmulatedDevice(order=2)


def run_op(
    device: Any,
    op: str,
    arrays: Arrays,
    attributes: Mapping[str, Any] | None = None,
    *,
    constants: Sequence[int] = (),
    n: int = 1,
) -> list[np.ndarray[Any, Any]]:
    """The outputs of one node; no part of it may have run on the host."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET, "graphc": 1}, name="one")
    builder, values, feeds = Builder(graph), [], {}
    for index, array in enumerate(arrays):
        if index in constants:
            values.append(builder.const(array))
            continue
        name = f"i{index}"
        value = ir.Value(name=name, type=ir.TensorType(ir.DataType.from_numpy(array.dtype)), shape=ir.Shape(array.shape))
        graph.inputs.append(value)
        values.append(value)
        feeds[name] = array
    domain = "graphc" if op.startswith("graphc::") else ""
    made = builder.emit(op.removeprefix("graphc::"), values, attributes, domain=domain, outputs=n)
    graph.outputs.extend(made)
    found, segment = run_segment(ir.to_proto(ir.Model(graph, ir_version=IR_VERSION)), feeds, device)
    assert not segment.fallbacks
    return [found[v.name or ""] for v in segment.graph.outputs]


# Scatters ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("counted", [sorting.COUNTED, 64])
def test_the_gradient_of_an_embedding_adds_what_many_tokens_share(
    counted: int, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Places sorted by counting and by a network of several tiles; runs that fill many chunks, and single tokens."""
    monkeypatch.setattr(sorting, "COUNTED", counted)
    tokens, width, count = 60, 3, 700 if isinstance(device, EmulatedDevice) else 5000
    indices = np.where(rng.random(count) < 0.4, 7, rng.integers(0, tokens, count))
    updates = rng.standard_normal((count, width)).astype(np.float32)
    zeros = np.zeros((tokens, width), np.float32)
    (got,) = run_op(device, "ScatterND", [zeros, indices[:, None], updates], {"reduction": "add"})
    want = zeros.astype(np.float64)
    np.add.at(want, indices, updates.astype(np.float64))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("reduction", "start"), [("mul", 1.0), ("max", -9.0), ("min", 9.0)])
def test_a_scatter_combines_in_order(reduction: str, start: float) -> None:
    data = np.full(50, start, np.float64)
    indices, updates = rng.integers(-50, 50, 900), rng.uniform(0.9, 1.1, 900)
    function = {"mul": np.multiply, "max": np.maximum, "min": np.minimum}[reduction]
    want = data.copy()
    function.at(want, indices, updates)
    (got,) = run_op(HostDevice(), "ScatterElements", [data, indices, updates], {"reduction": reduction})
    np.testing.assert_allclose(got, want, rtol=1e-12)


def test_a_scatter_of_many_lines_takes_one_thread_each(device: Any) -> None:
    data, updates = (rng.standard_normal(shape).astype(np.float32) for shape in ((5, 9, 70), (4, 6, 70)))
    indices = rng.integers(-9, 9, updates.shape)
    (got,) = run_op(device, "ScatterElements", [data, indices, updates], {"axis": 1, "reduction": "add"})
    want = data.astype(np.float64)
    for at in np.ndindex(*indices.shape):
        want[at[0], indices[at], at[2]] += updates[at]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


# Order and running sums ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("k", "counted", "n"), [(3, 1 << 15, 300), (60, 1 << 15, 300), (60, 64, 3000)])
@pytest.mark.parametrize("largest", [0, 1])
def test_top_k_by_selection_by_counting_and_by_a_network(
    k: int, counted: int, n: int, largest: int, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sorting, "COUNTED", counted)
    x = rng.integers(-40, 40, (2, n, 1)).astype(np.float32)  # many equal ones: the lower index comes first
    values, places = run_op(
        device, "TopK", [x, np.array([k])], {"axis": 1, "largest": largest}, constants=(1,), n=2
    )  # fmt: skip
    order = np.argsort(-x if largest else x, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(places, order)
    np.testing.assert_array_equal(values, np.take_along_axis(x, order, 1))


def test_nan_is_the_greatest_of_all(device: Any) -> None:
    x = np.array([[3, np.nan, -1, np.nan, 7]], np.float32)
    _, most = run_op(device, "TopK", [x, np.array([3])], {"largest": 1}, constants=(1,), n=2)
    _, least = run_op(device, "TopK", [x, np.array([3])], {"largest": 0}, constants=(1,), n=2)
    assert most.tolist() == [[1, 3, 4]]
    assert least.tolist() == [[2, 0, 4]]


@pytest.mark.parametrize(("exclusive", "reverse"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_running_sums_of_rows_that_a_block_shares(exclusive: int, reverse: int, device: Any) -> None:
    x = rng.standard_normal((2, 700)).astype(np.float32)
    attributes = {"exclusive": exclusive, "reverse": reverse}
    (got,) = run_op(device, "CumSum", [x, np.array(1)], attributes, constants=(1,))
    way = x[:, ::-1] if reverse else x
    want = np.cumsum(way, axis=1, dtype=np.float64) - (way if exclusive else 0)
    np.testing.assert_allclose(got, want[:, ::-1] if reverse else want, rtol=1e-4, atol=1e-4)


# Sums that lanes share -----------------------------------------------------------------------------------------------


def test_sums_of_products_share_columns(device: Any) -> None:
    a, b = rng.standard_normal((3, 40, 5)).astype(np.float32), rng.standard_normal((40, 5, 2)).astype(np.float32)
    (got,) = run_op(device, "Einsum", [a, b], {"equation": "ikl,klj->ji"})
    np.testing.assert_allclose(got, np.einsum("ikl,klj->ji", a, b), rtol=1e-4, atol=1e-4)


def test_convolutions_of_double_precision_and_three_axes_have_kernels(device: Any) -> None:
    torch = pytest.importorskip("torch")
    x = torch.tensor(rng.standard_normal((2, 4, 5, 4, 6)), requires_grad=True)
    w = torch.tensor(rng.standard_normal((6, 2, 2, 3, 2)), requires_grad=True)
    options = {"stride": (1, 2, 1), "padding": (1, 0, 1), "dilation": (1, 1, 2), "groups": 2}
    y = torch.nn.functional.conv3d(x, w, **options)
    dy = torch.tensor(rng.standard_normal(y.shape))
    y.backward(dy)
    attributes = {"strides": [1, 2, 1], "pads": [1, 0, 1] * 2, "dilations": [1, 1, 2], "group": 2, "kernel_shape": [2, 3, 2]}
    arrays = [x.detach().numpy(), w.detach().numpy(), dy.numpy()]
    shapes = [np.array(a.shape) for a in arrays]
    found = [
        run_op(device, "Conv", arrays[:2], attributes),
        run_op(device, "graphc::ConvGradInput", [arrays[2], arrays[1], shapes[0]], attributes, constants=(2,)),
        run_op(device, "graphc::ConvGradWeight", [arrays[0], arrays[2], shapes[1]], attributes, constants=(2,)),
    ]
    for (got,), want in zip(found, (y.detach(), x.grad, w.grad), strict=True):
        np.testing.assert_allclose(got, want.numpy(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("kernel", "strides", "pads"), [((3, 3), (2, 2), (1, 1)), ((2, 3), (3, 1), (0, 1))])
def test_a_pool_that_notes_its_maxima_has_the_gradient_of_pytorch(kernel: Any, strides: Any, pads: Any, device: Any) -> None:
    """Equal maxima in many windows, windows that overlap and that leave out elements, vectors of channels."""
    torch = pytest.importorskip("torch")
    x = torch.tensor(rng.integers(0, 3, (2, 8, 9, 8)).astype(np.float32), requires_grad=True)
    y = torch.nn.functional.max_pool2d(x, kernel, strides, pads)
    dy = torch.tensor(rng.standard_normal(y.shape).astype(np.float32))
    y.backward(dy)
    attributes = {"kernel_shape": list(kernel), "strides": list(strides), "pads": [*pads, *pads]}
    x_last, dy_last = (np.ascontiguousarray(v.detach().numpy().transpose(0, 2, 3, 1)) for v in (x, dy))
    got, taps = run_op(device, "graphc::ChannelsLastMaxPoolTaps", [x_last], attributes, n=2)
    np.testing.assert_array_equal(got.transpose(0, 3, 1, 2), y.detach().numpy())
    arrays = [dy_last, taps, np.array(x_last.shape)]
    (got,) = run_op(device, "graphc::ChannelsLastMaxPoolTapsGrad", arrays, attributes, constants=[2])
    np.testing.assert_allclose(got.transpose(0, 3, 1, 2), x.grad.numpy(), atol=1e-6)


def test_a_maximum_that_is_nan_gets_the_gradient_as_in_pytorch(device: Any) -> None:
    """The last NaN of a window is its maximum; noted as a tap, or looked for. On the CPU backends too."""
    torch = pytest.importorskip("torch")
    values = rng.standard_normal((2, 8, 9, 8)).astype(np.float32)
    values[rng.random(values.shape) < 0.15] = np.nan
    x = torch.tensor(values, requires_grad=True)
    y = torch.nn.functional.max_pool2d(x, (3, 2), (2, 1), (1, 1))
    dy = torch.tensor(rng.standard_normal(y.shape).astype(np.float32))
    y.backward(dy)
    attributes = {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 1, 1, 1]}
    arrays = [v.detach().numpy() for v in (dy, x, y)]
    dy_last, x_last, y_last = (np.ascontiguousarray(a.transpose(0, 2, 3, 1)) for a in arrays)
    (got,) = run_op(device, "graphc::MaxPoolGrad", arrays, attributes)
    np.testing.assert_allclose(got, x.grad.numpy(), atol=1e-6)
    got, taps = run_op(device, "graphc::ChannelsLastMaxPoolTaps", [x_last], attributes, n=2)
    np.testing.assert_array_equal(got, y_last)
    shape = np.array(x_last.shape)
    (got,) = run_op(device, "graphc::ChannelsLastMaxPoolTapsGrad", [dy_last, taps, shape], attributes, constants=[2])
    np.testing.assert_allclose(got.transpose(0, 3, 1, 2), x.grad.numpy(), atol=1e-6)
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET, "graphc": 1}, name="one")
    for name, array in zip(("dy", "x", "y"), arrays, strict=True):
        kind = ir.TensorType(ir.DataType.from_numpy(array.dtype))
        graph.inputs.append(ir.Value(name=name, type=kind, shape=ir.Shape(array.shape)))
    graph.outputs.append(Builder(graph).graphc.MaxPoolGrad(*graph.inputs, **attributes))
    for backend in ("numpy", "onnxruntime"):
        model = ir.Model(graph, ir_version=IR_VERSION)
        (got,) = run_model(model, dict(zip(("dy", "x", "y"), arrays, strict=True)), backend, threads=1).values()
        np.testing.assert_allclose(got, x.grad.numpy(), atol=1e-6, err_msg=backend)


@pytest.mark.parametrize("ties", [False, True])
def test_gradients_of_pooling_are_those_of_pytorch(ties: bool, device: Any) -> None:
    torch = pytest.importorskip("torch")
    values = rng.integers(0, 3, (2, 3, 9, 8)) if ties else rng.standard_normal((2, 3, 9, 8))
    x = torch.tensor(values.astype(np.float32), requires_grad=True)
    attributes = {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 1, 1, 1]}
    dy = torch.tensor(rng.standard_normal((2, 3, 5, 9)).astype(np.float32))
    y = torch.nn.functional.max_pool2d(x, (3, 2), (2, 1), (1, 1))
    y.backward(dy)
    arrays = [v.detach().numpy() for v in (dy, x, y)]
    last = [np.ascontiguousarray(a.transpose(0, 2, 3, 1)) for a in arrays]
    (got,) = run_op(device, "graphc::MaxPoolGrad", arrays, attributes)
    np.testing.assert_allclose(got, x.grad.numpy(), atol=1e-6)
    (got,) = run_op(device, "graphc::ChannelsLastMaxPoolGrad", last, attributes)
    np.testing.assert_allclose(got.transpose(0, 3, 1, 2), x.grad.numpy(), atol=1e-6)
    (got,) = run_op(device, "graphc::ChannelsLastMaxPool", last[1:2], attributes)
    np.testing.assert_array_equal(got, last[2])
    for padded in (0, 1):
        x.grad = None
        torch.nn.functional.avg_pool2d(x, (3, 2), (2, 1), (1, 1), count_include_pad=bool(padded)).backward(dy)
        shape = np.array(x.shape)
        (got,) = run_op(
            device, "graphc::AveragePoolGrad", [dy.numpy(), shape], {**attributes, "count_include_pad": padded}, constants=(1,)
        )
        np.testing.assert_allclose(got, x.grad.numpy(), atol=1e-6)
        options = {**attributes, "count_include_pad": padded}
        (got,) = run_op(device, "graphc::ChannelsLastAveragePoolGrad", [last[0], shape[[0, 2, 3, 1]]], options, constants=(1,))
        np.testing.assert_allclose(got.transpose(0, 3, 1, 2), x.grad.numpy(), atol=1e-6)


# Activations -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16], ids=lambda t: np.dtype(t).name)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_slope_of_gelu_is_that_of_pytorch(approximate: str, dtype: Any, device: Any) -> None:
    """In half precision only the result is rounded: near its zero the slope shows every constant that is."""
    torch = pytest.importorskip("torch")
    x = np.linspace(-12, 12, 4096).astype(dtype)
    dy = np.linspace(0.5, 2, 4096).astype(dtype)
    (got,) = run_op(device, "graphc::GeluGrad", [dy, x], {"approximate": approximate})
    at = torch.from_numpy(x.astype(np.float64)).requires_grad_()
    torch.nn.functional.gelu(at, approximate=approximate).backward(torch.from_numpy(dy.astype(np.float64)))
    tolerance = {"float32": (2e-6, 2e-6), "float64": (1e-12, 1e-13)}.get(np.dtype(dtype).name, (2.0**-8, 2e-5))
    assert got.dtype == dtype
    np.testing.assert_allclose(got.astype(np.float64), at.grad.numpy(), rtol=tolerance[0], atol=tolerance[1])


# Random numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 3])
def test_random_numbers_inside_a_kernel_are_those_of_the_cpu(offset: int, device: Any) -> None:
    seed, step, shape = -77, 5, (6, 7)
    scalars = [np.array(v) for v in (seed, step, offset)]
    attributes = {"ratio": 0.3, "tag": "drop"}
    (got,) = run_op(device, "graphc::DropoutMask", [np.array(shape), *scalars], attributes, constants=(0,))
    words = philox_words(offset * 7, 42, seed=seed, step=step, tag="drop").reshape(shape)
    want = np.where(words < dropout_threshold(0.3), 0, dropout_scale(0.3)).astype(np.float32)
    assert got.tobytes() == want.tobytes()
    (got,) = run_op(device, "graphc::Uniform", [np.array(shape), *scalars], {"tag": "drop"}, constants=(0,))
    assert got.tobytes() == ((words >> np.uint64(8)).astype(np.float32) * np.float32(2.0**-24)).tobytes()


@pytest.mark.parametrize("shape", [(6, 48), (3, 2, 20), (5, 9)], ids=str)
def test_masks_are_the_same_wherever_a_kernel_draws_them(shape: tuple[int, ...], device: Any) -> None:
    """By fours for vectors of neighbours, one by one for other orders: element by element, along rows, across rows, turned."""
    seed, step, offset = 2**40 + 3, 11, 6
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET, "graphc": 1}, name="one")
    given = {"x": (ir.DataType.FLOAT, shape), **dict.fromkeys(("seed", "step", "offset"), (ir.DataType.INT64, ()))}
    for name, (dtype, dims) in given.items():
        graph.inputs.append(ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(dims)))
    op = Builder(graph)
    x, *scalars = graph.inputs
    scalars[2] = op.Mul(scalars[2], np.array(2))  # as for a value with two rows a sample
    y = op.Mul(x, op.graphc.DropoutMask(op.const(list(shape)), *scalars, ratio=0.4, tag="a"))
    results = [y, op.ReduceSum(y, [-1], keepdims=0), op.ReduceSum(y, [0], keepdims=0), op.Transpose(y)]
    for k, value in enumerate(results):
        value.name = f"y{k}"
        graph.outputs.append(value)
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    feeds = {"x": values, "seed": np.array(seed), "step": np.array(step), "offset": np.array(offset)}
    found, segment = run_segment(ir.to_proto(ir.Model(graph, ir_version=IR_VERSION)), feeds, device)
    texts = "".join(call.source.body for call in segment.calls if isinstance(call, KernelCall))
    assert ("philox_words" in texts) == (math.prod(shape[1:]) % 4 == 0)
    words = philox_words(2 * offset * math.prod(shape[1:]), values.size, seed=seed, step=step, tag="a").reshape(shape)
    want = np.where(words < dropout_threshold(0.4), 0, np.float32(dropout_scale(0.4))) * values
    for key, value in zip(found, (want, want.sum(-1), want.sum(0), want.T), strict=True):
        np.testing.assert_allclose(found[key], value, rtol=1e-5, atol=1e-5, err_msg=key)


def test_a_dropout_and_what_surrounds_it_are_one_kernel() -> None:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET, "graphc": 1}, name="one")
    for name, dtype, shape in (
        ("x", ir.DataType.FLOAT, (64, 96)),
        ("seed", ir.DataType.INT64, ()),
        ("step", ir.DataType.INT64, ()),
    ):
        graph.inputs.append(ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape)))
    op = Builder(graph)
    x, seed, step = graph.inputs
    mask = op.graphc.DropoutMask(op.const([64, 96]), seed, step, np.array(0), tag="t")
    graph.outputs.append(op.Relu(op.Mul(op.Gelu(x), mask)))
    assert len(compile_segment(ir.to_proto(ir.Model(graph, ir_version=IR_VERSION))).calls) == 1


# Control flow --------------------------------------------------------------------------------------------------------

COLLATZ = """<ir_version: 10, opset_import: ["" : 20]>
collatz (int64 x, float[3] a) => (int64 last, int64 steps, float[3] sums) {
  one = Constant <value = int64 {1}> ()
  zero = Constant <value = int64 {0}> ()
  start = Greater (x, one)
  last, steps, sums = Loop (, start, x, zero, a) <body = step (int64 i, bool going, int64 n, int64 count, float[3] s)
      => (bool goes_on, int64 m, int64 next, float[3] t) {
    two = Constant <value = int64 {2}> ()
    three = Constant <value = int64 {3}> ()
    rest = Mod (n, two)
    odd = Cast <to = 9> (rest)
    m = If (odd) <then_branch = up () => (int64 u) { p = Mul (n, three) u = Add (p, one) },
                  else_branch = down () => (int64 d) { d = Div (n, two) }>
    next = Add (count, one)
    t = Add (s, a)
    goes_on = Greater (m, one)
  }>
}"""


@pytest.mark.parametrize("start", [1, 2, 27])
def test_a_loop_goes_on_until_its_condition_says_so(start: int, register_backend: Callable[..., None]) -> None:
    """27 takes 111 steps; a branch is chosen in each; 1 takes none, and the states are what they were."""
    register_backend("cupy", lambda **_: cupy_on(HostDevice()))
    a = np.array([1, 2, 3], np.float32)
    found = run_model(onnx.parser.parse_model(COLLATZ), {"x": np.array(start), "a": a}, "cupy")
    n, steps = start, 0
    while n > 1:
        n, steps = (3 * n + 1 if n % 2 else n // 2), steps + 1
    assert (int(found["last"]), int(found["steps"])) == (n, steps)
    np.testing.assert_array_equal(found["sums"], a * (steps + 1))


def test_what_the_host_decides_cannot_be_captured_and_known_lengths_can() -> None:
    model = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(COLLATZ))
    segment = compile_segment(model)
    assert any(isinstance(call, Control) for call in segment.calls)
    assert not segment.fallbacks
    assert not segment.queued
    scan = """<ir_version: 10, opset_import: ["" : 20]>
    g (float[2] h, float[5, 2] x) => (float[2] last, float[5, 2] y) {
      last, y = Scan <num_scan_inputs = 1, body = b (float[2] s, float[2] v) => (float[2] t, float[2] o) {
        t = Add (s, v) o = Identity (t) }> (h, x)
    }"""
    assert compile_segment(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(scan))).queued


# What runs on the host -----------------------------------------------------------------------------------------------

NOISE = """<ir_version: 10, opset_import: ["" : 20]>
g (float[4, 8] x) => (float[4, 8] y) { r = RandomNormalLike (x) y = Add (x, r) }"""


def test_nodes_on_the_host_are_reported_in_one_line(
    register_backend: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    register_backend("cupy", lambda **_: cupy_on(HostDevice()))
    model = ir.from_proto(onnx.parser.parse_model(NOISE))
    pipeline.run(model, "legalize,simplify")  # without the pass 'draws', which leaves nothing to the host
    engine = make_backend("cupy", threads=1)
    with caplog.at_level(logging.WARNING, "graphc.cupy"):
        plan = make_plan(model, {"x": (4, 8)}, engine)
        Executor(plan, State(model, memory=engine.memory), engine).run({"x": np.zeros((4, 8), np.float32)})
    engine.close()
    (line,) = [record.getMessage() for record in caplog.records if record.name == "graphc.cupy"]
    assert "RandomNormalLike" in line
    assert "0.000 MB" in line  # 256 bytes


def test_a_plan_knows_without_a_gpu_what_the_host_will_run() -> None:
    BACKENDS.load()
    model = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(NOISE))
    (found,) = PLANNERS["cupy"]().fallbacks(model)
    assert (found.op, found.nbytes) == ("RandomNormalLike", 2 * 4 * 8 * 4)


def test_every_op_that_a_plan_can_hold_runs_on_the_gpu() -> None:
    """What is left draws numbers as the standard's reference does, or has sequences, strings, or sizes that depend on data."""
    BACKENDS.load()
    how: Callable[[str], str] = COVERAGE["cupy"]
    allowed = ("Random", "Sequence", "String", "Optional", "Multinomial", "NonZero", "NonMaxSuppression", "Unique", "Regex")
    allowed += ("ImageDecoder", "TfIdfVectorizer", "MelWeightMatrix", "SplitTo")
    names = {s.name for s in onnx.defs.get_all_schemas() if s.domain == "" and not s.deprecated}
    host = [name for name in sorted(names) if how(name) == "host" and not any(word in name for word in allowed)]
    assert not host
    assert {how(name) for name in names} >= {"generated", "kernel", "decomposed", "loop", "host"}


def test_the_host_runs_only_what_has_no_other_way() -> None:
    model = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(NOISE))
    calls = [call for call in compile_segment(model).calls if isinstance(call, NodeCall)]
    assert [call.node.op_type for call in calls] == ["RandomNormalLike"]


COUNTS = """<ir_version: 10, opset_import: ["" : 20]>
g (int64[2, 5] x) => (float[2, 4] y) {
    t = TfIdfVectorizer <max_gram_length = 1, max_skip_count = 0, min_gram_length = 1, mode = "TF", ngram_counts = [0],
                         ngram_indexes = [0, 1, 2, 3], pool_int64s = [3, 5, 7, 9]> (x)
    y = Neg (t)
}"""


def test_the_host_computes_in_onnxruntime_and_what_that_lacks_in_numpy(
    register_backend: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from graphc.backends.numpy import NumpyBackend

    register_backend("cupy", lambda **_: cupy_on(HostDevice()))
    noise = run_model(onnx.parser.parse_model(NOISE), {"x": np.zeros((4, 8), np.float32)}, "cupy")["y"]
    assert len(np.unique(noise)) == noise.size
    monkeypatch.setattr(NumpyBackend, "__init__", lambda *_, **__: pytest.fail("numpy computes what onnxruntime can"))
    words = np.array([[3, 5, 3, 9, 1], [7, 7, 7, 0, 2]], np.int64)
    found = run_model(onnx.parser.parse_model(COUNTS), {"x": words}, "cupy")["y"]
    np.testing.assert_array_equal(found, [[-2, -1, 0, -1], [0, 0, -3, 0]])


# Training ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_networks_with_dropout_train_as_in_onnxruntime(
    kind: str, tmp_path: Path, register_backend: Callable[..., None]
) -> None:
    """The loop of the forward and that of the gradient run on the device, and the masks are those of the CPU."""
    torch = pytest.importorskip("torch")
    register_backend("cupy", lambda **_: cupy_on(HostDevice()))
    torch.manual_seed(0)

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.states = getattr(torch.nn, kind)(6, 8, batch_first=True)
            self.drop, self.out = torch.nn.Dropout(0.2), torch.nn.Linear(8, 4)

        def forward(self, x: Any) -> Any:
            return self.out(self.drop(self.states(x)[0][:, -1]))

    path = str(tmp_path / "network.onnx")
    options = {"dynamo": False, "do_constant_folding": False, "training": torch.onnx.TrainingMode.TRAINING}
    torch.onnx.export(Network(), (torch.zeros(5, 7, 6),), path, input_names=["x"], output_names=["y"], **options)
    losses: dict[str, list[float]] = {}
    for backend in ("onnxruntime", "cupy"):
        program = graphc.compile(
            path,
            loss=graphc.losses.SoftmaxCrossEntropy(logits="y", label="label"),
            optimizer=graphc.optim.Adam(lr=0.05),
            backend=backend,
        )
        data = np.random.default_rng(0)
        with graphc.Trainer(program, seed=3) as trainer:
            feeds = [
                {"x": data.standard_normal((5, 7, 6)).astype(np.float32), "label": data.integers(0, 4, 5)} for _ in range(4)
            ]
            losses[backend] = [float(trainer.step(feed)["loss"]) for feed in feeds]
    np.testing.assert_allclose(losses["cupy"], losses["onnxruntime"], rtol=1e-5)
