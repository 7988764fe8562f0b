"""Running products and their gradients in kernels, with zeros in every place: as PyTorch's in float64."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime")
torch = pytest.importorskip("torch")

from graphc.backend import Binding, native_kernel  # noqa: E402
from graphc.backends.onnxruntime.pool import ThreadPool  # noqa: E402
from tests.backends.onnxruntime.node_cases import single_node  # noqa: E402

Array = np.ndarray[Any, Any]
SHAPES = [(7,), (5, 9), (3, 6, 70), (200, 3, 130), (300, 64)]


def computed(pool: ThreadPool, op: str, *operands: Array, **attributes: int) -> Array:
    node = next(n for n in single_node(op, operands, attributes, (len(operands) - 1,)).graph if n.op_type != "Constant")
    kernel = native_kernel("onnxruntime", node)
    assert kernel is not None
    result = np.full(operands[0].shape, np.nan, operands[0].dtype)
    kernel.bind(Binding(node, operands, [result], attributes, pool, {}))()
    return result


@pytest.mark.full
@pytest.mark.parametrize("zeros", ["none", "some", "many"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_and_slopes_are_those_of_pytorch(shape: tuple[int, ...], dtype: Any, zeros: str) -> None:
    rng, pool = np.random.default_rng(0), ThreadPool(2)
    x = rng.uniform(0.5, 1.5, shape).astype(dtype) * rng.choice([-1, 1], shape).astype(dtype)
    x[rng.random(shape) < {"none": 0, "some": 0.02, "many": 0.4}[zeros]] = 0
    if zeros != "none":
        x.reshape(-1)[[0, -1]] = 0
    dy = rng.standard_normal(shape).astype(dtype)
    for axis in range(len(shape)):
        place = np.array(axis - len(shape) if axis % 2 else axis)
        wide = torch.tensor(x).double().requires_grad_()
        y = torch.cumprod(wide, axis)
        y.backward(torch.tensor(dy).double())
        close = {"rtol": 2e-6, "atol": 2e-6} if dtype == np.float32 else {"rtol": 1e-12, "atol": 1e-12}
        found = computed(pool, "CumProd", x, place)
        np.testing.assert_allclose(found, y.detach().numpy(), **close)
        size = max(1.0, float(wide.grad.abs().max()))
        slope = computed(pool, "graphc::RunningProductGrad", dy, x, found, place)
        np.testing.assert_allclose(slope / size, wide.grad.numpy() / size, **close)
    pool.close()


@pytest.mark.parametrize(("exclusive", "reverse"), [*itertools.product((0, 1), (0, 1))])
def test_products_in_both_directions_with_and_without_an_element(exclusive: int, reverse: int) -> None:
    x, pool = np.random.default_rng(1).uniform(0.5, 1.5, (3, 11, 5)), ThreadPool(1)
    turned = x[:, ::-1] if reverse else x
    wanted = np.cumprod(turned, 1)
    if exclusive:
        wanted = np.concatenate([np.ones((3, 1, 5)), wanted[:, :-1]], 1)
    found = computed(pool, "CumProd", x, np.array(1), exclusive=exclusive, reverse=reverse)
    np.testing.assert_allclose(found, wanted[:, ::-1] if reverse else wanted, rtol=1e-14)
    pool.close()
