"""Batch norms with their activations in one kernel: whole steps beside PyTorch."""

from __future__ import annotations

import copy

import numpy as np
import pytest

pytest.importorskip("onnxruntime")

import torch
from torch import nn

import graphc

ACTIVATIONS = [nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.Hardswish, nn.SiLU]


class Activated(nn.Module):
    """A norm in front of each activation, and one whose results are added to what came before."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), activation())
            for activation in ACTIVATIONS
        )
        self.conv, self.norm = nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 4)
        for norm in (m for m in self.modules() if isinstance(m, nn.BatchNorm2d)):
            nn.init.normal_(norm.weight, 3.0)  # so that results lie beyond all bounds
            nn.init.normal_(norm.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(torch.relu(x + self.norm(self.conv(x))).mean((2, 3)))  # type: ignore[no-any-return]


def test_steps_follow_pytorch() -> None:
    module, rng = Activated(), np.random.default_rng(0)
    other = copy.deepcopy(module).double()
    batches = [(rng.standard_normal((8, 6, 9, 9), dtype=np.float32), rng.integers(0, 4, 8)) for _ in range(4)]
    program = graphc.compile(
        module,
        example_inputs=(torch.from_numpy(batches[0][0]),),
        loss=graphc.losses.SoftmaxCrossEntropy(),
        optimizer=graphc.optim.SGD(lr=1e-2),
    )
    optimizer = torch.optim.SGD(other.parameters(), lr=1e-2)
    with graphc.Trainer(program, threads=2) as trainer:
        for x, label in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(other(torch.from_numpy(x).double()), torch.from_numpy(label))
            loss.backward()
            optimizer.step()
            assert trainer.step({"x": x, "label": label})["loss"] == pytest.approx(loss.item(), rel=1e-5)
        (executor,) = trainer.plans.training.values()
        ops = [node.op_type for step in executor.plan.steps for node in step.nodes]
        assert ops.count("FusedBatchNormalization") == len(ACTIVATIONS) + 1
        assert ops.count("FusedBatchNormalizationGrad") == len(ACTIVATIONS)
        trainer.load_into(module)
    for (name, got), want in zip(module.named_parameters(), other.parameters(), strict=True):
        np.testing.assert_allclose(got.detach().numpy(), want.detach().numpy(), rtol=1e-4, atol=1e-5, err_msg=name)
