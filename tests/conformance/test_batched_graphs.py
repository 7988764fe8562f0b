"""Every strategy, and the GPU backend, beside one worker of the numpy backend on random graphs: the loss and a step."""

from __future__ import annotations

import functools
import itertools
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import graphc
from graphc.distributed.threads import run_threads
from graphc.errors import UsageError
from graphc.mesh import Mesh
from tests.backends.host_kernels import HostDevice, cupy_on
from tests.conformance.batched_graphs import BatchedGraph, cut
from tests.tiers import params, thinned

pytest.importorskip("onnxruntime")

SAMPLES = 7
"""An odd number, so that shares and micro-batches are uneven."""

STRATEGIES: dict[str, dict[str, Any]] = {
    "alone": {},
    "micro-batches": {"accumulate": 2},
    "recomputed": {"recompute": "all"},
    "mirrored": {"mesh": Mesh(data=3)},
    "zero-1": {"mesh": Mesh(data=2), "strategy": "zero:stage=1"},
    "zero-3": {"mesh": Mesh(data=2), "strategy": "zero:stage=3"},
    "zero-3, recomputed, micro-batches": {
        "mesh": Mesh(data=2), "strategy": "zero:stage=3", "recompute": "cheap", "accumulate": 2,
    },
    "central storage": {"mesh": Mesh(data=2), "strategy": "central_storage"},
    "tensor": {"mesh": Mesh(tensor=2)},
    "tensor, sequence": {"mesh": Mesh(data=2, tensor=2), "shard": ["auto:sequence"]},
    "pipeline": {"mesh": Mesh(pipe=2), "accumulate": 2},
    "zero-bubble pipeline": {"mesh": Mesh(data=2, pipe=2), "accumulate": 2, "schedule": "zero-bubble"},
}  # fmt: skip

WITHIN_OTHERS = ("alone", "micro-batches", "recomputed", "zero-1", "zero-3", "tensor", "pipeline")
"""What other strategies do too, with more."""

NOT_DIVISIBLE = ("no weight can be divided", "stages are too many", "no float value passes the cut")
"""What is said of a graph that is too small for a strategy."""


def step(graph: BatchedGraph, backend: str, mesh: Mesh | None = None, **options: Any) -> tuple[float, dict[str, Any]]:
    """The loss of one step of SGD, and the change of every parameter; replicas must be equal."""
    loss, optimizer = graphc.losses.SoftmaxCrossEntropy(), graphc.optim.SGD(lr=1.0)
    program = graphc.compile(graph.model.clone(), loss=loss, optimizer=optimizer, backend=backend, mesh=mesh, **options)

    def work(comm: Any) -> tuple[float, dict[str, Any], str]:
        with graphc.Trainer(program, comm=comm, threads=1) as trainer:
            before = {name: np.array(value) for name, value in trainer.trained_values().items()}
            feeds, offset = cut(graph.feeds(SAMPLES), trainer.data_rank, trainer.data_size)
            found = trainer.step(feeds, offset=offset)["loss"]
            changes = {name: np.array(value) - before[name] for name, value in trainer.trained_values().items()}
            return found, changes, trainer.state_sha256()

    results = run_threads(mesh.size, work) if mesh is not None else [work(None)]
    assert len({digest for _, _, digest in results}) == 1, graph.text
    return results[0][:2]


@functools.cache
def expected(seed: int) -> tuple[BatchedGraph, float, dict[str, Any]]:
    graph = BatchedGraph(seed)
    return graph, *step(graph, "numpy")


def check(seed: int, strategy: str, backend: str = "onnxruntime:fuse_small=true") -> bool:
    """Compare; False where the graph does not suit the strategy, or compares rounding."""
    graph, loss, changes = expected(seed)
    if not np.isfinite(loss) or loss > 100:
        return False
    try:
        found, got = step(graph, backend, **STRATEGIES[strategy])
    except UsageError as error:
        if not any(text in str(error) for text in NOT_DIVISIBLE):
            raise
        return False
    assert found == pytest.approx(loss, rel=1e-4, abs=1e-4), graph.text
    for name, change in changes.items():
        scale = np.abs(change).max()
        np.testing.assert_allclose(got[name], change, rtol=0, atol=1e-3 * scale + 3e-5, err_msg=f"{name}\n{graph.text}")
    return True


@pytest.mark.full
@pytest.mark.parametrize("seed", params(range(3), large=[1, 2]))
@pytest.mark.parametrize("strategy", params(STRATEGIES, large=WITHIN_OTHERS))
def test_a_strategy_on_random_graphs(strategy: str, seed: int) -> None:
    """The first four that suit it, other ones for each strategy."""
    first = 150 * list(STRATEGIES).index(strategy) + 50 * seed
    suitable = (k for k in range(first, first + 50) if check(k, strategy))
    assert len(list(itertools.islice(suitable, 4))) == 4


@pytest.mark.full
def test_a_micro_batch_of_one_sample_hands_other_values_to_the_next_stage() -> None:
    """Its one index is that of a whole row, so that a gather of rows replaces one of elements, on both sides of the cut."""
    assert check(2060, "zero-bubble pipeline")


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("first", thinned(range(3000, 3040, 10), 2))
def test_kernels_for_a_gpu_compute_on_the_host_what_is_expected(first: int, register_backend: Callable[..., None]) -> None:
    register_backend("pretended", lambda **_: cupy_on(HostDevice()))
    for seed in range(first, first + 10):
        check(seed, "alone", "pretended")


@pytest.mark.gpu
@pytest.mark.parametrize("first", range(3100, 3120, 10))
def test_a_gpu_computes_what_is_expected(first: int) -> None:
    for seed in range(first, first + 10):
        check(seed, "alone", "cupy")


@pytest.mark.large
@pytest.mark.parametrize("first", range(2000, 2400, 40))
def test_more_random_graphs(first: int) -> None:
    for seed in range(first, first + 40):
        for strategy in STRATEGIES:
            check(seed, strategy)
