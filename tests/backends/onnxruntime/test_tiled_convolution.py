"""Convolutions on AMX's tiles against PyTorch in float64, at shapes that fill no tile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime")
torch = pytest.importorskip("torch")

from graphc.backends.host.processor import has_matrix_tiles  # noqa: E402
from graphc.backends.onnxruntime.kernels.convolutions import tiled_convolution  # noqa: E402
from graphc.backends.onnxruntime.kernels.convolutions.tiled_convolution import convolve, weight_gradient  # noqa: E402
from graphc.backends.onnxruntime.pool import ThreadPool  # noqa: E402
from graphc.device import Run  # noqa: E402
from graphc.ir.ops.convolution import Window  # noqa: E402

pytestmark = pytest.mark.skipif(not has_matrix_tiles(), reason="this processor has no AMX, or GRAPHC_PROCESSOR leaves it out")

Array = np.ndarray
rng = np.random.default_rng(9)

CASES: dict[str, tuple[tuple[int, ...], int, dict[str, list[int]]]] = {
    "square": ((2, 32, 32, 32), 32, {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}),
    "odd channels": ((3, 70, 9, 11), 33, {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}),
    "few channels": ((4, 3, 12, 40), 5, {"kernel_shape": [2, 3], "pads": [0, 1, 1, 0]}),
    "narrow images": ((19, 40, 4, 4), 48, {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}),
    "groups of four": ((5, 33, 6, 8), 34, {"kernel_shape": [3, 2], "pads": [2, 0, 1, 1]}),
    "dilated": ((2, 33, 21, 20), 40, {"kernel_shape": [3, 3], "dilations": [2, 4], "pads": [2, 4, 2, 4]}),
    "five taps a side": ((2, 20, 10, 33), 64, {"kernel_shape": [5, 5], "pads": [2, 2, 2, 2]}),
    "no padding": ((3, 33, 8, 9), 32, {"kernel_shape": [2, 2]}),
    "lines": ((6, 40, 77), 50, {"kernel_shape": [5], "dilations": [3], "pads": [12, 0]}),
    "many positions": ((2, 16, 40, 70), 8, {"kernel_shape": [2, 2], "pads": [1, 0, 0, 1]}),
}


def normal(*shape: int) -> Array:
    return rng.standard_normal(shape, dtype=np.float32)


def arrays(case: str) -> tuple[Array, Array, Array, Array, Window]:
    """x, w, bias and a slope of y, and the window."""
    shape, outs, attributes = CASES[case]
    x, w = normal(*shape), normal(outs, shape[1], *attributes["kernel_shape"])
    window = Window.of(attributes, shape[2:], w.shape[2:])
    assert window.pads is not None
    axes = range(len(shape) - 2)
    reach = [window.dilations[k] * (window.kernel[k] - 1) for k in axes]
    sizes = [shape[2 + k] + window.pads[k] + window.pads[len(reach) + k] - reach[k] for k in axes]
    return x, w, normal(outs), normal(shape[0], outs, *sizes), window


def never() -> Run:
    raise AssertionError("all numbers are finite")


def computed(kind: str, x: Array, w: Array, bias: Array, dy: Array, window: Window, threads: int = 2) -> Array:
    pool = ThreadPool(threads)
    result = np.full_like({"forward": dy, "input": x, "weight": w}[kind], np.nan)
    if kind == "weight":
        weight_gradient(pool, x, result, dy, window, never)()
    elif kind == "input":
        convolve("input", pool, result, w, None, dy, window, never)()
    else:
        convolve("forward", pool, x, w, bias, result, window, never)()
    pool.close()
    return result


@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients(case: str) -> None:
    x, w, bias, dy, window = arrays(case)
    assert window.pads is not None
    axes = x.ndim - 2
    tensors: list[Any] = [torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in (x, w)]
    padding = [p for k in reversed(range(axes)) for p in (window.pads[k], window.pads[axes + k])]
    function: Callable[..., Any] = torch.nn.functional.conv2d if axes == 2 else torch.nn.functional.conv1d
    padded = torch.nn.functional.pad(tensors[0], padding)
    y = function(padded, tensors[1], torch.tensor(bias, dtype=torch.float64), dilation=window.dilations)
    y.backward(torch.tensor(dy, dtype=torch.float64))
    for kind, exact in (("forward", y.detach()), ("input", tensors[0].grad), ("weight", tensors[1].grad)):
        found = computed(kind, x, w, bias, dy, window)
        assert np.abs(found - exact.numpy()).max() < 2e-6 * float(exact.abs().max()), kind


@pytest.mark.parametrize("kind", ["forward", "input", "weight"])
def test_a_large_convolution_holds_a_part_of_its_images_at_a_time(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = arrays("groups of four")
    whole = computed(kind, *given)
    monkeypatch.setattr(tiled_convolution, "ROOM", 1)
    monkeypatch.setattr(tiled_convolution, "NEAR", 1)
    assert np.abs(computed(kind, *given) - whole).max() < 1e-6 * np.abs(whole).max()


@pytest.mark.parametrize("kind", ["forward", "input", "weight"])
@pytest.mark.parametrize("case", ["odd channels", "many positions"])
def test_threads_do_not_change_a_bit(kind: str, case: str) -> None:
    given = arrays(case)
    one = computed(kind, *given, threads=1)
    assert (one == computed(kind, *given, threads=3)).all()


@pytest.mark.parametrize("kind", ["forward", "input", "weight"])
def test_numbers_that_are_not_finite_are_left_to_another_kernel(kind: str) -> None:
    x, w, bias, dy, window = arrays("narrow images")
    (dy if kind == "input" else x)[18, 3, 2, 1] = np.inf
    pool, calls = ThreadPool(2), []

    def otherwise() -> Run:
        return lambda: calls.append(kind)

    result = np.empty_like({"forward": dy, "input": x, "weight": w}[kind])
    if kind == "weight":
        run = weight_gradient(pool, x, result, dy, window, otherwise)
    elif kind == "input":
        run = convolve("input", pool, result, w, None, dy, window, otherwise)
    else:
        run = convolve("forward", pool, x, w, bias, result, window, otherwise)
    run()
    run()
    assert calls == [kind, kind]
    pool.close()
