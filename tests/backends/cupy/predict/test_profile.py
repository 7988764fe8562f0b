"""What every call of a step takes, measured on a GPU, and the table of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import graphc
from graphc.bench.kernel_table import centres, markdown, rows
from graphc.bench.specs import SPECS
from graphc.report.step_time import TIMERS, Cost, Timed


def timed(name: str, seconds: float, predicted: float, centre: str = "elements") -> Timed:
    return Timed(Cost(centre, name, predicted, nbytes=4_000_000, flops=0), seconds)


def test_equal_calls_are_one_row_and_what_loses_most_comes_first() -> None:
    calls = [timed("k1 a", 2e-6, 2e-6), timed("k2 x", 9e-6, 4e-6), timed("k1 b", 3e-6, 2e-6), timed("copy", 1e-6, 0.0, "other")]
    table = rows(calls)
    assert [(row["name"], row["calls"]) for row in table] == [("k2 x", 1), ("k1 a", 2), ("copy", 1)]
    assert table[1]["measured_us"] == pytest.approx(5)
    assert table[1]["excess_us"] == pytest.approx(1)
    assert table[0]["ratio"] == pytest.approx(2.25)
    assert table[2]["ratio"] is None
    (elements, other) = centres(table)
    assert (elements["centre"], elements["calls"], other["centre"]) == ("elements", 3, "other")
    assert elements["measured_us"] == pytest.approx(14)
    text = markdown(table, 1)
    assert "| 9.0 | 4.0 | 2.25 | 1 | 0.44 |  | elements | k2 x |" in text
    assert "k1 a" not in text


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["lenet", "transformer-small"])
def test_every_call_is_measured_and_the_step_is_what_it_was(name: str, exported: Callable[[str], str]) -> None:
    program = graphc.compile(
        exported(name),
        loss=graphc.losses.SoftmaxCrossEntropy(),
        optimizer=graphc.optim.parse("adamw:lr=1e-3"),
        precision="bf16",
        backend="cupy:deterministic",
    )
    feeds: dict[str, Any] = dict(zip(("input", "label"), SPECS[name].batch(8), strict=True))
    states = []
    for measured in (False, True):
        with graphc.Trainer(program, threads=1) as trainer:
            for _ in range(3):
                trainer.step(feeds)
            if measured:
                (executor,) = trainer.plans.training.values()
                before = executor.runs
                calls = TIMERS["cupy"](trainer.backend, executor, lambda: trainer.step(feeds))
                assert executor.runs is before
            else:
                for _ in range(14):
                    trainer.step(feeds)
            trainer.step(feeds)
            states.append(trainer.state.snapshot())
    for key, value in states[0].items():
        np.testing.assert_array_equal(states[1][key], value, err_msg=key)
    assert {"products", "updates"} <= {call.cost.centre for call in calls}
    assert sum(call.seconds > 0 for call in calls) > len(calls) // 2
    updates = [call.cost.name for call in calls if call.cost.centre == "updates"]
    assert any("AdamW" in update for update in updates)
