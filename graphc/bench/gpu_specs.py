"""The four jobs of ``make gpu-bench``, defined without importing PyTorch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from graphc import losses, optim
from graphc.atomic_files import whole_file
from graphc.errors import UsageError, nearest

Arrays = dict[str, "np.ndarray[Any, np.dtype[Any]]"]


@dataclass(frozen=True, slots=True)
class BenchJob:
    """One training job.

    Attributes:
        batch: samples of a step.
        inputs: shape of a sample.
        tokens: vocabulary size of token inputs; 0: float32 images.
        classes: number of classes of each label.
        per_token: whether every position of a sample has its own label.
        layers, width, heads: of a transformer.
        optimizer, precision: as for ``graphc train``; precision ``tf32`` leaves the graph in float32.
        goal_ms: goal for the time of a step on an H200.
    """

    batch: int
    inputs: tuple[int, ...]
    classes: int
    optimizer: str
    precision: str
    goal_ms: float
    tokens: int = 0
    per_token: bool = False
    layers: int = 0
    width: int = 0
    heads: int = 0

    def feeds(self, seed: int = 0) -> Arrays:
        """Make one batch of random samples: ``input`` and ``label``."""
        rng = np.random.default_rng(seed)
        shape = (self.batch, *self.inputs)
        x: Any = rng.integers(0, self.tokens, shape) if self.tokens else rng.standard_normal(shape, dtype=np.float32)
        return {"input": x, "label": rng.integers(0, self.classes, shape if self.per_token else self.batch)}

    def shapes(self) -> dict[str, list[int]]:
        """Shapes of the feeds."""
        label = (self.batch, *self.inputs) if self.per_token else (self.batch,)
        return {"input": [self.batch, *self.inputs], "label": list(label)}

    def options(self) -> dict[str, Any]:
        """Arguments of ``graphc.compile`` besides the model."""
        loss = losses.SoftmaxCrossEntropy(axis=2 if self.per_token else 1)
        precision = None if self.precision == "tf32" else self.precision
        return {"loss": loss, "optimizer": optim.parse(self.optimizer), "precision": precision}

    def smaller(self, *, layers: int = 0, batch: int = 0) -> BenchJob:
        """Return the job with other sizes; 0 keeps a size."""
        return replace(self, layers=layers or self.layers, batch=batch or self.batch)

    def tiny(self) -> BenchJob:
        """Return the job at a tiny size, to test the benchmark itself on any machine."""
        if self.tokens:
            return replace(self, batch=2, inputs=(16,), classes=48, tokens=48, layers=1, width=32, heads=2)
        if len(self.inputs) == 3:
            return replace(self, batch=4, inputs=(3, 64, 64), classes=8, layers=18, width=4)
        return replace(self, batch=4, inputs=(16,), width=32)


ADAMW = "adamw:lr=3e-4,beta2=0.95,weight_decay=0.1"
MOMENTUM = "sgd:lr=0.01,momentum=0.9"

JOBS: Mapping[str, BenchJob] = {
    "gpt2": BenchJob(16, (1024,), 50304, ADAMW, "bf16", 31.0, 50304, True, 12, 768, 12),
    "bert": BenchJob(64, (128,), 30528, ADAMW, "bf16", 14.0, 30528, True, 12, 768, 12),
    "resnet50": BenchJob(256, (3, 224, 224), 1000, MOMENTUM, "bf16", 31.0, layers=50, width=64),
    "mlp-wide": BenchJob(1024, (784,), 10, MOMENTUM, "tf32", 0.6, width=4096),
}
"""GPT-2 124M (vocabulary 50,257 padded to 50,304), BERT-base with a head over the vocabulary (30,522 padded to 30,528) at every
position, ResNet-50 and an MLP 784-4096-4096-10."""


def check_jobs(names: Iterable[str]) -> None:
    """Raise UsageError for an unknown job name."""
    for name in names:
        if name not in JOBS:
            raise UsageError(f"there is no job {name!r}{nearest(name, JOBS)}; jobs are {', '.join(JOBS)}")


def write_json(path: Path, result: Any) -> None:
    """Write a result atomically, replacing an earlier one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.write(f"{json.dumps(result, indent=1)}\n".encode())
