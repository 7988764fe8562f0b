"""Models and runs on meshes of several axes, shared by threads and MPI processes."""

from __future__ import annotations

from typing import Any

import onnx

import graphc
from graphc import Mesh
from graphc.distributed.communicator import Communicator
from tests.training import pipe_cases, tensor_cases
from tests.training.compile_once import shared

STEPS = 3
"""Steps of a run."""


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


@shared
def compiled(name: str, mesh: Mesh, accumulate: int, **options: Any) -> graphc.Program:
    """The program of a model."""
    loss = graphc.losses.SoftmaxCrossEntropy(axis=1) if name == "gpt" else pipe_cases.LOSS
    return pipe_cases.compiled(MODELS[name](), mesh, accumulate, **{"loss": loss, **options})


def train(
    comm: Communicator | None, name: str, mesh: str, accumulate: int, options: dict[str, Any], samples: int = 8
) -> dict[str, Any]:
    """Losses, evaluation, weights and hash of :data:`STEPS` steps of ``samples``."""
    program = compiled(name, Mesh.parse(mesh), accumulate, **options)
    return pipe_cases.run(program, batches(name, size=samples), comm)


def train_all(comm: Communicator, runs: list[tuple[str, str, int, dict[str, Any]]], samples: int = 8) -> list[dict[str, Any]]:
    """:func:`train` for several runs, one after the other."""
    comm.close = lambda: None  # type: ignore[method-assign]  # each run's trainer would close it
    return [train(comm, *run, samples) for run in runs]
