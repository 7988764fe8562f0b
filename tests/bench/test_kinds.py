"""The kinds of models of the benchmark train as PyTorch trains them in float64.

BatchNormalization over few samples amplifies roundings: a ResNet-18's fourth loss is off by 1e-4 in PyTorch's own float32.
Where that is more than the tolerance, twice as much is allowed.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import graphc
from graphc.bench.kinds.models import KINDS


def losses_of(module: nn.Module, inputs: tuple[torch.Tensor, ...], label: torch.Tensor) -> np.ndarray[Any, Any]:
    """The losses of four steps of PyTorch in the type of the module's parameters."""
    module.train()
    dtype = next(module.parameters()).dtype
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=1e-3), []
    for _ in range(4):
        optimizer.zero_grad()
        logits = module(*(x.to(dtype) if x.is_floating_point() else x for x in inputs))
        loss = nn.functional.cross_entropy(logits.movedim(-1, 1) if label.dim() == 2 else logits, label)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return np.array(losses)


@pytest.mark.large
@pytest.mark.parametrize("fuse", ["true", "false"])
@pytest.mark.parametrize("name", KINDS)
def test_a_kind_follows_pytorch_step_by_step(name: str, fuse: str) -> None:
    kind = KINDS[name]["small"]
    torch.manual_seed(0)
    module, inputs = kind.module(), kind.inputs()
    label = torch.randint(0, kind.classes, kind.labels)
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        elif isinstance(part, nn.TransformerEncoderLayer):
            part.self_attn.dropout = 0.0
    program = graphc.compile(
        module,
        example_inputs=inputs,
        loss=graphc.losses.SoftmaxCrossEntropy(axis=1 if len(kind.labels) == 3 else None),
        optimizer=graphc.optim.SGD(lr=1e-3),
        backend=f"onnxruntime:fuse={fuse}",
    )
    names = [value.name for value in program.model.graph.inputs if value.name != "label"]
    feeds = dict(zip(names, (x.numpy() for x in inputs), strict=True)) | {"label": label.numpy()}
    with graphc.Trainer(program, threads=2) as trainer:
        found = [trainer.step(feeds)["loss"] for _ in range(4)]
    exact, single = (losses_of(copy.deepcopy(module).to(dtype), inputs, label) for dtype in (torch.float64, torch.float32))
    allowed = np.maximum(1e-5 * np.abs(exact), 2 * np.abs(single - exact))
    np.testing.assert_array_less(np.abs(found - exact), allowed)


@pytest.mark.large
def test_the_memory_of_both_sides_holds_the_training_state() -> None:
    command = [sys.executable, "-m", "graphc.bench.kinds.memory", "--size", "full", "dlrm"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    ours, theirs, _, state = map(float, done.stdout.splitlines()[-1].split()[1:])
    assert min(ours, theirs) > 0.9 * state > 0


@pytest.mark.large
def test_the_command_for_a_gpu_times_both_sides_on_the_same_losses() -> None:
    """On the CPU, where the command takes the same path but for the devices."""
    command = [sys.executable, "-m", "graphc.bench.kinds.gpu", "dlrm", "--size", "small", "--precision", "tf32"]
    done = subprocess.run(
        [*command, "--device", "cpu", "--eager", "--seconds", "0.05"], capture_output=True, text=True, check=True
    )
    head, row = done.stdout.splitlines()
    found = dict(zip(("graphc", "eager", "compile", "ratio", "first", "off"), map(float, row.split()[1:]), strict=True))
    assert head.split()[0] == "kind"
    assert row.startswith("dlrm")
    assert found["ratio"] == pytest.approx(found["eager"] / found["graphc"], abs=0.02)
    assert found["off"] < 1e-5
