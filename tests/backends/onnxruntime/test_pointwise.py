"""Convolutions with one-pixel windows against sums in float64: weight gradients, and products in groups."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("onnxruntime")

from graphc.backends.onnxruntime.kernels.convolutions import pointwise
from graphc.backends.onnxruntime.kernels.onednn import binding
from graphc.backends.onnxruntime.pool import ThreadPool
from tests.backends.onnxruntime.node_cases import native

SHAPES = [
    (3, 5, 7, 19),
    (2, 64, 32, 300),
    (1, 33, 130, 49),
    (5, 70, 6, 16),
    (2, 96, 96, 600),
    (1, 16, 1, 4096),
    (9, 40, 1100, 17),
]
"""Samples, outputs, channels, pixels: partial tiles and panels, many pixels and few, more channels than are copied at once."""


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_plan_gives_the_sums(shape: tuple[int, int, int, int], threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    samples, outputs, channels, pixels = shape
    rng = np.random.default_rng(3)
    x, dy = (rng.standard_normal((samples, n, pixels)).astype(np.float32) for n in (channels, outputs))
    want = np.einsum("nmp,ncp->mc", dy.astype(np.float64), x.astype(np.float64))
    plans = pointwise.plans_of(*shape, threads)
    assert {plan.turned for plan in plans} == {False, True}
    pool = ThreadPool(threads)
    for plan in plans:
        monkeypatch.setattr(pointwise, "plan_of", lambda *_, plan=plan: plan)
        dw = np.full((outputs, channels), np.nan, dtype=np.float32)
        run = pointwise.weight_gradient(pool, x, dy, dw)
        run()
        first = dw.copy()
        np.testing.assert_allclose(dw, want, rtol=0, atol=2e-6 * np.abs(want).max() * max(1, np.sqrt(samples * pixels) / 30))
        run()
        assert np.array_equal(first, dw)


@pytest.mark.skipif(binding.library() is None, reason="convolutions run in onnxruntime without oneDNN")
def test_groups_of_pixels_are_products() -> None:
    rng = np.random.default_rng(3)
    x, w, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((3, 12, 9, 11), (15, 4, 1, 1), (15,)))
    apart, weights = x.reshape(3, 3, 4, 9, 11).astype(np.float64), w.reshape(3, 5, 4).astype(np.float64)
    y = np.einsum("gmc,ngchw->ngmhw", weights, apart).reshape(3, 15, 9, 11)
    dx = np.einsum("gmc,ngmhw->ngchw", weights, y.reshape(3, 3, 5, 9, 11)).reshape(x.shape)
    pool, window = ThreadPool(2), {"group": 3}
    like_y, like_x = y.astype(np.float32), np.array(x.shape)
    got = native("Conv", [x, w, b], window, pool, [like_y])[0]
    np.testing.assert_allclose(got, y + b[:, None, None], rtol=0, atol=1e-5)
    np.testing.assert_allclose(native("Conv", [x, w], window, pool, [like_y])[0], y, rtol=0, atol=1e-5)
    found = native("graphc::ConvGradInput", [like_y, w, like_x], window, pool, [x], (2,))[0]
    np.testing.assert_allclose(found, dx, rtol=0, atol=2e-6 * np.abs(dx).max())


def test_sums_of_all_threads_stay_small() -> None:
    for plan in pointwise.plans_of(64, 2048, 2048, 49, 16):
        assert plan.sums * plan.rows * plan.columns <= pointwise.LARGEST or plan.sums == 1
