"""Products on AMX's tiles: as exact as float32, the same with any number of threads, and right where numbers are not finite."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime")

from graphc.backends.host.processor import has_matrix_tiles
from graphc.backends.onnxruntime.kernels.convolutions import convolution
from graphc.backends.onnxruntime.kernels.products.linear import product_without_tiles
from graphc.backends.onnxruntime.kernels.products.tiles import is_better_on_tiles, product_on_tiles
from graphc.backends.onnxruntime.pool import ThreadPool
from tests.backends.onnxruntime.node_cases import native

pytestmark = pytest.mark.skipif(not has_matrix_tiles(), reason="this processor has no AMX, or GRAPHC_PROCESSOR leaves it out")

Array = np.ndarray
rng = np.random.default_rng(5)


def normal(*shape: int) -> Array:
    return rng.standard_normal(shape, dtype=np.float32)


def product(a: Array, b: Array, bias: Array | None = None, threads: int = 2) -> Array:
    c = np.full((*a.shape[:-1], b.shape[-1]), np.nan, dtype=np.float32)
    pool = ThreadPool(threads)

    def otherwise() -> object:
        return product_without_tiles(pool, a, b, c, bias)

    product_on_tiles(pool, a, b, c, bias, otherwise)()
    pool.close()
    return c


def error(found: Array, a: Array, b: Array, bias: Array | None) -> float:
    """The largest error in units of the sum of the terms' sizes."""
    a, b, bias = a.astype(np.float64), b.astype(np.float64), np.zeros(1) if bias is None else bias
    return float((np.abs(found - (a @ b + bias)) / (np.abs(a) @ np.abs(b) + np.abs(bias))).max())


@pytest.mark.parametrize(
    ("rows", "depth", "columns"), [(1, 1, 1), (33, 70, 95), (64, 32, 96), (130, 513, 40), (40, 1100, 600), (1030, 65, 700)]
)
def test_products_are_as_exact_as_those_of_float32(rows: int, depth: int, columns: int) -> None:
    for turned_a, turned_b, has_bias in itertools.product((False, True), repeat=3):
        a = normal(depth, rows).T if turned_a else normal(rows, depth)
        b = normal(columns, depth).T if turned_b else normal(depth, columns)
        bias = normal(columns) if has_bias else None
        assert error(product(a, b, bias), a, b, bias) < 2e-7


def test_parts_of_wider_matrices() -> None:
    a, b = normal(70, 200)[:, 30:130], normal(160, 200)[20:120, 3:100]
    assert error(product(a, b), a, b, None) < 2e-7


@pytest.mark.parametrize("count", [2, 5, 40])
def test_many_products(count: int) -> None:
    a, b = normal(count, 70, 90), normal(count, 50, 90).transpose(0, 2, 1)
    found = product(a, b)
    assert max(error(found[n], a[n], b[n], None) for n in range(count)) < 2e-7


@pytest.mark.parametrize(("count", "depth"), [(1, 40), (5, 49), (3, 600), (40, 20)])
@pytest.mark.parametrize(("rows", "columns"), [(64, 200), (90, 33)])
def test_a_sum_of_products(count: int, depth: int, rows: int, columns: int) -> None:
    a, b = normal(count, rows, depth), normal(count, columns, depth).transpose(0, 2, 1)
    found = [product_on_tiles_summed(a, b, threads) for threads in (1, 2, 3)]
    long_a, long_b = a.transpose(1, 0, 2).reshape(rows, -1), b.reshape(-1, columns)
    assert error(found[0], long_a, long_b, None) < 2e-7
    assert all((other == found[0]).all() for other in found[1:])


def product_on_tiles_summed(a: Array, b: Array, threads: int) -> Array:
    c, pool = np.full((a.shape[1], b.shape[2]), np.nan, dtype=np.float32), ThreadPool(threads)
    product_on_tiles(pool, a, b, c, None, lambda: pytest.fail("all numbers are finite"), summed=True)()
    pool.close()
    return c


@pytest.mark.parametrize("spatial", [(7, 7), (28, 20), (300,)])
def test_weight_gradients_of_windows_of_one_tap(spatial: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    x, dy = normal(5, 250, *spatial), normal(5, 257, *spatial)
    shape = np.array([257, 250, *[1] * len(spatial)], dtype=np.int64)
    summed: list[bool] = []

    def watched(*arguments: Any, **options: Any) -> Any:
        summed.append(options["summed"])
        return product_on_tiles(*arguments, **options)

    monkeypatch.setattr(convolution, "product_on_tiles", watched)
    pool = ThreadPool(2)
    wanted = np.einsum("nms,ncs->mc", dy.reshape(5, 257, -1).astype(np.float64), x.reshape(5, 250, -1).astype(np.float64))
    window = {"kernel_shape": [1] * len(spatial)}
    (found,) = native("graphc::ConvGradWeight", [x, dy, shape], window, pool, [np.empty(shape, dtype=np.float32)], (2,))
    pool.close()
    assert summed
    assert np.abs(found.reshape(257, 250) - wanted).max() < 2e-6 * np.abs(wanted).max()


def test_one_left_operand_for_many_products() -> None:
    a, b = normal(70, 90), normal(9, 90, 200)
    found = product(np.broadcast_to(a, (9, 70, 90)), b)
    assert max(error(found[n], a, b[n], None) for n in range(9)) < 2e-7


def test_numbers_of_very_different_sizes() -> None:
    a = normal(64, 256) * np.float32(10) ** rng.integers(-15, 16, (64, 1)).astype(np.float32)
    b = normal(256, 64) * np.float32(10) ** rng.integers(-15, 16, (1, 64)).astype(np.float32)
    assert error(product(a, b), a, b, None) < 2e-7


@pytest.mark.parametrize(("count", "rows", "columns"), [(1, 700, 650), (1, 650, 700), (5, 70, 600), (7, 200, 40)])
def test_threads_do_not_change_a_bit(count: int, rows: int, columns: int) -> None:
    a, b = normal(count, rows, 600), normal(count, 600, columns)
    found = [product(a, b, threads=threads) for threads in (1, 2, 3)]
    assert (found[0] == found[1]).all()
    assert (found[0] == found[2]).all()


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 3.4e38, 1.3e30])
@pytest.mark.parametrize("edge", [False, True])
def test_numbers_that_are_not_finite_come_out_as_elsewhere(value: float, edge: bool) -> None:
    a, b = normal(70, 80), np.ones((80, 50), dtype=np.float32)
    a[69 if edge else 3, 17] = value
    b[:, 1] = 1.7e30
    with np.errstate(over="ignore", invalid="ignore"):
        found, exact = product(a, b), a @ b
    assert (np.isnan(found) == np.isnan(exact)).all()
    known = np.isfinite(exact)
    assert (found[~known & ~np.isnan(exact)] == exact[~known & ~np.isnan(exact)]).all()
    assert np.allclose(found[known], exact[known], rtol=1e-5, atol=1e-5)


def test_infinite_results_once_do_not_slow_later_ones() -> None:
    a, b, c = normal(64, 64), normal(64, 64), np.empty((64, 64), dtype=np.float32)
    pool, calls = ThreadPool(1), []

    def otherwise() -> object:
        calls.append("made")
        return lambda: calls.append("run")

    run = product_on_tiles(pool, a, b, c, None, otherwise)
    run()
    a[0, 0] = np.inf
    run()
    run()
    a[0, 0] = 1
    run()
    assert calls == ["made", "run", "run"]
    pool.close()


def test_large_products_alone_are_worth_it() -> None:
    pool, low = ThreadPool(2), ThreadPool(2, bf16_products=True)
    assert is_better_on_tiles(pool, (1, 1024, 1024), 256)
    assert not is_better_on_tiles(pool, (1, 1024, 32), 256)
    assert not is_better_on_tiles(pool, (1, 64, 64), 64)
    assert not is_better_on_tiles(low, (1, 1024, 1024), 256)
    pool.close()
    low.close()


def test_code_for_a_level_of_processors_uses_none() -> None:
    script = "from graphc.backends.host.processor import has_matrix_tiles as has; print(has())"
    environment = {**os.environ, "GRAPHC_PROCESSOR": "x86-64-v4"}
    found = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"
