"""Training with parameter servers, and a model whose parameters count their updates."""

from __future__ import annotations

from typing import Any

import graphc
from graphc.bench.specs import SPECS
from graphc.data import share
from tests.training.compile_once import compile_once

OPTIMIZERS = {"sgd": "sgd:lr=0.05,momentum=0.9", "adam": "adam:lr=1e-3"}


def compiled(path: str, strategy: str, optimizer: str = "adam", **options: Any) -> graphc.Program:
    loss = graphc.losses.SoftmaxCrossEntropy()
    chosen = graphc.optim.parse(OPTIMIZERS.get(optimizer, optimizer))
    return compile_once(path, loss=loss, optimizer=chosen, strategy=strategy, bucket_mb=0.05, **options)


def train(comm: Any, path: str, name: str, strategy: str, optimizer: str, steps: int = 6) -> tuple[list[float], str]:
    """Losses of one rank, and the hash of the final state."""
    losses = []
    with graphc.Trainer(compiled(path, strategy, optimizer), comm=comm, threads=1) as trainer:
        if trainer.is_server:
            trainer.serve()
            return [], trainer.state_sha256()
        for step in range(steps):
            x, y = SPECS[name].batch(8, step)
            mine = share(8, comm.rank - trainer.servers, trainer.workers)
            losses.append(trainer.step({"input": x[mine], "label": y[mine]}, offset=mine.start)["loss"])
        trainer.finish()
        return losses, trainer.state_sha256()


COUNTING = """<ir_version: 10, opset_import: ["": 21]>
counting (float[batch, 1] x) => (float loss)
<float[3] v = {0, 0, 0}, float[5] w = {0, 0, 0, 0, 0}>
{
  mean = ReduceMean<keepdims: int = 0>(x)
  a = ReduceSum<keepdims: int = 0>(v)
  b = ReduceSum<keepdims: int = 0>(w)
  sum = Add(a, b)
  loss = Mul(mean, sum)
}"""
"""A model whose gradient is always 1: with lr = 1 every applied push takes exactly 1 from every element."""
