"""Convolutions over few pixels as products, against PyTorch's in double precision."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime")
torch = pytest.importorskip("torch")

from graphc.backends.onnxruntime.kernels.convolutions import unfolded  # noqa: E402
from graphc.backends.onnxruntime.kernels.convolutions.epilogues import PLAIN, ConvEpilogue  # noqa: E402
from graphc.backends.onnxruntime.kernels.onednn import binding  # noqa: E402
from graphc.backends.onnxruntime.pool import ThreadPool  # noqa: E402
from graphc.ir.ops.convolution import Window  # noqa: E402
from tests.backends.onnxruntime.node_cases import used_pool  # noqa: E402

pytestmark = pytest.mark.skipif(binding.library() is None, reason="its products are oneDNN's")

Array = np.ndarray[Any, Any]

CASES = {
    # samples, channels in and out, size, window, strides, dilations, pads
    "an image": (3, 40, 50, (4, 5), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)),
    "strides": (2, 40, 50, (5, 8), (3, 3), (2, 3), (1, 1), (1, 0, 1, 2)),
    "dilations": (2, 33, 20, (6, 5), (3, 2), (1, 1), (2, 3), (2, 1, 2, 2)),
    "a pixel": (5, 40, 50, (1, 1), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)),
    "a line": (2, 40, 30, (9,), (5,), (2,), (1,), (2, 2)),
    "a volume": (2, 12, 30, (2, 3, 2), (3, 3, 3), (1, 1, 1), (1, 1, 1), (1,) * 6),
}


@pytest.fixture(params=[1, 3])
def pool(request: pytest.FixtureRequest) -> Iterator[ThreadPool]:
    yield from used_pool(request.param)


@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients_are_those_of_pytorch(case: str, pool: ThreadPool) -> None:
    samples, channels, outs, size, kernel, strides, dilations, pads = CASES[case]
    rng, n = np.random.default_rng(3), len(CASES[case][3])
    x, w, b = (
        torch.tensor(rng.standard_normal(shape).astype(np.float32), dtype=torch.float64, requires_grad=True)
        for shape in [(samples, channels, *size), (outs, channels, *kernel), (outs,)]
    )
    sides = [pad for axis in reversed(range(n)) for pad in (pads[axis], pads[n + axis])]
    y = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}[n](torch.nn.functional.pad(x, sides), w, b, strides, 0, dilations)
    dy = torch.tensor(rng.standard_normal(y.shape).astype(np.float32), dtype=torch.float64)
    y.backward(dy)
    given, weights, bias, result, slopes = (a.detach().numpy().astype(np.float32) for a in (x, w, b, y, dy))
    window = Window(kernel, strides, dilations, pads[:n], pads[n:])
    got, images, gradient = (np.full_like(a, np.nan) for a in (result, given, weights))
    unfolded.convolve(pool, given, weights, ConvEpilogue(shift=bias), got, window)()
    unfolded.input_gradient(pool, slopes, weights, images, window)()
    unfolded.weight_gradient(pool, given, slopes, gradient, window)()
    for found, want in ((got, y), (images, x.grad), (gradient, w.grad)):
        expected = want.detach().numpy()
        np.testing.assert_allclose(found, expected, rtol=0, atol=3e-6 * float(np.abs(expected).max()))
    unfolded.convolve(pool, given, weights, PLAIN, got, window)()
    np.testing.assert_allclose(got, result - bias.reshape(-1, *[1] * n), rtol=0, atol=3e-6 * float(np.abs(result).max()))
