"""A two-layer classifier in ONNX and in PyTorch, for tests of what happens between gradients and updates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

import graphc
from graphc.data import share
from graphc.ir.infer import propagate

Array = np.ndarray[Any, Any]

INPUTS, HIDDEN, CLASSES = 12, 20, 5
SHAPES: Mapping[str, tuple[int, ...]] = {"w1": (INPUTS, HIDDEN), "b1": (HIDDEN,), "w2": (HIDDEN, CLASSES), "b2": (CLASSES,)}


def weights(seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {name: (0.5 * rng.standard_normal(shape)).astype(np.float32) for name, shape in SHAPES.items()}


def model() -> ir.Model:
    """logits = relu(input·w1 + b1)·w2 + b2"""
    text = f"""<ir_version: 11, opset_import: ["" : 26]> g (float[N,{INPUTS}] input) => (float[N,{CLASSES}] logits)
        <float[{INPUTS},{HIDDEN}] w1 = {{}}, float[{HIDDEN}] b1 = {{}}, float[{HIDDEN},{CLASSES}] w2 = {{}},
         float[{CLASSES}] b2 = {{}}>
        {{ m1 = MatMul(input, w1) h1 = Add(m1, b1) r1 = Relu(h1) m2 = MatMul(r1, w2) logits = Add(m2, b2) }}"""
    found = ir.from_onnx_text(text)
    for name, array in weights().items():
        found.graph.initializers[name].const_value = ir.tensor(array, name=name)
    for k, node in enumerate(found.graph):
        node.name = f"node{k}"
    propagate(found.graph)
    return found


def batch(count: int, seed: int) -> tuple[Array, Array]:
    """Samples and labels of one global batch; the labels can be learned."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, INPUTS)).astype(np.float32)
    return x, np.argmax(x[:, :CLASSES] + 0.5 * x[:, CLASSES : 2 * CLASSES], axis=1)


def compiled(optimizer: str = "sgd:lr=0.1", **options: Any) -> graphc.Program:
    """The training program; two or three small buckets."""
    return graphc.compile(
        model(),
        loss=graphc.losses.SoftmaxCrossEntropy(),
        optimizer=graphc.optim.parse(optimizer),
        bucket_mb=options.pop("bucket_mb", 0.0005),
        **options,
    )


def train(comm: Any, program: graphc.Program, steps: int, sizes: tuple[int, ...] = (16,), first: int = 0) -> dict[str, Any]:
    """Steps of one rank on its share; global batch sizes are used in turn. Metrics, final state and its hash."""
    metrics: list[dict[str, float]] = []
    with graphc.Trainer(program, comm=comm, threads=1) as trainer:
        for step in range(first, first + steps):
            count = sizes[step % len(sizes)]
            x, y = batch(count, step)
            mine = share(count, comm.rank, comm.size)
            metrics.append(trainer.step({"input": x[mine], "label": y[mine]}, offset=mine.start))
        return {
            "metrics": metrics,
            "state": trainer.state.snapshot(comm if trainer.state.shards else None),
            "hash": trainer.state_sha256(),
        }


class Torch:
    """The same classifier in PyTorch."""

    def __init__(self, optimizer: Any) -> None:
        import torch  # not needed by the processes that only use the model

        self.parameters = {name: torch.tensor(array, requires_grad=True) for name, array in weights().items()}
        self.optimizer = optimizer(list(self.parameters.values()))

    def backward(self, x: Array, y: Array) -> float:
        import torch

        self.optimizer.zero_grad()
        p = self.parameters
        logits = torch.relu(torch.tensor(x) @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(y))
        loss.backward()
        return float(loss.detach())

    def state(self) -> dict[str, Array]:
        return {name: p.detach().numpy().copy() for name, p in self.parameters.items()}


def largest_difference(a: Mapping[str, Array], b: Mapping[str, Array]) -> float:
    """Over the parameters, relative to the largest element of each."""
    return max(float(np.abs(a[n] - b[n]).max() / np.abs(b[n]).max()) for n in SHAPES)


def allocated(trainer: graphc.Trainer) -> int:
    """Bytes of all arrays that a trainer with one plan holds for training."""
    (executor,) = trainer.plans.training.values()
    state = sum(array.nbytes for array in trainer.state.flat.values())
    fixed = set(trainer.program.model.graph.initializers) - trainer.state.updated
    fixed -= {low for lows in trainer.state.copies.values() for low in lows}
    single = sum(trainer.state.arrays[name].nbytes for name in fixed)
    buffers = sum(b.nbytes for name, b in executor.places.buffers.items() if name not in trainer.state.flat)
    return state + single + buffers + sum(a.nbytes for a in executor.inputs.values())
