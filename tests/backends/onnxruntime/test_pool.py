"""The team of threads: which functions run natively, in which threads, and how they fail."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch

pytest.importorskip("onnxruntime")

import graphc
from graphc.backend import make_backend
from graphc.backends.host.processor import copies_to_bfloat16, multiplies_bfloat16
from graphc.backends.onnxruntime import pool as pools
from graphc.backends.onnxruntime.kernels.onednn.binding import library
from graphc.backends.onnxruntime.kernels.onednn.primitives import ConvolutionPrimitive, MatmulPrimitive
from graphc.distributed.host_queue import NullCommunicator
from graphc.distributed.world import usable_cores
from graphc.errors import InternalError, UsageError


@pytest.fixture(params=["team", "own threads"])
def pool(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[pools.ThreadPool]:
    if request.param == "own threads":
        monkeypatch.setattr(pools, "library", lambda: None)
    made = pools.ThreadPool(3)
    yield made
    made.close()


@numba.njit(nogil=True)
def _mixed(
    matrix: np.ndarray[Any, Any],
    scale: float,
    wide: float,
    count: int,
    pair: tuple[int, int],
    negate: bool,
    result: np.ndarray[Any, Any],
    start: int,
    stop: int,
) -> None:
    for i in range(start, stop):
        total = 0.0
        for j in range(matrix.shape[1]):
            total += matrix[i, j] * scale
        result[i] = (total + wide + count + pair[0] - pair[1]) * (-1.0 if negate else 1.0)


@pytest.mark.full
def test_arguments_of_every_kind_reach_machine_code(pool: pools.ThreadPool) -> None:
    matrix = np.arange(70.0, dtype=np.float32).reshape(10, 7).T  # rows are not contiguous
    result = np.zeros(7)
    run = pool.bind(_mixed, (matrix, np.float32(0.5), 0.25, 3, (10, 4), True, result), 7)
    for _ in range(3):
        result[:] = 0
        run()
        np.testing.assert_allclose(result, -(matrix.sum(1) * 0.5 + 0.25 + 3 + 6), rtol=1e-6)
    matrix[...] = 0  # addresses are bound, values are not
    run()
    assert result.tolist() == [-9.25] * 7


@numba.njit(nogil=True)
def _fails(values: np.ndarray[Any, Any], start: int, stop: int) -> None:
    for i in range(start, stop):
        if values[i] < 0:
            raise ValueError("negative")


def test_failures_of_compiled_code_are_raised_once(pool: pools.ThreadPool) -> None:
    values = np.ones(9)
    run = pool.bind(_fails, (values,), values.size)
    run()
    values[8] = -1
    with pytest.raises(InternalError, match="native kernel failed"):
        run()
    values[8] = 1
    run()


@numba.njit(nogil=True)
def _touch(values: np.ndarray[Any, Any], start: int, stop: int) -> None:
    for i in range(start, stop):
        values[i] += 1


@pytest.mark.skipif(library() is None or not os.path.isdir("/proc/self/task"), reason="needs oneDNN and Linux")
def test_kernels_run_in_the_threads_of_onednn() -> None:
    lib = library()
    assert lib is not None
    a = np.ones((64, 64), dtype=np.float32)
    c, own, values = np.zeros((64, 64), dtype=np.float32), pools.ThreadPool(2), np.zeros(1000)
    product = MatmulPrimitive(lib, a, a, c, None, pool=own).runner()
    product()
    before = set(os.listdir("/proc/self/task"))
    run = own.bind(_touch, (values,), values.size)
    for _ in range(5):
        run()
        product()
    assert set(os.listdir("/proc/self/task")) <= before  # an earlier, larger team may still be ending
    assert (values == 5).all()
    assert (c == 64).all()


@pytest.mark.skipif(library() is None, reason="needs oneDNN")
@pytest.mark.parametrize("form", ["small", "large", "turned", "many"])
def test_products_of_bfloat16_follow_those_of_float32(form: str) -> None:
    """Within bfloat16's resolution of each operand, 2⁻⁸; a processor without such arithmetic computes float32."""
    lib, rng = library(), np.random.default_rng(0)
    assert lib is not None
    shapes = {"small": ((128, 256), (256, 96)), "many": ((3, 256, 64), (3, 64, 320))}.get(form, ((384, 256), (256, 512)))
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    if form == "turned":
        a, b = np.ascontiguousarray(a.T).T, np.ascontiguousarray(b.T).T
    bias = rng.standard_normal(b.shape[-1]).astype(np.float32) if a.ndim == 2 else None
    found = np.zeros((*a.shape[:-1], b.shape[-1]), dtype=np.float32)
    MatmulPrimitive(lib, a, b, found, bias, pool=pools.ThreadPool(2, bf16_products=True)).runner()()
    bound = np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64)) * 2**-7 + 1e-6
    off = np.abs(found - (a.astype(np.float64) @ b + (0 if bias is None else bias)))
    assert (off <= bound).all()
    if form != "small" and copies_to_bfloat16():
        assert off.max() > 1e-3  # of products in bfloat16


@pytest.mark.skipif(library() is None or not multiplies_bfloat16(), reason="needs oneDNN and a processor with bfloat16")
def test_emulated_bfloat16_is_said_to_be_slow(exported: Callable[[str], str]) -> None:
    loss, optimizer = graphc.losses.SoftmaxCrossEntropy(), graphc.optim.SGD(lr=0.1)
    program = graphc.compile(exported("mlp"), loss=loss, optimizer=optimizer, precision="bf16:deny=Relu", backend="onnxruntime")
    with pytest.warns(UserWarning, match="emulates bfloat16 .* backend='onnxruntime:bf16_products=true' multiplies"):
        graphc.Trainer(program, threads=1).close()


@pytest.mark.skipif(library() is None or not multiplies_bfloat16(), reason="needs oneDNN and a processor with bfloat16")
@pytest.mark.parametrize("kind", ["forward", "input", "weight"])
def test_convolutions_of_bfloat16_follow_those_of_float32(kind: str) -> None:
    """Their operands are rounded, their sums and results are not."""
    lib, rng = library(), np.random.default_rng(0)
    assert lib is not None
    x, w, y = (rng.standard_normal(shape).astype(np.float32) for shape in ((4, 64, 14, 14), (96, 64, 3, 3), (4, 96, 7, 7)))
    given = {name: torch.from_numpy(array.astype(np.float64)).requires_grad_() for name, array in (("x", x), ("w", w))}
    result = torch.nn.functional.conv2d(given["x"], given["w"], stride=2, padding=1)
    result.backward(torch.from_numpy(y.astype(np.float64)))
    wanted = {"forward": result.detach(), "input": given["x"].grad, "weight": given["w"].grad}[kind]
    target = {"forward": y, "input": x, "weight": w}[kind]
    form = {"group": 1, "strides": (2, 2), "dilations": (1, 1), "pads": (1, 1, 1, 1), "blocked": True, "rounded": True}
    ConvolutionPrimitive(lib, kind, x, w, y, **form, pool=pools.ThreadPool(2, bf16_products=True)).runner()()
    assert wanted is not None
    off = np.abs(target - wanted.numpy()).max() / np.abs(wanted.numpy()).max()
    assert 1e-5 < off < 2**-7


def test_products_of_bfloat16_are_an_option_of_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    from graphc.backends import onnxruntime

    if library() is not None:
        backend = make_backend("onnxruntime:bf16_products=true", threads=1)
        assert isinstance(backend, onnxruntime.OnnxRuntimeBackend)
        flags = Path("/proc/cpuinfo").read_text().split()
        assert backend.pool.bf16_products == any(flag in flags for flag in ("amx_bf16", "avx512_bf16", "bf16"))
        backend.close()
    monkeypatch.setattr(onnxruntime, "library", lambda: None)
    with pytest.raises(UsageError, match="needs oneDNN"):
        make_backend("onnxruntime:bf16_products=true", threads=1)


def _allowed(pool: pools.ThreadPool) -> list[set[int]]:
    """The cores that each thread of the team may use."""
    found: dict[int, set[int]] = {}

    def look(_: int, start: int, stop: int) -> None:
        found[start] = os.sched_getaffinity(0)

    code = pools._CODE(look)
    pool.bind(code, (0,), pool.threads)()
    return [found[k] for k in range(pool.threads)]


def test_pinned_threads_stay_on_their_cores_until_the_pool_is_closed(pool: pools.ThreadPool) -> None:
    usable = usable_cores()
    cores = [usable[k % len(usable)] for k in range(3)]
    pool.pin(cores)
    assert _allowed(pool) == [set(cores), {cores[1]}, {cores[2]}]
    pool.close()
    later = pools.ThreadPool(3)  # OpenMP gives it the same threads
    assert _allowed(later) == [set(usable)] * 3
    later.close()
    assert usable_cores() == usable


@pytest.mark.skipif(len(usable_cores()) < 2, reason="one core is every thread's")
def test_a_pinned_trainer_computes_the_same_and_leaves_processes_free(exported: Callable[[str], str]) -> None:
    loss, optimizer, rng = graphc.losses.SoftmaxCrossEntropy(), graphc.optim.SGD(lr=0.1), np.random.default_rng(0)
    feeds = {"input": rng.standard_normal((64, 784), dtype=np.float32), "label": rng.integers(0, 10, 64)}
    losses = []
    for backend in ("onnxruntime", "onnxruntime:pin=true"):
        program = graphc.compile(exported("mlp"), loss=loss, optimizer=optimizer, backend=backend)
        with graphc.Trainer(program, comm=NullCommunicator()) as trainer:
            losses.append([trainer.step(feeds)["loss"] for _ in range(3)])
            pool = trainer.backend.pool  # type: ignore[attr-defined]
            assert pool.threads == len(trainer.cores)
            if "pin" in backend:
                assert _allowed(pool)[1:] == [{core} for core in trainer.cores[1:]]
            assert usable_cores() == trainer.cores  # what a data loader's processes inherit
    assert losses[0] == losses[1]


def test_threads_without_cores_of_their_own_are_not_pinned(exported: Callable[[str], str]) -> None:
    loss, optimizer, threads = graphc.losses.SoftmaxCrossEntropy(), graphc.optim.SGD(lr=0.1), len(usable_cores()) + 1
    program = graphc.compile(exported("mlp"), loss=loss, optimizer=optimizer, backend="onnxruntime:pin=true")
    with pytest.raises(UsageError, match=f"needs a core for every thread: {threads} threads on"):
        graphc.Trainer(program, threads=threads)
