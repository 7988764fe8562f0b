"""Native Resize and its gradient, compared with PyTorch in double precision."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from graphc.backends.onnxruntime.pool import ThreadPool
from tests.backends.onnxruntime.node_cases import native

rng = np.random.default_rng(7)

RESIZES: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((2, 3, 50), (100,), {"mode": "linear"}),
    ((1, 1, 700), (1399,), {"mode": "linear", "align_corners": True}),
    ((3, 3, 64), (10,), {"mode": "linear"}),
    ((2, 5, 9, 7), (18, 14), {"mode": "bilinear"}),
    ((2, 5, 9, 7), (9, 30), {"mode": "bilinear", "align_corners": True}),
    ((2, 4, 12, 33), (5, 8), {"mode": "bilinear", "antialias": True}),
    ((1, 2, 12, 33), (40, 8), {"mode": "bicubic"}),
    ((1, 2, 20, 21), (9, 50), {"mode": "bicubic", "antialias": True}),
    ((2, 2, 3, 5, 6), (6, 10, 12), {"mode": "trilinear"}),
    ((2, 2, 8, 5, 20), (3, 5, 9), {"mode": "trilinear"}),
    ((2, 2, 1, 1), (5, 7), {"mode": "bilinear"}),
]


@pytest.fixture(params=[1, 3])
def pool(request: pytest.FixtureRequest) -> Iterator[ThreadPool]:
    made = ThreadPool(request.param)
    yield made
    made.close()


def normal(*shape: int) -> np.ndarray[Any, Any]:
    return rng.standard_normal(shape).astype(np.float32)


def close(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any], tolerance: float) -> None:
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * float(np.abs(want).max()))


@pytest.mark.parametrize(("shape", "size", "options"), RESIZES, ids=str)
def test_resize_is_that_of_pytorch(
    shape: tuple[int, ...], size: tuple[int, ...], options: dict[str, Any], pool: ThreadPool
) -> None:
    x = torch.tensor(normal(*shape), dtype=torch.float64, requires_grad=True)
    y = F.interpolate(x, size, **options)
    dy = torch.tensor(normal(*y.shape), dtype=torch.float64)
    (dx,) = torch.autograd.grad(y, x, dy)
    corners, cubic = options.get("align_corners"), options["mode"] == "bicubic"
    attributes = {
        "mode": "cubic" if cubic else "linear",
        "coordinate_transformation_mode": "align_corners" if corners else "half_pixel",
        "antialias": int(options.get("antialias", 0)),
        "cubic_coeff_a": -0.5 if options.get("antialias") and cubic else -0.75,
        "exclude_outside": int(options.get("antialias", 0)),
    }
    known = np.array([*shape[:2], *size]), (3,)
    x32, y32, dy32, dx32 = (value.detach().numpy().astype(np.float32) for value in (x, y, dy, dx))
    (got,) = native("Resize", [x32, None, None, known[0]], attributes, pool, [y32], known[1])
    close(got, y32, 2e-6)
    operands = [dy32, np.array(shape), None, None, known[0]]
    (got,) = native("graphc::ResizeGrad", operands, attributes, pool, [dx32], (1, 4))
    close(got, dx32, 2e-6)


def test_the_gradient_of_picking_neighbours_adds_up_what_was_picked(pool: ThreadPool) -> None:
    # of such lengths, none is exactly between two neighbours
    x = torch.tensor(normal(2, 3, 9, 30), requires_grad=True)
    y = F.interpolate(x, (12, 46), mode="nearest-exact")
    dy = torch.tensor(normal(*y.shape))
    (dx,) = torch.autograd.grad(y, x, dy)
    operands = [dy.numpy(), np.array(x.shape), None, None, np.array(y.shape)]
    attributes = {"mode": "nearest", "nearest_mode": "round_prefer_ceil"}
    close(native("graphc::ResizeGrad", operands, attributes, pool, [dx.numpy()], (1, 4))[0], dx.numpy(), 1e-6)


def test_a_long_line_takes_no_matrix(pool: ThreadPool) -> None:
    """As a product, this gradient would need 40 GB for its matrix."""
    dy = normal(1, 1, 200_000)
    operands = [dy, np.array([1, 1, 50_000]), None, None, np.array([1, 1, 200_000])]
    x = torch.zeros(1, 1, 50_000, requires_grad=True)
    (dx,) = torch.autograd.grad(F.interpolate(x, 200_000, mode="linear"), x, torch.tensor(dy))
    (got,) = native("graphc::ResizeGrad", operands, {"mode": "linear"}, pool, [dx.numpy()], (1, 4))
    close(got, dx.numpy(), 2e-6)
