"""One measurement: ``python -m graphc.bench.measure graphc|torch MODEL …`` prints a JSON line.

Each side runs in its own process, so that the thread pools do not disturb each other. With several workers the same command
runs in each: graphc over MPI, PyTorch under DistributedDataParallel over gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from graphc.bench.specs import SPECS
from graphc.data import share

LEARNING_RATE, MOMENTUM = 0.01, 0.9


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=("graphc", "torch"))
    parser.add_argument("model", choices=sorted(SPECS))
    parser.add_argument("--file", help="the ONNX file of the model (graphc's side)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--profile", action="store_true", help="print graphc's time per step kind on stderr")
    arguments = parser.parse_args()
    side = graphc_side if arguments.side == "graphc" else torch_side
    print(json.dumps(side(arguments)), flush=True)
    if arguments.side == "torch" and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        _leave_torch()


def graphc_side(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure graphc: median step time, time to the first step, Python time outside plan steps."""
    import graphc
    from graphc.bench.profile import StepTimer

    start = time.perf_counter()
    program = graphc.compile(
        arguments.file,
        loss=graphc.losses.SoftmaxCrossEntropy(),
        optimizer=graphc.optim.SGD(lr=LEARNING_RATE, momentum=MOMENTUM),
    )
    compiled = time.perf_counter() - start
    timer = StepTimer() if arguments.profile else None
    with graphc.Trainer(program, threads=arguments.threads, wrap=timer.wrap if timer else None) as trainer:
        x, y = _share(arguments.model, trainer.rank, trainer.size)
        feeds = {"input": x, "label": y}
        loss = trainer.step(feeds)["loss"]
        first = time.perf_counter() - start
        median = _measure(lambda: trainer.step(feeds), arguments.seconds)
        if timer is not None:
            timer.report(trainer.steps_done)
        return {
            "ms": median,
            "compile_s": compiled,
            "first_step_s": first,
            "loss": loss,
            "rank": trainer.rank,
            "python_ms": _python_overhead(trainer, feeds),
        }


def _python_overhead(trainer: Any, feeds: dict[str, Any]) -> float:
    """Milliseconds of Python per step: times a step whose plan steps are replaced by empty functions."""
    (executor,) = trainer.plans.training.values()
    executor.runs = [lambda: None] * len(executor.runs)
    times = []
    for _ in range(200):
        start = time.perf_counter()
        trainer.step(feeds)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def torch_side(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure PyTorch's median step time: eager, or DistributedDataParallel if the environment names a world."""
    import torch
    from torch import nn

    from graphc.bench.models import build

    torch.set_num_threads(arguments.threads)
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    module: nn.Module = build(arguments.model).train()
    if size > 1:
        torch.distributed.init_process_group("gloo", rank=rank, world_size=size)
        module = nn.parallel.DistributedDataParallel(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    x, y = (torch.from_numpy(a) for a in _share(arguments.model, rank, size))
    loss_function = nn.CrossEntropyLoss()

    def step() -> float:
        optimizer.zero_grad()
        loss = loss_function(module(x), y)
        loss.backward()
        optimizer.step()
        return float(loss.item())

    first = step()
    return {"ms": _measure(step, arguments.seconds), "loss": first, "rank": rank}


def _leave_torch() -> None:
    """Leave the process group; gloo's threads may abort a process that exits while its peer still closes their connection."""
    import torch

    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _share(model: str, rank: int, size: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    spec = SPECS[model]
    x, y = spec.batch(spec.batch_size)
    mine = share(len(x), rank, size)
    return x[mine], y[mine]


def _measure(step: Callable[[], Any], seconds: float) -> float:
    """Median milliseconds of a step; the time of the first steps sets their number, equal on all workers."""
    for _ in range(3):
        step()
    start = time.perf_counter()
    for _ in range(3):
        step()
    count = _agreed(max(8, min(2000, int(seconds / ((time.perf_counter() - start) / 3)))))
    times = []
    for _ in range(count):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def _agreed(count: int) -> int:
    """Broadcast rank 0's number of steps: a worker that stopped early would block the others."""
    if int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1")) > 1:
        from mpi4py import MPI

        agreed = np.array([count])
        MPI.COMM_WORLD.Bcast(agreed)
        return int(agreed[0])
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        import torch

        shared = [count]
        torch.distributed.broadcast_object_list(shared)
        return shared[0]
    return count


if __name__ == "__main__":
    main()
