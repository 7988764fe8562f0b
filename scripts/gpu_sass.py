"""Compiles every generated kernel of the GPU jobs by the real NVRTC, and prints what each takes of a GPU. Needs no GPU.

    python scripts/gpu_sass.py                      # the four jobs of make gpu-bench
    python scripts/gpu_sass.py resnet50 --top 60    # one job, more rows

Exit code 1: a kernel spills registers, or has too few warps or bytes in flight (`predict/resources.py` says what is asked for).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from graphc.backends.cupy.predict.hardware import DEFAULT, GPUS, gpu_of
from graphc.backends.cupy.predict.resources import Compiled, compiled_kernels, faults, table
from graphc.bench.gpu_models import export
from graphc.bench.gpu_specs import JOBS, BenchJob, check_jobs
from graphc.compiler import compile
from graphc.report.memory import feed_shapes


def kernels_of_job(name: str, job: BenchJob) -> list[Compiled]:
    """The generated kernels of a job's step."""
    with tempfile.TemporaryDirectory(prefix="graphc-sass-") as folder:
        path = Path(folder) / f"{name}.onnx"
        export(name, path, job)
        graph = compile(path, backend="cupy", **job.options()).model
        return compiled_kernels(graph, feed_shapes(graph, 1) | job.shapes())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("jobs", nargs="*", help="jobs of make gpu-bench; all by default")
    parser.add_argument("--gpu", default=DEFAULT, help=f"whose multiprocessors count: {', '.join(GPUS)}")
    parser.add_argument("--top", type=int, default=25, help="rows of each table, those that move most bytes first")
    arguments = parser.parse_args()
    check_jobs(arguments.jobs)
    gpu, wrong = gpu_of(arguments.gpu), []
    for name in arguments.jobs or JOBS:
        kernels = kernels_of_job(name, JOBS[name])
        print(f"\n{name}: {len(kernels)} generated kernels, sm_90, on {gpu.name}")
        rows = table(kernels, gpu)[: arguments.top + 1]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            print(
                "  ".join(
                    cell.rjust(width) if k else cell.ljust(width)
                    for k, (cell, width) in enumerate(zip(row, widths, strict=True))
                )
            )
        wrong += [f"{name}: {fault}" for fault in faults(kernels, gpu)]
    for fault in wrong:
        print(fault, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
