"""Models and runs on meshes of several axes, shared by threads and MPI processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx

import graphc
from graphc import Mesh
from graphc.distributed.communicator import Communicator
from tests.training import pipe_cases, tensor_cases

VOCABULARY, LENGTH = tensor_cases.VOCABULARY, tensor_cases.SEQUENCE

LOSSES = {"gpt": graphc.losses.SoftmaxCrossEntropy(axis=1)}

STEPS = 3


def cnn() -> onnx.ModelProto:
    """Convolutions with BatchNormalization and skips, and two products behind them, which a tensor axis divides."""
    model = pipe_cases.residual_cnn()
    head, _ = model.graph.node[-1], model.graph.node.pop()
    (features,) = (name for name in head.input if name != "w")
    for op, inputs, output in (("MatMul", [features, "up"], "u"), ("Relu", ["u"], "r"), ("MatMul", ["r", "down"], "y")):
        model.graph.node.append(onnx.helper.make_node(op, inputs, [output], name=output))
    model.graph.initializer.remove(next(t for t in model.graph.initializer if t.name == "w"))
    return pipe_cases.parameters(model, {"up": (4, 8), "down": (8, 3)})


MODELS = {"mlp": pipe_cases.mlp, "cnn": cnn, "gpt": tensor_cases.gpt}


def batches(name: str, count: int = STEPS, size: int = 8) -> list[dict[str, Any]]:
    """Global batches for the model."""
    if name == "gpt":
        return [tensor_cases.batch(step, size) for step in range(count)]
    return pipe_cases.batches(MODELS[name](), [size] * count)


def compiled(name: str, mesh: Mesh, accumulate: int, **options: Any) -> graphc.Program:
    """The program of a model."""
    options = {"loss": LOSSES.get(name, pipe_cases.LOSS), **options}
    return pipe_cases.compiled(MODELS[name](), mesh, accumulate, **options)


def train(comm: Communicator | None, name: str, mesh: str, accumulate: int, options: dict[str, Any]) -> dict[str, Any]:
    """Losses, evaluation, weights and hash of :data:`STEPS` steps."""
    return pipe_cases.run(compiled(name, Mesh.parse(mesh), accumulate, **options), batches(name), comm)


def train_all(comm: Communicator, runs: list[tuple[str, str, int, dict[str, Any]]]) -> list[dict[str, Any]]:
    """:func:`train` for several runs, each with a communicator of its own."""
    everyone = list(range(comm.size))
    return [train(comm.subgroup(everyone, f"run {k}", 1000 + k), *run) for k, run in enumerate(runs)]


def continue_run(
    comm: Communicator | None, mesh: str, accumulate: int, batch: int, restore: str, save: str, options: dict[str, Any]
) -> tuple[float, str]:
    """One step of the GPT on another mesh, between two checkpoints; returns its loss and the hash of the state."""
    with graphc.Trainer(compiled("gpt", Mesh.parse(mesh), accumulate, **options), comm=comm, threads=1) as trainer:
        if restore:
            trainer.restore(restore)
        loss = trainer.step(pipe_cases.own_part(trainer, batches("gpt", batch + 1)[batch]))["loss"]
        if save:
            trainer.save(Path(save))
        return loss, trainer.state_sha256()
