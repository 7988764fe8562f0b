"""Times a training step of each kind on a GPU: graphc, PyTorch eager, and ``torch.compile`` with CUDA graphs.

    python -m graphc.bench.kinds.gpu unet convnext
    python -m graphc.bench.kinds.gpu --kernels 10 unet

Each side has a process of its own, one after the other, and reads feeds that lie on the GPU. Both train with AdamW, PyTorch
with its fused one; images of PyTorch's have their channels last. A step is the mean of many that are queued one behind the
other, and the best of two rounds counts. ``ratio`` is of PyTorch's faster mode to graphc, ``off by`` the largest relative
difference of a loss from PyTorch eager over four steps of models without dropout.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from graphc.bench.gpu_worker import MODES, Step, Steps, kernels, milliseconds, on_device, torch_step

LEARNING_RATE = 1e-3
STEPS = 4
"""Losses that are compared."""


def main() -> None:
    """Parse the command line, measure each side in a process, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("kinds", nargs="*", help="all, when none is named")
    parser.add_argument("--size", choices=("large", "full", "small"), default="large")
    parser.add_argument("--precision", choices=("bf16", "tf32"), default="bf16")
    parser.add_argument("--seconds", type=float, default=0.4, help="of a round of one side")
    parser.add_argument("--kernels", type=int, default=0, help="print so many calls of graphc's step, the longest first")
    parser.add_argument("--eager", action="store_true", help="leave torch.compile out, which takes 20 to 60 s a kind")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu", help="cpu: to try the command itself")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        print(json.dumps(SIDES[arguments.side](arguments.kinds[0], arguments)), flush=True)
        return
    from graphc.bench.kinds.models import KINDS  # loads PyTorch, which graphc's side does without

    unknown = sorted(set(arguments.kinds) - set(KINDS))
    if unknown:
        parser.error(f"there is no kind {unknown[0]!r}; there are {', '.join(KINDS)}")
    columns = f"{'graphc ms':>10} {'eager ms':>10} {'compile ms':>10}"
    print(f"{'kind':<10} {columns} {'ratio':>6} {'first s':>8} {'off by':>8}", flush=True)
    for name in arguments.kinds or KINDS:
        with tempfile.TemporaryDirectory() as folder:
            found = {side: _child(side, name, folder, arguments) for side in SIDES}
        _print(name, found["graphc"], found["torch"], arguments)


def _print(name: str, ours: dict[str, Any], theirs: dict[str, Any], arguments: argparse.Namespace) -> None:
    best = min(theirs["eager"], theirs.get(MODES[-1], float("inf")))
    off = float("nan")
    if not theirs["drops"]:
        off = max(abs(a - b) / abs(b) for a, b in zip(ours["losses"], theirs["losses"], strict=True))
    columns = (ours["ms"], theirs["eager"], theirs.get(MODES[-1], float("nan")))
    times = " ".join(f"{milliseconds:10.2f}" for milliseconds in columns)
    print(f"{name:<10} {times} {best / ours['ms']:6.2f} {ours['first']:8.2f} {off:8.1e}", flush=True)
    for row in ours["kernels"][: arguments.kernels]:
        print(f"    {row['calls']:4} × {row['measured_us'] / row['calls']:8.1f} µs  {row['centre']}: {row['name']}", flush=True)


def _child(side: str, kind: str, folder: str, arguments: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "graphc.bench.kinds.gpu", kind, "--side", side, "--folder", folder]
    for option in ("size", "precision", "seconds", "kernels", "device"):
        command += [f"--{option}", str(getattr(arguments, option))]
    command += ["--eager"] if arguments.eager else []
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _export(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Write the model and its feeds."""
    from graphc import frontends

    module, inputs, label = _made(name, arguments.size)
    model = frontends.export(module, inputs)
    frontends.save(model, str(arguments.folder / "model.onnx"))
    names = [value.name or "" for value in model.graph.inputs]
    feeds = dict(zip(names, (x.numpy() for x in inputs), strict=True)) | {"label": label.numpy()}
    np.savez(arguments.folder / "feeds.npz", **feeds)
    return {}


def _graphc(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    import graphc

    with np.load(arguments.folder / "feeds.npz") as file:
        host = dict(file)
    gpu, low = arguments.device == "gpu", arguments.precision == "bf16"
    start = time.perf_counter()
    program = graphc.compile(
        str(arguments.folder / "model.onnx"),
        loss=graphc.losses.SoftmaxCrossEntropy(axis=1 if host["label"].ndim == 3 else None),
        optimizer=graphc.optim.AdamW(lr=LEARNING_RATE),
        backend=("cupy" if low else "cupy:tf32=true") if gpu else "onnxruntime",
        precision="bf16" if low else None,
    )
    with graphc.Trainer(program) as trainer:
        feeds = on_device(trainer.backend.memory, host)
        losses = [trainer.step(feeds)["loss"]]
        first = time.perf_counter() - start
        losses += [trainer.step(feeds)["loss"] for _ in range(STEPS - 1)]
        spent = _best(lambda count: trainer.fit(itertools.repeat(feeds, count)), lambda: None, arguments.seconds)
        table = kernels(trainer, feeds) if arguments.kernels else []
        table.sort(key=lambda row: -row["measured_us"])
        return {"ms": spent, "first": first, "losses": losses, "kernels": table}


def _torch(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    import torch

    device = "cuda" if arguments.device == "gpu" else "cpu"
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    found: dict[str, Any] = {}
    for mode in MODES[:1] if arguments.eager else (MODES[0], MODES[-1]):
        module, inputs, label = _made(name, arguments.size)
        found["drops"] = any(isinstance(m, torch.nn.Dropout) and m.p > 0 for m in module.modules())
        step = _torch_step(module, inputs, label, device, arguments.precision == "bf16", mode)
        losses = [float(step()) for _ in range(STEPS)]
        found.setdefault("losses", losses)
        found[mode] = _best(functools.partial(_repeat, step), wait, arguments.seconds)
    return found


def _repeat(step: Step, count: int) -> None:
    for _ in range(count):
        step()


def _torch_step(module: Any, inputs: tuple[Any, ...], label: Any, device: str, low: bool, mode: str) -> Step:
    import torch

    module = module.to(device).train()
    inputs, label = tuple(x.to(device) for x in inputs), label.to(device)
    if any(x.dim() == 4 for x in inputs):
        module = module.to(memory_format=torch.channels_last)
        inputs = tuple(x.to(memory_format=torch.channels_last) if x.dim() == 4 else x for x in inputs)
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, fused=True)

    def forward() -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=low):
            logits = module(*inputs)
            if label.dim() == 2:
                return torch.nn.functional.cross_entropy(logits.flatten(0, 1), label.flatten())
            return torch.nn.functional.cross_entropy(logits, label)

    return torch_step(forward, optimizer, mode)


def _made(name: str, size: str) -> tuple[Any, tuple[Any, ...], Any]:
    import torch

    from graphc.bench.kinds.models import KINDS

    kind = KINDS[name][size]
    torch.manual_seed(0)
    return kind.module(), kind.inputs(), torch.randint(0, kind.classes, kind.labels)


def _best(run: Steps, wait: Step, seconds: float) -> float:
    return min(milliseconds(run, wait, seconds) for _ in range(2))


SIDES = {"export": _export, "graphc": _graphc, "torch": _torch}

if __name__ == "__main__":
    main()
