"""Rows of native calls: in order, to the one that fails, and back in Python where they take long."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from typing import Any

import numba
import numpy as np
import pytest
import torch

pytest.importorskip("onnxruntime")

import graphc
from graphc.backends import onnxruntime
from graphc.backends.host.calls import NativeCall, in_a_row, native_calls
from graphc.backends.onnxruntime.pool import ThreadPool
from graphc.device import in_order
from graphc.errors import InternalError
from graphc.frontends.torch import export
from tests.tiers import params

Array = np.ndarray[Any, Any]


@numba.njit(nogil=True)
def _follow(values: Array, number: float, start: int, stop: int) -> None:
    for i in range(start, stop):
        if values[i] < 0:
            raise ValueError("negative")
        values[i] = 10 * values[i] + number


@numba.njit(nogil=True)
def _work(values: Array, rounds: int, start: int, stop: int) -> None:
    for _ in range(rounds):
        for i in range(start, stop):
            values[i] = np.sqrt(values[i] + 1.0)


@pytest.mark.parametrize("threads", [1, 2])
def test_calls_of_a_row_run_in_order_to_the_one_that_fails(threads: int) -> None:
    values, pool = np.zeros(6), ThreadPool(threads)
    calls = [pool.bind(_follow, (values, float(k)), 6) for k in (1, 2, 3)]
    found = native_calls(in_order([calls[0], in_order(calls[1:])]))
    assert found is not None
    row = in_a_row(found)
    row()
    assert values.tolist() == [123] * 6
    values[:] = 0
    values[5] = -1
    with pytest.raises(InternalError, match="native kernel failed"):
        row()
    assert values[0] == 1  # nothing ran behind the first
    values[:] = 0
    row()
    assert values.tolist() == [123] * 6
    pool.close()


def test_work_of_python_joins_no_row() -> None:
    pool = ThreadPool(1)
    native = pool.bind(_follow, (np.zeros(1), 0.0), 1)
    assert native_calls(in_order([native, lambda: None])) is None


def test_a_signal_is_handled_within_a_long_row() -> None:
    class AlarmError(Exception):
        pass

    def ring(*_: object) -> None:
        raise AlarmError

    values, pool = np.zeros(1000), ThreadPool(1)
    one = pool.bind(_work, (values, 10), 1000)
    one()
    begun = time.perf_counter()
    pool.bind(_work, (values, 1000), 1000)()
    each = (time.perf_counter() - begun) / 1000
    call = pool.bind(_work, (values, max(1, int(0.02 / each))), 1000)  # about 20 ms
    assert isinstance(call, NativeCall)
    row = in_a_row([call] * 250)
    previous = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    begun = time.perf_counter()
    try:
        with pytest.raises(AlarmError):
            row()
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert time.perf_counter() - begun < 2  # of five seconds


@pytest.mark.full
def test_kernels_of_a_step_are_rows_unless_they_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    module = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(6)))
    x = torch.randn(256, 128)
    program = graphc.compile(export(module, (x,)), loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=graphc.optim.SGD(lr=0.1))
    kinds, sizes = list[str](), list[int]()

    def row_of(calls: Any) -> Any:
        sizes.append(len(calls))
        return in_a_row(calls)

    monkeypatch.setattr(onnxruntime, "in_a_row", row_of)

    def noted(kind: str, name: str, run: Any) -> Any:
        kinds.append(kind)
        return run

    feeds = {next(v.name for v in program.model.graph.inputs if v.name != "label"): x.numpy(), "label": np.zeros(256, np.int64)}
    with graphc.Trainer(program, threads=1, wrap=noted) as watched, graphc.Trainer(program, threads=1) as plain:
        loss = watched.step(feeds)["loss"]
        assert not sizes
        assert plain.step(feeds)["loss"] == loss
        assert plain.state_sha256() == watched.state_sha256()
    assert max(sizes) > kinds.count("kernel") / 3


_INTERRUPTED = """
import signal
import numpy as np
from graphc.backends.onnxruntime.kernels.onednn.binding import library
from graphc.backends.onnxruntime.kernels.onednn.primitives import ConvolutionPrimitive
from graphc.backends.onnxruntime.pool import ThreadPool

if library() is None:
    raise SystemExit(9)
random, pool = np.random.default_rng(0), ThreadPool({threads})
x, w = (random.standard_normal(shape, dtype=np.float32) for shape in ((2, 128, 55, 55), (16, 128, 1, 1)))
y = np.zeros((2, 16, 55, 55), np.float32)
options = dict(group=1, strides=(1, 1), dilations=(1, 1), pads=(0, 0, 0, 0), blocked=False, pool=pool)
run = ConvolutionPrimitive(library(), "forward", x, w, y, **options).runner()
caught = []
signal.signal(signal.SIGPROF, lambda *_: caught.append(1))
signal.setitimer(signal.ITIMER_PROF, 0.001, 0.001)
while len(caught) < 400:
    run()
    held = [bytes(1000 * k) for k in range(9)]  # the heap is used, and its damage found
signal.setitimer(signal.ITIMER_PROF, 0)
print(np.abs(y - np.einsum("nchw,mcij->nmhw", x, w)).max() < 1e-3)
"""


@pytest.mark.parametrize("threads", params([1, 2], full=[2], large=[1]))
def test_handlers_of_signals_do_not_write_where_products_work(threads: int) -> None:
    """Where the stack pointer of oneDNN's code lies on the heap, as it does in products, the frame of a handler destroys it."""
    done = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED.format(threads=threads)], capture_output=True, text=True, timeout=120
    )
    if done.returncode == 9:
        pytest.skip("oneDNN is not installed")
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
