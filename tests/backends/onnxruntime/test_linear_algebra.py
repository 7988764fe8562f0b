"""Kernels of linear algebra: small matrices one by one, large ones in blocks; values against PyTorch's in float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime")
torch = pytest.importorskip("torch")

from graphc.backend import Binding, native_kernel  # noqa: E402
from graphc.backends.onnxruntime.kernels.products.blocked_factors import LEAST  # noqa: E402
from graphc.backends.onnxruntime.pool import ThreadPool  # noqa: E402
from tests.backends.onnxruntime.node_cases import reference, single_node  # noqa: E402

Array = np.ndarray[Any, Any]
LINALG = torch.linalg
SIZES = [(1, 2, 1), (5, 3, 2), (40, 2, 41), (LEAST, 1, 1), (LEAST + 1, 3, 40), (200, 1, 200)]
"""Rows of a matrix, matrices, and columns of what a system is solved for."""


@pytest.fixture(params=[1, 2, 3])
def pool(request: pytest.FixtureRequest) -> Iterator[ThreadPool]:
    pool = ThreadPool(request.param)
    yield pool
    pool.close()


def computed(pool: ThreadPool, op: str, operands: list[Array], wanted: list[Any], **attributes: int) -> list[Array]:
    """Results of a kernel, which are the same at every run, whatever an earlier one has left."""
    node = next(node for node in single_node(op, operands, attributes, ()).graph if node.op_type != "Constant")
    kernel = native_kernel("onnxruntime", node)
    assert kernel is not None
    results = [np.full(value.shape, np.nan, operands[0].dtype) for value in wanted]
    run = kernel.bind(Binding(node, operands, results, attributes, pool, {}))
    run()
    first = [result.copy() for result in results]
    for result in results:
        result[...] = np.nan
    run()
    for one, other in zip(first, results, strict=True):
        np.testing.assert_array_equal(one, other)
    return results


@pytest.mark.full
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("rows", "count", "columns"), SIZES)
def test_results_are_those_of_pytorch(pool: ThreadPool, rows: int, count: int, columns: int, dtype: Any) -> None:
    rng = np.random.default_rng(rows)
    a = (rng.standard_normal((count, rows, rows)) / rows**0.5 + np.eye(rows) / 4).astype(dtype)
    b = rng.standard_normal((count, rows, columns)).astype(dtype)
    positive, triangle = (a @ a.swapaxes(1, 2) / 4 + np.eye(rows) / 2).astype(dtype), (a + 3 * np.eye(rows)).astype(dtype)
    m, right, symmetric, sides = (torch.tensor(x).double() for x in (a, b, positive, triangle))
    cases = [
        ("graphc::Solve", [a, b], {"transposed": 0}, [LINALG.solve(m, right)]),
        ("graphc::Solve", [a, b], {"transposed": 1}, [LINALG.solve(m.mT, right)]),
        ("graphc::Cholesky", [positive], {}, [LINALG.cholesky(symmetric)]),
        ("graphc::LogDeterminant", [a], {}, list(LINALG.slogdet(m))),
        ("Det", [positive], {}, [LINALG.det(symmetric)]),
    ]
    for upper, transposed in itertools.product((0, 1), (0, 1)):
        half = sides.triu() if upper else sides.tril()
        wanted = LINALG.solve_triangular(half.mT if transposed else half, right, upper=upper != transposed)
        cases.append(("graphc::TriangularSolve", [triangle, b], {"upper": upper, "transposed": transposed}, [wanted]))
    for op, operands, attributes, results in cases:
        for found, exact in zip(computed(pool, op, operands, results, **attributes), results, strict=True):
            close = (2e-3 if dtype == np.float32 else 1e-11) * exact.abs().max().item()
            np.testing.assert_allclose(found, exact.numpy(), rtol=0, atol=close, err_msg=f"{op} {attributes}")


@pytest.mark.full
@pytest.mark.parametrize("rows", [5, 60])
def test_forms_in_standard_ops_compute_the_same(rows: int) -> None:
    """Written out row by row, and in a Scan where there are many."""
    rng = np.random.default_rng(rows)
    a = rng.standard_normal((2, rows, rows)) / rows**0.5 + np.eye(rows) / 4
    b, positive = rng.standard_normal((2, rows, 3)), a @ a.swapaxes(1, 2) + np.eye(rows)
    m, right, symmetric = (torch.tensor(x) for x in (a, b, positive))
    cases = [
        ("graphc::Solve", [a, b], {"transposed": 0}, LINALG.solve(m, right)),
        ("graphc::Solve", [a, b], {"transposed": 1}, LINALG.solve(m.mT, right)),
        ("graphc::Cholesky", [positive], {}, LINALG.cholesky(symmetric)),
        ("graphc::TriangularSolve", [positive, b], {"upper": 0}, LINALG.solve_triangular(symmetric.tril(), right, upper=False)),
        ("graphc::TriangularSolve", [positive, b], {"upper": 1, "transposed": 1}, _of_transposed_triangle(symmetric, right)),
    ]
    for op, operands, attributes, wanted in cases:
        (found,) = reference(op, operands, attributes)
        np.testing.assert_allclose(found, wanted.numpy(), rtol=0, atol=1e-10 * wanted.abs().max().item(), err_msg=op)


def _of_transposed_triangle(a: Any, b: Any) -> Any:
    return LINALG.solve_triangular(a.triu().mT, b, upper=False)


@pytest.mark.parametrize("rows", [4, LEAST])
def test_singular_matrices_have_no_determinant_and_no_finite_solution(pool: ThreadPool, rows: int) -> None:
    a, b = np.ones((1, rows, rows)), np.arange(1.0, rows + 1).reshape(1, rows, 1)
    (determinant,) = computed(pool, "Det", [a], [np.zeros(1)])
    sign, size = computed(pool, "graphc::LogDeterminant", [a], [np.zeros(1)] * 2)
    assert (determinant[0], sign[0], size[0]) == (0, 0, -np.inf)
    assert not np.isfinite(computed(pool, "graphc::Solve", [a, b], [b], transposed=0)[0]).all()


@pytest.mark.parametrize("rows", [4, LEAST])
def test_a_matrix_that_is_not_positive_has_no_cholesky_factor(pool: ThreadPool, rows: int) -> None:
    a = np.eye(rows)[None] - 2 * (np.arange(rows) == rows - 1) * np.eye(rows)
    (low,) = computed(pool, "graphc::Cholesky", [a], [a])
    assert np.isnan(low[0, -1, -1])
    np.testing.assert_array_equal(low[0, :-1, :-1], np.eye(rows - 1))
