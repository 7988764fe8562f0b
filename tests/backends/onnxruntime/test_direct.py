"""Convolutions of few channels and wide windows, against PyTorch's in double precision."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime")
torch = pytest.importorskip("torch")

from graphc.backends.onnxruntime.kernels.convolutions import direct, direct_plans  # noqa: E402
from graphc.backends.onnxruntime.kernels.convolutions.epilogues import PLAIN, ConvEpilogue  # noqa: E402
from graphc.backends.onnxruntime.kernels.onednn import binding  # noqa: E402
from graphc.backends.onnxruntime.pool import ThreadPool  # noqa: E402
from graphc.ir.ops.convolution import Window  # noqa: E402
from tests.backends.onnxruntime.node_cases import native, used_pool  # noqa: E402

Array = np.ndarray[Any, Any]

CASES = {
    # samples, channels in and out, groups, size, window, strides, dilations, pads
    "three results": (2, 20, 3, 1, (17, 23), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)),
    "one result of a line": (3, 5, 1, 1, (301,), (31,), (1,), (1,), (15, 15)),
    "groups of four, strides": (2, 16, 16, 4, (19, 22), (3, 3), (2, 2), (1, 1), (1, 1, 1, 1)),
    "groups of one, two results each": (2, 3, 6, 3, (9, 40), (3, 7), (1, 1), (1, 1), (1, 3, 1, 3)),
    "uneven padding, dilations": (2, 6, 7, 1, (15, 18), (3, 2), (1, 1), (2, 3), (2, 0, 1, 3)),
    "strides of four": (2, 3, 8, 1, (203,), (9,), (4,), (1,), (4, 4)),
    "strides of three": (2, 3, 10, 1, (200,), (10,), (3,), (2,), (0, 5)),
    "uneven strides": (1, 5, 4, 1, (21, 30), (3, 4), (3, 1), (1, 1), (0, 2, 1, 1)),
    "many regions": (1, 48, 9, 1, (40, 200), (5, 5), (1, 1), (1, 1), (2, 2, 2, 2)),
    "more results than a tile": (2, 3, 23, 1, (12, 12), (5, 5), (1, 1), (1, 1), (0, 0, 0, 0)),
    "windows beyond the image": (2, 3, 5, 1, (2, 3), (3, 5), (1, 1), (1, 1), (2, 4, 2, 4)),
    "a volume to three": (1, 6, 3, 1, (7, 9, 20), (3, 3, 3), (1, 1, 1), (1, 1, 1), (1,) * 6),
    "a volume, uneven strides": (2, 4, 8, 2, (7, 10, 18), (3, 2, 3), (2, 1, 2), (1, 3, 1), (1, 0, 2, 1, 1, 0)),
    "layers far apart": (1, 3, 4, 1, (5, 4, 9), (3, 1, 3), (1, 1, 1), (4, 1, 2), (4, 0, 2, 4, 0, 2)),
    "a pixel": (1, 2, 3, 1, (1, 1), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)),
}


@pytest.fixture(params=[1, 3])
def pool(request: pytest.FixtureRequest) -> Iterator[ThreadPool]:
    yield from used_pool(request.param)


def arrays(case: str) -> tuple[Window, int, list[Array]]:
    """Window and groups, and x, w, bias, y, dy, dx, dw of PyTorch."""
    samples, channels, outs, group, size, kernel, strides, dilations, pads = CASES[case]
    rng = np.random.default_rng(3)
    x, w, b = (
        torch.tensor(rng.standard_normal(shape).astype(np.float32), dtype=torch.float64, requires_grad=True)
        for shape in [(samples, channels, *size), (outs, channels // group, *kernel), (outs,)]
    )
    n = len(size)
    sides = [pad for axis in reversed(range(n)) for pad in (pads[axis], pads[n + axis])]
    convolve = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}[n]
    y = convolve(torch.nn.functional.pad(x, sides), w, b, strides, 0, dilations, group)
    dy = torch.tensor(rng.standard_normal(y.shape).astype(np.float32), dtype=torch.float64)
    y.backward(dy)
    found = (x, w, b, y, dy, x.grad, w.grad)
    window = Window(kernel, strides, dilations, pads[:n], pads[n:])
    return window, group, [a.detach().numpy().astype(np.float32) for a in found]


def close(got: Array, want: Array) -> None:
    np.testing.assert_allclose(got, want, rtol=0, atol=3e-6 * float(np.abs(want).max()))


@pytest.mark.parametrize("case", CASES)
def test_results_and_weight_gradients_are_those_of_pytorch(case: str, pool: ThreadPool) -> None:
    window, group, (x, w, b, y, dy, _, dw) = arrays(case)
    got = np.full_like(y, np.nan)
    run = direct.convolve(pool, x, w, ConvEpilogue(shift=b), got, window, group)
    run()
    close(got, y)
    direct.convolve(pool, x, w, PLAIN, got, window, group)()
    close(got, y - b.reshape(-1, *(1 for _ in window.kernel)))
    found = np.full_like(dw, np.nan)
    gradient = direct.weight_gradient(pool, x, dy, found, window, group)
    gradient()
    close(found, dw)
    before = found.copy()
    gradient()
    assert np.array_equal(before, found)


@pytest.mark.skipif(binding.library() is None, reason="convolutions run in onnxruntime without oneDNN")
@pytest.mark.parametrize("case", [case for case in CASES if "strides" not in case])
def test_input_gradients_are_those_of_pytorch(case: str, pool: ThreadPool, monkeypatch: pytest.MonkeyPatch) -> None:
    window, group, (x, w, _, _, dy, dx, _) = arrays(case)
    monkeypatch.setattr(direct_plans, "is_faster", lambda *_, **__: True)
    attributes = {**window.attributes(), "group": group}
    shape = np.array(x.shape, dtype=np.int64)
    close(native("graphc::ConvGradInput", [dy, w, shape], attributes, pool, [dx], (2,))[0], dx)


@pytest.mark.parametrize("case", ["more results than a tile", "strides of four", "a volume to three"])
def test_threads_share_the_results_of_a_large_gradient(case: str, pool: ThreadPool, monkeypatch: pytest.MonkeyPatch) -> None:
    window, group, (x, _, _, _, dy, _, dw) = arrays(case)
    monkeypatch.setattr(direct_plans, "LARGEST", 0)
    monkeypatch.setattr(direct_plans, "MOST_LINES", 1)
    found = np.full_like(dw, np.nan)
    direct.weight_gradient(pool, x, dy, found, window, group)()
    close(found, dw)


def test_a_nan_is_in_the_results_that_read_it(pool: ThreadPool) -> None:
    window, group, (x, w, b, y, *_) = arrays("three results")
    x[1, 7, 8, 9] = np.nan
    got = np.zeros_like(y)
    direct.convolve(pool, x, w, ConvEpilogue(shift=b), got, window, group)()
    reads = np.zeros(y.shape, dtype=bool)
    reads[1, :, 7:10, 8:11] = True
    assert np.array_equal(np.isnan(got), reads)


def test_estimates_leave_whole_vectors_of_channels_to_onednn() -> None:
    window = Window((3, 3), (1, 1), (1, 1), (1, 1), (1, 1))

    def chosen(channels: int, outs: int, group: int = 1) -> tuple[bool, bool]:
        shapes = (4, channels, 64, 64), (outs, channels // group, 3, 3), (4, outs, 64, 64)
        x, w, y = (np.empty(shape, np.float32) for shape in shapes)
        return direct_plans.is_faster(x, w, y, group, window, 2), direct_plans.gradient_is_faster(x, w, y, group, window, 2)

    assert chosen(64, 64) == (False, False)
    assert chosen(64, 3) == (True, True)
    assert chosen(128, 128, 32) == (True, True)
