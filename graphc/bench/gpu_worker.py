"""One side of ``make gpu-bench`` in a process of its own: ``python -m graphc.bench.gpu_worker graphc|torch JOB …``.

It sets up, prints a JSON line with what the set-up took, then measures once for every line that it reads and prints what it
found, until its input ends. So two sides can take turns on one GPU, each with a process that imports only its own libraries.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from graphc.bench.gpu_specs import JOBS, Job

Step = Callable[[], Any]
MODES = ("eager", "compile", "compile+graphs")


def main() -> None:
    """Parse the command line, set up, and measure on request."""
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=("graphc", "torch", "losses-graphc", "losses-torch"))
    parser.add_argument("job", choices=sorted(JOBS))
    parser.add_argument("--file", help="the ONNX file of the model (graphc's side)")
    parser.add_argument("--backend", default="cupy")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--batch", type=int, default=0)
    parser.add_argument("--precision", default="")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=1.0)
    arguments = parser.parse_args()
    job = JOBS[arguments.job].smaller(layers=arguments.layers, batch=arguments.batch)
    precision = arguments.precision or job.precision
    if arguments.side == "losses-graphc":
        say({"losses": graphc_losses(job, arguments.file, arguments.backend, precision, arguments.steps)})
    elif arguments.side == "losses-torch":
        say({"losses": torch_losses(arguments.job, job, precision, arguments.steps)})
    elif arguments.side == "graphc":
        serve(*graphc_side(job, arguments.file, arguments.backend, precision), arguments.seconds)
    else:
        serve(*torch_side(arguments.job, job, precision), arguments.seconds)


def say(result: dict[str, Any]) -> None:
    """One JSON line for the other process."""
    print(json.dumps(result), flush=True)


def serve(found: dict[str, Any], steps: dict[str, Step], wait: Step, seconds: float) -> None:
    """Report the set-up, then the milliseconds of a step in every mode, as often as a line comes in."""
    say(found)
    for _ in sys.stdin:
        say({name: milliseconds(step, wait, seconds) for name, step in steps.items()})


def milliseconds(step: Step, wait: Step, seconds: float) -> float:
    """Of one step, over as many as fit into ``seconds``; the clock stops when all of them have run."""
    for _ in range(2):
        step()
    wait()
    start = time.perf_counter()
    for _ in range(3):
        step()
    wait()
    count = max(5, min(2000, int(seconds / ((time.perf_counter() - start) / 3))))
    start = time.perf_counter()
    for _ in range(count):
        step()
    wait()
    return (time.perf_counter() - start) / count * 1e3


# graphc ---------------------------------------------------------------------------------------------------------------


def _trainer(job: Job, path: str, backend: str, precision: str) -> Any:
    import graphc
    from graphc.backend import BACKENDS

    if precision == "tf32":
        BACKENDS.register("cupy-tf32", functools.partial(BACKENDS[backend], tf32=True), origin=__name__)
        backend = "cupy-tf32"
    options = {**job.options(), "precision": None if precision in ("tf32", "fp32") else precision}
    return graphc.Trainer(graphc.compile(path, backend=backend, **options))


def graphc_side(job: Job, path: str, backend: str, precision: str) -> tuple[dict[str, Any], dict[str, Step], Step]:
    """A trainer that has taken its first steps; the first run measures, the second is captured."""
    from cupy.cuda import runtime

    free = runtime.memGetInfo()[0]
    feeds = job.feeds()
    start = time.perf_counter()
    trainer = _trainer(job, path, backend, precision)
    loss = trainer.step(feeds)["loss"]
    first = time.perf_counter() - start
    for _ in range(3):
        trainer.step(feeds)
    used = free - runtime.memGetInfo()[0]
    found = {"first_step_s": first, "device_bytes": used, "loss": loss}
    return found, {"graphc": lambda: trainer.step(feeds)}, lambda: None


def graphc_losses(job: Job, path: str, backend: str, precision: str, steps: int) -> list[float]:
    """The losses of the first steps on one batch."""
    feeds = job.feeds()
    with _trainer(job, path, backend, precision) as trainer:
        return [trainer.step(feeds)["loss"] for _ in range(steps)]


# PyTorch --------------------------------------------------------------------------------------------------------------


def _torch_step(name: str, job: Job, precision: str, mode: str, device: str) -> Step:
    """One training step of the module: fused optimizer, autocast to bfloat16, channels last for pictures."""
    import torch

    from graphc.bench.gpu_models import build

    module = build(name, job).to(device).train()
    feeds = {key: torch.from_numpy(value).to(device) for key, value in job.feeds().items()}
    if len(job.inputs) == 3:
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        feeds["input"] = feeds["input"].to(memory_format=torch.channels_last)
    optimizer = _torch_optimizer(job, module, device)
    low = precision == "bf16"

    def forward() -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=low):
            logits = module(feeds["input"])
            return torch.nn.functional.cross_entropy(logits.flatten(0, -2), feeds["label"].flatten())

    loss_of = forward
    if mode != "eager":
        loss_of = torch.compile(forward, mode="reduce-overhead" if mode == "compile+graphs" else None)

    def step() -> torch.Tensor:
        if mode == "compile+graphs":
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        loss = loss_of()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _torch_optimizer(job: Job, module: Any, device: str) -> Any:
    import torch

    kind, _, rest = job.optimizer.partition(":")
    options: dict[str, Any] = {key: float(value) for key, _, value in (item.partition("=") for item in rest.split(","))}
    fused = device == "cuda"
    if kind == "sgd":
        return torch.optim.SGD(module.parameters(), **options, fused=fused)
    betas = (options.pop("beta1", 0.9), options.pop("beta2", 0.999))
    return torch.optim.AdamW(module.parameters(), betas=betas, **options, fused=fused)


def torch_side(name: str, job: Job, precision: str) -> tuple[dict[str, Any], dict[str, Step], Step]:
    """Every mode, compiled and warm; each has its own copy of the module."""
    import torch

    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.benchmark = True
    found: dict[str, Any] = {"version": torch.__version__, "first_step_s": {}, "peak_bytes": {}, "failed": {}}
    steps: dict[str, Step] = {}
    for mode in MODES:
        torch.cuda.reset_peak_memory_stats()
        before, start = torch.cuda.memory_allocated(), time.perf_counter()
        try:
            step = _torch_step(name, job, precision, mode, "cuda")
            found["loss"] = float(step())
            found["first_step_s"][mode] = time.perf_counter() - start
            for _ in range(4):
                step()
            torch.cuda.synchronize()
        except Exception as error:  # a mode that this version of PyTorch cannot run is left out and named
            found["failed"][mode] = f"{type(error).__name__}: {str(error)[:200]}"
            continue
        found["peak_bytes"][mode] = torch.cuda.max_memory_allocated() - before
        steps[mode] = step
    return found, steps, torch.cuda.synchronize


def torch_losses(name: str, job: Job, precision: str, steps: int) -> list[float]:
    """The losses of the first steps on one batch, by PyTorch eager."""
    import torch

    torch.set_float32_matmul_precision("highest")
    step = _torch_step(name, job, precision, "eager", "cuda" if torch.cuda.is_available() else "cpu")
    return [float(np.float32(float(step()))) for _ in range(steps)]


if __name__ == "__main__":
    main()
