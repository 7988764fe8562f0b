"""Functions of float64 in generated kernels: vectors of them are as exact as the C library's, one number at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
import pytest

pytest.importorskip("onnxruntime")

from graphc.backends.onnxruntime import OnnxRuntimeBackend
from graphc.device import Array

rng = np.random.default_rng(0)
EDGES = [
    0.0, -0.0, 1.0, -1.0, 0.5, 3.0, -7.0, math.inf, -math.inf, math.nan, 5e-324, 1e-320, 1e308, -1e308, 709.9, -746.0, 2.0**60
]  # fmt: skip


@pytest.fixture
def backend() -> Iterator[OnnxRuntimeBackend]:
    backend = OnnxRuntimeBackend(threads=1, fuse_small=True)
    yield backend
    backend.close()


def computed(backend: OnnxRuntimeBackend, expression: str, **operands: Array) -> Array:
    """Of operands of one shape, by a generated kernel."""
    size = next(iter(operands.values())).size
    inputs = ", ".join(f"double[{size}] {name}" for name in operands)
    text = f'<ir_version: 11, opset_import: ["": 26]> g ({inputs}) => (double[{size}] y) {{ y = {expression} }}'
    model, y = onnx.parser.parse_model(text), np.zeros(size)
    assert [part.runs for part in backend.segment_parts(model)] == ["kernel"]
    backend.bind_segment(model, operands, {"y": y})()
    return y


def spread(*ranges: tuple[float, float]) -> Array:
    return np.concatenate([rng.uniform(*bounds, 4000) for bounds in ranges])


ANGLES = np.concatenate(
    [
        spread((-10, 10), (-1e6, 1e6), (-1e17, 1e17)),
        rng.uniform(-1, 1, 4000) * np.exp(rng.uniform(0, 700, 4000)),
        np.arange(4000) * math.pi / 2,
    ]
)

CASES: dict[str, tuple[Callable[[Any], Any], Array, float]] = {
    "Exp": (np.exp, spread((-708, 709), (-1, 1)), 0),
    "Log": (np.log, np.concatenate([spread((0, 2), (0.99, 1.01)), np.exp(spread((-700, 700))), spread((0, 1e-307))]), 0),
    "Tanh": (np.tanh, spread((-3, 3), (-30, 30), (-1e-5, 1e-5)), 0),
    "Erf": (np.vectorize(math.erf), spread((-6, 6), (-1, 1), (-1e-5, 1e-5), (-40, 40)), 0),
    "Sin": (np.sin, ANGLES, 5e-16),
    "Cos": (np.cos, ANGLES, 5e-16),
    "Softplus": (lambda x: np.log1p(np.exp(-abs(x))) + np.maximum(x, 0), spread((-30, 30), (-700, 700)), 0),
}


@pytest.mark.parametrize("op", CASES)
def test_a_function_is_exact_to_a_few_roundings(backend: OnnxRuntimeBackend, op: str) -> None:
    function, x, near_zero = CASES[op]
    wide = x if op == "Erf" else x.astype(np.longdouble)  # math.erf rounds once
    np.testing.assert_allclose(
        computed(backend, f"{op}(x)", x=x), function(wide).astype(np.float64), rtol=1e-15, atol=near_zero
    )


@pytest.mark.parametrize("op", [op for op in CASES if op != "Softplus"])
def test_a_function_has_the_values_of_c_at_its_edges(backend: OnnxRuntimeBackend, op: str) -> None:
    x = np.array(EDGES)
    y = computed(backend, f"{op}(x)", x=x)
    with np.errstate(all="ignore"):
        wanted = CASES[op][0](x)
    np.testing.assert_allclose(y, wanted, rtol=1e-15, atol=5e-16 if op in ("Sin", "Cos") else 0)
    zeros = (y == 0) & (wanted == 0)
    np.testing.assert_array_equal(np.signbit(y[zeros]), np.signbit(wanted[zeros]))


def test_powers_are_exact_to_a_few_roundings(backend: OnnxRuntimeBackend) -> None:
    x = np.concatenate([spread((0.5, 2)), np.exp(spread((-300, 300))), spread((0, 10)), 1 + spread((-1e-9, 1e-9))])
    z = spread((-500, 500), (-2, 2), (-3, 3), (-1e9, 1e9))
    y = computed(backend, "Pow(x, z)", x=x, z=z)
    np.testing.assert_allclose(y, np.power(x.astype(np.longdouble), z).astype(np.float64), rtol=2e-15)


def test_powers_have_the_values_of_c_at_their_edges(backend: OnnxRuntimeBackend) -> None:
    x, z = map(np.array, zip(*itertools.product(EDGES, [*EDGES, 2.0, -3.0, 0.3]), strict=True))
    y = computed(backend, "Pow(x, z)", x=x, z=z)
    with np.errstate(all="ignore"):
        wanted = np.power(x, z)
    np.testing.assert_allclose(y, wanted, rtol=2e-15, atol=5e-324)
    zeros = (y == 0) & (wanted == 0)
    np.testing.assert_array_equal(np.signbit(y[zeros]), np.signbit(wanted[zeros]))
