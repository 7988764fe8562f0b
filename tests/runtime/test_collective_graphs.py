"""Collectives as graph ops: what they compute in a plan, their gradients, and the proof that all ranks' plans fit together."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from graphc.distributed.collective_proof import check_events
from graphc.distributed.groups import Groups
from graphc.distributed.threads import ThreadCommunicator, run_threads
from graphc.errors import ModelError, WorldError
from graphc.ir.builder import Builder
from graphc.mesh import Mesh
from graphc.plan.group_places import CollectiveEvent
from graphc.plan.partition import make_plan
from tests.runtime.collective_graphs import Emit, differences, graph_of, run_plan
from tests.runtime.mpi_run import map_ranks


def emits(name: str, **attributes: Any) -> Emit:
    return lambda op, x: op.emit(name, [x], {"tag": "tensor/c", "group": "tensor", **attributes}, domain="graphc")[0]


CASES: dict[str, tuple[Emit, tuple[int, ...], tuple[int, ...]]] = {
    "AllReduce": (emits("AllReduce"), (3, 2), (3, 2)),
    "mean": (emits("AllReduce", reduce="mean"), (3, 2), (3, 2)),
    "Broadcast": (emits("Broadcast", root=1), (3, 2), (3, 2)),
    "Reduce": (emits("Reduce", root=1), (3, 2), (3, 2)),
    "Barrier": (emits("Barrier"), (3, 2), (3, 2)),
    "AllGatherStack": (emits("AllGatherStack", size=2), (3, 2), (2, 3, 2)),
    "ReduceScatterStack": (emits("ReduceScatterStack", size=2), (2, 3), (3,)),
    "AllToAll": (emits("AllToAll", size=2), (2, 3), (2, 3)),
}

WHOLE: dict[str, Emit] = {  # f and g of Megatron-LM: what lies between them differs by rank
    "Fork, AllReduce": lambda op, x: emits("AllReduce", adjoint="whole")(op, own(op, emits("Fork")(op, x))),
    "OwnPart, AllGatherStack": lambda op, x: op.Mul(
        emits("AllGatherStack", size=2, adjoint="whole")(op, op.graphc.OwnPart(x, tag="p", group="tensor", size=2)), 2.0
    ),
}


def own(op: Builder, x: ir.Value) -> ir.Value:
    """Something that differs by rank."""
    return op.Mul(x, op.Add(op.Cast(op.graphc.Coordinate(group="tensor"), to=int(ir.DataType.DOUBLE)), np.float64(1.5)))


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_parts_of_a_loss(name: str) -> None:
    emit, shape, weight = CASES[name]
    for error in run_threads(4, lambda comm: differences(Groups(comm, Mesh(data=2, tensor=2)), emit, shape, weight)):
        assert error < 1e-6


@pytest.mark.parametrize("name", WHOLE)
def test_gradients_of_a_loss_that_all_ranks_hold(name: str) -> None:
    for error in run_threads(
        2, lambda comm: differences(Groups(comm, Mesh(tensor=2)), WHOLE[name], (2, 3), (2, 3), whole=True)
    ):
        assert error < 1e-6


def all_on_mpi(comm: Any) -> list[float]:
    groups = Groups(comm, Mesh(tensor=2) if comm.size == 2 else Mesh(data=2, tensor=2))
    return [differences(groups, *case) for case in CASES.values()]


@pytest.mark.mpi
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.large)])
def test_on_processes(size: int) -> None:
    assert max(max(errors) for errors in map_ranks(size, all_on_mpi)) < 1e-6


def test_what_the_root_does_not_hold_is_zero() -> None:
    def work(comm: ThreadCommunicator) -> Any:
        model = graph_of(emits("Reduce", root=1), (3,), (3,))
        x = np.full(3, comm.rank + 1.0)
        return float(run_plan(comm, Mesh(tensor=2), model, {"x": x, "w": np.ones(3)})["loss"])

    assert run_threads(2, work) == pytest.approx([0.0, 3 * np.sin(5.0)])


def test_send_and_receive() -> None:
    """loss = Σ w·sin(y) on rank 1, of y = x² of rank 0: the adjoint comes back."""

    def work(comm: ThreadCommunicator) -> Any:
        sends = comm.rank == 0

        def emit(op: Builder, x: ir.Value) -> ir.Value:
            if sends:
                return op.graphc.Send(x, tag="y", group="pipe", peer=1)
            return op.Add(
                op.graphc.Recv(tag="y", group="pipe", peer=0, shape=[3], dtype=int(ir.DataType.DOUBLE)), op.Mul(x, 0.0)
            )

        model = graph_of_stage(emit, sends)
        x = np.arange(1.0, 4.0)
        return run_plan(comm, Mesh(pipe=2), model, {"x": x, "w": np.zeros(3) if sends else np.array([1.0, -2.0, 3.0])})

    first, second = run_threads(2, work)
    x, w = np.arange(1.0, 4.0), np.array([1.0, -2.0, 3.0])
    assert float(second["loss"]) == pytest.approx(float((w * np.sin(x * x)).sum()))
    np.testing.assert_allclose(first["dx"], w * np.cos(x * x) * 2 * x)


def graph_of_stage(emit: Emit, sends: bool) -> ir.Model:
    """As :func:`graph_of`; the stage that receives differentiates with respect to what it receives, too."""
    from graphc.passes.gradients import reverse_mode
    from tests.runtime import collective_graphs

    if sends:
        return graph_of(emit, (3,), (3,))
    plain = collective_graphs.differentiate

    def with_received(graph: ir.Graph, targets: Any, sources: Any) -> Any:
        received = [node.outputs[0] for node in graph if node.op_type == "Recv"]
        return plain(graph, targets, [*sources, *received])

    collective_graphs.differentiate = with_received
    try:
        return graph_of(emit, (3,), (3,))
    finally:
        collective_graphs.differentiate = reverse_mode.differentiate


def test_a_graph_for_another_mesh_is_refused() -> None:
    shapes = {"x": (3, 2), "w": (2, 3, 2)}
    model = graph_of(*CASES["AllGatherStack"])
    with pytest.raises(ModelError, match=r"made for a group of 2 ranks, and the group 'tensor' of .*tensor=4 has 4"):
        make_plan(model, shapes, mesh=Mesh(tensor=4))
    with pytest.raises(ModelError, match="'tensor/c' was made for a group of 2 ranks; this one has one"):
        make_plan(model, shapes)


def begin(tag: str, text: str = "FLOAT[3]", lane: tuple[Any, ...] = ("pipe", 0, 1)) -> CollectiveEvent:
    return CollectiveEvent(tag, True, text, *lane)


def wait(tag: str, text: str = "FLOAT[3]", lane: tuple[Any, ...] = ("pipe", 0, 1)) -> CollectiveEvent:
    return CollectiveEvent(tag, False, text, *lane)


BACK = ("pipe", 1, 0)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ([begin("a")], [], r"rank 0 sends 'a' \(FLOAT\[3\]\) to rank 1, which never receives it"),
        ([], [begin("a")], r"rank 1 receives 'a' \(FLOAT\[3\]\) from rank 0, which never sends it"),
        (
            [begin("a")],
            [begin("a", "FLOAT[4]")],
            r"sends 'a' \(FLOAT\[3\]\) to rank 1, which expects 'a' \(FLOAT\[4\]\)",
        ),
        ([begin("a"), begin("b")], [begin("b"), begin("a")], r"rank 0 sends 'a' .* which expects 'b'"),
        (
            [begin("s", lane=("pipe",))],
            [begin("t", "x", lane=("pipe",))],
            "collectives of group 'pipe': entry 0 is 'FLOAT.* on rank 0",
        ),
        (
            [begin("a"), wait("a"), begin("b", lane=BACK), wait("b", lane=BACK)],
            [begin("b", lane=BACK), wait("b", lane=BACK), begin("a"), wait("a")],
            "wait for each other forever: rank 0 waits in 'a' for rank 1; rank 1 waits in 'b' for rank 0",
        ),
    ],
)
def test_ranks_that_do_not_fit_together(first: Any, second: Any, message: str) -> None:
    with pytest.raises(WorldError, match=message):
        check_events(Mesh(pipe=2), [first, second])


def test_ranks_that_fit_together() -> None:
    """Both begin to send before they wait."""
    check_events(
        Mesh(pipe=2),
        [
            [begin("a"), begin("b", lane=BACK), wait("b", lane=BACK), wait("a")],
            [begin("b", lane=BACK), wait("b", lane=BACK), begin("a"), wait("a")],
        ],
    )
