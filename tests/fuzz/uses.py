"""What is done with a mutant of a model: every way in which a person may hand a file to graphc."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

import graphc
from graphc import frontends
from graphc.cli import main
from graphc.training.inference import run_model
from tests.fuzz.hostile import DATA, DATA_BYTES
from tests.fuzz.seeds import SIZE, Seed

LARGEST_TARGET = 1_000_000
"""Elements; a mutant whose output claims more is fed a target of one element, which must be refused."""


def use(data: bytes, seed: Seed, how: str) -> None:
    """Write the file, with a file of data beside it, and hand it to graphc."""
    with tempfile.TemporaryDirectory(prefix="graphc-fuzz-") as place, contextlib.chdir(place):
        Path("model.onnx").write_bytes(data)
        Path(DATA).write_bytes(np.ones(DATA_BYTES // 4, np.float32).tobytes())
        USES[how](Path("model.onnx"), seed)


def train(path: Path, seed: Seed) -> None:
    """Compile it and train one step towards zeros."""
    loss = graphc.losses.MSE(prediction=seed.output, label="target__")
    program = graphc.compile(path, loss=loss, optimizer=graphc.optim.SGD(lr=0.1))
    made = next((v for v in program.original.graph.outputs if v.name == seed.output), None)
    shape = [d if isinstance(d, int) else SIZE for d in (made.shape or ())] if made is not None else []
    size = float(np.prod(shape, dtype=float))
    with graphc.Trainer(program, threads=1) as trainer:
        trainer.step({**seed.feeds, "target__": np.zeros(shape if size <= LARGEST_TARGET else 1, np.float32)})


def run(path: Path, seed: Seed) -> None:
    run_model(frontends.load(path), dict(seed.feeds))


def grad(path: Path, seed: Seed) -> None:
    held = [tensor.name for tensor in seed.model.graph.initializer if tensor.data_type == 1]
    graphc.grad(path, of=seed.output, wrt=held[:1])


def command(*words: str) -> Callable[[Path, Seed], None]:
    """Run a command line; the words may name the model and its output."""

    def work(path: Path, seed: Seed) -> None:
        os.environ["GRAPHC_DEBUG"] = "1"  # errors come out as they are
        code = main([word.format(model=path, output=seed.output) for word in words])
        if code not in (0, 1, 2, 3):
            raise AssertionError(f"exit code {code}")

    return work


USES: dict[str, Callable[[Path, Seed], None]] = {
    "train": train,
    "run": run,
    "grad": grad,
    "check": command("check", "{model}", "-v"),
    "inspect": command("inspect", "{model}", "--show", "nodes,params"),
    "memory": command("inspect", "{model}", "--memory"),
    "compile": command(
        "compile",
        "{model}",
        "--loss",
        "mse:prediction={output},label=target__",
        "--optimizer",
        "adam:lr=0.1",
        "-o",
        "out.onnx",
        "--standard",
    ),
    "opt": command("opt", "{model}", "-p", "legalize,simplify", "-o", "out.onnxtxt"),
    "rebatch": command("check", "{model}", "--batch", "3"),
}
