"""``make gpu-bench``: compares training steps on a GPU with PyTorch's; writes JSON.

    python -m graphc.bench.gpu --output build/gpu_bench.json [--only gpt2,mlp-wide] [--rounds 3] [--kernels 10] [--dry]
    python -m graphc.bench.gpu --modes none --skeletons models --cache kept                    # without PyTorch

For every job: graphc trains from the exported ONNX file (kernels uncached, then cached), PyTorch trains the module it was
exported from (eager, torch.compile, torch.compile with CUDA graphs), and the two processes measure in turn. While PyTorch
compiles, the losses of twenty steps of a smaller copy are compared: float32 with graphc's CPU backend, bfloat16 with PyTorch.
The best round counts on both sides. Finally every call of graphc's step is measured alone and compared with the cost model.

Failures are part of the result, which is rewritten after every part of every job; no part waits beyond the time budgets of the
job and the run, and the smallest job comes first. A step that is not captured as a CUDA graph is a failure. With ``--dry``
everything runs at tiny sizes on the host instead of a GPU.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graphc.bench.gpu_processes import BenchProcess, Clock, export_all, fill_all, once
from graphc.bench.gpu_specs import JOBS, check_jobs, write_json
from graphc.bench.kernel_table import markdown, worst
from graphc.errors import UsageError

SMALL = {"gpt2": (2, 1), "bert": (2, 4), "resnet50": (0, 8), "mlp-wide": (0, 64)}
"""Layers (0: all) and batch of the copies whose losses are compared step by step."""

GENTLE = {"resnet50": "sgd:lr=1e-5,momentum=0.9"}
"""Optimizers of these copies, if two correct runs diverge under the job's own optimizer because rounding flips the sign of ReLU
inputs. With lr=0.01 PyTorch and graphc, both in float32 on one CPU, are 6e-3 apart after the first step of ResNet-50 on 8
pictures and 5e-2 after the eleventh; with 1e-4 still 2e-3 after the second."""

FIRST_STEP, CACHED_STEP = 20.0, 3.0
"""Goals for the seconds to the first step, without and with compiled kernels on disk."""

FLOAT32, BFLOAT16 = 1e-3, 2e-2
"""Goals for the relative difference of losses."""

WORKER = ("-m", "graphc.bench.gpu_worker")


def main(given: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 if a part of a job failed. Without a GPU print the reason and return 0."""
    parser = argparse.ArgumentParser(description="Training steps on a GPU beside PyTorch's.")
    parser.add_argument("--output", type=Path, default=Path("build/gpu_bench.json"))
    parser.add_argument("--only", "--models", default=",".join(JOBS), help=f"of {', '.join(JOBS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="of one measurement")
    parser.add_argument("--kernels", type=int, default=10, help="calls of each step to print, measured; 0: measure none")
    parser.add_argument("--backend", help="of graphc; by default cupy, with --dry auto")
    parser.add_argument("--load", help="a module that every process imports first, for example to register the backend")
    parser.add_argument("--modes", help="of PyTorch: eager, compile, compile+graphs; by default all, with --dry eager; or none")
    parser.add_argument("--budget", type=float, default=560.0, help="time budget of the run in seconds")
    parser.add_argument("--limit", type=float, default=300.0, help="time budget of a job in seconds")
    parser.add_argument("--skeletons", type=Path, help="folder of models without weights; by default they are exported")
    parser.add_argument("--cache", type=Path, help="folder of compiled kernels and choices, reused and left behind")
    parser.add_argument("--patience", type=float, default=240.0, help="seconds that the set-up of one side may take")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on the GPU: tries out the benchmark")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on the host: tries out the benchmark, measures nothing")
    arguments = parser.parse_args(given)
    models = [model for model in arguments.only.split(",") if model]
    try:
        check_jobs(models)
        models.sort(key=lambda model: JOBS[model].goal_ms)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    arguments.tiny |= arguments.dry
    arguments.backend = arguments.backend or ("auto" if arguments.dry else "cupy")
    arguments.modes = arguments.modes or ("eager" if arguments.dry else "eager,compile,compile+graphs")
    reason = "" if arguments.dry else missing(arguments.backend, torch=arguments.modes != "none")
    if reason:
        write_json(arguments.output, {"skipped": reason})
        print(f"gpu-bench is skipped: {reason}")
        return 0
    result = run(models, arguments)
    return 1 if any(found.get("failed") for found in result["jobs"].values()) else 0


def missing(backend: str, *, torch: bool = True) -> str:
    """Return why nothing can be measured here, or "". A child process asks, so its CUDA context ends with it.

    Args:
        torch: whether PyTorch is measured too.
    """
    code = f"""
import json
from graphc.backend import make_backend
from graphc.errors import GraphcError
reason = ""
try:
    make_backend({backend!r}, threads=1).close()
    if {torch}:
        import torch
    if {torch} and not torch.cuda.is_available():
        reason = f"PyTorch {{torch.__version__}} sees no GPU"
except GraphcError as error:
    reason = str(error)
except ImportError as error:
    reason = f"PyTorch is not installed, which is measured beside graphc ({{error}})"
print(json.dumps({{"reason": reason}}))
"""
    try:
        return str(once(("-c", code), os.environ, Clock(120))["reason"])
    except RuntimeError as error:
        return str(error)


def run(models: Sequence[str], arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all jobs and return the result; a failed job is reported and does not stop the others."""
    clock = Clock(arguments.budget)
    result: dict[str, Any] = {"machine": machine(), "dry": arguments.dry, "jobs": {}}
    with tempfile.TemporaryDirectory(prefix="graphc-gpu-bench-") as name:
        folder = Path(name)
        wanted = dict.fromkeys((model, layers) for model in models for layers in (0, _layers(model, arguments)))
        if arguments.skeletons is not None:
            files = fill_all(list(wanted), arguments.skeletons, folder, clock=clock)
        else:
            files = export_all(list(wanted), folder, tiny=arguments.tiny, clock=clock)
        for model in models:
            found: dict[str, Any] = {"failed": {}}
            result["jobs"][model] = found
            result["seconds"] = arguments.budget - clock.left()

            def save() -> None:
                write_json(arguments.output, result)

            cache, own = (arguments.cache or folder / "cache") / model, Clock(clock.left(arguments.limit))
            job = JobRun(model, arguments, own, files, _caches(cache), found, save, fresh=not list(cache.glob("*/*")))
            job.run()
            print(summary(model, found), flush=True)
            if found.get("kernels"):
                print(markdown(found["kernels"], arguments.kernels), flush=True)
    result["seconds"] = arguments.budget - clock.left()
    write_json(arguments.output, result)
    return result


def machine() -> dict[str, str]:
    """The GPU and its driver."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        found = []
    name, _, driver = (found[0] if found else "unknown, unknown").partition(", ")
    return {"gpu": name, "driver": driver}


@dataclass
class JobRun:
    """Runs one job on both sides.

    Attributes:
        files: exported model by (job, layers), or why the export failed.
        found: the result; every part adds to it.
        save: called after every part.
        fresh: whether nothing is cached yet.
    """

    model: str
    arguments: argparse.Namespace
    clock: Clock
    files: dict[tuple[str, int], Path | str]
    environment: dict[str, str]
    found: dict[str, Any]
    save: Callable[[], None]
    fresh: bool = True
    rounds: list[dict[str, float]] = field(default_factory=list)

    def run(self) -> None:
        """Run every part; a failed part does not stop the others."""
        self.found["goal_ms"] = JOBS[self.model].goal_ms
        with ExitStack() as stack:
            if self.fresh:
                uncached = self._part(
                    "graphc, uncached", lambda: once(self._graphc(), self.environment, self.clock, self.arguments.patience)
                )
                self._keep(uncached, "uncached")
            graphc = self._begin(stack, "graphc", self._graphc)
            torch = None
            with ThreadPoolExecutor(1) as beside:  # while PyTorch compiles
                parity = beside.submit(self._part, "parity", self._parity)
                if self.arguments.modes != "none":
                    torch = self._begin(stack, "torch", self._torch)
                parity.result()
            for _ in range(self.arguments.rounds):
                self._part("rounds", lambda: self._round([w for w in (graphc, torch) if w is not None]))
            if graphc is not None and self.arguments.kernels:
                self._part("kernels", lambda: self.found.update(kernels=graphc.measure("kernels").get("kernels", [])))
                self.found["worst"] = worst(self.found.get("kernels", []))
                self.save()

    def _part(self, name: str, work: Callable[[], Any]) -> Any:
        """Return the result of ``work``; on an error None, with the reason under ``failed``."""
        try:
            return work() if self.clock.left() else self._fail(name, "the time is spent")
        except Exception as error:
            return self._fail(name, f"{type(error).__name__}: {error}")
        finally:
            self.save()

    def _fail(self, name: str, reason: str) -> None:
        self.found["failed"][name] = reason

    def _begin(self, stack: ExitStack, side: str, command: Callable[[], Sequence[str]]) -> BenchProcess | None:
        def begin() -> BenchProcess:
            worker = stack.enter_context(BenchProcess(command(), self.environment, self.clock))
            try:
                told = worker.read(self.arguments.patience)
            except RuntimeError:
                worker.stop()  # else it would disturb the next measurement
                raise
            self._keep(told, "cached" if side == "graphc" else "torch")
            if said := worker.said():
                self.found.setdefault("said", {})[side] = said
            return worker

        worker: BenchProcess | None = self._part(side, begin)
        return worker

    def _keep(self, told: dict[str, Any] | None, when: str) -> None:
        """Store what one side reported about its set-up."""
        if told is None:
            return
        first = self.found.setdefault("first_step_s", {})
        if when == "torch":
            first.update(told["first_step_s"])
            self.found["pytorch"] = {"version": told["version"], "peak_bytes": told["peak_bytes"]}
            for mode, reason in told["failed"].items():
                self._fail(f"PyTorch {mode}", reason)
            return
        first[when] = told["first_step_s"]
        self.found.setdefault("shares_s", {})[when] = told["shares_s"]
        for key in ("device_bytes", "calls", "not_captured"):
            self.found[key] = told[key]
        if told["not_captured"]:
            self._fail("capture", f"the step is not one CUDA graph, so its time is Python's: {'; '.join(told['not_captured'])}")

    def _round(self, workers: Sequence[BenchProcess]) -> None:
        if workers:
            self.rounds.append({mode: ms for worker in workers for mode, ms in worker.measure().items()})
            self.found.update(best_of(self.rounds))

    # Commands ---------------------------------------------------------------------------------------------------------

    def _graphc(self) -> list[str]:
        return [*WORKER, "graphc", self.model, *self._common(), "--file", self._file(0), "--backend", self.arguments.backend]

    def _torch(self) -> list[str]:
        return [*WORKER, "torch", self.model, *self._common(), "--modes", self.arguments.modes]

    def _common(self) -> list[str]:
        load = ["--load", self.arguments.load] if self.arguments.load else []
        return ["--seconds", str(self.arguments.seconds), *load, *(["--tiny"] if self.arguments.tiny else [])]

    def _file(self, layers: int) -> str:
        found = self.files[self.model, layers]
        if isinstance(found, str):
            raise RuntimeError(found)
        return str(found)

    # Parity -----------------------------------------------------------------------------------------------------------

    def _parity(self) -> None:
        """Largest relative difference of losses over twenty steps of a smaller copy; the four runs are concurrent."""
        layers, batch = _layers(self.model, self.arguments), 0 if self.arguments.tiny else SMALL[self.model][1]
        own = ["--file", self._file(layers), "--backend"]
        steps = "5" if self.arguments.tiny else "20"
        gentle = ["--optimizer", GENTLE[self.model]] if self.model in GENTLE else []
        numbers = ["--steps", steps, "--layers", str(layers), "--batch", str(batch)]
        size = [self.model, *self._common(), *gentle, *numbers, "--precision"]
        runs = {
            "graphc fp32": ["losses-graphc", *size, "fp32", *own, self.arguments.backend],
            "reference fp32": ["losses-graphc", *size, "fp32", *own, "numpy" if self.arguments.dry else "auto"],
            "graphc bf16": ["losses-graphc", *size, "bf16", *own, self.arguments.backend],
            "reference bf16": ["losses-torch", *size, "bf16"],
        }
        pairs = [("CPU backend", "fp32", FLOAT32), ("PyTorch", "bf16", BFLOAT16)]
        if self.arguments.modes == "none" or self.arguments.skeletons is not None:  # PyTorch's weights are others
            runs, pairs = {name: command for name, command in runs.items() if name.endswith("fp32")}, pairs[:1]
        with ThreadPoolExecutor(len(runs)) as pool:
            given = {
                name: pool.submit(once, [*WORKER, *command], self.environment, self.clock, self.arguments.patience)
                for name, command in runs.items()
            }
        for name, precision, goal in pairs:
            sides = [self._part(f"parity, {s} {precision}", given[f"{s} {precision}"].result) for s in ("graphc", "reference")]
            if all(side is not None for side in sides):
                a, b = (side["losses"] for side in sides)
                most = max(abs(x - y) / max(abs(y), 1e-6) for x, y in zip(a, b, strict=True))
                line = {"largest": most, "goal": goal, "first": [a[0], b[0]], "last": [a[-1], b[-1]]}
                self.found.setdefault("parity", {})[f"{precision} and {name}"] = line


def best_of(rounds: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return the minimum time of every mode, and PyTorch's fastest mode ÷ graphc."""
    best = {mode: min(r[mode] for r in rounds if mode in r) for mode in dict.fromkeys(m for r in rounds for m in r)}
    ours = best.pop("graphc", None)
    fastest = min(best, key=lambda mode: best[mode], default="")
    ratio = best[fastest] / ours if fastest and ours else None
    return {"graphc_ms": ours, "pytorch_ms": best, "best_pytorch": fastest, "ratio": ratio, "rounds": list(rounds)}


def summary(model: str, found: dict[str, Any]) -> str:
    """Format one line per job, and one per failed part."""

    def number(value: Any, form: str = ".2f") -> str:
        return format(value, form) if isinstance(value, (int, float)) and math.isfinite(value) else "-"

    peer = found.get("best_pytorch") or ""
    first, used = found.get("first_step_s", {}), found.get("device_bytes")
    line = (
        f"{model}: {number(found.get('graphc_ms'))} ms (goal {found['goal_ms']:g}), "
        f"PyTorch {peer} {number(found.get('pytorch_ms', {}).get(peer))} ms; "
        f"first step {number(first.get('uncached'))} s (goal {FIRST_STEP:g}), cached {number(first.get('cached'))} s "
        f"(goal {CACHED_STEP:g}); {number(used and used / 1e9)} GB"
    )
    for name, parity in found.get("parity", {}).items():
        line += f"; {name} {parity['largest']:.1e} (goal {parity['goal']:g})"
    return "\n".join([line, *(f"  failed: {part}: {reason}" for part, reason in found["failed"].items())])


def _layers(model: str, arguments: argparse.Namespace) -> int:
    """Layers of the smaller copy whose losses are compared."""
    return 0 if arguments.tiny else SMALL[model][0]


def _caches(folder: Path) -> dict[str, str]:
    """Environment of a job: both sides cache compiled kernels in a new folder."""
    return {**os.environ, "GRAPHC_CACHE_DIR": str(folder / "graphc"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}


if __name__ == "__main__":
    sys.exit(main())
