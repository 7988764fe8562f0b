"""Generated kernels and onnxruntime against the numpy backend, on random graphs: results, and a step of every parameter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphc
from graphc.errors import GraphcError
from graphc.training.inference import run_model
from tests.conformance.random_graphs import RandomGraph
from tests.tiers import params

pytest.importorskip("onnxruntime")

FUSED = "onnxruntime:fuse_small=true"


def trained(graph: RandomGraph, backend: str) -> dict[str, Any]:
    """The change of every parameter in one step."""
    program = graphc.compile(
        graph.model.clone(), loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=graphc.optim.SGD(lr=1.0), backend=backend
    )
    with graphc.Trainer(program, threads=2) as trainer:
        before = {name: np.array(value) for name, value in trainer.trained_values().items()}
        trainer.step({"x": graph.x, "label": np.array([1])})
        return {name: np.array(value) - before[name] for name, value in trainer.trained_values().items()}


def check(seed: int) -> None:
    graph = RandomGraph(seed)
    expected = run_model(graph.model.clone(), {"x": graph.x}, backend="numpy")["y"]
    if not np.isfinite(expected).all() or np.abs(expected).max() > 1e3:
        return  # compares rounding
    found = run_model(graph.model.clone(), {"x": graph.x}, backend=FUSED)["y"]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5, err_msg=graph.text)
    try:
        wanted = trained(graph, "numpy")
    except GraphcError as error:
        if "nothing to train" not in str(error):
            raise
        return
    for name, change in trained(graph, FUSED).items():
        scale = np.abs(wanted[name]).max()
        np.testing.assert_allclose(change, wanted[name], rtol=0, atol=1e-3 * scale + 2e-5, err_msg=f"{name}\n{graph.text}")


@pytest.mark.parametrize("seed", params(range(60), full=range(12, 20), large=range(20, 60)))
def test_a_random_graph(seed: int) -> None:
    check(seed)


@pytest.mark.large
@pytest.mark.parametrize("first", range(60, 1060, 100))
def test_more_random_graphs(first: int) -> None:
    for seed in range(first, first + 100):
        check(seed)
