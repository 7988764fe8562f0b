"""Adasum against the published rule, on PyTorch's mean gradients of each share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import graphc
from graphc.data import share
from graphc.distributed.threads import run_threads
from graphc.errors import UsageError
from tests.training import small

pytestmark = pytest.mark.full

Array = np.ndarray[Any, Any]


def pair(a: Array, b: Array) -> Array:
    """Maleki et al., equation 5."""
    dot = float(np.sum(a * b))
    return (1 - dot / (2 * np.sum(a * a))) * a + (1 - dot / (2 * np.sum(b * b))) * b


def combined(parts: list[Array]) -> Array:
    """Recursive halving over a power of two of ranks."""
    return parts[0] if len(parts) == 1 else pair(combined(parts[: len(parts) // 2]), combined(parts[len(parts) // 2 :]))


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("size", [16, 14])
def test_adasum_is_the_published_rule_per_tensor(workers: int, size: int) -> None:
    parameters = {name: array.astype(np.float64) for name, array in small.weights().items()}
    for step in range(5):
        x, y = small.batch(size, step)
        found: list[dict[str, Array]] = []
        for rank in range(workers):
            reference, mine = small.Torch(lambda p: torch.optim.SGD(p, lr=0.1)), share(size, rank, workers)
            for name, parameter in reference.parameters.items():
                parameter.data = torch.tensor(parameters[name].astype(np.float32))
            reference.backward(x[mine], y[mine])
            found.append({name: p.grad.numpy().astype(np.float64) for name, p in reference.parameters.items()})
        for name in parameters:
            parameters[name] -= 0.1 * combined([grads[name] for grads in found])
    program = small.compiled("sgd:lr=0.1", strategy="adasum")
    ranks = run_threads(workers, lambda comm: small.train(comm, program, 5, (size,)))
    assert len({rank["hash"] for rank in ranks}) == 1
    assert small.largest_difference(ranks[0]["state"], parameters) < 1e-5


def test_equal_gradients_are_averaged() -> None:
    """Two workers with the same samples do what one does with them, clipping included."""
    options = {"strategy": "adasum", "clip_norm": 0.3}
    (one,) = run_threads(1, lambda comm: small.train(comm, small.compiled("adam:lr=0.01", **options), 4, (8,)))

    def twice(comm: Any) -> dict[str, Any]:
        with graphc.Trainer(small.compiled("adam:lr=0.01", **options), comm=comm, threads=1) as trainer:
            for step in range(4):
                x, y = small.batch(8, step)
                norm = trainer.step({"input": x, "label": y})["grad_norm"]
            return {"state": trainer.state.snapshot(), "norm": norm}

    two = run_threads(2, twice)
    assert small.largest_difference(two[0]["state"], one["state"]) < 1e-5
    assert two[0]["norm"] == pytest.approx(one["metrics"][-1]["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("compress", ["bf16", "powersgd:rank=1", "topk:ratio=0.1"])
@pytest.mark.parametrize("strategy", ["adasum", "local_sgd", "zero", "central_storage"])
def test_strategies_that_take_gradients_as_they_are_refuse_compressed_ones(strategy: str, compress: str) -> None:
    with pytest.raises(UsageError, match=f"{strategy}.*compress"):
        small.compiled(strategy=strategy, compress=compress)
