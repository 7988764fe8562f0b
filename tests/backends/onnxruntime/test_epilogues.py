"""Convolutions with what follows them, in every kernel, against PyTorch in double precision."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime")
torch = pytest.importorskip("torch")

from graphc.backend import Binding, native_kernel  # noqa: E402
from graphc.backends.onnxruntime.kernels.convolutions.convolution import fused_conv  # noqa: E402
from graphc.backends.onnxruntime.kernels.onednn import binding  # noqa: E402
from graphc.backends.onnxruntime.pool import ThreadPool  # noqa: E402
from graphc.ir.declare import declaration_of  # noqa: E402
from tests.backends.onnxruntime.node_cases import single_node  # noqa: E402

pytestmark = pytest.mark.skipif(binding.library() is None, reason="convolutions run in onnxruntime without oneDNN")

Array = np.ndarray[Any, Any]

CONVOLUTIONS = {
    # samples, channels in and out, groups, size, window, stride, padding
    "tiles of 2 x 2": (2, 16, 33, 1, (21, 24), 3, 1, 1),
    "few channels": (2, 20, 3, 1, (20, 23), 3, 1, 1),
    "a wide window of single channels": (2, 5, 5, 5, (20, 20), 9, 1, 4),
    "single channels": (2, 24, 24, 24, (20, 20), 3, 1, 1),
    "pixels": (2, 40, 48, 1, (16, 15), 1, 1, 0),
    "few pixels": (2, 40, 48, 1, (3, 4), 1, 1, 0),
    "pixels in groups": (2, 32, 32, 4, (12, 12), 1, 1, 0),
    "patches": (2, 16, 32, 1, (16, 16), 4, 4, 0),
    "strides": (2, 16, 32, 1, (17, 18), 3, 2, 1),
    "a line": (2, 8, 12, 1, (40,), 5, 1, 2),
    "a volume": (2, 4, 4, 1, (7, 8, 9), 3, 1, 1),
}
ACTIVATIONS: dict[str, tuple[dict[str, float], Callable[[Any], Any]]] = {
    "": ({}, lambda x: x),
    "relu": ({}, torch.relu),
    "leaky_relu": ({"alpha": 0.2}, lambda x: torch.nn.functional.leaky_relu(x, 0.2)),
    "clip": ({"alpha": -0.5, "beta": 1.5}, lambda x: torch.clamp(x, -0.5, 1.5)),
    "hard_sigmoid": ({"alpha": 0.3, "beta": 0.4}, lambda x: torch.clamp(0.3 * x + 0.4, 0, 1)),
    "hard_swish": ({}, torch.nn.functional.hardswish),
}


@pytest.fixture(params=[1, 3])
def pool(request: pytest.FixtureRequest) -> Iterator[ThreadPool]:
    made = ThreadPool(request.param)
    yield made
    made.close()


def operands(case: str) -> tuple[dict[str, Any], list[Array], Any]:
    """Attributes; x, w, scale, shift and residual; and Conv(x, w) in double precision."""
    samples, channels, outs, group, size, window, stride, pad = CONVOLUTIONS[case]
    rng, n = np.random.default_rng(5), len(size)
    x, w = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((samples, channels, *size), (outs, channels // group, *[window] * n))
    )
    convolve = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}[n]
    y = convolve(*(torch.from_numpy(a).double() for a in (x, w)), None, stride, pad, 1, group)
    scale, shift, residual = (rng.standard_normal(shape).astype(np.float32) for shape in (outs, outs, tuple(y.shape)))
    attributes = {"kernel_shape": [window] * n, "strides": [stride] * n, "pads": [pad] * 2 * n, "group": group}
    return attributes, [x, w, scale, shift, residual], y


def computed(arrays: list[Array | None], attributes: dict[str, Any], shape: tuple[int, ...], pool: ThreadPool) -> Array:
    """The result, whether or not a kernel is chosen for it."""
    node = next(n for n in single_node("graphc::FusedConv", arrays, attributes, ()).graph)
    declaration, y = declaration_of(node), np.full(shape, np.nan, dtype=np.float32)
    assert declaration is not None
    fused_conv(Binding(node, arrays, [y], declaration.attribute_values(node), pool, {}))()
    return y


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_what_follows_is_computed_as_in_pytorch(case: str, pool: ThreadPool) -> None:
    attributes, arrays, plain = operands(case)
    names = itertools.cycle(ACTIVATIONS)
    for given in itertools.product((True, False), repeat=3):
        activation = next(names)
        numbers, function = ACTIVATIONS[activation]
        scale, shift, residual = (a if there else None for a, there in zip(arrays[2:], given, strict=True))
        before = plain
        for vector, act in ((scale, torch.mul), (shift, torch.add)):
            if vector is not None:
                before = act(before, torch.from_numpy(vector).double().reshape(-1, *[1] * (plain.ndim - 2)))
        before = before if residual is None else before + torch.from_numpy(residual).double()
        want = function(before).numpy().astype(np.float32)
        values = {**attributes, "activation": activation, **numbers}
        got = computed([*arrays[:2], scale, shift, residual], values, want.shape, pool)
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * float(before.abs().max()), err_msg=f"{given} {activation}")


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_nan_stays_and_a_masked_result_is_zero(case: str, pool: ThreadPool) -> None:
    attributes, (x, w, _, _, residual), _ = operands(case)
    residual[0, 1] = -np.inf
    for activation in ACTIVATIONS:
        got = computed([x * np.float32(np.nan), w], {**attributes, "activation": activation}, residual.shape, pool)
        assert np.isnan(got).all(), activation
    got = computed([x, w, None, None, residual], {**attributes, "activation": "relu"}, residual.shape, pool)
    assert not got[0, 1].any()
    assert np.isfinite(got).all()


def test_kernels_are_chosen_that_need_no_sweep() -> None:
    chosen = set()
    for case in CONVOLUTIONS:
        attributes, (x, w, scale, shift, residual), _ = operands(case)
        node = next(n for n in single_node("graphc::FusedConv", [x, w, scale, shift, residual], attributes, ()).graph)
        chosen |= {case} if native_kernel("onnxruntime", node) is not None else set()
    assert chosen >= {"tiles of 2 x 2", "few channels", "a wide window of single channels"}
    assert chosen.isdisjoint({"pixels", "few pixels", "patches"})
