"""Training on a real GPU: twenty steps beside the CPU, and what test_device_strategies.py has of two workers, on one GPU.

Sums run in another order there, so that losses agree to a thousandth, as they must, and mostly to much less.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphc
from graphc.backends.cupy import CupyBackend
from graphc.bench.specs import SPECS
from tests.backends.cupy.training import strategy_cases as strategies

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::graphc.distributed.nccl.device_transport.StagedWarning"),
]

OPTIMIZERS = {"mlp": "sgd:lr=0.05,momentum=0.9", "lenet": "sgd:lr=0.05,momentum=0.9", "transformer-small": "adamw:lr=1e-3"}


@pytest.fixture(autouse=True)
def device(register_backend: Callable[..., None]) -> None:
    """What stands for a device in the cases of the other file is a GPU."""
    register_backend(strategies.DEVICE, lambda **_: CupyBackend())


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_twenty_steps_follow_the_cpu(name: str, precision: str | None, exported: Callable[[str], str]) -> None:
    # On batches that come again losses soon vanish, and then every rounding is a large part of them.
    batches = [dict(zip(("input", "label"), SPECS[name].batch(8, seed), strict=True)) for seed in range(20)]
    losses: dict[str, Any] = {}
    for backend in ("cupy", "onnxruntime"):
        program = graphc.compile(
            exported(name),
            loss=graphc.losses.SoftmaxCrossEntropy(),
            optimizer=graphc.optim.parse(OPTIMIZERS[name]),
            precision=precision,
            backend=backend,
        )
        with graphc.Trainer(program, threads=1) as trainer:
            losses[backend] = [trainer.step(feeds)["loss"] for feeds in batches]
    tolerance = 1e-3 if precision is None else 2e-2
    np.testing.assert_allclose(losses["cupy"], losses["onnxruntime"], rtol=tolerance, atol=tolerance / 10)


def test_feeds_of_other_libraries_are_taken_on_the_gpu(exported: Callable[[str], str]) -> None:
    cupy, torch = pytest.importorskip("cupy"), pytest.importorskip("torch")
    kinds: dict[str, Callable[[Any], Any]] = {"numpy": lambda a: a, "cupy": cupy.asarray}
    if torch.cuda.is_available():
        kinds["torch"] = lambda a: torch.from_numpy(a).cuda()
    program = graphc.compile(
        exported("lenet"),
        loss=graphc.losses.SoftmaxCrossEntropy(),
        optimizer=graphc.optim.SGD(lr=0.05),
        backend="cupy:deterministic",
    )
    losses: dict[str, Any] = {}
    for kind, place in kinds.items():
        with graphc.Trainer(program, threads=1) as trainer:
            batches = [SPECS["lenet"].batch(8, seed) for seed in range(3)]
            losses[kind] = [trainer.step({"input": place(x), "label": place(y)})["loss"] for x, y in batches]
    assert all(found == losses["numpy"] for found in losses.values())


@pytest.mark.parametrize("name", strategies.PROGRAMS)
def test_two_workers_share_a_gpu(name: str) -> None:
    strategies.check_strategy(name, 1e-4)


@pytest.mark.parametrize("name", strategies.HALVES)
def test_two_workers_share_a_gpu_in_low_precision(name: str) -> None:
    strategies.check_low_precision(name)


@pytest.mark.parametrize("strategy", ["zero:stage=2,offload=true", "central_storage"])
def test_offloaded_state_lies_on_the_host(strategy: str) -> None:
    strategies.check_offloaded(strategy)


def test_a_nan_checkpoints_and_servers(tmp_path: Path) -> None:
    strategies.check_nan()
    strategies.check_checkpoint(tmp_path)
    strategies.check_servers()
