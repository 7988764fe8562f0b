"""Inputs that the threads of a worker bring in together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

pytest.importorskip("onnxruntime")

import graphc
from graphc.backends.onnxruntime.memory import LEAST, TeamMemory
from graphc.backends.onnxruntime.pool import ThreadPool
from graphc.device import Array

ROWS = 67
"""Of an input; bytes of LEAST // ROWS columns are few enough for one thread to copy."""


@pytest.fixture(params=[1, 2, 3])
def memory(request: pytest.FixtureRequest) -> Iterator[TeamMemory]:
    pool = ThreadPool(request.param)
    yield TeamMemory(pool)
    pool.close()


def forms_of(plain: Array) -> list[Array]:
    """The same values in other places, orders and strides."""
    wide = np.zeros((*plain.shape[:-1], 2 * plain.shape[-1]), plain.dtype)
    wide[..., ::2] = plain
    apart = np.zeros(plain.nbytes + 8, np.uint8)[4 : 4 + plain.nbytes].view(plain.dtype).reshape(plain.shape)
    apart[...] = plain
    return [plain, wide[..., ::2], apart, np.asfortranarray(plain), plain[::-1][::-1]]


@pytest.mark.parametrize("dtype", [np.float32, np.uint8, np.float16, np.bool_, np.int64, ir.DataType.BFLOAT16.numpy()], ids=str)
@pytest.mark.parametrize("size", [LEAST // ROWS, LEAST // ROWS + 1, 70_001])
def test_an_input_holds_what_was_brought(memory: TeamMemory, dtype: Any, size: int) -> None:
    """Also after the array that was brought has been used for something else, and for arrays of any order."""
    raw = memory.zeros((ROWS * size + 2) * np.dtype(dtype).itemsize).view(dtype)
    target = raw[1 : 1 + ROWS * size].reshape(ROWS, size)
    bring = memory.bind_feed(target)
    for number in range(2):
        plain = (np.random.default_rng(number).random((ROWS, size)) * 200).astype(dtype)
        for form in forms_of(plain):
            target[...] = 0
            given = form.copy(order="K")
            bring(given)
            given[...] = 0
            np.testing.assert_array_equal(target, plain)
    assert not raw[0]
    assert not raw[-1], "wrote beside the input"


def test_a_step_reads_feeds_of_any_order() -> None:
    text = """<ir_version: 10, opset_import: ["": 21]>
g (float[N, 512] x) => (float[N] y) <float[512] w = {WEIGHTS}> {
    scaled = Mul(x, w)
    axes = Constant <value_ints = [1]> ()
    y = ReduceSum<keepdims = 0>(scaled, axes)
}""".replace("WEIGHTS", ", ".join(["1"] * 512))
    program = graphc.compile(ir.from_onnx_text(text), loss=graphc.losses.MSE(), optimizer=graphc.optim.SGD(lr=0.0), train=["w"])
    x = np.random.default_rng(0).standard_normal((300, 512)).astype(np.float32)
    goal = np.zeros(300, np.float32)
    wanted = np.square(x.astype(np.float64).sum(1)).mean()
    label = next(v.name for v in program.model.graph.inputs if v.name != "x")
    with graphc.Trainer(program, threads=2) as trainer:
        for form in forms_of(x):
            assert trainer.step({"x": form, label: goal})["loss"] == pytest.approx(wanted, rel=1e-5)
