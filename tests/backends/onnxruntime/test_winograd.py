"""Convolutions by Winograd's algorithm against PyTorch's in double precision."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime")
torch = pytest.importorskip("torch")

from graphc.backends.onnxruntime.kernels.convolutions import winograd_plans  # noqa: E402
from graphc.backends.onnxruntime.kernels.onednn import binding  # noqa: E402
from graphc.backends.onnxruntime.pool import ThreadPool  # noqa: E402
from graphc.ir.ops.convolution import Window  # noqa: E402
from tests.backends.onnxruntime.node_cases import native  # noqa: E402

Array = np.ndarray[Any, Any]

CASES = {
    # samples, channels in and out, size, pads
    "even": (2, 32, 32, (16, 16), [1, 1, 1, 1]),
    "odd sizes": (3, 32, 64, (13, 19), [1, 1, 1, 1]),
    "no padding": (2, 32, 32, (31, 26), [0, 0, 0, 0]),
    "uneven padding": (2, 32, 32, (15, 16), [2, 1, 0, 2]),
    "channels beside the lanes": (4, 59, 61, (18, 18), [1, 1, 1, 1]),
    "fewer channels out": (2, 96, 32, (24, 24), [1, 1, 1, 1]),
    "images of a tile": (160, 32, 64, (2, 2), [1, 1, 1, 1]),
    "images wider than a block": (1, 32, 32, (6, 150), [1, 1, 1, 1]),
    "few tiles, many channels": (32, 64, 90, (4, 4), [1, 1, 1, 1]),
    "more threads than rows of tiles": (1, 64, 96, (6, 62), [1, 1, 1, 1]),
}


@pytest.fixture(params=[1, 3, 8])
def pool(request: pytest.FixtureRequest) -> Iterator[ThreadPool]:
    made = ThreadPool(request.param)
    yield made
    made.close()


def arrays(case: str) -> tuple[dict[str, Any], list[Array]]:
    """Attributes, and x, w, bias, y, dy, dx, dw of PyTorch."""
    samples, channels, outs, size, pads = CASES[case]
    rng = np.random.default_rng(3)
    x, w, b = (
        torch.tensor(rng.standard_normal(shape).astype(np.float32), dtype=torch.float64, requires_grad=True)
        for shape in [(samples, channels, *size), (outs, channels, 3, 3), (outs,)]
    )
    top, left, bottom, right = pads
    y = torch.conv2d(torch.nn.functional.pad(x, [left, right, top, bottom]), w, b)
    dy = torch.tensor(rng.standard_normal(y.shape).astype(np.float32), dtype=torch.float64)
    y.backward(dy)
    found = (x, w, b, y, dy, x.grad, w.grad)
    return {"kernel_shape": [3, 3], "pads": pads}, [a.detach().numpy().astype(np.float32) for a in found]


def close(got: Array, want: Array) -> None:
    np.testing.assert_allclose(got, want, rtol=0, atol=3e-6 * float(np.abs(want).max()))


def shape_of(array: Array) -> Array:
    return np.array(array.shape, dtype=np.int64)


@pytest.mark.skipif(binding.library() is None, reason="convolutions run in onnxruntime without oneDNN")
@pytest.mark.parametrize("case", CASES)
def test_convolutions_and_gradients_are_those_of_pytorch(case: str, pool: ThreadPool) -> None:
    attributes, (x, w, b, y, dy, dx, dw) = arrays(case)
    window = Window.of(attributes, x.shape[2:])
    assert all(winograd_plans.is_faster(kind, window, x.shape, y.shape) for kind in ("forward", "input", "weight"))
    close(native("Conv", [x, w, b], attributes, pool, [y])[0], y)
    close(native("Conv", [x, w], attributes, pool, [y])[0], y - b[:, None, None])
    close(native("graphc::ConvGradInput", [dy, w, shape_of(x)], attributes, pool, [dx], (2,))[0], dx)
    close(native("graphc::ConvGradWeight", [x, dy, shape_of(w)], attributes, pool, [dw], (2,))[0], dw)


@pytest.mark.skipif(binding.library() is None, reason="convolutions run in onnxruntime without oneDNN")
def test_a_nan_is_in_every_result_that_reads_it(pool: ThreadPool) -> None:
    attributes, (x, w, b, y, *_) = arrays("even")
    x[1, 3, 4, 5] = np.nan
    got = native("Conv", [x, w, b], attributes, pool, [y])[0]
    assert np.isnan(got[1, :, 3:6, 4:7]).all()
    assert not np.isnan(got[0]).any()


@pytest.mark.parametrize(
    ("shape", "change"),
    [
        ((8, 64, 64, 32, 32), {"strides": [2, 2]}),
        ((8, 64, 64, 32, 32), {"dilations": [2, 2]}),
        ((8, 64, 64, 32, 32), {"kernel_shape": [3, 1]}),
        ((8, 3, 64, 32, 32), {}),  # transforming costs more than it saves
        ((1, 512, 512, 2, 2), {}),  # so does transforming the weights
    ],
)
def test_other_convolutions_stay_in_onednn(shape: tuple[int, ...], change: dict[str, Any]) -> None:
    samples, channels, outs, *size = shape
    window = Window.of({"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], **change}, size)
    assert not any(
        winograd_plans.is_faster(kind, window, (samples, channels, *size), (samples, outs, *size))
        for kind in ("forward", "input")
    )


@pytest.mark.skipif(binding.library() is None, reason="convolutions run in onnxruntime without oneDNN")
def test_a_gradient_without_a_summand_is_zero_and_no_rounding(pool: ThreadPool) -> None:
    """Where x is 0 under a tap, rounding would leave 1e-9, of which Adam makes a whole step."""
    generator = np.random.default_rng(0)
    x, dy = (generator.standard_normal((3, 128, 4, 4)).astype(np.float32) for _ in "xy")
    x[:, :64, :3] = 0  # the first row of a window never meets the last of x
    (dw,) = native(
        "graphc::ConvGradWeight",
        [x, dy, np.array([128, 128, 3, 3])],
        {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]},
        pool,
        [np.zeros((128, 128, 3, 3), np.float32)],
        (2,),
    )
    assert (dw[:, :64, 0] == 0).all()
    assert (dw[:, :64, 1:] != 0).all()


@pytest.mark.skipif(binding.library() is None, reason="convolutions run in onnxruntime without oneDNN")
@pytest.mark.parametrize(
    ("samples", "channels", "size", "padding", "kept"),
    [
        (8, 128, (8, 8), (1, 1), 0.02),
        (2, 64, (71, 45), (1, 1), 0.0004),  # more pixels than are summed at a time
        (8, 64, (12, 9), (0, 2), 0.01),
    ],
)
def test_gradients_of_few_summands_keep_their_bits(
    samples: int, channels: int, size: tuple[int, int], padding: tuple[int, int], kept: float, pool: ThreadPool
) -> None:
    """As a ReLU and a pooling leave them: each gradient has few summands, many have none."""
    generator = np.random.default_rng(0)
    out = [length + 2 * pad - 2 for length, pad in zip(size, padding, strict=True)]
    x, dy = (generator.standard_normal((samples, channels, *lengths)).astype(np.float32) for lengths in (size, out))
    x *= generator.random(x.shape) < 0.1
    dy *= generator.random(dy.shape) < kept
    want = torch.nn.grad.conv2d_weight(
        torch.tensor(x).double(), (channels, channels, 3, 3), torch.tensor(dy).double(), padding=padding
    ).numpy()
    attributes = {"kernel_shape": [3, 3], "pads": [*padding, *padding]}
    assert winograd_plans.is_faster("weight", Window.of(attributes, x.shape[2:]), x.shape, dy.shape)
    (dw,) = native(
        "graphc::ConvGradWeight", [x, dy, np.array(want.shape)], attributes, pool, [np.zeros(want.shape, np.float32)], (2,)
    )
    none = want == 0
    assert none.sum() > 5_000
    assert (dw[none] == 0).all()
    small = ~none & (np.abs(want) > 1e-4)
    np.testing.assert_allclose(dw[small], want[small], rtol=5e-3)
    assert (np.sign(dw[small]) == np.sign(want[small])).all()
