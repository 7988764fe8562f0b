"""Proposals of every kind train as one worker does, and hold the memory that was predicted."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
import onnx
import pytest

import graphc
from graphc import device
from graphc.backend import Backend, make_backend
from graphc.distributed.communicator import Communicator
from graphc.distributed.threads import run_threads
from graphc.mesh import Mesh
from graphc.plan.buffers import STASH
from graphc.plan.state_rewrites import adapted
from graphc.plan.steps import PlanStep
from graphc.planner.costs import ModelCosts, on_host
from graphc.planner.division import Division
from graphc.planner.network import Curve, Link, Network
from graphc.planner.search import Predicted, best
from graphc.report.memory import feed_shapes
from graphc.report.pipe_memory import stage_plans
from graphc.report.step_profile import StepProfile
from tests.training import pipe_cases

DEVICES, BATCH = 4, 16
WIDTH = 128
"""Products of one sample are kernels of their own, so that the plans of one sample and of four, between which memory is a line,
have the same steps."""
NETWORK = Network(2, Link(Curve.line(1e9, 1e-6)), Link(Curve.line(1e8, 1e-5)))


def network() -> onnx.ModelProto:
    """Eight layers whose states are larger than what else a worker holds."""
    lines, value = [], "x"
    for k in range(8):
        lines += [f"m{k} = MatMul ({value}, w{k})", f"h{k} = Tanh (m{k})"]
        value = f"h{k}"
    text = "\n".join([*lines, f"y = Identity (m{7})"])
    head = f'<ir_version: 10, opset_import: ["": 21]> net (float[batch, {WIDTH}] x) => (float[batch, {WIDTH}] y)'
    return pipe_cases.parameters(onnx.parser.parse_model(f"{head} {{ {text} }}"), {f"w{k}": (WIDTH, WIDTH) for k in range(8)})


MODEL = network()


def compiled(**options: Any) -> graphc.Program:
    loss = graphc.losses.SoftmaxCrossEntropy()
    optimizer = graphc.optim.Adam(lr=0.01, eps=1e-4)  # a gradient near zero does not step by its rounding
    return graphc.compile(MODEL, loss=loss, optimizer=optimizer, **options)


def batches() -> list[dict[str, Any]]:
    rng = np.random.default_rng(3)
    return [{"x": rng.normal(size=(BATCH, WIDTH)).astype(np.float32), "label": rng.integers(0, WIDTH, BATCH)} for _ in range(2)]


def fixed(steps: Iterable[PlanStep], engine: Backend) -> StepProfile:
    """Times by rates alone: nothing is measured."""
    del steps
    return StepProfile({"name": "any machine"}, engine.name, 1, 1e10, 1e10)


@pytest.fixture(scope="module")
def costs() -> ModelCosts:
    return on_host(compiled, "auto", (2, 4), (2,), fixed)


def kind_of(choice: Division) -> tuple[object, ...]:
    mesh, several = choice.mesh, choice.micro_batches > 1
    return mesh.pipe, mesh.tensor, mesh.node > 1, choice.zero, choice.recompute, choice.schedule if mesh.pipe > 1 else several


@pytest.fixture(scope="module")
def proposals(costs: ModelCosts) -> dict[tuple[object, ...], Predicted]:
    """The fastest of each kind."""
    found: dict[tuple[object, ...], Predicted] = {}
    for proposal in best(costs, NETWORK, DEVICES, 1e12, BATCH):
        found.setdefault(kind_of(proposal.choice), proposal)
    return found


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Thread → bytes of the host's memory that it asked for and that are still in use."""
    found: dict[int, int] = {}
    given = device.aligned_zeros

    def change(thread: int, nbytes: int) -> None:
        found[thread] = found.get(thread, 0) + nbytes

    def counted(nbytes: int) -> Any:
        array, thread = given(nbytes), threading.get_ident()
        change(thread, nbytes)
        weakref.finalize(array if array.base is None else array.base, change, thread, -nbytes)  # views keep the base
        return array

    monkeypatch.setattr(device, "aligned_zeros", counted)
    return found


def train(comm: Communicator | None, program: graphc.Program, held: dict[int, int]) -> dict[str, Any]:
    with graphc.Trainer(program, comm=comm, threads=1) as trainer:
        losses = [trainer.step(pipe_cases.own_part(trainer, batch))["loss"] for batch in batches()]
        gc.collect()
        nbytes = held.get(threading.get_ident(), 0)  # before whole weights are gathered
        return {"losses": losses, "weights": trainer.trained_values(), "held": nbytes}


def options_of(choice: Division) -> dict[str, Any]:
    """The options of a proposal's file as arguments of ``graphc.compile``."""
    found = choice.options()
    assert found.pop("workers") == DEVICES
    assert found.pop("batch-size") == BATCH
    return {name: Mesh.parse(value) if name == "mesh" else value for name, value in found.items()}


def check(chosen: Iterable[Predicted], held: dict[int, int]) -> None:
    """Train two steps on threads; losses and weights are those of one worker, and memory is what was predicted."""
    alone = train(None, compiled(), held)
    for proposal in chosen:
        program = compiled(**options_of(proposal.choice))
        gc.collect()  # what earlier trainings held is given back now, not below
        held.clear()
        ranks = run_threads(DEVICES, lambda comm, program=program: train(comm, program, held), deadline=60)
        for rank in ranks:
            assert rank["losses"] == pytest.approx(alone["losses"], rel=1e-5), proposal.choice
            assert all(np.allclose(rank["weights"][name], value, atol=1e-4) for name, value in alone["weights"].items())
        share = proposal.memory / max(rank["held"] for rank in ranks)
        assert LEAST <= share <= MOST, proposal.choice


LEAST, MOST = 0.95, 1.1
"""Predicted memory of the rank that needs most, as a share of what it holds."""


def test_between_its_tasks_a_stage_keeps_activations_not_gradients_of_weights() -> None:
    """Recomputed activations look like gathered parameters in another form where they begin with the feeds of a stage."""
    engine = make_backend("auto", threads=1)
    options = {"mesh": Mesh(data=2, pipe=2), "accumulate": 2, "strategy": "zero:stage=3", "schedule": "zero-bubble"}
    kept = []
    for recompute in ({}, {"recompute": "all"}):
        model = adapted(compiled(**options, **recompute).model, engine)
        kept.append(stage_plans(model, feed_shapes(model, 4), engine)[0].buffers[f"{STASH}0"])
    assert kept[1] <= kept[0] < 4 * WIDTH * WIDTH, "less than one gradient"
    engine.close()


@pytest.mark.large  # seven programs on four workers each
def test_the_fastest_proposals_train_and_hold_what_was_predicted(
    proposals: dict[tuple[object, ...], Predicted], held: dict[int, int]
) -> None:
    found: dict[tuple[object, ...], Predicted] = {}
    for proposal in proposals.values():
        mesh = proposal.choice.mesh
        found.setdefault((mesh.pipe > 1, mesh.tensor > 1, proposal.choice.zero > 0), proposal)
    assert len(found) == 7, "two stages of a tensor axis have no replicas on four devices"
    check(found.values(), held)


@pytest.mark.large
def test_all_kinds_of_proposals_train(proposals: dict[tuple[object, ...], Predicted], held: dict[int, int]) -> None:
    """Large: 50 combinations of axes, strategies, schedules and recomputation."""
    check(proposals.values(), held)
