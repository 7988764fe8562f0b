"""Graphs with one collective, run as plans on every rank of a mesh; their gradients against central differences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.backend import make_backend
from graphc.distributed.collective_proof import prove_collectives
from graphc.distributed.communicator import Communicator
from graphc.distributed.groups import Groups
from graphc.ir import IR_VERSION, OPSET
from graphc.ir.builder import Builder
from graphc.ir.ops.collectives import collective_groups
from graphc.mesh import Mesh
from graphc.passes.distributed.schedule import schedule
from graphc.passes.gradients.reverse_mode import differentiate
from graphc.pipeline import Context
from graphc.plan.group_places import collective_events
from graphc.plan.partition import make_plan
from graphc.runtime.executor import Executor
from graphc.runtime.state import State

Array = np.ndarray[Any, Any]
Emit = Callable[[Builder, ir.Value], ir.Value]
STEP = 1e-5


def graph_of(emit: Emit, shape: Sequence[int], weight: Sequence[int]) -> ir.Model:
    """loss = Σ w·sin(emit(x²)), and the gradient of the loss with respect to x."""
    double = ir.TensorType(ir.DataType.DOUBLE)
    x, w = (ir.Value(name=name, type=double, shape=ir.Shape(size)) for name, size in (("x", shape), ("w", weight)))
    graph = ir.Graph([x, w], [], nodes=[], opset_imports={"": OPSET, "graphc": 1}, name="one")
    op = Builder(graph)
    loss = op.ReduceSum(op.Mul(op.Sin(emit(op, op.Mul(x, x))), w), keepdims=0)
    loss.name = "loss"
    gradient = differentiate(graph, [loss], [x])[x]
    gradient.name = "dx"
    graph.outputs.extend([loss, gradient])
    model = ir.Model(graph, ir_version=IR_VERSION)
    schedule(model, Context())
    return model


def bind_plan(groups: Groups, model: ir.Model, shapes: dict[str, Any]) -> Callable[[dict[str, Array]], dict[str, Array]]:
    """What runs one step on this rank and returns its outputs."""
    backend = make_backend("numpy", threads=1)
    plan = make_plan(model, shapes, backend, mesh=groups.mesh, rank=groups.world.rank)
    groups.open(collective_groups(model.graph))
    groups.open_channels(prove_collectives(groups.world, groups.mesh, collective_events(plan.steps)))
    executor = Executor(plan, State(model, memory=backend.memory), backend, groups.world, groups=groups, check=False)

    def run(feeds: dict[str, Array]) -> dict[str, Array]:
        executor.run(feeds)
        return {name: array.copy() for name, array in executor.outputs.items()}

    return run


def run_plan(comm: Communicator, mesh: Mesh, model: ir.Model, feeds: dict[str, Array]) -> dict[str, Array]:
    """The outputs of the second step on this rank, which finds what the first one left."""
    run = bind_plan(Groups(comm, mesh), model, {name: array.shape for name, array in feeds.items()})
    run(feeds)
    return run(feeds)


def differences(groups: Groups, emit: Emit, shape: Sequence[int], weight: Sequence[int], *, whole: bool = False) -> float:
    """The largest difference between a rank's gradient and central differences.

    Args:
        whole: the ranks of a group hold the same x, weights and loss, which counts once.
    """
    comm = groups.world
    run = bind_plan(groups, graph_of(emit, shape, weight), {"x": tuple(shape), "w": tuple(weight)})
    seed = 0 if whole else comm.rank
    x = np.random.default_rng([1, seed]).uniform(0.5, 1.5, shape)
    w = np.random.default_rng([2, seed]).normal(size=weight)
    direction = np.random.default_rng([3, seed]).normal(size=shape)
    found = run({"x": x, "w": w})
    worst = 0.0
    for moved in range(1 if whole else comm.size):
        by = STEP * direction if whole or comm.rank == moved else 0 * x
        losses = [float(run({"x": x + sign * by, "w": w})["loss"]) for sign in (1, -1)]
        totals = np.array(comm.allgather_object(losses))
        up, down = totals[0] if whole else totals.sum(0)
        if whole or comm.rank == moved:
            worst = abs((up - down) / (2 * STEP) - float((found["dx"] * direction).sum()))
    return worst
