"""Sums along rows and across them in one kernel: the gradient of a layer normalisation against PyTorch's."""

from __future__ import annotations

import shutil
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from graphc.backends.cupy.predict.traffic import nbytes, traffic
from graphc.backends.cupy.segment.compile import compile_segment
from graphc.backends.cupy.segment.program import KernelCall
from tests.backends.cupy.codegen.layer_norm_cases import model
from tests.backends.host_kernels import EmulatedDevice, HostDevice, run_segment

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


def feeds(rows: int, columns: int) -> dict[str, Any]:
    rng = np.random.default_rng(rows)
    x, g, after = (rng.standard_normal((rows, columns)).astype(np.float32) for _ in range(3))
    s, b = (rng.standard_normal(columns).astype(np.float32) for _ in range(2))
    return {"x": 3 * x + 1, "g": g.astype(ml_dtypes.bfloat16), "after": after, "s": s, "b": b}


def torchs(given: dict[str, Any]) -> dict[str, Any]:
    x, s, b = (torch.from_numpy(given[name]).double().requires_grad_() for name in "xsb")
    y = torch.nn.functional.layer_norm(x, x.shape[-1:], s, b, 1e-5)
    y.backward(torch.from_numpy(given["g"].astype(np.float64)))
    return {"dx": x.grad.numpy() + given["after"], "ds": s.grad.numpy(), "db": b.grad.numpy()}


def joined(segment: Any) -> list[KernelCall]:
    return [call for call in segment.calls if isinstance(call, KernelCall) and call.source.totals]


@needs_compiler
@pytest.mark.parametrize(
    ("device", "rows", "columns"),
    [
        (HostDevice(), 700, 96),
        (EmulatedDevice(0), 700, 96),
        pytest.param(EmulatedDevice(1, watched=True), 301, 776, marks=pytest.mark.full),
        pytest.param(EmulatedDevice(2), 150, 3072, marks=pytest.mark.full),
        pytest.param(HostDevice(), 667, 99, marks=pytest.mark.full),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, int) else str(value),
)
def test_the_gradient_is_pytorchs(device: HostDevice, rows: int, columns: int) -> None:
    given = feeds(rows, columns)
    found, segment = run_segment(model(rows, columns), given, device)
    assert len(joined(segment)) == 1
    for name, value in torchs(given).items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=3e-6 * max(1.0, np.abs(value).max()), err_msg=name)


@needs_compiler
@pytest.mark.parametrize("device", [HostDevice(), EmulatedDevice(0)], ids=lambda device: type(device).__name__)
def test_the_gradient_of_a_bias_before_it_is_summed_beside(device: HostDevice) -> None:
    """Of dx as it is rounded for the product that reads it; no kernel reads it again for the sum."""
    given = feeds(700, 96)
    found, segment = run_segment(model(700, 96, bias=True), given, device)
    (call,) = joined(segment)
    assert len(call.source.partials) == 3
    assert not any(
        "low" in [v.name for v in c.source.operands[: c.source.reads]] for c in segment.calls if isinstance(c, KernelCall)
    )
    wanted = torchs(given)
    np.testing.assert_allclose(found["low"].astype(np.float64), wanted["dx"], rtol=4e-3, atol=1e-4)
    np.testing.assert_allclose(found["bias"], found["low"].astype(np.float64).sum(0), rtol=0, atol=2e-4)


def test_nothing_large_is_read_twice() -> None:
    """x forward; x, the gradient and what is added to it backward: each once, beside totals of a few blocks."""
    rows, columns = 16384, 768
    segment = compile_segment(model(rows, columns))
    size = rows * columns
    moved = sum(traffic(call.source, call.parts) for call in segment.calls if isinstance(call, KernelCall))
    (call,) = joined(segment)
    assert sum(nbytes(v) for v in call.source.operands) == pytest.approx(size * (4 + 2 + 4 + 4), rel=0.01)
    assert moved == pytest.approx(size * (4 + 2 + 4 + 2 + 4 + 4), rel=0.12)


def test_what_is_small_or_too_wide_for_registers_stays_apart() -> None:
    assert not joined(compile_segment(model(64, 64)))
    assert not joined(compile_segment(model(512, 1 << 17)))
