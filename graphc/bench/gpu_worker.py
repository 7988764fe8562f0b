"""One side of ``make gpu-bench``: ``python -m graphc.bench.gpu_worker graphc|torch JOB …``.

It prints a JSON line with the costs of the set-up, then measures once per line of input and prints the result, until its input
ends; for the line ``kernels`` graphc's side measures every call of its step. So both sides take turns on one GPU, and each
process imports only its own libraries.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from graphc.bench.gpu_specs import JOBS, Arrays, BenchJob
from graphc.bench.kernel_table import Row, rows
from graphc.options import key_values
from graphc.report.step_time import TIMERS

Step = Callable[[], Any]
Steps = Callable[[int], Any]
"""Runs so many steps."""
Answers = dict[str, Callable[[], dict[str, Any]]]
MODES = ("eager", "compile", "compile+graphs")
SIDES = ("graphc", "torch", "losses-graphc", "losses-torch")


def main() -> None:
    """Parse the command line, set up, and measure on request."""
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("job", choices=sorted(JOBS))
    parser.add_argument("--file", help="the ONNX file of the model (graphc's side)")
    parser.add_argument("--backend", default="cupy")
    parser.add_argument("--load", help="a module to import first, for example to register the backend")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--batch", type=int, default=0)
    parser.add_argument("--precision", default="")
    parser.add_argument("--optimizer", default="")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--modes", default=",".join(MODES), help="of PyTorch")
    arguments = parser.parse_args()
    if arguments.load:
        importlib.import_module(arguments.load)
    job = JOBS[arguments.job].tiny() if arguments.tiny else JOBS[arguments.job]
    job = job.smaller(layers=arguments.layers, batch=arguments.batch)
    job = replace(job, optimizer=arguments.optimizer or job.optimizer)
    precision = arguments.precision or job.precision
    if arguments.side == "losses-graphc":
        say({"losses": graphc_losses(job, arguments.file, arguments.backend, precision, arguments.steps)})
    elif arguments.side == "losses-torch":
        say({"losses": torch_losses(arguments.job, job, precision, arguments.steps)})
    elif arguments.side == "graphc":
        found, steps, answers = graphc_side(job, arguments.file, arguments.backend, precision)
        serve(found, steps, _nothing, arguments.seconds, answers)
    else:
        serve(*torch_side(arguments.job, job, precision, arguments.modes.split(",")), arguments.seconds)


def say(result: dict[str, Any]) -> None:
    """Print one JSON line for the parent process."""
    print(json.dumps(result), flush=True)


def serve(found: dict[str, Any], steps: dict[str, Steps], wait: Step, seconds: float, answers: Answers | None = None) -> None:
    """Report the set-up, then answer every line of standard input; by default with the step's milliseconds in every mode."""
    say(found)
    for line in sys.stdin:
        answer = (answers or {}).get(line.strip())
        say(answer() if answer else {name: milliseconds(run, wait, seconds) for name, run in steps.items()})


def milliseconds(run: Steps, wait: Step, seconds: float) -> float:
    """Mean milliseconds of a step over as many steps as fit into ``seconds``; the clock stops when all have run."""
    run(2)
    wait()
    start = time.perf_counter()
    run(3)
    wait()
    count = max(5, min(2000, int(seconds / ((time.perf_counter() - start) / 3))))
    start = time.perf_counter()
    run(count)
    wait()
    return (time.perf_counter() - start) / count * 1e3


# graphc ---------------------------------------------------------------------------------------------------------------


def _program(job: BenchJob, path: str, backend: str, precision: str) -> Any:
    import graphc
    from graphc.backend import backend_of
    from graphc.errors import UsageError

    if precision == "tf32":
        with contextlib.suppress(UsageError):  # a backend without a TF32 mode
            backend_of(f"{backend}:tf32=true")
            backend += ":tf32=true"
    options = {**job.options(), "precision": None if precision in ("tf32", "fp32") else precision}
    return graphc.compile(path, backend=backend, **options)


def graphc_side(job: BenchJob, path: str, backend: str, precision: str) -> tuple[dict[str, Any], dict[str, Steps], Answers]:
    """Make a trainer and run its first steps: one tunes kernels, the next is captured as a CUDA graph.

    Feeds are on the device, as PyTorch's are. Measured steps are those of ``fit``, which queues a step before it reads the
    results of the last one; PyTorch's do not wait for theirs either.
    """
    marks = [time.perf_counter()]

    def passed() -> float:
        marks.append(time.perf_counter())
        return marks[-1] - marks[-2]

    import graphc

    free = free_bytes()
    shares = {"import": passed()}
    host = job.feeds()
    passed()
    program = _program(job, path, backend, precision)
    shares["compile"] = passed()
    trainer = graphc.Trainer(program)
    shares["trainer"] = passed()
    feeds = on_device(trainer.backend.memory, host)
    loss = trainer.step(feeds)["loss"]
    shares["step"] = passed()
    for _ in range(3):
        trainer.step(feeds)

    def run(count: int) -> None:
        trainer.fit(itertools.repeat(feeds, count))

    after = free_bytes()
    runs = [run for executor in trainer.plans.training.values() for run in executor.runs]
    found = {
        "first_step_s": shares["compile"] + shares["trainer"] + shares["step"],
        "shares_s": shares,
        "device_bytes": None if free is None or after is None else free - after,
        "loss": loss,
        "calls": len(runs),
        "not_captured": [text for run in runs if (text := getattr(run, "refusal", None))],
    }
    return found, {"graphc": run}, {"kernels": lambda: {"kernels": kernels(trainer, feeds)}}


def kernels(trainer: Any, feeds: dict[str, Any]) -> list[Row]:
    """Return every call of a step, measured and predicted; empty if the backend cannot measure calls."""
    timer = TIMERS.get(trainer.backend.name)
    (executor,) = trainer.plans.training.values()
    return rows(timer(trainer.backend, executor, lambda: trainer.step(feeds))) if timer else []


def free_bytes() -> int | None:
    """Return the free bytes of the GPU, or None without one; makes a CUDA context."""
    try:
        from cupy.cuda import runtime

        return int(runtime.memGetInfo()[0])
    except (ImportError, RuntimeError):
        return None


def on_device(memory: Any, arrays: Arrays) -> dict[str, Any]:
    """Copy arrays to the memory of a backend."""
    if memory.on_host:
        return dict(arrays)
    found = {name: memory.zeros(array.nbytes).view(array.dtype).reshape(array.shape) for name, array in arrays.items()}
    for name, array in arrays.items():
        memory.copy(found[name], array)
    return found


def graphc_losses(job: BenchJob, path: str, backend: str, precision: str, steps: int) -> list[float]:
    """Losses of the first steps, each on a new batch: on a repeated batch they would soon vanish."""
    import graphc

    with graphc.Trainer(_program(job, path, backend, precision)) as trainer:
        return [trainer.step(job.feeds(seed))["loss"] for seed in range(steps)]


# PyTorch --------------------------------------------------------------------------------------------------------------


def _torch_step(name: str, job: BenchJob, precision: str, mode: str, device: str, feeds: dict[str, Any] | None = None) -> Step:
    """One training step of the module: fused optimizer, autocast to bfloat16, channels last for pictures.

    Args:
        feeds: receives the tensors that a step reads.
    """
    import torch

    from graphc.bench.gpu_models import build

    module = build(name, job).to(device).train()
    feeds = {} if feeds is None else feeds
    feeds.update((key, _tensor(value).to(device)) for key, value in job.feeds().items())
    if len(job.inputs) == 3:
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        feeds["input"] = feeds["input"].to(memory_format=torch.channels_last)
    optimizer = _torch_optimizer(job, module, device)
    low = precision == "bf16"

    def forward() -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=low):
            logits = module(feeds["input"])
            return torch.nn.functional.cross_entropy(logits.flatten(0, -2), feeds["label"].flatten())

    return torch_step(forward, optimizer, mode)


def torch_step(forward: Step, optimizer: Any, mode: str) -> Step:
    """One training step in one of the :data:`MODES`; ``forward`` returns the loss, the step the loss without its graph."""
    import torch

    loss_of = forward
    if mode != "eager":
        loss_of = torch.compile(forward, mode="reduce-overhead" if mode == "compile+graphs" else None)

    def step() -> torch.Tensor:
        if mode == "compile+graphs":
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()  # type: ignore[no-any-return]

    return step


def _torch_optimizer(job: BenchJob, module: Any, device: str) -> Any:
    import torch

    kind, _, rest = job.optimizer.partition(":")
    options: dict[str, Any] = {key: float(value) for key, value in key_values(rest).items()}
    fused = device == "cuda"
    if kind == "sgd":
        return torch.optim.SGD(module.parameters(), **options, fused=fused)
    betas = (options.pop("beta1", 0.9), options.pop("beta2", 0.999))
    return torch.optim.AdamW(module.parameters(), betas=betas, **options, fused=fused)


def _torch_device(precision: str) -> str:
    """Set PyTorch's float32 precision to ``precision`` and return the device."""
    import torch

    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    return "cuda" if torch.cuda.is_available() else "cpu"


def torch_side(
    name: str, job: BenchJob, precision: str, modes: Sequence[str] = MODES
) -> tuple[dict[str, Any], dict[str, Steps], Step]:
    """Compile and warm up every mode, each with its own copy of the module."""
    import torch

    device = _torch_device(precision)
    torch.backends.cudnn.benchmark = True
    cuda = torch.cuda if device == "cuda" else None
    wait: Step = torch.cuda.synchronize if cuda else lambda: None
    found: dict[str, Any] = {"version": torch.__version__, "first_step_s": {}, "peak_bytes": {}, "failed": {}}
    steps: dict[str, Steps] = {}
    for mode in modes:
        if cuda:
            cuda.reset_peak_memory_stats()
        before, start = cuda.memory_allocated() if cuda else 0, time.perf_counter()
        try:
            step = _torch_step(name, job, precision, mode, device)
            found["loss"] = float(step())
            found["first_step_s"][mode] = time.perf_counter() - start
            for _ in range(4):
                step()
            wait()
        except Exception as error:  # modes that this version of PyTorch cannot run are reported and left out
            found["failed"][mode] = f"{type(error).__name__}: {str(error)[-300:]}"
            continue
        found["peak_bytes"][mode] = cuda.max_memory_allocated() - before if cuda else None
        steps[mode] = functools.partial(_repeat, step)
    return found, steps, wait


def _repeat(step: Step, count: int) -> None:
    for _ in range(count):
        step()


def torch_losses(name: str, job: BenchJob, precision: str, steps: int) -> list[float]:
    """Losses of the same steps in eager PyTorch."""
    feeds: dict[str, Any] = {}
    step = _torch_step(name, job, precision, "eager", _torch_device(precision), feeds)
    losses = []
    for seed in range(steps):
        for key, value in job.feeds(seed).items():
            feeds[key].copy_(_tensor(value))
        losses.append(float(step()))
    return losses


def _nothing() -> None:
    """Wait for nothing: the step itself waits for its results."""


def _tensor(array: Any) -> Any:
    import torch

    return torch.from_numpy(array)


if __name__ == "__main__":
    main()
