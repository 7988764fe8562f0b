"""Nodes put on devices by hand: the numbers of one worker, and branches that run at the same time."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import onnx
import pytest

import graphc
from graphc import Mesh
from graphc.distributed.threads import run_threads
from graphc.errors import UsageError
from tests.training import pipe_cases as cases

HEAD = '<ir_version: 10, opset_import: ["": 21]> net (float[batch, 8] x) => (float[batch, 3] y)'
CHAIN = f"{HEAD} {{ m = MatMul(x, w)  y = Add(m, b) }}"
TWO_CHAINS = f"""{HEAD} {{
    left = MatMul(x, w0)    right = MatMul(x, w1)
    lefts = Tanh(left)      rights = Tanh(right)
    both = Add(lefts, rights)   y = Add(both, b)
}}"""
BACK_AND_FORTH = f"{HEAD} {{ m0 = MatMul(x, v0)  t0 = Tanh(m0)  m1 = MatMul(t0, v1)  t1 = Tanh(m1)  y = MatMul(t1, w) }}"
SHAPES = {"w": (8, 3), "b": (3,), "w0": (8, 3), "w1": (8, 3), "v0": (8, 8), "v1": (8, 8)}


def model_of(text: str) -> onnx.ModelProto:
    return cases.parameters(onnx.parser.parse_model(text), {n: s for n, s in SHAPES.items() if f" {n})" in text})


def compare(text: str, devices: int, place: list[str]) -> graphc.Program:
    """Train placed and on one worker; the results must be the same."""
    model = model_of(text)
    data = cases.batches(model, [8, 8, 6])
    wanted = cases.run(cases.compiled(model, Mesh(), 1), data)
    program = cases.compiled(model, Mesh(pipe=devices), 1, place=place)
    found = run_threads(devices, lambda comm: cases.run(program, data, comm), deadline=60)
    assert max(cases.distance(one, wanted) for one in found) < 1e-5
    assert len({one["hash"] for one in found}) == 1
    return program


def test_a_product_on_one_device_and_a_sum_on_the_next() -> None:
    program = compare(CHAIN, 2, ["m=0", "y=1"])
    stages = {n.outputs[0].name: n.metadata_props.get("graphc.stage") for n in program.model.graph}
    assert (stages["m"], stages["y"], stages["w::grad"]) == ("0", "1", "0")


@pytest.mark.full
def test_devices_may_alternate() -> None:
    compare(BACK_AND_FORTH, 2, ["m0=0", "m1=1", "y=0"])
    compare(BACK_AND_FORTH, 3, ["m*=2", "t0=1", "t1=0"])


def test_independent_chains_run_at_the_same_time() -> None:
    place = ["left*=0", "right*=1", "both=0", "y=0"]
    compare(TWO_CHAINS, 2, place)
    model = model_of(TWO_CHAINS)
    program = cases.compiled(model, Mesh(pipe=2), 1, place=place)
    (batch,) = cases.batches(model, [8])
    together = threading.Barrier(2)

    def work(comm: Any) -> float:
        seen = []

        def wrap(kind: str, name: str, run: Any) -> Any:
            if kind != "segment" or seen:
                return run
            seen.append(name)  # the first segment of each device: its chain

            def both_at_once() -> None:
                together.wait(timeout=30)  # ends only if the other device is in its chain too
                run()
                together.wait(timeout=30)

            return both_at_once

        with graphc.Trainer(program, comm=comm, threads=1, wrap=wrap) as trainer:
            return trainer.step(batch)["loss"]

    first, second = run_threads(2, work, deadline=60)
    assert first == second
    assert np.isfinite(first)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"place": ["z=1"]}, "'z=1' matches no node"),
        ({"place": ["m=2"]}, "DEVICE is one of 0 … 1"),
        ({"place": ["m"]}, "write GLOB=DEVICE"),
        ({"place": ["m=0"]}, "no node is placed on device 1"),
        ({"place": ["m=0", "y=1"], "schedule": "gpipe"}, "exclude each other"),
        ({"place": ["m=0", "y=1"], "accumulate": 2}, "leave accumulate out"),
    ],
)
def test_wrong_places_say_what_to_do(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        cases.compiled(model_of(CHAIN), Mesh(pipe=2), options.pop("accumulate", 1), **options)
