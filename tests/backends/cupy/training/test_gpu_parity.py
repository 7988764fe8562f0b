"""Twenty steps of networks with residual joins on the GPU: in bfloat16 beside PyTorch's autocast, in float32 beside the CPU.

They are small enough for a GPU that is made up on the host. What the compiler does with large arrays only (masks of bits, a
layer normalisation's gradient in one pass) it is made to do with these.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import graphc
from graphc import backends
from graphc.backends.cupy.codegen import row_column
from graphc.backends.cupy.device.cuda_graph import Recording
from graphc.backends.cupy.segment import compile as segment_compile
from graphc.backends.cupy.segment.program import KernelCall, Segment
from graphc.bench.models import _Block

pytestmark = pytest.mark.gpu

STEPS = 20


class Bottlenecks(nn.Module):
    """The parts of ResNet-50: a stem with a pool, a projected shortcut, an identity, a strided block."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        blocks = [(16, 8, 32, 1), (32, 8, 32, 1), (32, 16, 64, 2)]
        self.blocks = nn.Sequential(*(_Block(*sizes, True, nn.ReLU()) for sizes in blocks))
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))  # type: ignore[no-any-return]


class PreNorm(nn.Module):
    """Two blocks of GPT-2: the residual stream is normalised in front of attention and of the layers, and in the end."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(100, width), nn.Parameter(torch.randn(1, 16, width) * 0.02)
        layers = [nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True) for _ in "12"]
        self.layers = nn.Sequential(*layers)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.layers(self.embedding(tokens) + self.position)).mean(1))  # type: ignore[no-any-return]


NETWORKS: dict[str, Callable[[], nn.Module]] = {"bottlenecks": Bottlenecks, "pre-norm": PreNorm}
RATES = {"bottlenecks": 0.0015, "pre-norm": 0.1}
"""At higher ones two right computations part: PyTorch's from its own with weights that differ by a millionth."""


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    return NETWORKS[name]().train()


def batch(name: str, seed: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed % 4)
    x: Any = rng.standard_normal((8, 3, 32, 32), np.float32) if name == "bottlenecks" else rng.integers(0, 100, (16, 16))
    return x, rng.integers(0, 10, len(x))


def train(name: str, backend: str, precision: str | None = None, steps: int = STEPS) -> tuple[list[float], dict[str, Any]]:
    program = graphc.compile(
        copy.deepcopy(network(name)),
        example_inputs=(torch.from_numpy(batch(name, 0)[0]),),
        loss=graphc.losses.SoftmaxCrossEntropy(),
        optimizer=graphc.optim.SGD(lr=RATES[name], momentum=0.9),
        precision=precision,
        backend=backend,
    )
    feed = next(v.name for v in program.model.graph.inputs if v.name != "label")
    losses = []
    with graphc.Trainer(program, threads=1) as trainer:
        for step in range(steps):
            x, label = batch(name, step)
            losses.append(trainer.step({feed: x, "label": label})["loss"])
        return losses, trainer.state.snapshot()


def autocast(name: str) -> list[float]:
    module, losses = network(name), []
    optimizer = torch.optim.SGD(module.parameters(), lr=RATES[name], momentum=0.9)
    for step in range(STEPS):
        x, label = (torch.from_numpy(a) for a in batch(name, step))
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = module(x)
        loss = nn.functional.cross_entropy(logits.float(), label)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[KernelCall]:
    """The generated kernels of what is compiled, where nothing is too small for a kernel of its kind."""
    found: list[KernelCall] = []
    compile_segment = backends.cupy.compile_segment  # type: ignore[attr-defined]

    def watched(*arguments: Any, **options: Any) -> Segment:
        made = compile_segment(*arguments, **options)
        found.extend(call for call in made.calls if isinstance(call, KernelCall))
        return made  # type: ignore[no-any-return]

    monkeypatch.setattr(backends.cupy, "compile_segment", watched)
    for module in (segment_compile, row_column):
        monkeypatch.setattr(module, "SMALL", 0)
    return found


@pytest.mark.parametrize("name", NETWORKS)
def test_bfloat16_follows_autocast(name: str, calls: list[KernelCall]) -> None:
    losses, _ = train(name, "cupy", "bf16")
    np.testing.assert_allclose(losses, autocast(name), rtol=0.02)
    if name == "bottlenecks":
        assert any((v.name or "").endswith(".bits") for call in calls for v in call.source.operands), "masks of bits"
    else:
        assert sum(bool(call.source.totals) for call in calls) >= 3, "gradients of layer normalisations in one pass"


@pytest.mark.parametrize("name", NETWORKS)
def test_float32_follows_the_cpu(name: str) -> None:
    np.testing.assert_allclose(train(name, "cupy")[0], train(name, "onnxruntime")[0], rtol=1e-3)


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("name", NETWORKS)
def test_deterministic_runs_have_the_same_bits_captured_or_not(
    name: str, precision: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from graphc.backends.cupy.device.cuda_device import CudaDevice

    first, again = (train(name, "cupy:deterministic=true", precision, 6) for _ in range(2))
    monkeypatch.setattr(CudaDevice, "record", lambda self, runs: Recording(runs, None))
    uncaptured = train(name, "cupy:deterministic=true", precision, 6)
    for losses, state in (again, uncaptured):
        assert losses == first[0]
        for key, value in first[1].items():
            np.testing.assert_array_equal(state[key], value, err_msg=key)
