"""``make gpu-bench``: training steps on a GPU beside PyTorch's, in one run; writes one JSON file.

    python -m graphc.bench.gpu --output build/gpu_bench.json [--models gpt2,mlp-wide] [--rounds 3]

For every job: the ONNX file is exported, graphc trains from it (kernels uncached, then cached), PyTorch trains the module it
was exported from (eager, torch.compile, torch.compile with CUDA graphs), and the two processes measure in turn. Then twenty
steps of a smaller copy are compared: float32 with graphc's CPU backend, bfloat16 with PyTorch. The best of the rounds counts
on both sides.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from graphc.bench.gpu_specs import JOBS

SMALL = {"gpt2": (2, 1), "bert": (2, 4), "resnet50": (0, 8), "mlp-wide": (0, 64)}
"""Layers (0: all) and batch of the copies that are compared step by step."""

FIRST_STEP, CACHED_STEP = 20.0, 3.0
"""Seconds to the first step that are aimed at, without and with compiled kernels on disk."""

FLOAT32, BFLOAT16 = 1e-3, 2e-2
"""Relative difference of losses that is aimed at."""


def main() -> int:
    """Measure what the command line asks for; without a GPU, say so and succeed."""
    parser = argparse.ArgumentParser(description="Training steps on a GPU beside PyTorch's.")
    parser.add_argument("--output", type=Path, default=Path("build/gpu_bench.json"))
    parser.add_argument("--models", default=",".join(JOBS))
    parser.add_argument("--files", type=Path, help="folder with NAME.onnx files, in place of an export by PyTorch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="of one measurement")
    parser.add_argument("--backend", default="cupy")
    parser.add_argument("--budget", type=float, default=560.0, help="seconds after which no further job is begun")
    arguments = parser.parse_args()
    reason = missing(arguments.backend)
    result: dict[str, Any] = {"skipped": reason} if reason else run(arguments)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    if reason:
        print(f"gpu-bench is skipped: {reason}")
    return 0


def missing(backend: str) -> str:
    """Why nothing can be measured here; empty: all is there."""
    from graphc.backend import BACKENDS
    from graphc.errors import GraphcError

    try:
        BACKENDS[backend](threads=1, spin=False).close()
    except GraphcError as error:
        return str(error)
    try:
        import torch
    except ImportError:
        return "PyTorch is not installed, which is measured beside graphc"
    return "" if torch.cuda.is_available() else f"PyTorch {torch.__version__} sees no GPU"


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The whole result; a job that fails is reported and the others go on."""
    started = time.perf_counter()
    result: dict[str, Any] = {"machine": machine(), "jobs": {}}
    with tempfile.TemporaryDirectory(prefix="graphc-gpu-bench-") as name:
        for model in arguments.models.split(","):
            if time.perf_counter() - started > arguments.budget:
                result["jobs"][model] = {"skipped": "the time is spent"}
                continue
            try:
                result["jobs"][model] = job(model, Path(name), arguments)
            except (subprocess.SubprocessError, OSError, RuntimeError) as error:
                result["jobs"][model] = {"failed": str(error)[-2000:]}
            print(summary(model, result["jobs"][model]), flush=True)
    result["seconds"] = time.perf_counter() - started
    return result


def machine() -> dict[str, str]:
    """The GPU and its driver."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    name, _, driver = (found[0] if found else "unknown, unknown").partition(", ")
    return {"gpu": name, "driver": driver}


def job(model: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """One job on both sides."""
    path = _file(model, folder, arguments.files)
    caches = _caches(folder / f"cache-{model}")
    common = [model, "--seconds", str(arguments.seconds)]
    ours = ["graphc", *common, "--file", str(path), "--backend", arguments.backend]
    uncached = once(ours, caches)
    with Worker(ours, caches) as graphc, Worker(["torch", *common], caches) as torch:
        cached, peer = graphc.read(), torch.read()
        rounds = [{**graphc.measure(), **torch.measure()} for _ in range(arguments.rounds)]
    best = {mode: min(r[mode] for r in rounds) for mode in rounds[0]}
    modes = [mode for mode in best if mode != "graphc"]
    fastest = min(modes, key=lambda mode: best[mode]) if modes else ""
    return {
        "graphc_ms": best["graphc"],
        "goal_ms": JOBS[model].goal_ms,
        "pytorch": {mode: best[mode] for mode in modes} | {"version": peer["version"], "failed": peer["failed"]},
        "best_pytorch": fastest,
        "ratio": best[fastest] / best["graphc"] if fastest else None,
        "rounds": rounds,
        "first_step_s": {"uncached": uncached["first_step_s"], "cached": cached["first_step_s"], **peer["first_step_s"]},
        "device_bytes": cached["device_bytes"],
        "pytorch_peak_bytes": peer["peak_bytes"],
        "parity": parity(model, folder, caches, arguments),
    }


def parity(model: str, folder: Path, caches: dict[str, str], arguments: argparse.Namespace) -> dict[str, Any]:
    """Largest relative difference of losses over twenty steps of a smaller copy."""
    layers, batch = SMALL[model]
    path = _file(model, folder, None, layers)
    size = [model, "--layers", str(layers), "--batch", str(batch), "--precision"]
    gpu = ["--file", str(path), "--backend", arguments.backend]
    found = {}
    for name, mine, other, goal in (
        ("float32 and the CPU backend", ["fp32", *gpu], ["fp32", "--file", str(path), "--backend", "auto"], FLOAT32),
        ("bfloat16 and PyTorch", ["bf16", *gpu], ["bf16"], BFLOAT16),
    ):
        a = once(["losses-graphc", *size, *mine], caches)["losses"]
        b = once([f"losses-{'torch' if 'PyTorch' in name else 'graphc'}", *size, *other], caches)["losses"]
        difference = max(abs(x - y) / max(abs(y), 1e-6) for x, y in zip(a, b, strict=True))
        found[name] = {"largest": difference, "goal": goal, "first": [a[0], b[0]], "last": [a[-1], b[-1]]}
    return found


def summary(model: str, found: dict[str, Any]) -> str:
    """One line a job."""
    if "graphc_ms" not in found:
        return f"{model}: {found.get('failed') or found.get('skipped')}"
    peer = f"{found['best_pytorch']} {found['pytorch'][found['best_pytorch']]:.2f} ms" if found["best_pytorch"] else "none"
    first = found["first_step_s"]
    return (
        f"{model}: {found['graphc_ms']:.2f} ms (goal {found['goal_ms']:g}), PyTorch {peer};"
        f" first step {first['uncached']:.1f} s, cached {first['cached']:.1f} s; {found['device_bytes'] / 1e9:.1f} GB"
    )


class Worker:
    """A process of :mod:`.gpu_worker` that measures when asked."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [*_module(), *command], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def read(self) -> dict[str, Any]:
        """The next line that is a result.

        Raises:
            RuntimeError: the process ended before.
        """
        stream: IO[str] | None = self._process.stdout
        assert stream is not None
        for line in stream:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise RuntimeError(f"{' '.join(map(str, self._process.args))} ended with status {self._process.wait()}")  # type: ignore[arg-type]

    def measure(self) -> dict[str, Any]:
        """One measurement."""
        stream = self._process.stdin
        assert stream is not None
        stream.write("go\n")
        stream.flush()
        return self.read()


def once(command: Sequence[str], environment: dict[str, str]) -> dict[str, Any]:
    """What a process says first, or at its end."""
    with Worker(command, environment) as worker:
        return worker.read()


def _module() -> list[str]:
    return [sys.executable, "-m", "graphc.bench.gpu_worker"]


def _caches(folder: Path) -> dict[str, str]:
    """The environment of a job: compiled kernels of both sides go into a new folder."""
    return {**os.environ, "GRAPHC_CACHE_DIR": str(folder / "graphc"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}


def _file(model: str, folder: Path, files: Path | None, layers: int = 0) -> Path:
    if files is not None and (files / f"{model}.onnx").exists():
        return files / f"{model}.onnx"
    path = folder / f"{model}-{layers}.onnx"
    if not path.exists():
        command = [sys.executable, "-m", "graphc.bench.gpu_models", model, str(path), "--layers", str(layers)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the export of {model} failed: {done.stderr[-1500:]}")
    return path


if __name__ == "__main__":
    sys.exit(main())
