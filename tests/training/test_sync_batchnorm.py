"""BatchNormalization over the global batch: workers follow one worker, and one step is that of PyTorch on the whole batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from graphc.bench.models import build
from graphc.distributed.threads import run_threads
from tests.runtime.mpi_run import map_ranks
from tests.tiers import params
from tests.training import torch_models
from tests.training.batchnorm_cases import feeds, follows, train

pytestmark = pytest.mark.full

SIZE = 16


KINDS = {"cnn": torch_models.Cnn, "mlp": torch_models.Mlp}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, exported: Callable[[str], str]) -> Callable[[str], str]:
    """The file of a model, exported when it is first asked for."""
    folder: Path = tmp_path_factory.mktemp("sync")

    @functools.cache
    def of(name: str) -> str:
        if name == "resnet":
            return exported("resnet18-smooth")
        kind = KINDS[name]
        return torch_models.save(torch_models.make(kind), folder / f"{name}.onnx", torch.randn(4, *torch_models.SHAPES[kind]))

    return of


@pytest.mark.parametrize("name", params(["cnn", "mlp"], large=["cnn"]))
def test_workers_follow_one_for_twenty_steps(name: str, path: Callable[[str], str]) -> None:
    (one,) = run_threads(1, lambda comm: train(comm, path(name), name, 20, 0.05, SIZE))
    for workers, edges in ((2, None), (2, [0, 3, SIZE]), (4, None), (4, [0, 1, 8, 10, SIZE])):
        follows(one, run_threads(workers, lambda comm, e=edges: train(comm, path(name), name, 20, 0.05, SIZE, e)))


@pytest.mark.large
@pytest.mark.parametrize("edges", [None, [0, 10, 32]])
def test_a_residual_network_follows_one_worker_for_ten_steps(edges: list[int] | None, path: Callable[[str], str]) -> None:
    """Ten steps that move the loss by a few percent each.

    Parameters of two workers differ in their last bit after one step (float32 sums of two halves). A ReLU that flips makes of
    that 1e-5 of the loss within ten steps on some CPUs, so the activation is smooth.
    """
    (one,) = run_threads(1, lambda comm: train(comm, path("resnet"), "resnet", 10, 1e-3, 32))
    assert np.abs(np.diff(one["losses"])).max() > 1e-2
    follows(one, run_threads(2, lambda comm: train(comm, path("resnet"), "resnet", 10, 1e-3, 32, edges)))


@pytest.mark.mpi
def test_mpi_workers_follow_one(path: Callable[[str], str]) -> None:
    (one,) = run_threads(1, lambda comm: train(comm, path("cnn"), "cnn", 20, 0.05, SIZE))
    follows(one, map_ranks(2, train, path("cnn"), "cnn", 20, 0.05, SIZE, [0, 5, SIZE]))


def test_without_the_pass_statistics_are_those_of_a_share(path: Callable[[str], str]) -> None:
    """The comparison above would see the difference."""
    (one,) = run_threads(1, lambda comm: train(comm, path("cnn"), "cnn", 3, 0.05, SIZE))
    two = run_threads(2, lambda comm: train(comm, path("cnn"), "cnn", 3, 0.05, SIZE, sync_batchnorm=False))
    assert np.abs(two[0]["losses"] - one["losses"]).max() > 1e-3


@pytest.mark.parametrize("name", ["cnn", "resnet"])
def test_one_step_on_uneven_shares_is_that_of_pytorch_on_the_whole_batch(name: str, path: Callable[[str], str]) -> None:
    """``torch.nn.SyncBatchNorm`` is defined as BatchNorm over the whole batch."""
    module = torch_models.make(torch_models.Cnn) if name == "cnn" else build("resnet18-smooth").train()
    start = {n: p.detach().numpy().copy() for n, p in module.named_parameters()}
    x, y = feeds(name, SIZE, 0)
    loss = torch.nn.functional.cross_entropy(module(torch.from_numpy(x)), torch.from_numpy(y))
    loss.backward()
    got = run_threads(2, lambda comm: train(comm, path(name), name, 1, 1.0, SIZE, [0, 5, SIZE]))[0]
    assert abs(got["losses"][0] - loss.item()) < 1e-5 * loss.item()
    for key, parameter in module.named_parameters():
        gradient = start[key] - got["state"][key]
        assert parameter.grad is not None
        want = parameter.grad.numpy()
        # a weight minus its gradient is rounded to the weight's precision
        np.testing.assert_allclose(gradient, want, rtol=1e-4, atol=1e-4 * np.abs(want).max() + 3e-7, err_msg=key)
    for key, buffer in module.named_buffers():
        if key.endswith("running_mean"):
            np.testing.assert_allclose(got["state"][key], buffer.numpy(), rtol=1e-4, atol=1e-6, err_msg=key)


def test_halves_share_statistics_too(path: Callable[[str], str]) -> None:
    """bfloat16 products round the same on every number of workers; sums stay float64."""
    options = {"precision": "bf16"}
    (one,) = run_threads(1, lambda comm: train(comm, path("cnn"), "cnn", 5, 0.05, SIZE, **options))
    two = run_threads(2, lambda comm: train(comm, path("cnn"), "cnn", 5, 0.05, SIZE, [0, 3, SIZE], **options))
    assert two[0]["hash"] == two[1]["hash"]
    np.testing.assert_allclose(two[0]["losses"], one["losses"], rtol=2e-3)


@pytest.mark.parametrize("backend", ["onnxruntime", "numpy"])
def test_recomputed_activations_need_no_further_reduction(backend: str, path: Callable[[str], str]) -> None:
    options = {"backend": backend}
    kept = run_threads(2, lambda comm: train(comm, path("cnn"), "cnn", 2, 0.05, 8, **options))
    again = run_threads(2, lambda comm: train(comm, path("cnn"), "cnn", 2, 0.05, 8, recompute="cheap", **options))
    np.testing.assert_allclose(again[0]["losses"], kept[0]["losses"], rtol=1e-6)
