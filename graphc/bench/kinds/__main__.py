"""Times a training step of each kind: graphc with fused kernels and without, and PyTorch eager, in turn in one process.

    python -m graphc.bench.kinds --size small gpt unet
    graphc launch -n 2 -m graphc.bench.kinds gpt unet

A round takes a few steps of each side, and the fastest step counts. One thread is timed by its processor time, so that other
work on the machine disturbs little. Both train with AdamW, PyTorch with its fused one. ``off by`` is the largest relative
difference of a loss from that of PyTorch in float64 over the first ten steps of a model without dropout, ``eager`` the same
of PyTorch in float32, which shows what rounding does to a model. ``--compile`` measures ``torch.compile`` as well;
``ratio`` is of eager to fused.

With several workers, each takes its share of the batch, PyTorch under DistributedDataParallel over gloo. All of them take the
same number of steps a round, and the best median of a round counts, in wall time.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import graphc
from graphc.bench.kinds.eager import stepper
from graphc.bench.kinds.models import KINDS, ModelKind
from graphc.bench.profile import StepTimer
from graphc.data import share

SIDES = {"fused": "onnxruntime:fuse=true", "apart": "onnxruntime:fuse=false"}
LEARNING_RATE = 1e-3


def main() -> None:
    """Parse the command line, measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []], help="all, when none is named")
    parser.add_argument("--size", choices=("full", "small"), default="full")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="of a round of one side")
    parser.add_argument("--compile", action="store_true", help="torch.compile too, which needs a C++ compiler")
    parser.add_argument("--profile", action="store_true", help="print graphc's time per plan step on stderr")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    workers = Workers()
    say: Callable[[str], None] = (lambda line: print(line, flush=True)) if workers.rank == 0 else lambda line: None
    sides = {**{side: side for side in SIDES}, "eager": workers.peer, **({"compile": "compile"} if arguments.compile else {})}
    columns = " ".join(f"{name + ' ms':>10}" for name in sides.values())
    say(f"{'kind':<10} {columns} {'ratio':>6} {'first s':>8} {'off by':>8} {'eager':>8}")
    for name in arguments.kinds or KINDS:
        measured = _measured(KINDS[name][arguments.size], workers, arguments)
        ratio = measured["eager"] / measured["fused"]
        times = " ".join(f"{measured[side]:10.2f}" for side in sides)
        say(f"{name:<10} {times} {ratio:6.2f} {measured['first']:8.2f} {measured['off']:8.1e} {measured['eager off']:8.1e}")
        gc.collect()
    workers.close()


class Workers:
    """The processes that measure together: one, or those that ``graphc launch`` has started."""

    def __init__(self) -> None:
        self.rank, self.size, self.peer = 0, 1, "eager"
        if int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1")) == 1:
            return
        from mpi4py import MPI  # of the extra mpi

        self._world = MPI.COMM_WORLD
        self.rank, self.size, self.peer = self._world.rank, self._world.size, "DDP"
        self._folder = tempfile.TemporaryDirectory()
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        meeting = self._world.bcast(self._folder.name) + "/store"
        store = torch.distributed.FileStore(meeting, self.size)  # type: ignore[attr-defined]
        torch.distributed.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size)

    def share(self, batch: torch.Tensor) -> torch.Tensor:
        """This worker's samples."""
        return batch[share(len(batch), self.rank, self.size)]

    def wrap(self, module: Any) -> Any:
        """Reduce the gradients of all workers."""
        return nn.parallel.DistributedDataParallel(module) if self.size > 1 else module

    def mean(self, loss: float) -> float:
        """The loss of the whole batch from those of equal shares."""
        return float(self._world.allreduce(loss)) / self.size if self.size > 1 else loss

    def round(self, step: Callable[[], Any], seconds: float, clock: Callable[[], float]) -> float:
        """The milliseconds of a step in a round that takes about this long."""
        if self.size == 1:
            return _fastest(step, seconds, clock)
        start = time.perf_counter()
        step()
        times = []
        for _ in range(max(4, self._world.bcast(int(seconds / (time.perf_counter() - start))))):
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
        return statistics.median(times) * 1e3

    def close(self) -> None:
        """Leave PyTorch's group."""
        if self.size > 1:
            torch.distributed.destroy_process_group()
            self._world.barrier()
            self._folder.cleanup()


def _measured(kind: ModelKind, workers: Workers, arguments: argparse.Namespace) -> dict[str, float]:
    clock = time.process_time if arguments.threads == workers.size == 1 else time.perf_counter
    torch.manual_seed(0)
    module, inputs = kind.module(), tuple(workers.share(x) for x in kind.inputs())
    label = workers.share(torch.randint(0, kind.classes, kind.labels))
    found: dict[str, float] = {}
    steps: dict[str, Callable[[], Any]] = {}
    timers, losses = [], dict[str, list[float]]()
    for side, backend in SIDES.items():
        program = graphc.compile(
            module,
            example_inputs=inputs,
            loss=graphc.losses.SoftmaxCrossEntropy(axis=1 if len(kind.labels) == 3 else None),
            optimizer=graphc.optim.AdamW(lr=LEARNING_RATE),
            backend=backend,
        )
        start = clock()
        timer = StepTimer(clock)
        trainer = graphc.Trainer(program, threads=arguments.threads, wrap=timer.wrap if arguments.profile else None)
        names = [value.name or "" for value in program.model.graph.inputs if value.name != "label"]
        feeds = dict(zip(names, (x.numpy() for x in inputs), strict=False)) | {"label": label.numpy()}
        losses[side] = [trainer.step(feeds)["loss"]]
        if side == "fused":
            found["first"] = clock() - start
        losses[side] += [trainer.step(feeds)["loss"] for _ in range(9)]
        timer.seconds.clear()
        timers.append((side, timer, trainer, trainer.steps_done))
        steps[side] = functools.partial(trainer.step, feeds)
    if arguments.compile:
        steps["compile"] = stepper(workers.wrap(torch.compile(copy.deepcopy(module))), inputs, label, LEARNING_RATE)
        for _ in range(3):
            steps["compile"]()
    exact = copy.deepcopy(module).double()
    steps["eager"] = stepper(workers.wrap(module), inputs, label, LEARNING_RATE)
    losses["eager"] = [workers.mean(steps["eager"]()) for _ in range(10)]
    found["off"] = found["eager off"] = float("nan")
    if not any(isinstance(m, nn.Dropout) and m.p > 0 for m in module.modules()):
        wide = tuple(x.double() if x.is_floating_point() else x for x in inputs)
        step = stepper(workers.wrap(exact), wide, label, LEARNING_RATE)
        right = [workers.mean(step()) for _ in range(10)]
        for side, key in (("fused", "off"), ("eager", "eager off")):
            found[key] = max(abs(a - b) / abs(b) for a, b in zip(losses[side], right, strict=True))
    for _ in range(arguments.rounds):
        for side, step in steps.items():
            found[side] = min(found.get(side, float("inf")), workers.round(step, arguments.seconds, clock))
    for side, timer, trainer, before in timers:
        if arguments.profile:
            print(f"{side}:", file=sys.stderr)
            timer.report(trainer.steps_done - before, int(os.environ.get("MOST", "25")))
        trainer.close()
    return found


def _fastest(step: Callable[[], Any], seconds: float, clock: Callable[[], float]) -> float:
    """The fastest step of a round, in milliseconds."""
    best, end = float("inf"), clock() + seconds
    while clock() < end:
        start = clock()
        step()
        best = min(best, clock() - start)
    return best * 1e3


if __name__ == "__main__":
    main()
