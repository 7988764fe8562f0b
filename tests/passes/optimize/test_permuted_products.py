"""Products of many matrices read transposed operands where they lie, and train as in PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import graphc
from graphc.backend import make_backend
from graphc.plan.partition import make_plan
from tests.passes.optimize.beside_torch import ops_trained
from tests.tiers import params

MOVES = {"Transpose", "Reshape", "Squeeze"}


class Heads(nn.Module):
    """Four heads of 32 features whose products are written out."""

    def __init__(self, mix: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.qkv, self.out, self.mix = nn.Linear(128, 384), nn.Linear(128, 5), mix

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Features (batch × length × 128) to scores (batch × 5)."""
        parts = self.qkv(x).unflatten(2, (3, 4, 32)).unbind(2)
        mixed = self.mix(*(part.transpose(1, 2) for part in parts))
        return self.out(mixed.transpose(1, 2).flatten(2).mean(1))


def gates(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(q @ k.transpose(-2, -1)) @ v


def linear(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return q.softmax(-1) @ (k.softmax(-2).transpose(-2, -1) @ v)


def einsums(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bhnd,bhde->bhne", q, torch.einsum("bhnd,bhne->bhde", k, v)) / 32


def flat(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.reshape(-1, 40, 32) for x in (q, k, v))
    return torch.bmm(torch.bmm(q, k.mT).relu() / 40, v).reshape(-1, 4, 40, 32)


@pytest.mark.full
@pytest.mark.parametrize("mix", params([gates, linear, einsums, flat], large=[linear, einsums, flat]))
def test_no_step_only_transposes_operands_of_batched_products(mix: Callable[..., torch.Tensor]) -> None:
    torch.manual_seed(0)
    module, x, label = Heads(mix), torch.randn(6, 40, 128), torch.randint(0, 5, (6,))
    program = graphc.compile(
        module, example_inputs=(x,), loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=graphc.optim.SGD(lr=0.5)
    )
    backend = make_backend("onnxruntime", threads=1)
    try:
        plan = make_plan(
            program.model, {v.name or "": (6,) if v.name == "label" else x.shape for v in program.model.graph.inputs}, backend
        )
    finally:
        backend.close()
    kernels = [node.op_type for step in plan.steps if step.kind == "kernel" for node in step.nodes]
    assert kernels.count("PermutedMatMul") >= 5, kernels
    for step in plan.steps:
        assert {node.op_type for node in step.nodes} - MOVES or not step.nodes, step.nodes
    ops_trained(module, x, label)
