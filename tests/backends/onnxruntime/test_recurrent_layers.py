"""Native kernels of recurrent layers against the decomposition of their ops, and whole steps against PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime")

from graphc.backends.onnxruntime.pool import ThreadPool
from graphc.ir.ops.gate_order import PYTORCH
from graphc.ir.ops.recurrent_training import GRU, GRU_RESET_AFTER, LSTM, PLACES, RELU, TANH
from tests.backends.onnxruntime.node_cases import compare, native, reference
from tests.tiers import thinned

GATES = {LSTM: 4, GRU: 3, GRU_RESET_AFTER: 3, TANH: 1, RELU: 1}


@pytest.fixture(params=[1, 3])
def pool(request: pytest.FixtureRequest) -> Iterator[ThreadPool]:
    made = ThreadPool(request.param)
    yield made
    made.close()


def operands(cell: str, direction: str, sizes: tuple[int, int, int], *, ragged: bool, states: bool) -> list[Any]:
    """The inputs of RecurrentTraining."""
    rng = np.random.default_rng(3)
    (time, batch, hidden), count = sizes, 2 if direction == "bidirectional" else 1

    def normal(*shape: int) -> Any:
        return (rng.standard_normal(shape) * 0.8).astype(np.float32)

    wide = GATES[cell] * hidden
    return [
        normal(time, batch, count * wide),
        normal(count, wide, hidden) / np.float32(np.sqrt(hidden)),
        normal(count, wide) if states else None,
        normal(count, hidden) if cell == GRU_RESET_AFTER and states else None,
        rng.integers(0, time + 1, batch).astype(np.int32) if ragged else None,
        normal(count, batch, hidden) if states else None,
        normal(count, batch, hidden) if states and cell == LSTM else None,
    ]


CASES = [
    *((cell, way, (4, 9, 21), True, True) for cell in GATES for way in ("forward", "reverse", "bidirectional")),
    *((cell, "bidirectional", (3, 2, 5), False, False) for cell in GATES),
    *((cell, way, (4, 7, 21), ragged, False) for cell in GATES for way in ("forward", "reverse") for ragged in (True, False)),
    (LSTM, "forward", (1, 3, 40), False, False),
    (LSTM, "forward", (1, 1, 40), False, True),
    (LSTM, "forward", (5, 33, 64), False, False),
    *((cell, "bidirectional", (3, 40, 50), True, True) for cell in GATES),  # on matrix tiles where there are any
]


@pytest.mark.full
@pytest.mark.parametrize(("cell", "direction", "sizes", "ragged", "states"), thinned(CASES, 3))
def test_a_layer_and_its_gradient(
    cell: str, direction: str, sizes: tuple[int, int, int], ragged: bool, states: bool, pool: ThreadPool
) -> None:
    check_layer({"cell": cell, "direction": direction}, sizes, pool, ragged=ragged, states=states)


@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
@pytest.mark.parametrize("cell", PLACES)
def test_gates_in_the_order_of_pytorch(cell: str, direction: str, pool: ThreadPool) -> None:
    check_layer({"cell": cell, "direction": direction, "order": PYTORCH}, (4, 9, 21), pool, ragged=True, states=True)


def check_layer(
    attributes: dict[str, Any], sizes: tuple[int, int, int], pool: ThreadPool, *, ragged: bool, states: bool
) -> None:
    """Compare both kernels with the decompositions of their ops."""
    cell = attributes["cell"]
    inputs = operands(cell, attributes["direction"], sizes, ragged=ragged, states=states)
    while inputs[-1] is None:
        inputs.pop()
    compare("graphc::RecurrentTraining", inputs, attributes, pool)
    made = reference("graphc::RecurrentTraining", inputs, attributes)
    y, y_h, gates, cells, y_c = [*made, None, None][:5]
    _, r, _, hidden_bias, lengths, h, c = [*inputs, *[None] * 5][:7]
    rng = np.random.default_rng(4)
    slopes = [rng.standard_normal(v.shape).astype(np.float32) if v is not None else None for v in (y, y_h, y_c)]
    if not states:
        slopes[1:] = [None, None]  # only the outputs of all steps are used
    if ragged and hidden_bias is None and cell != LSTM:
        slopes[0] = None  # only the final state is used
    operand = [y, gates, r, cells, lengths, h, c, *slopes]
    while operand[-1] is None:
        operand.pop()
    compare("graphc::RecurrentTrainingGrad", operand, attributes, pool, tolerance=4e-6)


def test_any_number_of_threads_gives_the_same_bits() -> None:
    inputs = operands(LSTM, "bidirectional", (6, 17, 24), ragged=True, states=True)
    attributes = {"cell": LSTM, "direction": "bidirectional"}
    like = reference("graphc::RecurrentTraining", inputs, attributes)
    found = []
    for threads in (1, 2, 5):
        pool = ThreadPool(threads)
        found.append(native("graphc::RecurrentTraining", inputs, attributes, pool, like))
        pool.close()
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(a, b)
