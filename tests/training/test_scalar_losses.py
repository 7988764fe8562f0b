"""Losses that are one scalar of the model, or of another file: uneven shares give what one worker gives on the whole batch.

The oracle is PyTorch on the whole batch. A mean of the means of workers is off by far more than the tolerance: their scalars
differ, and so do their samples, labels that count, and tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch.nn import functional

import graphc
from graphc.distributed.threads import run_threads
from graphc.errors import UsageError

Array = np.ndarray[Any, Any]
Tensor = torch.Tensor

COUNT, INPUTS, CLASSES = 16, 6, 4

BODIES: Mapping[str, str] = {
    "mean of squares": "d = Sub(z, t) q = Mul(d, d) l = ReduceMean<keepdims=0>(q)",
    "half a mean and a penalty": (
        "d = Sub(z, t) q = Mul(d, d) r = ReduceMean<keepdims=0>(q) h = Constant<value_float=0.5>() s = Mul(r, h)"
        " w2 = Mul(w, w) p = ReduceMean<keepdims=0>(w2) l = Add(s, p)"
    ),
    "sum of squares": "d = Sub(z, t) q = Mul(d, d) s = ReduceSum<keepdims=0>(q) h = Constant<value_float=0.01>() l = Mul(s, h)",
    "mean over a mask": (
        "d = Sub(z, t) q = Mul(d, d) e = ReduceSum<keepdims=0>(q, one) o = Mul(e, mask) s = ReduceSum<keepdims=0>(o)"
        " n = ReduceSum<keepdims=0>(mask) l = Div(s, n)"
    ),
    "divided before the sum": (
        "d = Sub(z, t) q = Mul(d, d) e = ReduceSum<keepdims=0>(q, one) o = Mul(e, mask) n = ReduceSum<keepdims=0>(mask)"
        " k = Div(o, n) l = ReduceSum<keepdims=0>(k)"
    ),
    "cross-entropy that ignores": 'c = SoftmaxCrossEntropyLoss<ignore_index=0, reduction="mean">(z, y) l = Neg(c) ',
    "named weight": (
        "d = Sub(z, t) q = Mul(d, d) e = ReduceSum<keepdims=0>(q, one) o = Mul(e, mask) s = ReduceSum<keepdims=0>(o)"
        " n = ReduceSum<keepdims=0>(mask) r = Div(s, n) zero = Constant<value_float=0.0>() l = Max(r, zero)"
    ),
}

ORACLES: Mapping[str, Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "mean of squares": lambda z, t, mask, y, w: functional.mse_loss(z, t),
    "half a mean and a penalty": lambda z, t, mask, y, w: 0.5 * functional.mse_loss(z, t) + (w * w).mean(),
    "sum of squares": lambda z, t, mask, y, w: 0.01 * functional.mse_loss(z, t, reduction="sum"),
    "mean over a mask": lambda z, t, mask, y, w: (((z - t) ** 2).sum(1) * mask).sum() / mask.sum(),
    "divided before the sum": lambda z, t, mask, y, w: (((z - t) ** 2).sum(1) * mask).sum() / mask.sum(),
    "cross-entropy that ignores": lambda z, t, mask, y, w: -functional.cross_entropy(z, y, ignore_index=0),
    "named weight": lambda z, t, mask, y, w: (((z - t) ** 2).sum(1) * mask).sum() / mask.sum(),
}


def weights() -> Array:
    return np.random.default_rng(3).standard_normal((INPUTS, CLASSES)).astype(np.float32)


def feeds() -> dict[str, Array]:
    """Samples that differ much between the first 13 and the last 3, and so do their masks and labels."""
    rng = np.random.default_rng(4)
    x = rng.standard_normal((COUNT, INPUTS)).astype(np.float32)
    x[13:] *= 2
    mask = (np.arange(COUNT) % 3 > 0).astype(np.float32)
    y = rng.integers(0, CLASSES, COUNT)
    y[3:9], y[13:] = 0, 2
    t = rng.standard_normal((COUNT, CLASSES)).astype(np.float32)
    return {"x": x, "t": t, "mask": mask, "y": y}


def model(body: str) -> onnx.ModelProto:
    made = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]> g (float[N,{INPUTS}] x, float[N,{CLASSES}] t, float[N] mask, int64[N] y)
        => (float l) <float[{INPUTS},{CLASSES}] w = {{{",".join(["0"] * INPUTS * CLASSES)}}}, int64[1] one = {{1}}>
        {{ z = MatMul(x, w) {body} }}"""
    )
    made.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(weights(), "w"))
    return made


def in_torch(name: str, steps: int) -> tuple[list[float], Array]:
    w = torch.tensor(weights(), dtype=torch.float64, requires_grad=True)
    x, t, mask, y = (torch.tensor(array) for array in feeds().values())
    losses = []
    for _ in range(steps):
        loss = ORACLES[name](x.double() @ w, t.double(), mask.double(), y, w)
        (gradient,) = torch.autograd.grad(loss, w)
        w.data -= 0.1 * gradient
        losses.append(loss.item())
    return losses, w.detach().numpy()


def in_graphc(name: str, edges: tuple[int, ...], loss: graphc.losses.Loss | None = None, **options: Any) -> tuple[Any, ...]:
    loss = loss or graphc.losses.Output(weight="n" if name == "named weight" else None)
    program = graphc.compile(model(BODIES[name]), loss=loss, optimizer=graphc.optim.SGD(lr=0.1), **options)

    def worker(comm: Any) -> tuple[list[float], Array, dict[str, float]]:
        with graphc.Trainer(program, comm=comm, threads=1) as trainer:
            if trainer.is_server:
                trainer.serve()
                return [], trainer.trained_values()["w"].copy(), {}
            rank = comm.rank - trainer.servers
            mine = {key: array[edges[rank] : edges[rank + 1]] for key, array in feeds().items()}
            losses = [trainer.step(mine, offset=edges[rank])["loss"] for _ in range(2)]
            trainer.finish()
            return losses, trainer.trained_values()["w"].copy(), trainer.evaluate([mine]) if not trainer.servers else {}

    processes = len(edges) - 1 + (1 if "parameter_server" in options.get("strategy", "") else 0)
    return tuple(run_threads(processes, worker)[-1])


@pytest.mark.full
@pytest.mark.parametrize("edges", [(0, 16), (0, 13, 16), (0, 0, 16), (0, 5, 5, 16)])
@pytest.mark.parametrize("name", BODIES)
def test_uneven_and_empty_shares_are_one_worker_on_the_whole_batch(name: str, edges: tuple[int, ...]) -> None:
    losses, _ = in_torch(name, 3)
    got, values, evaluation = in_graphc(name, edges)
    np.testing.assert_allclose(got, losses[:2], rtol=2e-5)
    np.testing.assert_allclose(values, in_torch(name, 2)[1], rtol=0, atol=2e-5)
    np.testing.assert_allclose(evaluation["loss"], losses[2], rtol=2e-5)  # after both steps


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        {"accumulate": 3},
        {"strategy": "zero:stage=1"},
        {"strategy": "zero:stage=3"},
        {"strategy": "central_storage"},
        {"strategy": "parameter_server:servers=1,staleness=0"},
        {"clip_norm": 1e6},
        {"nonfinite": "skip"},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["mean of squares", "sum of squares", "cross-entropy that ignores"])
def test_every_strategy_weighs_the_shares(name: str, options: dict[str, Any]) -> None:
    losses, w = in_torch(name, 2)
    got, values, _ = in_graphc(name, (0, 13, 16), **options)
    np.testing.assert_allclose(got, losses, rtol=2e-5)
    np.testing.assert_allclose(values, w, rtol=0, atol=2e-5)


@pytest.mark.parametrize("options", [{"strategy": "local_sgd:every=1"}, {"deterministic": "any-world"}], ids=str)
def test_strategies_of_equal_shares(options: dict[str, Any]) -> None:
    losses, w = in_torch("mean of squares", 2)
    got, values, _ = in_graphc("mean of squares", (0, 8, 16), **options)
    np.testing.assert_allclose(got, losses, rtol=2e-5)
    np.testing.assert_allclose(values, w, rtol=0, atol=2e-5)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_loss_of_another_file_is_weighed(weighted: bool, tmp_path: Path) -> None:
    path = tmp_path / "loss.onnx"
    more = (", float n", "n = ReduceSum<keepdims=0>(mask) c = Max(l0, zero)") if weighted else ("", "c = Identity(l0)")
    ending = "o = Mul(e, mask) s = ReduceSum<keepdims=0>(o) k = ReduceSum<keepdims=0>(mask) l0 = Div(s, k)"
    onnx.save(
        onnx.parser.parse_model(
            f"""<ir_version: 10, opset_import: ["": 21]> g (float[N,{CLASSES}] z, float[N,{CLASSES}] t, float[N] mask)
            => (float c{more[0]}) <int64[1] one = {{1}}, float zero = {{0}}>
            {{ d = Sub(z, t) q = Mul(d, d) e = ReduceSum<keepdims=0>(q, one) {ending} {more[1]} }}"""
        ),
        path,
    )
    loss = graphc.losses.Model(str(path), weight="n" if weighted else None)
    losses, w = in_torch("mean over a mask", 2)
    got, values, _ = in_graphc("mean over a mask", (0, 13, 16), loss)
    np.testing.assert_allclose(got, losses, rtol=2e-5)
    np.testing.assert_allclose(values, w, rtol=0, atol=2e-5)


def test_a_share_of_ignored_labels_alone_gives_no_nan() -> None:
    """On its own the worker would divide by zero; PyTorch on the whole batch does not."""
    body = BODIES["cross-entropy that ignores"]
    program = graphc.compile(model(body), loss=graphc.losses.Output(), optimizer=graphc.optim.SGD(lr=0.1))

    def worker(comm: Any) -> float:
        edges = ((0, 3), (3, 9))[comm.rank]  # the labels of the second are all ignored
        with graphc.Trainer(program, comm=comm, threads=1) as trainer:
            return trainer.step({key: array[slice(*edges)] for key, array in feeds().items()})["loss"]

    z, y = torch.tensor(feeds()["x"][:9] @ weights()), torch.tensor(feeds()["y"][:9])
    np.testing.assert_allclose(run_threads(2, worker), -functional.cross_entropy(z, y, ignore_index=0).item(), rtol=1e-5)


def test_a_weight_that_is_no_number_or_contradicts_is_refused() -> None:
    for loss, words in (
        (graphc.losses.Output(weight="mask"), "must be one number"),
        (graphc.losses.Output(weight="nn"), "no value 'nn'; did you mean"),
        (graphc.losses.Output(weight="n", reduction="sum"), "reduction=sum has no weight"),
    ):
        with pytest.raises(UsageError, match=words):
            graphc.compile(model(BODIES["mean over a mask"]), loss=loss, optimizer=graphc.optim.SGD())
