"""``graphc train``: trains an ONNX model on arrays from a file."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphc.cli.terminal import config, options, output
from graphc.options import CompileOptions

if TYPE_CHECKING:
    from graphc.cli.training.job import Job, Prepared

EXAMPLES = (
    "graphc train model.onnx --data train.npz --loss softmax_cross_entropy \\",
    "    --optimizer adam:lr=1e-3 -o trained.onnx",
    "graphc train model.onnx --data train.npz --eval-data test.npz -n 2 \\",
    "    --loss mse:prediction=y,label=target --optimizer sgd:lr=0.1,momentum=0.9 \\",
    "    --epochs 10 --batch-size 64 --checkpoint ckpt -o trained.onnx",
    "graphc train model.onnx --data train.npz --loss mse --optimizer adam \\",
    "    --epochs 20 --resume ckpt -o trained.onnx",
    "graphc train model.onnx --data train.npz --loss mse --optimizer adam \\",
    "    -n 4 --mesh data=2,pipe=2 --schedule 1f1b --accumulate 8 -o trained.onnx",
    "graphc train --config plan.json --data train.npz -o trained.onnx",
)


@options.takes_options
def command(
    *,
    context: typer.Context,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", metavar="N", help="Samples of one step over all workers. Default: 32.", min=1)
    ] = None,
    per_worker_batch: Annotated[
        int | None, typer.Option("--per-worker-batch", metavar="N", help="Samples of one step on one worker, instead.", min=1)
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--workers",
            metavar="N",
            help="Processes that compute; parameter servers come on top. Default: 1, or the world this process was started in.",
            min=1,
        ),
    ] = None,
    file: Annotated[
        str | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="Options from a JSON file, as 'graphc plan -o' writes it; the command line wins.",
            is_eager=True,
            callback=config.read_options,
        ),
    ] = None,
    run: options.RunOptions,
    compilation: CompileOptions,
) -> int:
    """Train MODEL on DATA."""
    from graphc.ir.lazy_sympy import import_onnx_ir

    import_onnx_ir()
    from graphc.cli.training.job import Job
    from graphc.distributed.world import find_world, wanted_transport
    from graphc.errors import UsageError
    from graphc.mesh import Mesh
    from graphc.parallel import servers

    run = replace(run, transport=wanted_transport(run.transport))
    world = find_world(transport=run.transport)
    beside = servers(compilation)
    if 1 < world.size <= beside:
        raise UsageError(f"servers={beside} leaves no worker in a world of {world.size} processes")
    axes = Mesh.parse(run.mesh) if run.mesh is not None else None
    size = world.size - beside if world.size > 1 else workers or (axes.size if axes is not None else 1)
    if world.size > 1 and workers is not None and workers != size:
        raise UsageError(f"-n {workers} inside a world of {size} workers; leave -n out, or start without mpiexec")
    if beside and run.transport == "tcp":
        raise UsageError("--strategy parameter_server works over --transport mpi or threads, not over tcp")
    if batch_size is not None and per_worker_batch is not None:
        raise UsageError("--batch-size is over all workers, --per-worker-batch on one of them; give one of the two")
    shares = size
    if axes is not None:
        axes.check(size)
        shares = axes.data
    batch_size = per_worker_batch * shares if per_worker_batch is not None else batch_size or 32
    compilation = replace(compilation, recompute=_with_batch(compilation.recompute, batch_size, shares))
    job = Job(**vars(run), batch_size=batch_size, workers=size, compilation=compilation)
    return run_job(job, alone=world.size == 1, words=context.obj)


def _with_batch(recompute: str | None, batch_size: int, workers: int) -> str | None:
    """Add the batch of one worker to the text of ``--recompute`` unless it names a batch."""
    if recompute in (None, "none") or "batch=" in recompute:
        return recompute
    return f"{recompute},batch={max(1, -(-batch_size // workers))}"


def run_job(job: Job, *, alone: bool = True, prepared: Prepared | None = None, words: Sequence[str] | None = None) -> int:
    """Run ``job`` on its number of workers (and parameter servers); return the exit code.

    Args:
        alone: this process is not a worker, so it starts the workers.
        prepared: the job's program and data, if already prepared.
        words: the command line, without the program's name.
    """
    from graphc.cli.training.interrupt import Progress, how_to_resume, stopped
    from graphc.cli.training.job import execute, prepare
    from graphc.distributed.threads import run_threads
    from graphc.launch.folders import job_folder
    from graphc.launch.signals import ENDING, interruption, termination_interrupts

    progress = Progress()
    several = job.processes > 1 and alone
    try:
        with termination_interrupts():
            if several and job.transport != "threads":
                with job_folder() as folder:
                    job = _on_disk(job, folder)
                    if prepared is None:
                        prepare(job)  # errors in the arguments are reported once, before any worker starts
                    code = _launch(job, folder)
                if code - 128 in ENDING:
                    output.note(how_to_resume(job, progress.begun, words))
                return code
            ready = prepared or prepare(job)
            if several:
                run_threads(job.processes, lambda comm: execute(ready, comm, progress), deadline=job.deadline)
            else:
                execute(ready, progress=progress)
    except KeyboardInterrupt as end:
        what, code = interruption(end)
        output.note(stopped(job, progress, what, words))
        return code
    return 0


def _on_disk(job: Job, folder: Path) -> Job:
    """Save a model from standard input to a file that every worker can read."""
    if job.model != "-":
        return job
    target = folder / "model.onnx"
    target.write_bytes(sys.stdin.buffer.read())
    return replace(job, model=str(target))


def _launch(job: Job, folder: Path) -> int:
    from graphc.cli.training.job import to_json
    from graphc.launch.local import launch

    path = folder / "job.json"
    path.write_text(to_json(job))
    # The workers write into pipes; whether this process has a terminal decides how their output looks.
    environment = {output.TERMINALS: output.terminals(), "COLUMNS": str(shutil.get_terminal_size().columns)}
    argv = ["-m", "graphc.cli.training.worker", str(path)]
    served = job.processes > job.workers
    return launch(job.processes, argv, transport=job.transport, env=environment, keep_going=served, deadline=job.deadline)
