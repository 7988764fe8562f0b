"""A PyTorch module goes straight into compile."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import graphc
from graphc.bench.models import build
from graphc.bench.specs import SPECS


def test_a_module_trains_as_in_pytorch_and_what_it_holds_still_stays() -> None:
    module = build("lenet").train()
    module.features[0].weight.requires_grad_(False)
    x, y = SPECS["lenet"].batch(8)
    program = graphc.compile(
        module,
        loss=graphc.losses.SoftmaxCrossEntropy(),
        optimizer=graphc.optim.SGD(lr=0.05),
        example_inputs=(torch.from_numpy(x[:2]),),
    )
    (name,) = (v.name for v in program.model.graph.inputs if v.name != "label")
    reference = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.05)
    with graphc.Trainer(program, threads=1) as trainer:
        for _ in range(3):
            loss = torch.nn.functional.cross_entropy(module(torch.from_numpy(x)), torch.from_numpy(y))
            reference.zero_grad()
            loss.backward()
            reference.step()
            assert trainer.step({name: x, "label": y})["loss"] == pytest.approx(loss.item(), rel=1e-5)
        for key, value in module.named_parameters():
            np.testing.assert_allclose(trainer.state.arrays[key], value.detach().numpy(), rtol=1e-4, atol=1e-6)


def test_a_module_without_example_inputs_is_told_what_is_missing() -> None:
    with pytest.raises(graphc.GraphcError, match="example_inputs"):
        graphc.compile(build("mlp"), loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=graphc.optim.SGD(lr=0.1))
