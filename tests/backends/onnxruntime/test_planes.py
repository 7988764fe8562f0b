"""Depthwise convolutions of planes, against PyTorch's in double precision."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime")
torch = pytest.importorskip("torch")

from graphc.backends.onnxruntime.kernels.convolutions import planes  # noqa: E402
from graphc.backends.onnxruntime.kernels.convolutions.epilogues import PLAIN, ConvEpilogue  # noqa: E402
from graphc.backends.onnxruntime.pool import ThreadPool  # noqa: E402
from graphc.ir.ops.convolution import Window  # noqa: E402

Array = np.ndarray[Any, Any]

CASES = {
    # samples, channels, size, taps, stride, pads
    "three taps": (2, 5, (19, 53), 3, 1, (1, 1, 1, 1)),
    "two at a time": (2, 5, (19, 53), 3, 2, (1, 1, 1, 1)),
    "two at a time, even sizes": (2, 4, (20, 66), 3, 2, (1, 1, 1, 1)),
    "padding behind alone": (1, 3, (16, 40), 3, 2, (0, 0, 1, 1)),
    "no padding": (1, 3, (16, 37), 3, 1, (0, 0, 0, 0)),
    "no padding, two at a time": (1, 3, (17, 36), 5, 2, (0, 0, 0, 0)),
    "uneven padding": (1, 3, (13, 21), 5, 2, (1, 2, 2, 1)),
    "five taps": (2, 4, (10, 70), 5, 1, (2, 2, 2, 2)),
    "five taps, two at a time": (2, 4, (11, 70), 5, 2, (2, 2, 2, 2)),
    "more padding than taps": (1, 2, (9, 20), 3, 1, (4, 3, 5, 4)),
    "smaller than a window": (2, 3, (2, 3), 5, 1, (2, 2, 2, 2)),
    "smaller than a window, two at a time": (2, 3, (2, 3), 5, 2, (2, 2, 2, 2)),
    "a pixel": (1, 2, (1, 1), 3, 1, (1, 1, 1, 1)),
}


@pytest.fixture(params=[1, 3])
def pool(request: pytest.FixtureRequest) -> Iterator[ThreadPool]:
    made = ThreadPool(request.param)
    yield made
    made.close()


def arrays(case: str) -> tuple[Window, list[Array]]:
    """The window, and x, w, y, dy, dx, dw of PyTorch."""
    samples, channels, size, taps, stride, pads = CASES[case]
    rng = np.random.default_rng(3)
    x, w = (
        torch.tensor(rng.standard_normal(shape).astype(np.float32), dtype=torch.float64, requires_grad=True)
        for shape in [(samples, channels, *size), (channels, 1, taps, taps)]
    )
    padded = torch.nn.functional.pad(x, (pads[1], pads[3], pads[0], pads[2]))
    y = torch.conv2d(padded, w, None, stride, 0, 1, channels)
    dy = torch.tensor(rng.standard_normal(y.shape).astype(np.float32), dtype=torch.float64)
    y.backward(dy)
    window = Window((taps, taps), (stride, stride), (1, 1), pads[:2], pads[2:])
    return window, [a.detach().numpy().astype(np.float32) for a in (x, w, y, dy, x.grad, w.grad)]


def close(got: Array, want: Array, scale: float | None = None) -> None:
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * (scale or float(np.abs(want).max())))


@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients_are_those_of_pytorch(case: str, pool: ThreadPool) -> None:
    window, (x, w, y, dy, dx, dw) = arrays(case)
    results, images, weights = (np.full_like(a, np.nan) for a in (y, dx, dw))
    planes.convolve(pool, x, w, PLAIN, results, window)()
    close(results, y)
    planes.input_gradient(pool, dy, w, images, window)()
    close(images, dx)
    gradient = planes.weight_gradient(pool, x, weights, dy, window)
    gradient()
    close(weights, dw, float(np.abs(dw).max()) * max(1.0, dy[:, 0].size ** 0.5 / 10))
    before = weights.copy()
    gradient()
    assert np.array_equal(before, weights)


@pytest.mark.parametrize("case", ["three taps", "two at a time"])
def test_what_follows_is_computed_with_the_windows(case: str, pool: ThreadPool) -> None:
    window, (x, w, y, *_) = arrays(case)
    rng = np.random.default_rng(4)
    scale, shift, residual = (rng.standard_normal(shape).astype(np.float32) for shape in (len(w), len(w), y.shape))
    before = y * scale.reshape(-1, 1, 1) + shift.reshape(-1, 1, 1) + residual
    got = np.full_like(y, np.nan)
    planes.convolve(pool, x, w, ConvEpilogue(scale, shift, residual, "relu"), got, window)()
    close(got, np.maximum(before, 0), float(np.abs(before).max()))
    planes.convolve(pool, x, w, ConvEpilogue(scale, shift, residual, "hard_swish"), got, window)()
    close(got, before * np.clip(before / 6 + 0.5, 0, 1), float(np.abs(before).max()))


@pytest.mark.parametrize("case", ["three taps", "two at a time", "five taps, two at a time"])
def test_a_nan_is_in_what_reads_it_alone(case: str, pool: ThreadPool) -> None:
    window, (x, w, y, dy, dx, dw) = arrays(case)
    torch_x, torch_w = torch.from_numpy(np.where(np.isnan(x), 0, x)), torch.from_numpy(w)
    torch_x[1, 2, 8, 17] = torch.nan
    pads = window.padding[0]
    want = torch.conv2d(torch_x, torch_w, None, window.strides, pads, 1, len(w)).numpy()
    got = np.zeros_like(y)
    planes.convolve(pool, torch_x.numpy(), w, PLAIN, got, window)()
    assert np.array_equal(np.isnan(got), np.isnan(want))
    weights = np.zeros_like(dw)
    planes.weight_gradient(pool, torch_x.numpy(), weights, dy, window)()
    assert np.isnan(weights[2]).any()
    assert np.isfinite(np.delete(weights, 2, axis=0)).all()
    slopes = dy.copy()
    slopes[0, 1, 3, 5] = np.nan
    images = np.zeros_like(dx)
    planes.input_gradient(pool, slopes, w, images, window)()
    reads = np.isnan(images)
    assert reads[0, 1].any()
    assert not reads[1].any()
    assert not reads[0, 2].any()
