"""Weight gradients of convolutions with one-pixel windows, against sums in float64."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("onnxruntime")

from graphc.backends.onnxruntime.kernels import pointwise
from graphc.backends.onnxruntime.pool import ThreadPool

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


def test_sums_of_all_threads_stay_small() -> None:
    for plan in pointwise.plans_of(64, 2048, 2048, 49, 16):
        assert plan.sums * plan.rows * plan.columns <= pointwise.LARGEST or plan.sums == 1
