"""Results of kernels in the memory of operands that nothing reads any more: steps have the same bits, and less memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

pytest.importorskip("onnxruntime")

import torch
from torch import nn

import graphc
from graphc.backends.onnxruntime import OnnxRuntimeBackend
from graphc.plan.arena import Arena
from graphc.plan.partition import Plan


class Apart(OnnxRuntimeBackend):
    """The backend, with a place of its own for each result."""

    def inplace(self, node: ir.Node) -> Mapping[int, int]:
        return {}


class Frames(nn.Module):
    """Norms over images, one behind an activation and one beside a branch that reads the same gradient, and two LSTMs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.silu = nn.Conv2d(3, 8, 3, padding=1), nn.Sequential(nn.BatchNorm2d(8), nn.SiLU())
        self.second, self.beside, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)
        self.lstm = nn.LSTM(8 * 6, 16, num_layers=2, batch_first=True)
        self.narrow, self.head = nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.silu(self.first(x))
        x = torch.tanh(self.norm(self.second(x)) + self.beside(x))
        y, _ = self.lstm(x.permute(0, 2, 1, 3).flatten(2))
        return self.head(self.narrow(y.mean(1)))  # type: ignore[no-any-return]


def _train(backend: Any, steps: int = 3) -> tuple[list[bytes], Plan]:
    rng = np.random.default_rng(0)
    program = graphc.compile(
        Frames(),
        example_inputs=(torch.zeros(16, 3, 10, 6),),
        loss=graphc.losses.SoftmaxCrossEntropy(),
        optimizer=graphc.optim.SGD(lr=0.1),
        backend=backend,
    )
    feeds = {"x": rng.standard_normal((16, 3, 10, 6), dtype=np.float32), "label": rng.integers(0, 4, 16)}
    with graphc.Trainer(program, threads=2) as trainer:
        bits = [np.asarray(trainer.step(feeds)["loss"]).tobytes() for _ in range(steps)]
        bits += [array.tobytes() for array in trainer.trained_values().values()]
        (executor,) = trainer.plans.training.values()
    return bits, executor.plan


def test_steps_have_the_same_bits_in_less_memory(register_backend: Any) -> None:
    register_backend("apart", Apart)
    (apart, roomy), (within, plan) = _train("apart"), _train("onnxruntime")
    assert apart == within
    assert plan.buffers["arena"] < roomy.buffers["arena"]
    shared = set()
    for node in (node for step in plan.steps if step.kind == "kernel" for node in step.nodes):
        places = [[plan.places.get(v) if v is not None else None for v in values] for values in (node.inputs, node.outputs)]
        starts = [{(p.buffer, p.offset) for p in found if p is not None} for found in places]
        if starts[0] & starts[1]:
            shared.add(node.op_type)
    assert shared >= {
        "RecurrentTraining",
        "RecurrentTrainingGrad",
        "FusedBatchNormalizationGrad",
        "BatchNormalizationTrainingGrad",
        "SoftmaxCrossEntropy",
        "SoftmaxCrossEntropyGrad",
    }


def test_a_range_is_free_after_the_last_result_in_it() -> None:
    arena = Arena(16)
    first = arena.take(16, until=0)
    arena.take(16, until=3)
    arena.keep(first, step=0, until=2)
    arena.free_after(0)
    assert arena.take(16, until=1) not in (first, 16)
    arena.free_after(1)
    arena.free_after(2)
    assert arena.take(16, until=4) in (first, 32)
    assert arena.take(16, until=4) in (first, 32)
