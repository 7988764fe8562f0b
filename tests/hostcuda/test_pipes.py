"""Pipelines with the GPU backend: stages on emulated GPUs that send over NCCL. The reference is one worker with onnxruntime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import graphc
from graphc import Mesh
from graphc.distributed.communicator import Communicator
from graphc.errors import NonFiniteError
from tests.conftest import emulated
from tests.runtime.mpi_run import map_ranks
from tests.training import pipe_cases as cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.mpi,
    pytest.mark.skipif(not emulated(), reason="says how many GPUs there are"),
]

MODELS: dict[str, Callable[[], onnx.ModelProto]] = {"mlp": cases.mlp, "cnn": cases.residual_cnn, "gpt": cases.gpt}
KEPT = graphc.losses.SoftmaxCrossEntropy(axis=-1, keep_outputs=True)
STEPS = 5
"""The first two steps send through the host's memory, the others over NCCL."""

Case = tuple[str, Mesh, int, dict[str, Any]]
"""Model, mesh, micro-batches, options."""

TWO: dict[str, Case] = {
    "1f1b": ("mlp", Mesh(pipe=2), 4, {"schedule": "1f1b"}),
    "zero-bubble": ("cnn", Mesh(pipe=2), 4, {"schedule": "zero-bubble"}),
    "interleaved": ("gpt", Mesh(pipe=2), 4, {"schedule": "interleaved:stages=4"}),
    "gpipe": ("gpt", Mesh(pipe=2), 4, {"schedule": "gpipe"}),
    "recompute": ("mlp", Mesh(pipe=2), 4, {"recompute": "all"}),
    "clip norm": ("mlp", Mesh(pipe=2), 4, {"clip_norm": 0.5}),
    "clip value": ("mlp", Mesh(pipe=2), 4, {"clip_value": 0.05}),
    "skip": ("mlp", Mesh(pipe=2), 4, {"nonfinite": "skip"}),
    "bf16": ("mlp", Mesh(pipe=2), 4, {"precision": "bf16"}),
    "fp16": ("mlp", Mesh(pipe=2), 4, {"precision": "fp16"}),
    "place": ("mlp", Mesh(pipe=2), 1, {"place": ["m0=0", "a0=0", "h0=0", "m1=1", "a1=1"]}),
    "kept outputs": ("mlp", Mesh(pipe=2), 4, {"loss": KEPT}),
}
FOUR: dict[str, Case] = {
    "data, batch statistics": ("cnn", Mesh(data=2, pipe=2), 2, {"sync_batchnorm": True}),
    "data": ("gpt", Mesh(data=2, pipe=2), 2, {}),
    "zero 1": ("mlp", Mesh(data=2, pipe=2), 2, {"strategy": "zero"}),
    "zero 2": ("mlp", Mesh(data=2, pipe=2), 2, {"strategy": "zero:stage=2"}),
    "zero 3": ("mlp", Mesh(data=2, pipe=2), 2, {"strategy": "zero:stage=3"}),
    "tensor": ("gpt", Mesh(pipe=2, tensor=2), 4, {}),
}
ALONE = {"clip_norm", "clip_value", "nonfinite", "precision", "loss"}
"""Options that one worker takes too."""

TOLERANCES = {"bf16": 2**-9, "fp16": 2**-11}
"""The rounding of one 16-bit number; 1e-5 in float32."""


def on_gpus(comm: Communicator, table: dict[str, Case]) -> dict[str, Any]:
    comm.close = lambda: None  # type: ignore[method-assign]  # one world for all of them
    found = {}
    for name, (model, mesh, micro, options) in table.items():
        program = cases.compiled(MODELS[model](), mesh, micro, backend="cupy", **options)
        found[name] = cases.run(program, cases.batches(MODELS[model](), [8] * STEPS), comm)
    return found


@pytest.mark.parametrize(("devices", "table"), [(2, TWO), (4, FOUR)], ids=["two GPUs", "four GPUs"])
def test_stages_on_gpus_compute_what_one_worker_does(
    devices: int, table: dict[str, Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOSTCUDA_DEVICES", str(devices))
    ranks = map_ranks(devices, on_gpus, table, timeout=900)
    wrong = []
    for name, (model, mesh, micro, options) in table.items():
        own = {k: v for k, v in options.items() if k in ALONE}
        count, data = micro * mesh.data, cases.batches(MODELS[model](), [8] * STEPS)
        if "sync_batchnorm" in options:  # a micro-batch has samples of both replicas
            count, data = micro, [{k: array[[0, 1, 4, 5, 2, 3, 6, 7]] for k, array in batch.items()} for batch in data]
        wanted = cases.run(cases.compiled(MODELS[model](), Mesh(), count, **own), data)
        distances = [cases.distance(rank[name], wanted) for rank in ranks]
        print(f"{name:24} {max(distances):.1e}")
        if len({rank[name]["hash"] for rank in ranks}) != 1 or max(distances) > TOLERANCES.get(name, 1e-5):
            wrong.append(f"{name}: {distances}")
    assert not wrong, "\n".join(wrong)


def twice(comm: Communicator, folder: str) -> list[Any]:
    """Two trainings from one seed, the second with a NaN at its end, then a checkpoint."""
    comm.close = lambda: None  # type: ignore[method-assign]
    model, found = cases.gpt(), list[Any]()
    data = cases.batches(model, [8] * STEPS)
    for _ in range(2):
        program = cases.compiled(model, Mesh(pipe=2), 4, backend="cupy")
        with graphc.Trainer(program, comm=comm, threads=1, seed=5) as trainer:
            losses = [trainer.step(batch)["loss"] for batch in data]
            found.append((losses, trainer.state_sha256()))
            trainer.save(folder)
    bad = cases.batches(cases.mlp(), [8, 8, 8, 8])
    bad[-1]["x"][3] = np.nan
    with graphc.Trainer(cases.compiled(cases.mlp(), Mesh(pipe=2), 4, backend="cupy"), comm=comm, threads=1) as trainer:
        for batch in bad[:-1]:
            trainer.step(batch)
        before = trainer.state_sha256()
        try:
            trainer.step(bad[-1])
        except NonFiniteError as error:
            found.append((str(error), error.step, before == trainer.state_sha256()))
    return found


def test_bits_nan_and_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTCUDA_DEVICES", "2")
    ranks = map_ranks(2, twice, str(tmp_path / "kept"), timeout=600)
    for first, again, (message, step, unchanged) in ranks:
        assert first == again, "the same seed, the same bits"
        assert "gradients of stage 0, 1" in message
        assert (step, unchanged) == (3, True)
    assert ranks[0][0] == ranks[1][0]
    with graphc.Trainer(cases.compiled(cases.gpt(), Mesh(), 4), threads=1) as trainer:
        trainer.restore(tmp_path / "kept")
        assert trainer.steps_done == STEPS
        assert trainer.state_sha256() == ranks[0][0][1], "one worker with onnxruntime goes on from the same state"
