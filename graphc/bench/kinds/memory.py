"""The memory that a training step of each kind takes: graphc and PyTorch eager, each in a process of its own.

    python -m graphc.bench.kinds.memory --size full gpt unet

A figure is the largest resident memory during three steps, without what the process had before it made the model. By then it
has trained another model, so that libraries, kernels and threads are loaded, and graphc's caches hold the compiled segments:
a first start maps LLVM's optimiser too, 27 MB of pages that belong to no model. ``state`` is parameters, gradients and the
two moments of AdamW, which both sides need.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SIDES = ("graphc", "torch")
STEPS = 3
LEARNING_RATE = 1e-3


def main() -> None:
    """Parse the command line, measure each side in a process, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("kinds", nargs="*", help="all, when none is named")
    parser.add_argument("--size", choices=("full", "small"), default="full")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--side", choices=("export", *SIDES), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        one = {"export": _export, "graphc": _graphc, "torch": _torch}[arguments.side]
        print(json.dumps(one(arguments.folder, arguments.kinds[0], arguments)), flush=True)
        return
    from graphc.bench.kinds.models import KINDS  # loads PyTorch, which graphc's side does without

    unknown = sorted(set(arguments.kinds) - set(KINDS))
    if unknown:
        parser.error(f"there is no kind {unknown[0]!r}; there are {', '.join(KINDS)}")
    print(f"{'kind':<10} {'graphc MB':>10} {'eager MB':>10} {'share':>6} {'state MB':>9}")
    for name in arguments.kinds or KINDS:
        with tempfile.TemporaryDirectory() as folder:
            state = _child("export", name, folder, arguments)
            _child("graphc", name, folder, arguments)  # so that the caches hold its compiled segments
            ours, theirs = (_child(side, name, folder, arguments) for side in SIDES)
        print(f"{name:<10} {ours / 1e6:10.0f} {theirs / 1e6:10.0f} {ours / theirs:6.2f} {state / 1e6:9.0f}", flush=True)


def _child(side: str, kind: str, folder: str, arguments: argparse.Namespace) -> float:
    command = [sys.executable, "-m", "graphc.bench.kinds.memory", kind, "--side", side, "--folder", folder]
    command += ["--size", arguments.size, "--threads", str(arguments.threads)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


def _export(folder: Path, name: str, arguments: argparse.Namespace) -> float:
    """Write the kind and a small other one as ONNX files with their feeds; the bytes of the kind's training state."""
    from graphc import frontends

    for target, kind, size in (("model", name, arguments.size), ("other", _other(name), "small")):
        module, inputs, label = _made(kind, size)
        model = frontends.export(module, inputs)
        frontends.save(model, str(folder / f"{target}.onnx"))
        names = [value.name or "" for value in model.graph.inputs]
        feeds = dict(zip(names, (x.numpy() for x in inputs), strict=True)) | {"label": label.numpy()}
        np.savez(folder / f"{target}.npz", **feeds)
        if target == "model":
            state = 4 * sum(p.numel() * p.element_size() for p in module.parameters())
    return float(state)


def _other(name: str) -> str:
    return "wavenet" if name == "gpt" else "gpt"


def _made(name: str, size: str) -> tuple[Any, tuple[Any, ...], Any]:
    import torch

    from graphc.bench.kinds.models import KINDS

    kind = KINDS[name][size]
    torch.manual_seed(0)
    return kind.module(), kind.inputs(), torch.randint(0, kind.classes, kind.labels)


def _graphc(folder: Path, name: str, arguments: argparse.Namespace) -> float:
    import graphc

    def trainer(target: str) -> Callable[[], Any]:
        feeds = dict(np.load(folder / f"{target}.npz"))
        loss = graphc.losses.SoftmaxCrossEntropy(axis=1 if feeds["label"].ndim == 3 else None)
        program = graphc.compile(folder / f"{target}.onnx", loss=loss, optimizer=graphc.optim.AdamW(lr=LEARNING_RATE))
        found = graphc.Trainer(program, threads=arguments.threads)
        return lambda: found.step(feeds)

    return _peak(lambda: trainer("other"), lambda: trainer("model"))


def _torch(folder: Path, name: str, arguments: argparse.Namespace) -> float:
    import torch

    from graphc.bench.kinds.eager import stepper

    torch.set_num_threads(arguments.threads)

    def made(kind: str, size: str) -> Callable[[], float]:
        return stepper(*_made(kind, size), LEARNING_RATE)

    return _peak(lambda: made(_other(name), "small"), lambda: made(name, arguments.size))


def _peak(other: Callable[[], Callable[[], Any]], model: Callable[[], Callable[[], Any]]) -> float:
    """Bytes that the steps of a model take at most, beyond what the process holds after another model."""
    step = other()
    for _ in range(STEPS):
        step()
    del step
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the model has freed goes back to the system
    before = _resident("VmRSS")
    step = model()
    for _ in range(STEPS):
        step()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # forget the largest resident memory so far
    for _ in range(STEPS):
        step()
    return _resident("VmHWM") - before


def _resident(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


if __name__ == "__main__":
    main()
