"""Copies of parameters in a low type, which a device's update kernel writes: no step casts a weight, no bit changes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import graphc
from graphc.backends.cupy import CupyBackend
from graphc.backends.cupy.updates.bind import Update, launches_of
from graphc.bench.specs import SPECS
from graphc.data import share
from graphc.distributed.threads import run_threads
from tests.backends.host_kernels import HostDevice, every_epilogue
from tests.training import small

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")

ADAM = "adamw:lr=0.01,eps=1e-4"


class Casting(CupyBackend):
    """The same without copies."""

    state_rewrites = ""


class Watched(CupyBackend):
    """Takes note of the updates that it is asked to run."""

    def record(self, runs: Any) -> Any:
        found = [run for run in runs if isinstance(run, Update)]
        if found:
            self.launches = [[call.op for call in row[0].program.calls] for row in launches_of(found)]
        return super().record(runs)


@pytest.fixture(autouse=True)
def devices(register_backend: Callable[..., None]) -> None:
    register_backend("pretended", lambda **_: Watched(device=HostDevice(), choose=every_epilogue))
    register_backend("casting", lambda **_: Casting(device=HostDevice(), choose=every_epilogue))


def compiled(backend: str, **options: Any) -> graphc.Program:
    return small.compiled(
        options.pop("optimizer", ADAM), backend=backend, precision=options.pop("precision", "bf16"), **options
    )


def feeds(step: int) -> dict[str, Any]:
    return dict(zip(("input", "label"), small.batch(12, step), strict=True))


def casts_of_weights(trainer: graphc.Trainer) -> list[str]:
    """What the plans of a trainer convert from one type to another before any product has used it."""
    graphs = [executor.plan.model.graph for executor in trainer.plans.training.values()]
    return [
        f"{node.inputs[0].name}"
        for graph in graphs
        for node in graph
        if node.op_type == "Cast" and node.inputs[0].is_initializer() and len(node.inputs[0].shape) > 1
    ]


def run(backend: str, steps: int = 4, **options: Any) -> tuple[list[float], dict[str, Any], list[str]]:
    with graphc.Trainer(compiled(backend, **options), threads=1) as trainer:
        losses = [trainer.step(feeds(k))["loss"] for k in range(steps)]
        losses.append(trainer.evaluate([feeds(0)])["loss"])
        return losses, trainer.state.snapshot(), casts_of_weights(trainer)


def test_no_weight_is_cast_and_no_bit_changes() -> None:
    (losses, state, casts), (expected, before, cast) = run("pretended"), run("casting")
    assert sorted(cast) == ["w1", "w2"]
    assert casts == []
    assert losses == expected
    assert state.keys() == before.keys()
    assert all((state[name] == before[name]).all() for name in state), "masters and moments"
    reference, _, _ = run("onnxruntime")
    np.testing.assert_allclose(losses, reference, rtol=2e-3)


@pytest.mark.large
def test_an_exported_transformer_reads_its_weights_transposed_from_the_copies(exported: Callable[[str], str]) -> None:
    """Its linear layers hold Transpose(W), its embedding is read in float32."""
    batches = [dict(zip(("input", "label"), SPECS["transformer-small"].batch(4, k), strict=True)) for k in range(3)]
    found = {}
    for backend in ("pretended", "casting", "onnxruntime"):
        program = graphc.compile(
            exported("transformer-small"),
            loss=graphc.losses.SoftmaxCrossEntropy(),
            optimizer=graphc.optim.parse(ADAM),
            backend=backend,
            precision="bf16",
        )
        with graphc.Trainer(program, threads=1) as trainer:
            losses = [trainer.step(feeds)["loss"] for feeds in batches]
            found[backend] = losses, trainer.state_sha256()
            assert casts_of_weights(trainer) == [] or backend != "pretended"
    assert found["pretended"] == found["casting"]
    np.testing.assert_allclose(found["pretended"][0], found["onnxruntime"][0], rtol=2e-2)


def test_the_update_kernel_writes_the_copies() -> None:
    with graphc.Trainer(compiled("pretended"), threads=1) as trainer:
        trainer.step(feeds(0))
        launches = trainer.backend.launches  # type: ignore[attr-defined]
        assert ["AdamW", "Narrow"] in launches
        assert ["Narrow"] not in launches
        state = trainer.state
        for name in ("w1", "w2"):
            low = torch.from_numpy(state.fetch(name)).bfloat16().float().numpy()
            np.testing.assert_array_equal(state.fetch(f"{name}::bf16").astype(np.float32), low)


def test_a_checkpoint_holds_masters_and_fills_the_copies_again(tmp_path: Path) -> None:
    with graphc.Trainer(compiled("pretended"), threads=1) as trainer:
        for k in range(2):
            trainer.step(feeds(k))
        trainer.save(tmp_path / "saved")
        assert not [name for name in trainer.state.snapshot() if "::bf16" in name]
        assert not [name for name in trainer.trained_values() if "::bf16" in name]
        expected = [trainer.step(feeds(2))["loss"], trainer.step(feeds(3))["loss"]]
    for backend, exact in (("pretended", True), ("casting", True), ("onnxruntime", False)):
        with graphc.Trainer(compiled(backend), threads=1) as trainer:
            trainer.step(feeds(5))
            trainer.restore(tmp_path / "saved")
            found = [trainer.step(feeds(2))["loss"], trainer.step(feeds(3))["loss"]]
        np.testing.assert_allclose(found, expected, rtol=0 if exact else 2e-3)


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        {"accumulate": 2},
        {"nonfinite": "skip", "clip_value": 0.01},
        {"precision": "fp16:loss_scale=64"},
        {"recompute": "all"},
        {"optimizer": "sgd:lr=0.1,momentum=0.9"},
    ],
    ids=str,
)
def test_whatever_else_is_asked_for_no_bit_changes(options: dict[str, Any]) -> None:
    (losses, state, casts), (expected, before, _) = run("pretended", **dict(options)), run("casting", **dict(options))
    assert casts == []
    assert losses == expected
    assert all((state[name] == before[name]).all() for name in before)


@pytest.mark.full
def test_a_skipped_step_leaves_the_copies_alone() -> None:
    with graphc.Trainer(compiled("pretended", nonfinite="skip"), threads=1) as trainer:
        trainer.step(feeds(0))
        before = {name: trainer.state.fetch(name).copy() for name in ("w1", "w1::bf16", "w2::bf16")}
        trainer.step({**feeds(1), "input": np.full((12, small.INPUTS), np.nan, np.float32)})
        assert trainer.skipped_steps == 1
        for name, value in before.items():
            np.testing.assert_array_equal(trainer.state.fetch(name), value)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::graphc.distributed.nccl.device_transport.StagedWarning")
@pytest.mark.parametrize("strategy", ["mirrored", "local_sgd:every=2", "zero:stage=1", "adasum"])
def test_two_workers_train_alike_with_copies_and_without(strategy: str) -> None:
    """Where workers go their own ways between two averages, or a strategy keeps copies of its own, none are added."""

    def worker(comm: Any, backend: str) -> tuple[list[float], str]:
        with graphc.Trainer(compiled(backend, strategy=strategy), comm=comm, threads=1) as trainer:
            losses = []
            for k in range(3):
                mine = share(12, comm.rank, comm.size)
                losses.append(trainer.step({n: a[mine] for n, a in feeds(k).items()}, offset=mine.start)["loss"])
            return losses, trainer.state_sha256() if strategy != "local_sgd:every=2" else ""

    assert run_threads(2, lambda comm: worker(comm, "pretended")) == run_threads(2, lambda comm: worker(comm, "casting"))
