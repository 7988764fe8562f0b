"""Native kernels against the decompositions of their ops, run by plain onnxruntime, and against PyTorch."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numba
import numpy as np
import onnx
import onnx_ir as ir
import pytest

from graphc.backend import Binding, make_backend, native_kernel
from graphc.cli import main
from graphc.device import aligned_zeros
from graphc.ir.declare import declaration_of
from graphc.ir.ops.attention import operand_axes, packed
from graphc.passes.legalize.decompose import decompose_graph

ort = pytest.importorskip("onnxruntime")
torch = pytest.importorskip("torch")

from graphc.backends.onnxruntime.kernels.convolutions import convolution  # noqa: E402
from graphc.backends.onnxruntime.kernels.onednn import binding  # noqa: E402
from graphc.backends.onnxruntime.kernels.products.panels import parts_of_product  # noqa: E402
from graphc.backends.onnxruntime.pool import ThreadPool, partition  # noqa: E402
from tests.backends.onnxruntime.node_cases import compare, native, reference, single_node  # noqa: E402
from tests.tiers import params  # noqa: E402

rng = np.random.default_rng(7)


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Whatever ran before, a test has the same numbers."""
    rng.bit_generator.state = np.random.default_rng(7).bit_generator.state


def normal(*shape: int) -> np.ndarray[Any, Any]:
    return rng.standard_normal(shape).astype(np.float32)


@pytest.fixture(params=[1, 3])
def pool(request: pytest.FixtureRequest) -> Iterator[ThreadPool]:
    made = ThreadPool(request.param)
    yield made
    made.close()


def shape_of(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.array(array.shape, dtype=np.int64)


CONVOLUTIONS = [
    # samples, channels in and out, size, kernel, strides, dilations, pads, groups
    (3, 4, 6, (9, 11), [3, 3], [1, 1], [1, 1], [1, 1, 1, 1], 1),
    (4, 4, 6, (9, 11), [3, 2], [2, 1], [1, 2], [1, 0, 2, 1], 2),
    (1, 8, 8, (9, 11), [3, 3], [2, 2], [1, 1], [1, 1, 1, 1], 8),
    (3, 6, 6, (9, 19), [5, 7], [2, 3], [1, 1], [2, 3, 1, 4], 6),
    (2, 4, 8, (10, 9), [7, 5], [1, 1], [1, 2], [3, 1, 2, 2], 4),
    (2, 5, 5, (40,), [9], [2], [1], [4, 4], 5),
    (2, 5, 5, (40,), [9], [1], [2], [3, 20], 5),
    (3, 6, 6, (2100,), [6], [1], [1], [0, 2], 6),
    (2, 7, 7, (5,), [3], [1], [1], [6, 4], 7),
    (2, 4, 4, (41,), [3], [3], [2], [6, 1], 4),
    (2, 4, 4, (40,), [2], [4], [1], [0, 0], 4),
    (2, 4, 12, (50,), [3], [2], [1], [1, 1], 4),
    (2, 5, 5, (12, 13), [3, 3], [1, 2], [2, 2], [2, 1, 0, 2], 5),
    (2, 5, 5, (9, 10), [11, 9], [1, 1], [1, 1], [5, 4, 5, 4], 5),
    (2, 3, 6, (9, 10), [3, 2], [2, 1], [1, 1], [1, 4, 2, 0], 3),
    (2, 3, 3, (5, 6, 7), [3, 2, 3], [1, 2, 1], [1, 1, 2], [1, 0, 2, 1, 1, 2], 3),
    (2, 3, 6, (5, 6, 7), [3, 3, 3], [2, 2, 2], [1, 1, 1], [1, 1, 1, 1, 1, 1], 3),
    (5, 16, 32, (14, 14), [1, 1], [1, 1], [1, 1], [0, 0, 0, 0], 1),
    (5, 32, 16, (7, 7), [1, 1], [2, 2], [1, 1], [0, 0, 0, 0], 1),
    (2, 3, 5, (17,), [4], [3], [1], [2, 0], 1),
    (2, 6, 20, (9, 11), [3, 4], [1, 1], [1, 2], [2, 0, 1, 5], 1),  # few channels, whose gradient turns the weights
    (2, 8, 8, (5, 6, 9), [3, 2, 3], [1, 1, 1], [2, 1, 1], [1, 0, 2, 4, 1, 0], 1),
    (2, 6, 7, (12, 9), [3, 3], [1, 1], [1, 1], [1, 3, 1, 1], 1),  # padded by more than the window reaches
    (2, 3, 16, (31, 30), [3, 3], [5, 5], [1, 1], [2, 2, 2, 2], 1),
    (2, 3, 5, (7, 8, 9), [2, 3, 3], [1, 2, 1], [1, 1, 1], [1, 0, 0, 0, 1, 1], 1),
]


def convolve(case: tuple[Any, ...]) -> tuple[dict[str, Any], list[np.ndarray[Any, Any]]]:
    """Attributes, and x, w, b, y, dy, dx, dw by PyTorch."""
    n, channels, outs, size, taps, strides, dilations, pads, groups = case
    x, w, b = normal(n, channels, *size), normal(outs, channels // groups, *taps), normal(outs)
    tx, tw, tb = (torch.tensor(a, requires_grad=True) for a in (x, w, b))
    axes = len(taps)
    around = [p for axis in reversed(range(axes)) for p in (pads[axis], pads[axes + axis])]
    function = (torch.conv1d, torch.conv2d, torch.conv3d)[axes - 1]
    y = function(torch.nn.functional.pad(tx, around), tw, tb, stride=strides, dilation=dilations, groups=groups)
    dy = normal(*y.shape)
    y.backward(torch.tensor(dy))
    attributes = {"strides": strides, "dilations": dilations, "pads": pads, "group": groups, "kernel_shape": taps}
    return attributes, [x, w, b, y.detach().numpy(), dy, tx.grad.numpy(), tw.grad.numpy()]


def close(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any], tolerance: float = 2e-6) -> None:
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * float(np.abs(want).max()))


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolution_in_onednn_is_that_of_pytorch(case: tuple[Any, ...], pool: ThreadPool) -> None:
    if binding.library() is None:
        pytest.skip("oneDNN is not installed")
    attributes, (x, w, b, y, dy, dx, dw) = convolve(case)
    close(native("Conv", [x, w, b], attributes, pool, [y])[0], y)
    close(native("graphc::ConvGradInput", [dy, w, shape_of(x)], attributes, pool, [dx], (2,))[0], dx)
    close(native("graphc::ConvGradWeight", [x, dy, shape_of(w)], attributes, pool, [dw], (2,))[0], dw)


@pytest.mark.skipif(binding.library() is None, reason="needs oneDNN")
@pytest.mark.parametrize(
    ("x", "w", "options"),
    [
        ((2, 8, 7, 6), (8, 5, 4, 4), {"stride": 2, "padding": 1}),
        ((3, 6, 9), (6, 2, 3), {"stride": 3, "output_padding": 2, "groups": 3}),
        ((2, 16, 12, 12), (16, 8, 3, 3), {"padding": 1}),
        ((1, 4, 5, 6), (4, 3, 3, 2), {"stride": (2, 3), "dilation": (2, 1), "padding": (1, 0), "output_padding": (1, 2)}),
        ((2, 3, 4, 4, 4), (3, 4, 2, 2, 2), {"stride": 2}),
    ],
)
def test_transposed_convolution_is_that_of_pytorch(
    x: tuple[int, ...], w: tuple[int, ...], options: dict[str, Any], pool: ThreadPool
) -> None:
    axes = len(x) - 2
    wide = {k: [v] * axes if isinstance(v, int) and k != "groups" else v for k, v in options.items()}
    arrays = [normal(*x), normal(*w), normal(w[1] * options.get("groups", 1))]
    function = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)[axes - 1]
    attributes = {
        "kernel_shape": list(w[2:]),
        "strides": list(wide.get("stride", [1] * axes)),
        "dilations": list(wide.get("dilation", [1] * axes)),
        "pads": list(wide.get("padding", [0] * axes)) * 2,
        "output_padding": list(wide.get("output_padding", [0] * axes)),
        "group": options.get("groups", 1),
    }
    for operands in (arrays[:2], arrays):
        y = function(*(torch.tensor(a) for a in operands), **options).numpy()
        close(native("ConvTranspose", operands, attributes, pool, [y])[0], y)


@pytest.mark.parametrize("case", [case for case in CONVOLUTIONS if len(case[3]) < 3])
def test_weight_gradient_without_onednn(case: tuple[Any, ...], pool: ThreadPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution, "library", lambda: None)
    attributes, (x, w, _, _, dy, _, dw) = convolve(case)
    close(native("graphc::ConvGradWeight", [x, dy, shape_of(w)], attributes, pool, [dw], (2,))[0], dw)


def test_convolutions_that_share_scratch_memory(pool: ThreadPool) -> None:
    """The memory grows when a second, larger convolution is bound; the first must follow it."""
    cases = [convolve(CONVOLUTIONS[0]), convolve((3, 16, 32, (24, 24), [3, 3], [1, 1], [1, 1], [1, 1, 1, 1], 1))]
    runs, results = [], []
    for attributes, (x, w, _, _, dy, _, dw) in cases:
        (node,) = (
            n
            for n in single_node("graphc::ConvGradWeight", [x, dy, shape_of(w)], attributes, (2,)).graph
            if n.op_type == "ConvGradWeight"
        )
        declaration = declaration_of(node)
        assert declaration is not None
        got = np.full(dw.shape, 77, np.float32)
        binding = Binding(node, [x, dy, None], [got], declaration.attribute_values(node), pool, {})
        runs.append(convolution.conv_grad_weight(binding))
        results.append((got, dw))
    for _ in range(2):
        for run in runs:
            run()
    for got, want in results:
        close(got, want)


@pytest.mark.parametrize(
    ("size", "attributes"),
    [
        ((13, 10), {"kernel_shape": [3, 3], "strides": [2, 2]}),
        ((13, 10), {"kernel_shape": [3, 2], "strides": [1, 2], "pads": [1, 0, 1, 1]}),
        ((12, 12), {"kernel_shape": [2, 2], "strides": [2, 2]}),
        ((33, 37), {"kernel_shape": [2, 2], "strides": [2, 2]}),
        ((14, 14), {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}),
        ((11, 11), {"kernel_shape": [2, 3], "dilations": [2, 1], "pads": [1, 1, 0, 1]}),
        ((11, 12), {"kernel_shape": [2, 3], "strides": [2, 1], "auto_pad": "SAME_UPPER"}),
        ((15,), {"kernel_shape": [4], "strides": [3], "pads": [1, 1]}),
        ((15,), {"kernel_shape": [5], "pads": [2, 2]}),
        ((15,), {"kernel_shape": [4], "strides": [2], "ceil_mode": 1}),
        ((64,), {"kernel_shape": [2], "strides": [2]}),
        ((50, 37), {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
        ((19, 41), {"kernel_shape": [9, 13], "pads": [4, 6, 4, 6]}),
        ((9, 79), {"kernel_shape": [2, 3], "strides": [3, 3], "dilations": [4, 5]}),
        ((9, 70), {"kernel_shape": [4, 4], "strides": [4, 4]}),
        ((6, 7, 8), {"kernel_shape": [2, 2, 2], "strides": [2, 2, 2]}),
        ((7, 7, 9), {"kernel_shape": [3, 2, 2], "strides": [3, 2, 2]}),
        ((6, 7, 8), {"kernel_shape": [3, 2, 3], "strides": [2, 1, 3], "pads": [1, 0, 1, 0, 1, 1]}),
        ((6, 7, 8), {"kernel_shape": [2, 3, 2], "dilations": [2, 1, 3], "ceil_mode": 1}),
    ],
)
def test_pooling(size: tuple[int, ...], attributes: dict[str, Any], pool: ThreadPool) -> None:
    x = rng.integers(0, 5, (2, 3, *size)).astype(np.float32)  # many equal maxima: the first must win
    (y,) = reference("MaxPool", [x], attributes)
    compare("MaxPool", [x - 3], attributes, pool)
    compare("graphc::MaxPoolGrad", [normal(*y.shape), x, y], attributes, pool)
    dy, where = normal(*y.shape), torch.tensor(x, requires_grad=True)
    if attributes["kernel_shape"] == attributes.get("strides"):  # PyTorch takes the last NaN of a window
        where.data.reshape(2, -1)[:, ::7] = np.nan
        pooled = getattr(torch, f"max_pool{len(size)}d")(where, attributes["kernel_shape"])
        pooled.backward(torch.tensor(dy))
        assert where.grad is not None
        operands = [dy, where.detach().numpy(), pooled.detach().numpy()]
        (got,) = native("graphc::MaxPoolGrad", operands, attributes, pool, [x])
        np.testing.assert_array_equal(got, where.grad.numpy())
        (got,) = native("MaxPool", operands[1:2], attributes, pool, operands[2:])
        np.testing.assert_array_equal(got, operands[2])
    if "dilations" in attributes:
        return
    for include in (0, 1):
        both = {**attributes, "count_include_pad": include}
        (y,) = reference("AveragePool", [x], both)
        compare("graphc::AveragePoolGrad", [normal(*y.shape), shape_of(x)], both, pool, (1,))
        compare("AveragePool", [x], both, pool)


@pytest.mark.parametrize(
    ("size", "attributes"),
    [
        ((12, 40), {"kernel_shape": [3, 9], "strides": [3, 9]}),
        ((8, 34), {"kernel_shape": [3, 8], "strides": [2, 9], "pads": [1, 2, 1, 2]}),
        ((20,), {"kernel_shape": [20], "strides": [20]}),
        ((13, 15), {"kernel_shape": [13, 13], "strides": [1, 1], "pads": [6, 6, 6, 6]}),
        ((33,), {"kernel_shape": [3], "strides": [2], "pads": [1, 1]}),
        ((5, 6, 19), {"kernel_shape": [3, 3, 3], "strides": [1, 1, 1], "pads": [1] * 6}),
        ((6, 5, 12), {"kernel_shape": [2, 3, 9], "strides": [2, 2, 9], "pads": [1, 1, 0, 1, 1, 0]}),
    ],
)
def test_gradient_of_maxima_with_nan(size: tuple[int, ...], attributes: dict[str, Any], pool: ThreadPool) -> None:
    x = torch.randint(0, 5, (2, 3, *size)).float().requires_grad_()  # many equal maxima: the first must win
    x.data.reshape(2, -1)[:, ::47] = np.nan  # of which the last does
    padding = attributes.get("pads", [0] * 2 * len(size))[: len(size)]
    pooled = getattr(torch, f"max_pool{len(size)}d")(x, attributes["kernel_shape"], attributes["strides"], padding)
    dy = torch.randn_like(pooled)
    pooled.backward(dy)
    operands = [value.detach().numpy() for value in (dy, x, pooled)]
    (got,) = native("graphc::MaxPoolGrad", operands, attributes, pool, [x.detach().numpy()])
    np.testing.assert_array_equal(got, x.grad.numpy())


@pytest.mark.parametrize(
    ("size", "attributes"),
    [
        ((33,), {"kernel_shape": [3], "strides": [2], "pads": [1, 1]}),
        ((40,), {"kernel_shape": [16], "strides": [4], "pads": [8, 8]}),
        ((12, 40), {"kernel_shape": [2, 2], "strides": [2, 2]}),
        ((13, 71), {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
        ((13, 15), {"kernel_shape": [5, 8], "strides": [1, 1], "pads": [2, 4, 2, 4]}),
        ((9, 37), {"kernel_shape": [2, 1], "strides": [3, 3]}),
        ((11, 37), {"kernel_shape": [2, 2], "strides": [3, 3]}),
        ((5, 6, 19), {"kernel_shape": [3, 3, 3], "strides": [1, 1, 1], "pads": [1] * 6}),
        ((6, 5, 66), {"kernel_shape": [2, 3, 3], "strides": [2, 2, 4], "pads": [1, 1, 0, 1, 1, 0]}),
    ],
)
@pytest.mark.parametrize("special", [None, np.nan, np.inf, -np.inf], ids=str)
def test_maxima_that_keep_their_taps(
    size: tuple[int, ...], attributes: dict[str, Any], special: float | None, pool: ThreadPool
) -> None:
    x = torch.randint(0, 5, (2, 3, *size)).float().requires_grad_()  # many equal maxima: the first must win
    if special is not None:
        x.data.reshape(2, -1)[:, ::47] = special
        x.data[1, :, :2] = special
    padding = attributes.get("pads", [0] * 2 * len(size))[: len(size)]
    pooled = getattr(torch, f"max_pool{len(size)}d")(x, attributes["kernel_shape"], attributes["strides"], padding)
    dy = torch.randint(-9, 9, pooled.shape).float()  # whose sums are exact in any order
    pooled.backward(dy)
    out = pooled.detach().numpy()
    y, tap = native("graphc::MaxPoolTaps", [x.detach().numpy()], attributes, pool, [out, np.zeros(out.shape, np.uint8)])
    np.testing.assert_array_equal(y, out)
    if special != -np.inf:  # the decomposition takes padding for numbers that are as low
        np.testing.assert_array_equal(tap, reference("graphc::MaxPoolTaps", [x.detach().numpy()], attributes)[1])
    operands = [dy.numpy(), tap, shape_of(x.detach().numpy())]
    (got,) = native("graphc::MaxPoolTapsGrad", operands, attributes, pool, [x.detach().numpy()], (2,))
    np.testing.assert_array_equal(got, x.grad.numpy())
    np.testing.assert_array_equal(got, reference("graphc::MaxPoolTapsGrad", operands, attributes, (2,))[0])


@pytest.mark.parametrize("count", [None, 100, 5, 1], ids=["whole lines", "many", "a few", "one"])
@pytest.mark.parametrize("largest", [0, 1])
@pytest.mark.parametrize(
    ("shape", "axis"), [((40,), 0), ((5, 300), -1), ((3, 129, 7), 1), ((2, 16, 4, 4), 1), ((64, 5, 9), 1), ((512, 6), -1)]
)
def test_sorts_like_pytorch(shape: tuple[int, ...], axis: int, largest: int, count: int | None, pool: ThreadPool) -> None:
    x = np.round(normal(*shape) * 5)  # many are equal, and zeros have both signs: the first in a line comes first
    x.reshape(-1)[3:40:9] = np.array([np.inf, -np.inf, np.nan, -np.nan, 1e-40], np.float32)
    values, places = torch.sort(torch.tensor(x), dim=axis, descending=bool(largest), stable=True)
    taken = min(count or shape[axis], shape[axis])
    wanted = [np.ascontiguousarray(found.narrow(axis, 0, taken).numpy()) for found in (values, places)]
    got = native("TopK", [x, np.array([taken])], {"axis": axis, "largest": largest}, pool, wanted, (1,))
    np.testing.assert_array_equal(got[0], wanted[0])
    np.testing.assert_array_equal(got[1], wanted[1])


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "float64"])
def test_kernels_for_float32_take_no_other_type(dtype: str, tmp_path: Path) -> None:
    """Sorts, a large product and a running sum of other types are those of numpy."""
    numbers = [-(2**40), 2**40 + 1, 2**40, 7, 3] if dtype == "int64" else [9, 1, 5, 7, 3]
    x = rng.choice(np.array(numbers, dtype), 40)
    a = np.ones((128, 128), np.int32 if dtype == "uint8" else dtype)
    kind, product = onnx.helper.np_dtype_to_tensor_dtype(x.dtype), onnx.helper.np_dtype_to_tensor_dtype(a.dtype)
    node = onnx.helper.make_node
    nodes = [
        node("TopK", ["x", "k"], ["least", "least_at"], largest=0),
        node("TopK", ["x", "k"], ["most", "most_at"]),
        node("MatMul", ["a", "a"], ["squared"]),
        node("CumSum", ["a", "axis"], ["sums"]),
    ]
    value = onnx.helper.make_tensor_value_info
    outputs = [value(name, kind, [40]) for name in ("least", "most")]
    outputs += [value(name, onnx.TensorProto.INT64, [40]) for name in ("least_at", "most_at")]
    outputs += [value(name, product, [128, 128]) for name in ("squared", "sums")]
    inputs = [value("x", kind, [40]), value("a", product, [128, 128])]
    constants = [onnx.numpy_helper.from_array(np.array(number), name) for name, number in (("k", [40]), ("axis", 0))]
    graph = onnx.helper.make_graph(nodes, "g", inputs, outputs, constants)
    onnx.save(
        onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=9), tmp_path / "m.onnx"
    )
    np.savez(tmp_path / "i.npz", x=x, a=a)
    files = [str(tmp_path / "m.onnx"), "--inputs", str(tmp_path / "i.npz"), "-o", str(tmp_path / "o.npz")]
    assert main(["run", *files, "--backend", "onnxruntime"]) == 0
    order = np.argsort(x, kind="stable")
    reverse = 39 - np.argsort(x[::-1], kind="stable")[::-1]
    with np.load(tmp_path / "o.npz") as got:
        np.testing.assert_array_equal(got["least_at"], order)
        np.testing.assert_array_equal(got["least"], x[order])
        np.testing.assert_array_equal(got["most_at"], reverse)
        np.testing.assert_array_equal(got["most"], x[reverse])
        np.testing.assert_array_equal(got["squared"], a @ a)
        np.testing.assert_array_equal(got["sums"], np.cumsum(a, 0))


@pytest.mark.parametrize("points", [2, 3, 5, 7, 11, 13, 16, 30, 44, 128, 343, 400, 1001])
@pytest.mark.parametrize("inner", [1, 9])
def test_fourier_transforms_are_those_of_numpy(points: int, inner: int, pool: ThreadPool) -> None:
    z = rng.standard_normal((5, points, inner, 2)).astype(np.float32)
    wide = z.astype(np.float64).view(np.complex128)[..., 0]
    half = points // 2 + 1

    def transform(x: np.ndarray[Any, Any], want: np.ndarray[Any, Any], length: int, **attributes: int) -> None:
        pairs = np.stack([want.real, want.imag], -1) if np.iscomplexobj(want) else want[..., None]
        axis, count = np.array(1), np.array(length)
        (got,) = native("DFT", [x, count, axis], attributes, pool, [pairs.astype(np.float32)], (1, 2))
        close(got, pairs, 1e-6)

    transform(z, np.fft.fft(wide, axis=1), points)
    transform(z, np.fft.ifft(wide, axis=1), points, inverse=1)
    real = np.ascontiguousarray(z[..., :1])
    transform(real, np.fft.fft(wide.real, axis=1), points)
    transform(real, np.fft.ifft(wide.real, axis=1), points, inverse=1)
    transform(real, np.fft.rfft(wide.real, axis=1), points, onesided=1)
    transform(np.ascontiguousarray(z[:, :half]), np.fft.irfft(wide[:, :half], points, 1), points, inverse=1, onesided=1)
    for length in (14, 70):  # zeros behind, or the end left out
        transform(real, np.fft.rfft(wide.real, length, 1), length, onesided=1)


@pytest.mark.parametrize(("parts", "one_sided"), [(1, 1), (1, 0), (2, 0)])
def test_a_short_time_fourier_transform_is_that_of_numpy(parts: int, one_sided: int, pool: ThreadPool) -> None:
    x, window = normal(3, 700, parts), np.hanning(400).astype(np.float32)
    signal = x[..., 0] if parts == 1 else x[..., 0] + 1j * x[..., 1]
    frames = np.stack([signal[:, k : k + 400] for k in range(0, 301, 150)], 1)
    for inputs, scale in (([x, np.array(150), window, np.array(400)], window), ([x, np.array(150), None, np.array(400)], 1)):
        found = (np.fft.rfft if one_sided else np.fft.fft)(frames * scale)
        want = np.stack([found.real, found.imag], -1).astype(np.float32)
        (got,) = native("STFT", inputs, {"onesided": one_sided}, pool, [want], (1, 3))
        close(got, want, 1e-6)


def test_averages_of_a_long_line_take_no_matrix(pool: ThreadPool) -> None:
    """As a matrix, the windows would take 80 GB."""
    x = torch.tensor(normal(1, 1, 200_000), requires_grad=True)
    y = torch.nn.functional.avg_pool1d(x, 4)
    dy = torch.tensor(normal(*y.shape))
    (dx,) = torch.autograd.grad(y, x, dy)
    attributes = {"kernel_shape": [4], "strides": [4]}
    close(native("AveragePool", [x.detach().numpy()], attributes, pool, [y.detach().numpy()])[0], y.detach().numpy())
    operands = [dy.numpy(), shape_of(x.numpy(force=True))]
    close(native("graphc::AveragePoolGrad", operands, attributes, pool, [dx.numpy()], (1,))[0], dx.numpy())


@pytest.mark.parametrize(
    ("block", "options"),
    [
        ((3, 3), {"padding": 1}),
        ((2, 4), {"stride": (2, 3)}),
        ((3, 2), {"dilation": (2, 3), "padding": (1, 2), "stride": (1, 2)}),
        ((1, 1), {}),
    ],
)
def test_columns_of_windows_add_up_to_images(block: tuple[int, ...], options: dict[str, Any], pool: ThreadPool) -> None:
    image = (11, 14)
    sizes = torch.nn.functional.unfold(torch.zeros(1, 1, *image), block, **options).shape
    columns = normal(2, 5 * sizes[1], sizes[2])
    want = torch.nn.functional.fold(torch.tensor(columns), image, block, **options).numpy()
    wide = {name: [n, n] if isinstance(n, int) else list(n) for name, n in options.items()}
    given = {"strides": wide.get("stride"), "dilations": wide.get("dilation"), "pads": wide.get("padding", []) * 2}
    attributes = {name: value for name, value in given.items() if value}
    close(native("Col2Im", [columns, np.array(image), np.array(block)], attributes, pool, [want], (1, 2))[0], want)


@pytest.mark.parametrize(
    ("kernel", "stride", "pads"),
    [
        ((2, 2), (2, 2), (0, 0)),
        ((3, 3), (3, 3), (0, 0)),
        ((2, 1), (4, 4), (0, 0)),  # gaps between windows
        ((3, 3), (2, 2), (1, 1)),
        ((2, 5), (1, 3), (0, 2)),
        ((3, 3), (1, 1), (1, 1)),
        ((2, 7), (2, 5), (1, 3)),
    ],
)
@pytest.mark.parametrize("size", [(9, 71), (64, 64), (5, 6)])
def test_average_pool_of_images(
    kernel: tuple[int, int], stride: tuple[int, int], pads: tuple[int, int], size: tuple[int, int], pool: ThreadPool
) -> None:
    x = torch.tensor(normal(3, 5, *size), requires_grad=True)
    for include in (0, 1):
        y = torch.nn.functional.avg_pool2d(x, kernel, stride, pads, count_include_pad=bool(include))
        dy = torch.tensor(normal(*y.shape))
        (dx,) = torch.autograd.grad(y, x, dy)
        attributes = {"kernel_shape": kernel, "strides": stride, "pads": [*pads, *pads], "count_include_pad": include}
        close(native("AveragePool", [x.detach().numpy()], attributes, pool, [y.detach().numpy()])[0], y.detach().numpy())
        operands = [dy.numpy(), shape_of(x.numpy(force=True))]
        close(native("graphc::AveragePoolGrad", operands, attributes, pool, [dx.numpy()], (1,))[0], dx.numpy())


@pytest.mark.parametrize(
    ("kernel", "stride", "pads"), [((1, 25), (1, 1), (0, 12)), ((3, 7), (2, 6), (1, 3)), ((20, 18), (20, 18), (0, 0))]
)
def test_averages_over_long_windows(
    kernel: tuple[int, ...], stride: tuple[int, ...], pads: tuple[int, ...], pool: ThreadPool
) -> None:
    x = torch.tensor(normal(2, 3, 40, 71), requires_grad=True)
    y = torch.nn.functional.avg_pool2d(x, kernel, stride, pads, count_include_pad=False)
    dy = torch.tensor(normal(*y.shape))
    (dx,) = torch.autograd.grad(y, x, dy)
    attributes = {"kernel_shape": kernel, "strides": stride, "pads": [*pads, *pads]}
    close(native("AveragePool", [x.detach().numpy()], attributes, pool, [y.detach().numpy()])[0], y.detach().numpy())
    operands = [dy.numpy(), shape_of(x.numpy(force=True))]
    close(native("graphc::AveragePoolGrad", operands, attributes, pool, [dx.numpy()], (1,))[0], dx.numpy())


@pytest.mark.parametrize(
    ("kernel", "pads"),
    [
        ((5, 1, 1), (2, 0, 0)),
        ((1, 3, 1), (0, 1, 0)),
        ((1, 1, 4), (0, 0, 2)),
        ((1, 3, 2), (0, 1, 1)),
        ((1, 1, 1), (0, 0, 0)),
        ((3, 4, 5), (1, 2, 2)),
    ],
)
@pytest.mark.parametrize("stride", [1, 2])
def test_average_pool_of_volumes(kernel: tuple[int, ...], pads: tuple[int, ...], stride: int, pool: ThreadPool) -> None:
    strides = [stride if taps > 1 else 1 for taps in kernel]
    x = torch.tensor(normal(2, 3, 6, 7, 8), requires_grad=True)
    for include in (0, 1):
        y = torch.nn.functional.avg_pool3d(x, kernel, strides, pads, count_include_pad=bool(include))
        dy = torch.tensor(normal(*y.shape))
        (dx,) = torch.autograd.grad(y, x, dy)
        attributes = {"kernel_shape": kernel, "strides": strides, "pads": [*pads, *pads], "count_include_pad": include}
        close(native("AveragePool", [x.detach().numpy()], attributes, pool, [y.detach().numpy()])[0], y.detach().numpy())
        (got,) = native(
            "graphc::AveragePoolGrad", [dy.numpy(), shape_of(x.numpy(force=True))], attributes, pool, [dx.numpy()], (1,)
        )
        close(got, dx.numpy())


@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("size", [(7, 9), (1, 6), (3, 5, 4)], ids=str)
def test_samples_at_places_are_those_of_pytorch(
    mode: str, padding: str, corners: bool, size: tuple[int, ...], pool: ThreadPool
) -> None:
    x, grid = normal(2, 3, *size), 1.5 * normal(2, *(23,) * len(size), len(size))
    want = torch.nn.functional.grid_sample(torch.tensor(x), torch.tensor(grid), mode, padding, corners).numpy()
    kind = "linear" if mode == "bilinear" else mode
    attributes = {"mode": kind, "padding_mode": padding, "align_corners": int(corners)}
    (got,) = native("GridSample", [x, grid], attributes, pool, [want])
    close(got, want, 1e-5)


def test_a_place_that_is_nan_gives_nan(pool: ThreadPool) -> None:
    x, grid = normal(1, 2, 4, 4), normal(1, 3, 3, 2)
    grid[0, 1, 1, 0], grid[0, 2, 2, 1] = np.nan, np.inf
    (got,) = native("GridSample", [x, grid], {}, pool, [np.zeros((1, 2, 3, 3), np.float32)])
    assert np.isnan(got[:, :, 1, 1]).all()
    assert (got[:, :, 2, 2] == 0).all()
    assert np.isfinite(got).sum() == got.size - 2


def test_activations(pool: ThreadPool) -> None:
    x = np.concatenate([normal(40_000) * 3, np.array([0.0, -0.0, 30.0, -30.0], dtype=np.float32)])
    dy = normal(x.size)
    compare("graphc::ReluGrad", [dy, x], {}, pool, tolerance=0)
    for approximate in ("none", "tanh"):
        exact = torch.tensor(x, dtype=torch.float64, requires_grad=True)
        wanted = torch.nn.functional.gelu(exact, approximate=approximate)
        (y,) = native("Gelu", [x], {"approximate": approximate}, pool, [x])
        close(y, wanted.detach().numpy())
        wanted.backward(torch.tensor(dy, dtype=torch.float64))
        (dx,) = native("graphc::GeluGrad", [dy, x], {"approximate": approximate}, pool, [x])
        close(dx, exact.grad.numpy())


@pytest.mark.parametrize("shape", [(40, 8, 7, 130), (3, 1), (5, 2000)])
def test_softmax(shape: tuple[int, ...], pool: ThreadPool) -> None:
    x = normal(*shape) * 5
    x[0, ..., : shape[-1] // 2] = -np.inf
    compare("Softmax", [x], {"axis": -1}, pool)
    y = torch.softmax(torch.tensor(x), -1).numpy()
    compare("graphc::SoftmaxGrad", [normal(*shape), y], {"axis": len(shape) - 1}, pool)


SEEN = np.random.default_rng(0).random((4, 6, 7)) < 0.5
SEEN[1, 2] = False  # a query that sees nothing
ATTENTIONS = [
    # layout, heads of q, of k and v, queries, keys, elements of k and of v, mask
    ("bhtd,bhtd,bhtd->bhtd", 3, 3, 5, 7, 4, 6, None),
    ("bthd,bthd,bthd->tbhd", 4, 2, 5, 7, 4, 4, None),
    ("tb0hd,tb1hd,tb2hd->tbhd", 4, 4, 6, 6, 4, 4, None),
    ("tbhd,tb0hd,tb1hd->bhtd", 4, 4, 6, 7, 4, 4, normal(2, 1, 6, 7)),
    ("htbd,hbtd,thbd->tbhd", 4, 4, 6, 7, 4, 4, SEEN),
    ("htbd,hbtd,thbd->tbhd", 4, 1, 6, 7, 4, 4, np.where(SEEN, normal(4, 6, 7), np.float32(-np.inf))),
    ("btd,btd,btd->btd", 1, 1, 300, 700, 8, 8, None),
    ("bthd,bthd,bthd->bthd", 2, 2, 100, 100, 40, 72, None),  # several panels, and a last block of fewer queries
    ("bhtd,bhtd,bhtd->bhtd", 1, 1, 150, 600, 72, 40, None),
]


@pytest.mark.full
@pytest.mark.parametrize("saves", ["probabilities", "logsumexp"])
@pytest.mark.parametrize(
    ("case", "causal"),  # every layout with one of the two in `make test`
    [
        pytest.param(
            case, causal, id=f"{case[0]}-{case[3]}x{case[4]}-{causal}", marks=() if k % 2 == causal else pytest.mark.large
        )
        for k, case in enumerate(ATTENTIONS)
        for causal in (0, 1)
    ],
)
def test_attention(case: tuple[Any, ...], causal: int, saves: str, pool: ThreadPool) -> None:
    layout, heads, key_heads, queries, keys, size, width, mask = case
    axes = operand_axes(layout)
    sizes = [{"b": 2, "h": h, "t": t, "d": d} for h, t, d in ((heads, queries, size), (key_heads, keys, size))]
    sizes += [{**sizes[1], "d": width}, {**sizes[0], "d": width}]
    parts = sum(packed(a) is not None for a in axes)
    made = [normal(*(parts if c.isdigit() else of[c] for c in a)) for a, of in zip(axes, sizes, strict=True)]
    first = next((x for x, a in zip(made, axes, strict=True) if packed(a) is not None), None)
    q, k, v = (x if packed(a) is None else first for x, a in zip(made[:3], axes, strict=False))
    attributes = {"scale": min(0.3, size**-0.5), "causal": causal, "layout": layout, "saves": saves}
    drawn = np.random.default_rng(1).random((2, heads, queries, keys)) < 0.7
    for keep, factor in (
        (None, 1.0),
        (np.where(drawn, np.float32(1 / 0.7), np.float32(0)), 1.0),
        (drawn.astype(np.float32), 1 / 0.7),
    ):
        options, kept = {**attributes, "factor": factor}, [] if keep is None else [keep]
        compare("graphc::ScaledDotProductAttention", [q, k, v, mask, *kept], options, pool)
        y, saved = reference("graphc::ScaledDotProductAttention", [q, k, v, mask, *kept], options)
        compare("graphc::ScaledDotProductAttentionGrad", [made[3], q, k, v, mask, y, saved, *kept], options, pool)


@pytest.mark.parametrize("shape", [(2, 3, 5, 1), (1, 3, 5, 7), (5, 7)])
def test_attention_refuses_a_dropout_mask_that_lacks_elements(shape: tuple[int, ...]) -> None:
    operands = [normal(2, 3, 5, 4), normal(2, 3, 7, 4), normal(2, 3, 7, 4), None]
    for keep, fits in ((normal(*shape), False), (normal(2, 3, 5, 7), True)):
        graph = single_node("graphc::ScaledDotProductAttention", [*operands, keep], {"scale": 1.0}, ()).graph
        (node,) = (n for n in graph if n.op_type == "ScaledDotProductAttention")
        assert (native_kernel("onnxruntime", node) is not None) == fits


@pytest.mark.full
@pytest.mark.parametrize("causal", [False, True])
def test_attention_against_pytorch(causal: bool, pool: ThreadPool) -> None:
    arrays = [normal(2, 4, 40, 16) for _ in range(4)]
    tensors = [torch.tensor(a, requires_grad=True) for a in arrays]
    wanted = torch.nn.functional.scaled_dot_product_attention(*tensors[:3], is_causal=causal)
    wanted.backward(tensors[3])
    attributes = {"scale": 0.25, "causal": int(causal), "layout": "bhtd,bhtd,bhtd->bhtd", "saves": "probabilities"}
    like = [arrays[0], np.empty((2, 4, 40, 40), np.float32)]
    y, saved = native("graphc::ScaledDotProductAttention", arrays[:3], attributes, pool, like)
    operands = [arrays[3], *arrays[:3], None, y, saved]
    found = native("graphc::ScaledDotProductAttentionGrad", operands, attributes, pool, arrays[:3])
    for got, want in zip([y, *found], [wanted.detach(), *(t.grad for t in tensors[:3])], strict=True):
        np.testing.assert_allclose(got, want.numpy(), rtol=0, atol=1e-5 * float(want.abs().max()))


@pytest.mark.skipif(binding.library() is None, reason="needs oneDNN")
@pytest.mark.parametrize(("m", "k", "n"), [(128, 256, 64), (33, 1000, 70)])
@pytest.mark.parametrize(("a", "b"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_products(m: int, k: int, n: int, a: int, b: int, pool: ThreadPool) -> None:
    left, right = normal(*((k, m) if a else (m, k))), normal(*((n, k) if b else (k, n)))
    for bias in (None, normal(n), normal(1, n)):
        compare("Gemm", [left, right, bias], {"transA": a, "transB": b}, pool)
    if not a and not b:
        compare("MatMul", [left.reshape(1, m, 1, k), right], {}, pool)
        compare("MatMul", [normal(2, 3, m, k), normal(2, 3, k, n)], {}, pool)
        compare("MatMul", [normal(m, k), normal(2, 3, k, n)], {}, pool)


@pytest.mark.full
@pytest.mark.parametrize(("a", "b"), [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize(("m", "k", "n"), [(1024, 200, 100), (67, 1024, 512), (300, 131, 1024), (64, 300, 1100), (99, 515, 77)])
def test_products_of_large_matrices_in_every_layout(m: int, k: int, n: int, a: int, b: int, pool: ThreadPool) -> None:
    left, right = normal(*((k, m) if a else (m, k))), normal(*((n, k) if b else (k, n)))
    for bias in (None, normal(n)):
        compare("Gemm", [left, right, bias], {"transA": a, "transB": b}, pool)


OTHER_VECTORS = """
import dataclasses
import sys

from graphc.backends.host import processor as module

lanes = int(sys.argv[1])
found = dataclasses.replace(module.processor(), lanes=lanes, level=None)
module.processor = lambda: found
"""

PRODUCTS = """
import numpy as np
from graphc.backends.onnxruntime.kernels.products.panels import product_in_panels
from graphc.backends.onnxruntime.pool import ThreadPool

rng = np.random.default_rng(0)
pool = ThreadPool(2)
worst = 0.0
for m, k, n in ((1, 3, 2), (70, 300, 131), (256, 40, 64)):
    turned_a, turned_b = rng.standard_normal((k, m), dtype=np.float32).T, rng.standard_normal((n, k), dtype=np.float32).T
    for a in (turned_a, turned_a.copy(order="C")):
        for b in (turned_b, turned_b.copy(order="C")):
            for bias in (None, rng.standard_normal(n, dtype=np.float32)):
                c, exact = np.full((m, n), np.nan, dtype=np.float32), a.astype(np.float64) @ b + (0 if bias is None else bias)
                product_in_panels(pool, a, b, c, bias)()
                worst = max(worst, float(np.abs(c - exact).max() / np.abs(exact).max()))
pool.close()
print(worst < 1e-5, worst)
"""


@pytest.mark.full  # processes that compile
@pytest.mark.parametrize("lanes", params([4, 16], large=[4, 16]))
def test_products_in_panels_with_vectors_of_other_processors(
    lanes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHC_CACHE_DIR", str(tmp_path))
    command = [sys.executable, "-c", OTHER_VECTORS + PRODUCTS, str(lanes)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.stdout.startswith("True"), found.stdout + found.stderr


@pytest.mark.full  # processes that compile
@pytest.mark.parametrize("lanes", params([4, 16], large=[4, 16]))
def test_attention_with_vectors_of_other_processors(lanes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHC_CACHE_DIR", str(tmp_path))
    tests = f"{__file__}::test_attention_against_pytorch"
    script = f"{OTHER_VECTORS}\nimport pytest\nsys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', {tests!r}]))"
    found = subprocess.run([sys.executable, "-c", script, str(lanes)], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("threads", [2, 3, 4])
def test_a_small_result_is_shared_among_threads(threads: int) -> None:
    assert len(parts_of_product(64, 64, threads)) == threads


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 6, 7, 16])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (64, 5000), (67, 512), (1024, 96), (700, 700)])
def test_parts_of_a_product_cover_it_once(rows: int, columns: int, threads: int) -> None:
    covered = np.zeros((rows, columns), dtype=np.int64)
    tiles = parts_of_product(rows, columns, threads)
    for top, bottom, left, right in tiles:
        covered[top:bottom, left:right] += 1
    assert (covered == 1).all()
    assert len(tiles) <= threads


@pytest.mark.parametrize("shape", [(700, 24), (17, 10, 100), (20000,)])
def test_gradient_of_a_gather(shape: tuple[int, ...], pool: ThreadPool) -> None:
    indices = rng.integers(-shape[0], shape[0], (9, 5))
    for kind in (np.int64, np.int32):
        arrays = [normal(9, 5, *shape[1:]), indices.astype(kind), np.array(shape)]
        compare("graphc::GatherGrad", arrays, {}, pool, constants=(2,))


@pytest.mark.parametrize(("shape", "axis", "count"), [((8, 4, 48, 32), 3, 48), ((20, 30, 40), -2, 25), ((9, 2000), 0, 18)])
def test_gradient_of_a_gather_of_elements(shape: tuple[int, ...], axis: int, count: int, pool: ThreadPool) -> None:
    picked = list(shape)
    picked[axis] = count
    indices = rng.integers(-shape[axis], shape[axis], picked)
    for kind in (np.int64, np.int32):
        arrays = [normal(*picked), indices.astype(kind), np.array(shape)]
        compare("graphc::GatherElementsGrad", arrays, {"axis": axis}, pool, constants=(2,))


@pytest.mark.skipif(binding.library() is None, reason="needs oneDNN")
@pytest.mark.full
@pytest.mark.parametrize(
    ("of_a", "of_b", "of_y"),
    [
        ((0, 1, 3, 2), (0, 1, 2, 3), (0, 1, 2, 3)),
        ((0, 2, 1, 3), (0, 2, 3, 1), (0, 1, 2, 3)),
        ((0, 1, 2, 3), (0, 2, 1, 3), (0, 2, 1, 3)),
        ((1, 0, 2, 3), (2, 0, 1, 3), (1, 2, 0, 3)),
        ((0, 2, 3, 1), (0, 1, 3, 2), (2, 0, 1, 3)),
    ],
)
@pytest.mark.parametrize("sizes", [(2, 3, 65, 40, 70), (1, 4, 34, 64, 33), (3, 1, 32, 65, 130), (2, 2, 260, 512, 520)])
def test_products_of_permuted_operands(
    sizes: tuple[int, ...], of_a: tuple[int, ...], of_b: tuple[int, ...], of_y: tuple[int, ...], pool: ThreadPool
) -> None:
    outer, inner, rows, depth, columns = sizes
    a = normal(*(((outer, inner, rows, depth)[of_a.index(axis)]) for axis in range(4)))
    b = normal(*(((outer, inner, depth, columns)[of_b.index(axis)]) for axis in range(4)))
    compare("graphc::PermutedMatMul", [a, b], {"permA": of_a, "permB": of_b, "permY": of_y}, pool)


@pytest.mark.parametrize("rows", [1, 97, 600])
@pytest.mark.parametrize(("experts", "depth", "width"), [(1, 5, 3), (3, 300, 33), (6, 97, 1030), (4, 16, 64)])
def test_products_by_groups_of_rows(rows: int, experts: int, depth: int, width: int, pool: ThreadPool) -> None:
    owner = rng.integers(-1, experts + 1, rows)
    for owners in (owner, np.full_like(owner, experts - 1)):  # some rows have no matrix; all have the same one
        x, dy, w = normal(rows, depth), normal(rows, width), normal(experts, depth, width)
        compare("graphc::GroupedMatMul", [x, w, owners], {}, pool)
        compare("graphc::GroupedMatMul", [dy, w, owners], {"transB": 1}, pool)
        compare("graphc::GroupedMatMulGradWeight", [x, dy, owners, np.array(w.shape)], {}, pool, constants=(3,))


def test_products_by_groups_of_rows_have_the_same_bits_on_any_number_of_threads() -> None:
    x, dy, w, owner = normal(600, 300), normal(600, 333), normal(3, 300, 333), rng.integers(0, 3, 600)
    for op, arrays, constants in (
        ("graphc::GroupedMatMul", [x, w, owner], ()),
        ("graphc::GroupedMatMulGradWeight", [x, dy, owner, np.array(w.shape)], (3,)),
    ):
        like = [np.empty((600, 333) if op.endswith("MatMul") else w.shape, np.float32)]
        pools = [ThreadPool(threads) for threads in (1, 2, 3)]
        found = [native(op, arrays, {}, pool, like, constants)[0] for pool in pools]
        for pool in pools:
            pool.close()
        for other in found[1:]:
            np.testing.assert_array_equal(found[0], other)


@pytest.mark.parametrize(("shape", "axis"), [((16, 20, 256), -1), ((3, 4, 5), 1), ((7, 3), -1)])
def test_layer_normalization_forward(shape: tuple[int, ...], axis: int, pool: ThreadPool) -> None:
    size = shape[axis:] if axis > 0 else shape[-1:]
    arrays = [normal(*shape) + 3, normal(*size), normal(*size)]
    compare("LayerNormalization", arrays, {"axis": axis, "epsilon": 1e-3}, pool)
    compare("LayerNormalization", arrays[:2], {"axis": axis}, pool)


def test_nan_survives(pool: ThreadPool) -> None:
    x = np.array([np.nan, 1.0], dtype=np.float32)
    ones = np.ones(2, dtype=np.float32)
    for approximate in ("none", "tanh"):
        (dx,) = native("graphc::GeluGrad", [ones, x], {"approximate": approximate}, pool, [x])
        assert np.isnan(dx).tolist() == [True, False]
    logits = np.array([[np.nan, 1.0], [2.0, 3.0]], dtype=np.float32)
    for scores, label in ((logits, np.zeros(2, np.int64)), (np.tile(logits[:, :, None], 9), np.zeros((2, 9), np.int64))):
        like = [np.zeros((), np.float32), np.zeros((), np.float32), scores]
        total, _, log_prob = native("graphc::SoftmaxCrossEntropy", [scores, label], {"axis": 1}, pool, like)
        assert np.isnan(total)
        assert np.isnan(log_prob[0]).all()
        assert not np.isnan(log_prob[1]).any()


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ignore", [pytest.param(None, marks=pytest.mark.full), -100])
@pytest.mark.parametrize(
    ("shape", "axis"), [((50, 1000), 1), ((6, 5, 7, 3), 1), ((2, 4, 17, 19), 1), ((5, 3, 2), 1), ((4, 9, 11), -1)]
)
def test_softmax_cross_entropy(
    smoothing: float, weighted: bool, ignore: int | None, shape: tuple[int, ...], axis: int, pool: ThreadPool
) -> None:
    logits = normal(*shape) * 5
    classes = shape[axis]
    kept = [d for k, d in enumerate(shape) if k != axis % len(shape)]
    label = rng.integers(0, classes, kept)
    if ignore is not None:
        label[rng.random(kept) < 0.3] = ignore
    weight = rng.random(classes).astype(np.float32) if weighted else None
    attributes = {"axis": axis, "ignore_index": ignore, "label_smoothing": smoothing}
    arrays = [logits, label, weight]
    compare("graphc::SoftmaxCrossEntropy", arrays, attributes, pool)
    log_prob = torch.log_softmax(torch.tensor(logits), axis).numpy()
    dtotal = np.array(0.7, dtype=np.float32)
    compare("graphc::SoftmaxCrossEntropyGrad", [dtotal, log_prob, label.astype(np.int32), weight], attributes, pool)


@pytest.mark.parametrize(("shape", "axis"), [((40, 500), 1), ((3, 50, 130), 1), ((60, 3), 0), ((9,), -1)])
@pytest.mark.parametrize("exclusive", [0, 1])
@pytest.mark.parametrize("reverse", [0, 1])
def test_running_sums(shape: tuple[int, ...], axis: int, exclusive: int, reverse: int, pool: ThreadPool) -> None:
    x = normal(*shape)
    (found,) = native("CumSum", [x, np.array(axis)], {"exclusive": exclusive, "reverse": reverse}, pool, [x], constants=(1,))
    wide = np.flip(x, axis) if reverse else x
    expected = np.cumsum(wide, axis, dtype=np.float64) - exclusive * wide
    np.testing.assert_allclose(found, np.flip(expected, axis) if reverse else expected, rtol=1e-6, atol=1e-6)


def test_a_loss_near_zero_is_not_rounded_as_its_scores_are(pool: ThreadPool) -> None:
    """Scores around 1000, which float32 rounds in steps of 6e-5; the loss is rounded as numbers around 1 are."""
    logits = normal(64, 10) + np.float32(1000)
    label = logits.argmax(1)
    logits[np.arange(64), label] += np.float32(8)
    expected = torch.log_softmax(torch.from_numpy(logits).double(), 1).numpy()
    attributes = {"axis": -1, "ignore_index": None, "label_smoothing": 0.0}
    like = [np.zeros((), np.float32), np.zeros((), np.float32), np.zeros_like(logits)]
    _, _, log_prob = native("graphc::SoftmaxCrossEntropy", [logits, label], attributes, pool, like)
    np.testing.assert_allclose(log_prob[np.arange(64), label], expected[np.arange(64), label], rtol=0, atol=3e-7)


def test_label_outside_the_classes_gives_nan(pool: ThreadPool) -> None:
    outside = rng.integers(0, 3, (2, 10))
    outside[0, 3], outside[1, 7] = 3, -1
    for logits, label in ((normal(4, 3), np.array([0, 3, -1, 2])), (normal(2, 3, 10), outside)):
        compare("graphc::SoftmaxCrossEntropy", [logits, label], {"axis": 1}, pool)
        compare("graphc::SoftmaxCrossEntropyGrad", [np.array(1.0, dtype=np.float32), logits, label], {"axis": 1}, pool)


@pytest.mark.parametrize("offset", [pytest.param(0, marks=pytest.mark.full), 3])
@pytest.mark.parametrize("shape", [(5, 7), (3, 4096), (2, 3, 3)])
def test_random_numbers_are_bit_for_bit_those_of_the_decomposition(
    offset: int, shape: tuple[int, ...], pool: ThreadPool
) -> None:
    arrays = [np.array(shape), np.array(-(2**62) + 5), np.array(2**33 + 1), np.array(offset)]
    compare("graphc::DropoutMask", arrays, {"ratio": 0.3, "tag": "block/dropout"}, pool, (0,), tolerance=0)
    compare("graphc::Uniform", arrays, {"tag": "block/noise"}, pool, (0,), tolerance=0)


UPDATES: list[tuple[str, int, dict[str, Any]]] = [
    # op, number of state tensors, attributes
    ("SGD", 0, {}),
    ("SGD", 0, {"weight_decay": 0.1}),
    ("SGD", 0, {"weight_decay": 0.1, "clip_value": 0.05}),
    ("Momentum", 1, {"momentum": 0.9}),
    ("Momentum", 1, {"momentum": 0.8, "dampening": 0.3, "weight_decay": 0.1}),
    ("Momentum", 1, {"momentum": 0.8, "nesterov": 1, "weight_decay": 0.1, "clip_value": 0.05}),
    ("Adam", 2, {"weight_decay": 0.1}),
    ("Adam", 2, {"weight_decay": 0.1, "clip_value": 0.05}),
    ("AdamW", 2, {"beta1": 0.8}),
    ("Adagrad", 1, {"lr_decay": 0.1, "weight_decay": 0.1, "clip_value": 0.05}),
    ("RMSprop", 1, {"alpha": 0.9, "clip_value": 0.05}),
    ("RMSprop", 3, {"alpha": 0.9, "momentum": 0.5, "centered": 1, "weight_decay": 0.1}),
]


@pytest.mark.parametrize(("op", "states", "attributes"), UPDATES)
@pytest.mark.parametrize("divisor", [pytest.param(None, marks=pytest.mark.full), 12.0])
def test_updates(op: str, states: int, attributes: dict[str, Any], divisor: float | None, pool: ThreadPool) -> None:
    size = 50_001
    average = normal(size) * 0.1
    # A second moment is never below the square of the first.
    state: list[Any] = [[], [average], [average, average**2 + rng.random(size).astype(np.float32)]][min(states, 2)]
    if op in ("Adagrad", "RMSprop"):
        state = [average**2 + 0.5 + rng.random(size).astype(np.float32)]
        state += [average, normal(size)] if states == 3 else [None, None] if op == "RMSprop" else []
    step = [] if op in ("SGD", "RMSprop") else [np.array(1)]
    tail = [np.array(0.05, dtype=np.float32), None if divisor is None else np.array(divisor, dtype=np.float32)]
    for number in (1, 4):
        arrays = [normal(size), normal(size), *state, *(np.array(number) for _ in step), *tail]
        compare_update(op, arrays, attributes, pool)


def compare_update(op: str, arrays: list[Any], attributes: dict[str, Any], pool: ThreadPool) -> None:
    """Outputs apart from the inputs, then in place: equal to the decomposition, and to each other."""
    model = single_node(f"graphc::{op}", arrays, attributes, ())
    (node,) = (n for n in model.graph if n.op_type == op)
    declaration, kernel = declaration_of(node), native_kernel("onnxruntime", node)
    assert declaration is not None
    assert kernel is not None
    assert dict(kernel.inplace) == dict(declaration.next_value)
    for value in list(model.graph.outputs):
        index = declaration.next_value[node.outputs.index(value)]
        if index >= len(arrays) or arrays[index] is None:
            model.graph.outputs.remove(value)
    names = [v.name for v in model.graph.outputs]
    places = [declaration.next_value[[v.name for v in node.outputs].index(n)] for n in names]
    decompose_graph(model.graph, lambda n: False)
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    wanted = session.run(names, {i.name: arrays[int(i.name[1:])] for i in session.get_inputs()})

    values = declaration.attribute_values(node)
    apart = [np.full_like(arrays[i], 77) if i < len(arrays) and arrays[i] is not None else None for i in _states(declaration)]
    kernel.bind(Binding(node, arrays, apart, values, pool, {}))()
    own = [a.copy() if a is not None else None for a in arrays]
    within = [own[i] if i < len(own) else None for i in _states(declaration)]
    kernel.bind(Binding(node, own, within, values, pool, kernel.inplace))()
    for place, want in zip(places, wanted, strict=True):
        at = _states(declaration).index(place)
        np.testing.assert_allclose(apart[at], want, rtol=2e-6, atol=1e-6)
        np.testing.assert_array_equal(apart[at], within[at])


def _states(declaration: Any) -> list[int]:
    return [declaration.next_value[k] for k in sorted(declaration.next_value)]


def test_running_average_and_step_counter(pool: ThreadPool) -> None:
    compare_update("RunningAverage", [normal(70), normal(70), np.array(6, np.float32)], {"momentum": 0.7}, pool)
    compare_update("Increment", [np.array(41)], {}, pool)


@pytest.mark.parametrize("low", [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)])
def test_conversions_to_and_from_low_types(low: Any, pool: ThreadPool) -> None:
    """Every number of the low type and a million random bit patterns, against ml_dtypes and numpy bit for bit."""
    every = np.arange(1 << 16, dtype=np.uint16).view(low)
    (wide,) = native("graphc::Widen", [every], {"to": int(ir.DataType.FLOAT)}, pool, [np.zeros(every.size, np.float32)])
    edges = np.array([65504, 65519.996, 65520, 1e30, 2**-24, 2**-25, 1.001 * 2**-25, -(2**-14), 1e-40], dtype=np.float32)
    bits = rng.integers(0, 1 << 32, 1_000_000, dtype=np.uint32).view(np.float32)
    x = np.concatenate([edges, bits])
    to = int(ir.DataType.from_numpy(low))
    (narrow,) = native("graphc::RoundTo", [x], {"to": to}, pool, [np.zeros(x.size, low)])
    with np.errstate(all="ignore"):
        wanted = [(wide, every.astype(np.float32), np.uint32), (narrow, x.astype(low), np.uint16)]
    for got, want, unsigned in wanted:
        nan = np.isnan(want.astype(np.float32))
        np.testing.assert_array_equal(got.view(unsigned)[~nan], want.view(unsigned)[~nan])
        assert np.isnan(got.astype(np.float32)[nan]).all()


@pytest.mark.parametrize(("shape", "count"), [((7,), 3), ((40, 33), 40), ((2000, 100), 2000), ((5, 4), 20)])
def test_keep_largest(shape: tuple[int, ...], count: int, pool: ThreadPool) -> None:
    """Against the decomposition, ties and zeros among the elements; nothing is lost, bit for bit."""
    x = np.round(normal(*shape) * 20) / 20
    compare("graphc::KeepLargest", [x], {"count": count}, pool, tolerance=0)
    kept, rest = native("graphc::KeepLargest", [x], {"count": count}, pool, [x, x])
    assert np.count_nonzero(kept) <= count
    np.testing.assert_array_equal(np.where(kept != 0, kept, rest), x)
    assert np.abs(kept[kept != 0]).min() >= np.abs(rest).max()


@pytest.mark.parametrize("shape", [(50, 4), (3, 3), (200, 1)])
def test_orthogonalize(shape: tuple[int, ...], pool: ThreadPool) -> None:
    x = normal(*shape)
    (y,) = native("graphc::Orthogonalize", [x], {}, pool, [x])
    np.testing.assert_allclose(y.T @ y, np.eye(shape[1]), atol=1e-5)
    compare("graphc::Orthogonalize", [x], {}, pool, tolerance=2e-5)
    if shape[1] > 1:
        x[:, 1] = 3 * x[:, 0]  # depends on another column
        (y,) = native("graphc::Orthogonalize", [x], {}, pool, [x])
        assert not y[:, 1].any()
    x[0, 0] = np.nan
    assert np.isnan(native("graphc::Orthogonalize", [x], {}, pool, [x])[0]).any()


def test_sum_of_squares(pool: ThreadPool) -> None:
    """Over slices of one flat buffer, padding between them, and over arrays of their own; exact to float64's rounding."""
    flat = aligned_zeros(4 * 100_000).view(np.float32)
    arrays = [flat[:50_001].reshape(3, -1), flat[50_016:90_000], normal(7), normal(40_000) * np.float32(1e20)]
    for array in arrays[:2]:
        array[...] = normal(*array.shape)
    (total,) = native("graphc::SumOfSquares", arrays, {}, pool, [np.array(0.0)])
    assert total == pytest.approx(sum(float(np.sum(a.astype(np.float64) ** 2)) for a in arrays), rel=1e-12)


def test_sum_of_squares_does_not_depend_on_the_number_of_threads() -> None:
    array = normal(300_001)
    totals = []
    for threads in (1, 2, 3):
        pool = ThreadPool(threads)
        totals.append(float(native("graphc::SumOfSquares", [array], {}, pool, [np.array(0.0)])[0]))
        pool.close()
    assert len(set(totals)) == 1


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.complex64])
def test_the_check_finds_nan_and_infinity_anywhere(dtype: Any) -> None:
    backend = make_backend("onnxruntime", threads=3)
    arrays = [normal(3).astype(dtype), normal(100_003).astype(dtype)]
    calls: list[None] = []
    check = backend.bind_check(arrays, lambda: calls.append(None))
    check()
    assert not calls
    for array, place, value in ((0, 1, np.nan), (1, 0, -np.inf), (1, 50_000, np.inf), (1, 100_002, np.nan)):
        before, arrays[array][place] = arrays[array][place], value
        check()
        assert calls
        calls.clear()
        arrays[array][place] = before
    check()
    assert not calls
    backend.close()


def test_the_check_stops_a_row_of_native_calls() -> None:
    backend = make_backend("onnxruntime", threads=2)
    values, step = normal(40_000), np.zeros(1, dtype=np.int64)
    (node,) = single_node("graphc::Increment", [step], {}, ()).graph
    increment = backend.bind_kernel(node, [step], [step], {0: 0})

    def fail() -> None:
        raise FloatingPointError

    check = backend.bind_check([values], fail)
    assert backend.joins(check)
    assert backend.joins(increment)
    row = backend.record([check, increment])
    row()
    values[30_000] = np.nan
    for _ in range(2):
        with pytest.raises(FloatingPointError):
            row()
    assert step[0] == 1
    values[30_000] = 0
    row()
    assert step[0] == 2
    backend.close()


@numba.njit(nogil=True)
def _mark(seen: np.ndarray[Any, Any], start: int, stop: int) -> None:
    for k in range(start, stop):
        seen[k] += 1


@pytest.mark.full
def test_pool_covers_the_range_once_from_several_callers() -> None:
    def work(seen: np.ndarray[Any, Any], failures: list[BaseException]) -> None:
        try:
            own = ThreadPool(3)
            for total in (1, 2, 7, 1000):
                for _ in range(50):
                    own.run(_mark, (seen,), total)
            own.close()
        except BaseException as error:
            failures.append(error)

    seen = [np.zeros(1000, dtype=np.int64) for _ in range(4)]
    failures: list[BaseException] = []
    threads = [threading.Thread(target=work, args=(s, failures)) for s in seen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    expected = 50 * sum((np.arange(1000) < total).astype(np.int64) for total in (1, 2, 7, 1000))
    for s in seen:
        np.testing.assert_array_equal(s, expected)


def test_partition_is_even_and_keeps_the_grain() -> None:
    assert partition(10, 1, 3) == ((0, 3), (3, 6), (6, 10))
    assert partition(10, 6, 3) == ((0, 10),)
    assert partition(0, 1, 3) == ((0, 0),)


def test_pool_raises_what_a_range_raises_and_stays_usable() -> None:
    own = ThreadPool(2)

    def fail(start: int, stop: int) -> None:
        if start > 0:
            raise RuntimeError("range failed")

    with pytest.raises(RuntimeError, match="range failed"):
        own.run(fail, (), 4)
    seen = np.zeros(4, dtype=np.int64)
    own.run(_mark, (seen,), 4)
    assert seen.tolist() == [1, 1, 1, 1]
    before = threading.active_count()
    own.close()
    deadline = time.monotonic() + 60  # its threads end within milliseconds
    while threading.active_count() >= before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before - 1
    own.run(_mark, (seen,), 4)  # a closed pool runs in the caller
    assert seen.tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize("shape", [(6, 5), (700, 33), (9, 50, 7), (3, 7, 11), (4, 3, 9, 10), (2, 40, 33, 31)])
def test_batch_normalization(shape: tuple[int, ...], pool: ThreadPool) -> None:
    x, scale, bias = normal(*shape) * 2 + 5, normal(shape[1]), normal(shape[1])
    compare("graphc::BatchNormalizationTraining", [x, scale, bias], {"epsilon": 1e-3}, pool, tolerance=1e-5)
    exact = [torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in (x, scale, bias)]
    y = torch.nn.functional.batch_norm(exact[0], None, None, exact[1], exact[2], training=True, eps=1e-3)
    dy = normal(*shape)
    y.backward(torch.tensor(dy, dtype=torch.float64))
    axes = tuple(k for k in range(x.ndim) if k != 1)
    wide = x.astype(np.float64)
    mean, inv_std = wide.mean(axes).astype(np.float32), (1 / np.sqrt(wide.var(axes) + 1e-3)).astype(np.float32)
    made = native("graphc::BatchNormalizationTrainingGrad", [dy, x, scale, mean, inv_std], {}, pool, [x, scale, bias])
    for got, want in zip(made, exact, strict=True):
        close(got, want.grad.numpy(), 1e-5)


ACTIVATIONS: dict[str, Any] = {
    "relu": torch.relu,
    "clip": lambda y: torch.clamp(y, -0.5, 1.25),
    "leaky_relu": lambda y: torch.nn.functional.leaky_relu(y, -0.5),
    "hard_swish": torch.nn.functional.hardswish,
    "silu": torch.nn.functional.silu,
}


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("activation", [*ACTIVATIONS])
@pytest.mark.parametrize("shape", [(40, 33, 12), (9, 50, 8), (2, 40, 33, 31)])
def test_batch_normalization_with_what_follows(shape: tuple[int, ...], activation: str, added: bool, pool: ThreadPool) -> None:
    x, scale, bias = normal(*shape) * 2 + 5, normal(shape[1]), normal(shape[1])
    residual = [normal(*shape)] if added else []
    attributes = {"epsilon": 1e-3, "activation": activation, "alpha": -0.5, "beta": 1.25}
    compare("graphc::FusedBatchNormalization", [x, scale, bias, *residual], attributes, pool, tolerance=1e-5)


@pytest.mark.parametrize("activation", [*ACTIVATIONS])
@pytest.mark.parametrize("shape", [(40, 33, 12), (9, 50, 8), (2, 40, 33, 31)])
def test_gradients_of_batch_normalization_with_what_follows(shape: tuple[int, ...], activation: str, pool: ThreadPool) -> None:
    x, dy, scale, bias = normal(*shape) * 2 + 5, normal(*shape), 3 * normal(shape[1]), normal(shape[1])
    exact = [torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in (x, scale, bias)]
    y = torch.nn.functional.batch_norm(exact[0], None, None, exact[1], exact[2], training=True, eps=1e-3)
    ACTIVATIONS[activation](y).backward(torch.tensor(dy, dtype=torch.float64))
    axes = tuple(k for k in range(x.ndim) if k != 1)
    wide = x.astype(np.float64)
    mean, inv_std = wide.mean(axes).astype(np.float32), (1 / np.sqrt(wide.var(axes) + 1e-3)).astype(np.float32)
    attributes = {"activation": activation, "alpha": -0.5, "beta": 1.25}
    operands = [dy, x, scale, bias, mean, inv_std]
    made = native("graphc::FusedBatchNormalizationGrad", operands, attributes, pool, [x, scale, bias])
    for got, want in zip(made, exact, strict=True):
        assert want.grad is not None
        close(got, want.grad.numpy(), 1e-5)


def test_what_equals_a_bound_has_a_slope_where_the_gradient_is_closed(pool: ThreadPool) -> None:
    x = np.array([[[-1, -1, -1, -1, 1, 1, 1, 1]]], dtype=np.float32)  # the norm leaves it as it is
    one, none = np.ones(1, np.float32), np.zeros(1, np.float32)
    for closed in (0, 1):
        attributes = {"activation": "clip", "alpha": -1.0, "beta": 1.0, "closed": closed}
        operands = [np.ones_like(x), x, one, none, none, one]
        _, _, dbias = native("graphc::FusedBatchNormalizationGrad", operands, attributes, pool, [x, one, one])
        assert dbias == 8 * closed


@pytest.mark.parametrize(("shape", "axis"), [((5, 7, 64), -1), ((300, 256), 1), ((3, 4, 5, 6), 2)])
def test_layer_normalization_gradient(shape: tuple[int, ...], axis: int, pool: ThreadPool) -> None:
    x, dy, scale = normal(*shape), normal(*shape), normal(*shape[axis:])
    axes = tuple(range(axis % len(shape), len(shape)))
    mean = x.mean(axes, keepdims=True)
    inv_std = (1 / np.sqrt(x.var(axes, keepdims=True) + 1e-5)).astype(np.float32)
    compare("graphc::LayerNormalizationGrad", [dy, x, scale, mean, inv_std], {"axis": axis}, pool, tolerance=5e-6)


@pytest.mark.parametrize("size", [3, 4, 5])
def test_local_response_normalization_gradient(size: int, pool: ThreadPool) -> None:
    attributes = {"alpha": 0.3, "beta": 0.75 if size == 3 else 0.6, "bias": 1.5, "size": size}
    x = normal(2, 7, 20, 23)
    compare("graphc::LRNGrad", [normal(*x.shape), x, normal(*x.shape)], attributes, pool, tolerance=5e-6)


@pytest.mark.parametrize("shape", [(6, 5), (3, 7, 11), (2, 40, 33, 31)])
@pytest.mark.parametrize("live", [1.0, 0.0])
def test_shared_normalization(shape: tuple[int, ...], live: float, pool: ThreadPool) -> None:
    """Far from zero too, where a variance from float32 sums would be lost."""
    x, scale, bias, dy = normal(*shape) * np.float32(0.5) + 1000, normal(shape[1]), normal(shape[1]), normal(*shape)
    compare("graphc::BatchMoments", [x, np.array(live, np.float32)], {}, pool, tolerance=1e-12)
    axes = tuple(k for k in range(x.ndim) if k != 1)
    wide = x.astype(np.float64)
    sums = [np.array(x.size / shape[1]), wide.sum(axes), (wide * wide).sum(axes)]
    compare("graphc::BatchStatistics", sums, {"epsilon": 1e-3}, pool)
    mean, var, inv_std = native(
        "graphc::BatchStatistics", sums, {"epsilon": 1e-3}, pool, [x[0, :, ...].reshape(shape[1], -1)[:, 0]] * 3
    )
    np.testing.assert_allclose(mean, wide.mean(axes), rtol=1e-7)
    np.testing.assert_allclose(var, wide.var(axes), rtol=1e-6)
    compare(
        "graphc::SharedNormalization", [x, scale, bias, mean, inv_std, sums[0], np.array(live, np.float32)], {"tag": "t"}, pool
    )
    compare("graphc::SharedNormalizationSums", [dy, x, mean, inv_std], {}, pool)
    product, slope = normal(shape[1]).astype(np.float64), normal(shape[1]).astype(np.float64)
    compare(
        "graphc::SharedNormalizationGrad",
        [dy, x, scale, mean, inv_std, sums[0], product, slope, np.array(live, np.float32)],
        {},
        pool,
    )
