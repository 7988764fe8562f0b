"""Networks that no rule of the tensor axis was written for: divided for the most part, and equal to one worker."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

import graphc
from graphc import frontends
from graphc.distributed.threads import run_threads
from tests.training.divided_models import CASES, Case

STEPS = 3


def exported(case: Case, exporter: str) -> tuple[ir.Model, dict[str, Any]]:
    """The model of a file, and the feeds of a step."""
    torch.manual_seed(0)
    module, x = case.make(), case.feed()
    model = frontends.export(module, (x,), exporter=exporter, input_names=["x"])
    shape = tuple(module(x).shape)
    label = np.random.default_rng(0).integers(0, shape[1], (shape[0], *shape[2:]))
    return model, {"x": x.numpy(), "label": label}


def train(comm: Any, model: ir.Model, feeds: dict[str, Any], mesh: graphc.Mesh) -> tuple[list[float], dict[str, Any], str]:
    program = graphc.compile(
        model, loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=graphc.optim.SGD(lr=0.02, momentum=0.9), mesh=mesh
    )
    log = next((line for line in program.log if line.startswith("tensor_parallel")), "")
    with graphc.Trainer(program, comm=comm, threads=1) as trainer:
        losses = [trainer.step(feeds)["loss"] for _ in range(STEPS)]
        losses.append(trainer.evaluate([feeds])["loss"])
        return losses, {name: array.copy() for name, array in trainer.trained_values().items()}, log


QUICK = {("multihead", "torchscript"), ("llama, gate and up fused", "torchscript")}


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "exporter"),
    [
        pytest.param(name, exporter, marks=() if (name, exporter) in QUICK else pytest.mark.large)
        for name in CASES
        for exporter in ("dynamo", "torchscript")
    ],
)
def test_divided_networks_train_as_one_worker(name: str, exporter: str) -> None:
    """A plan that keeps all parameters whole would be equal too, so the share that is divided is asserted."""
    case = CASES[name]
    model, feeds = exported(case, exporter)
    expected, weights, _ = train(None, model, feeds, graphc.Mesh())
    for losses, values, log in run_threads(2, lambda comm: train(comm, model.clone(), feeds, graphc.Mesh(tensor=2))):
        np.testing.assert_allclose(losses, expected, rtol=1e-5, atol=1e-5)
        assert values.keys() == weights.keys()
        for key, array in weights.items():
            np.testing.assert_allclose(values[key], array, rtol=1e-5, atol=1e-5, err_msg=key)
        share = re.search(r"(\d+)% of the bytes", log)
        assert share is not None
        assert int(share[1]) >= 100 * case.share, log
