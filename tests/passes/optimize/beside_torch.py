"""Trains a small module beside PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graphc


def ops_trained(module: nn.Module, x: torch.Tensor, label: torch.Tensor) -> list[str]:
    """The ops of the module as compiled, whose losses in five steps of SGD are those of PyTorch.

    Args:
        x, label: float input (batch × …) and int64 classes (batch) of a module that gives scores (batch × classes).
    """
    program = graphc.compile(
        module, example_inputs=(x,), loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=graphc.optim.SGD(lr=0.5)
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    with graphc.Trainer(program) as trainer:
        (name,) = (v.name for v in program.model.graph.inputs if v.name != "label")
        for _ in range(5):
            loss = nn.functional.cross_entropy(module(x), label)
            found = trainer.step({name: x.numpy(), "label": label.numpy()})["loss"]
            assert found == pytest.approx(loss.item(), rel=1e-5)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return [node.op_type for node in program.model.graph]
