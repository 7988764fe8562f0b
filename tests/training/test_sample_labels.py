"""Contrastive models: the classes are the samples of the batch, so labels must lie in this worker's share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import graphc
from graphc.distributed.communicator import Communicator
from graphc.distributed.threads import run_threads
from graphc.errors import FeedError
from tests.cli.models import parse

PAIRS = """
<ir_version: 9, opset_import: ["" : 17]>
pairs (float[N,5] x, float[N,5] z) => (float[N,N] y)
<float[5,4] w>
{
  a = MatMul (x, w)
  b = MatMul (z, w)
  t = Transpose <perm = [1, 0]> (b)
  y = MatMul (a, t)
}
"""


def test_labels_outside_the_share_of_a_worker_are_named(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((8, 5)).astype(np.float32)
    path = str(tmp_path / "pairs.onnx")
    onnx.save(parse(PAIRS), path)

    def loss(comm: object, label: np.ndarray, rows: slice) -> float:
        program = graphc.compile(path, loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=graphc.optim.SGD(lr=0.1))
        with graphc.Trainer(program, comm=comm, threads=1) as trainer:  # type: ignore[arg-type]
            return trainer.step({"x": x[rows], "z": x[rows], "label": label})["loss"]

    def share(comm: Communicator, *, own: bool) -> float:
        rows = slice(4 * comm.rank, 4 * comm.rank + 4)
        return loss(comm, np.arange(4) if own else np.arange(8)[rows], rows)

    w = onnx.numpy_helper.to_array(parse(PAIRS).graph.initializer[0])
    halves = [x[k : k + 4] @ w @ (x[k : k + 4] @ w).T for k in (0, 4)]
    expected = np.mean([np.log(np.exp(s).sum(1)) - np.diag(s) for s in halves])
    assert run_threads(2, lambda comm: share(comm, own=True))[0] == pytest.approx(expected, rel=1e-5)
    with pytest.raises(FeedError, match=r"label 4 at label\[0\] is outside 0 … 3: the classes are the samples of the batch"):
        run_threads(2, lambda comm: share(comm, own=False))
