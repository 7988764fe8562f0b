"""Clipping against ``torch.nn.utils`` on the global batch, for one to four workers, uneven shares included."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

import graphc
from graphc.backend import make_backend
from graphc.distributed.threads import run_threads
from graphc.errors import UsageError
from graphc.ir.decomposition import decompose_graph
from graphc.plan.partition import make_plan
from tests.training import small

pytestmark = pytest.mark.full

STEPS = 20
OPTIMIZERS = {
    "sgd:lr=0.1,momentum=0.9,weight_decay=0.01": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam:lr=0.01": lambda p: torch.optim.Adam(p, lr=0.01),
}


def in_torch(optimizer: str, sizes: tuple[int, ...], norm: float | None, value: float | None) -> tuple[Any, list[float]]:
    reference = small.Torch(OPTIMIZERS[optimizer])
    norms = []
    for step in range(STEPS):
        reference.backward(*small.batch(sizes[step % len(sizes)], step))
        parameters = list(reference.parameters.values())
        if norm is not None:
            norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, norm)))
        if value is not None:
            torch.nn.utils.clip_grad_value_(parameters, value)
        reference.optimizer.step()
    return reference.state(), norms


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("norm", "value"), [(0.3, None), (None, 0.02), (0.5, 0.05)])
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.large), pytest.param(2, marks=pytest.mark.large), 4])
def test_clipping_is_that_of_pytorch_on_the_global_batch(
    optimizer: str, norm: float | None, value: float | None, workers: int
) -> None:
    sizes = (16, 13)  # shares of 4, 3, 3 and 3 in every other step
    program = small.compiled(optimizer, clip_norm=norm, clip_value=value)
    ranks = run_threads(workers, lambda comm: small.train(comm, program, STEPS, sizes))
    wanted, norms = in_torch(optimizer, sizes, norm, value)
    assert len({rank["hash"] for rank in ranks}) == 1
    assert small.largest_difference(ranks[0]["state"], wanted) < 1e-5
    if norm is not None:
        reported = [m["grad_norm"] for m in ranks[-1]["metrics"]]
        np.testing.assert_allclose(reported, norms, rtol=1e-5)
        assert max(norms) > norm  # the bound is in force


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_clipping_without_native_kernels(optimizer: str) -> None:
    program = small.compiled(optimizer, clip_norm=0.3, clip_value=0.05, backend="numpy")
    ranks = run_threads(2, lambda comm: small.train(comm, program, STEPS))
    assert small.largest_difference(ranks[0]["state"], in_torch(optimizer, (16,), 0.3, 0.05)[0]) < 1e-5


def test_a_bound_that_is_not_reached_changes_nothing() -> None:
    (free,) = run_threads(1, lambda comm: small.train(comm, small.compiled(), 3))
    (bound,) = run_threads(1, lambda comm: small.train(comm, small.compiled(clip_norm=1e4, clip_value=1e4), 3))
    assert small.largest_difference(bound["state"], free["state"]) == 0


def test_no_pass_over_memory_beside_the_norm() -> None:
    """Clipping adds scalar ops and one sum of squares, which reads the gradients where they lie; no copy, no multiplication."""
    backend = make_backend("onnxruntime", threads=1)
    shapes = {"input": (16, small.INPUTS), "label": (16,)}
    for workers in (1, 2):
        plan = make_plan(small.compiled(clip_norm=1.0).model, shapes, backend, world_size=workers)
        (measure,) = [s for s in plan.steps if s.nodes and s.nodes[0].op_type == "SumOfSquares"]
        gradients = {group.buffer(1) for group in plan.groups if 1 in group.flat}
        assert {plan.places[v].buffer for v in measure.inputs} == gradients
        behind = [n for s in plan.steps[plan.steps.index(measure) + 1 :] if s.kind == "segment" for n in s.nodes]
        assert all(v.shape is not None and v.shape.rank() == 0 for n in behind for v in n.outputs)


def test_the_exported_graph_clips_in_plain_onnxruntime() -> None:
    """The norm is an output of the standard graph too."""
    program = small.compiled(clip_norm=0.3, clip_value=0.05)
    copy = program.model.clone()
    decompose_graph(copy.graph, lambda node: False)
    session = ort.InferenceSession(ir.to_proto(copy).SerializeToString(), providers=["CPUExecutionProvider"])
    x, y = small.batch(16, 0)
    (norm,) = session.run(["grad_norm"], {"input": x, "label": y})
    assert norm == pytest.approx(in_torch("adam:lr=0.01", (16,), 0.3, None)[1][0], rel=1e-5)


@pytest.mark.parametrize("options", [{"clip_norm": 0.0}, {"clip_value": -1.0}, {"clip_norm": float("nan")}])
def test_bounds_must_be_positive(options: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="must be a positive number"):
        small.compiled(**options)


def test_a_clipped_gradient_of_nan_stops_the_step() -> None:
    program = small.compiled(clip_norm=1.0, clip_value=0.1)
    with graphc.Trainer(program, threads=1) as trainer:
        before = trainer.state.snapshot()
        x, y = small.batch(8, 0)
        x[3, 2] = np.nan
        with pytest.raises(graphc.errors.NonFiniteError):
            trainer.step({"input": x, "label": y})
        assert all(np.array_equal(before[n], a) for n, a in trainer.state.snapshot().items())


@pytest.mark.parametrize("strategy", ["zero:stage=1", "zero:stage=2", "zero:stage=3", "central_storage"])
def test_the_norm_is_over_all_shards(strategy: str) -> None:
    """Each rank holds a part of the gradient; the norm, and the flag that skips a step, are of the whole."""
    optimizer = "adam:lr=0.01"
    program = small.compiled(optimizer, clip_norm=0.3, clip_value=0.05, strategy=strategy, nonfinite="skip")

    def train(comm: Any) -> Any:
        with graphc.Trainer(program, comm=comm, threads=1) as trainer:
            norms = []
            for step in range(STEPS):
                x, y = small.batch(13, step)
                mine = graphc.data.share(13, comm.rank, comm.size)
                norms.append(trainer.step({"input": x[mine], "label": y[mine]}, offset=mine.start)["grad_norm"])
            before = trainer.state.snapshot(comm)
            x[-1] = np.nan
            trainer.step({"input": x[mine], "label": y[mine]}, offset=mine.start)
            after = trainer.state.snapshot(comm)
            assert all(np.array_equal(before[n], after[n]) for n in small.SHAPES)
            return norms, before, trainer.skipped_steps, trainer.state_sha256()

    ranks = run_threads(2, train)
    wanted, norms = in_torch(optimizer, (13,), 0.3, 0.05)
    assert [rank[2] for rank in ranks] == [1, 1]
    assert ranks[0][3] == ranks[1][3]
    np.testing.assert_allclose(ranks[1][0], norms, rtol=1e-5)
    assert small.largest_difference(ranks[0][1], wanted) < 1e-5
