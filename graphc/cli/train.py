"""``graphc train``: train an ONNX model on arrays from a file, on one or several workers."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphc.cli import options, output
from graphc.cli.output import Format

if TYPE_CHECKING:
    from graphc.cli.job import Job, Prepared


def command(
    model: options.Model,
    data: Annotated[
        str,
        typer.Option(
            "--data",
            metavar="D.npz|FOLDER",
            show_default=False,
            help="One array per graph input plus the label; axis 0 = sample. Or a folder of NAME.npy files, left on disk.",
        ),
    ],
    loss: options.LossText,
    optimizer: options.OptimizerText,
    epochs: Annotated[int, typer.Option("--epochs", help="In total, those before --resume included.", min=1)] = 1,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", help="Samples of one step over all workers. Default: 32.", min=1)
    ] = None,
    per_worker_batch: Annotated[
        int | None, typer.Option("--per-worker-batch", help="Samples of one step on one worker, instead.", min=1)
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--workers",
            help="Processes that compute; parameter servers come on top. Default: 1, or the world this process was started in.",
            min=1,
        ),
    ] = None,
    transport: options.Transport = "auto",
    backend: options.Backend = "auto",
    initialize: options.Initialize = None,
    seed: options.Seed = 0,
    no_shuffle: Annotated[bool, typer.Option("--no-shuffle", help="Take the samples in the order of the file.")] = False,
    tail: Annotated[
        str,
        typer.Option(
            "--tail", metavar="TAIL", help="What becomes of samples that fill no batch: keep, drop, pad or weight-zero."
        ),
    ] = "keep",
    prefetch: Annotated[int, typer.Option("--prefetch", metavar="N", help="Batches that a thread reads ahead.", min=0)] = 0,
    scale_lr_from: Annotated[
        int | None,
        typer.Option(
            "--scale-lr-from", metavar="B0", help="The learning rate is meant for batches of B0: scale it linearly.", min=1
        ),
    ] = None,
    warmup_steps: Annotated[
        int, typer.Option("--warmup-steps", metavar="N", help="Reach the learning rate on a straight line.", min=0)
    ] = 0,
    log_every: Annotated[
        int, typer.Option("--log-every", metavar="K", help="Report every K steps; 0: every 10 in JSON, never in text.", min=0)
    ] = 0,
    batch: options.Batch = None,
    bucket_mb: options.BucketMB = 25.0,
    precision: options.Precision = None,
    recompute: options.Recompute = None,
    strategy: options.Strategy = "mirrored",
    accumulate: options.Accumulate = 1,
    sync_batchnorm: options.SyncBatchnorm = False,
    clip_norm: options.ClipNorm = None,
    clip_value: options.ClipValue = None,
    compress: options.Compress = None,
    deterministic: options.Deterministic = None,
    nonfinite: options.Nonfinite = "stop",
    eval_data: Annotated[
        str | None, typer.Option("--eval-data", metavar="E.npz", help="Evaluate on it, in inference mode, after each epoch.")
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", metavar="DIR", help="Save all state after each epoch.")
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option("--trace", metavar="FILE.json", help="Timeline of all workers, for Perfetto or chrome://tracing."),
    ] = None,
    trace_steps: Annotated[int, typer.Option("--trace-steps", metavar="N", help="Steps that --trace records.", min=1)] = 200,
    resume: Annotated[str | None, typer.Option("--resume", metavar="DIR", help="Go on from this checkpoint.")] = None,
    out: Annotated[
        str | None, typer.Option("-o", "--output", metavar="FILE", help="The trained model: your file with new weights.")
    ] = None,
    freeze: options.Freeze = None,
    train: options.Train = None,
    deadline: options.Deadline = None,
    form: options.Format = Format.text,
) -> int:
    """Train MODEL on DATA."""
    from graphc.ir.lazy_sympy import import_onnx_ir

    import_onnx_ir()
    from graphc.cli.job import Job
    from graphc.distributed.world import find_world, wanted_transport
    from graphc.errors import UsageError
    from graphc.parallel import Parallel

    transport = wanted_transport(transport)
    world = find_world(transport=transport)
    parallel = Parallel(strategy, accumulate, sync_batchnorm, clip_norm, clip_value, compress, deterministic, nonfinite)
    servers = parallel.servers
    if 1 < world.size <= servers:
        raise UsageError(f"servers={servers} leaves no worker in a world of {world.size} processes")
    size = world.size - servers if world.size > 1 else workers or 1
    if world.size > 1 and workers is not None and workers != size:
        raise UsageError(f"-n {workers} inside a world of {size} workers; leave -n out, or start without mpiexec")
    if batch_size is not None and per_worker_batch is not None:
        raise UsageError("--batch-size is over all workers, --per-worker-batch on one of them; give one of the two")
    batch_size = per_worker_batch * size if per_worker_batch is not None else batch_size or 32
    job = Job(
        model=model,
        data=data,
        loss=loss,
        optimizer=optimizer,
        epochs=epochs,
        batch_size=batch_size,
        workers=size,
        backend=backend,
        initialize=initialize,
        seed=seed,
        shuffle=not no_shuffle,
        log_every=log_every,
        batch=batch,
        bucket_mb=bucket_mb,
        precision=precision,
        recompute=_with_batch(recompute, batch_size, size),
        parallel=parallel,
        freeze=freeze,
        train=train,
        eval_data=eval_data,
        checkpoint=checkpoint,
        resume=resume,
        tail=tail,
        prefetch=prefetch,
        scale_lr_from=scale_lr_from,
        trace=trace,
        trace_steps=trace_steps,
        warmup_steps=warmup_steps,
        output=out,
        deadline=deadline,
        transport=transport,
        form=form.value,
    )
    return run_job(job, alone=world.size == 1)


def _with_batch(recompute: str | None, batch_size: int, workers: int) -> str | None:
    """The text of ``--recompute``, with what a batch is on one worker unless it says so itself."""
    if recompute in (None, "none") or "batch=" in recompute:
        return recompute
    return f"{recompute},batch={max(1, -(-batch_size // workers))}"


def run_job(job: Job, *, alone: bool = True, prepared: Prepared | None = None) -> int:
    """Run ``job`` on as many workers (and parameter servers) as it says; returns the exit code.

    Args:
        alone: this process is no worker yet, so that it has to start them.
        prepared: the job's program and data, when they are at hand.
    """
    from graphc.cli.job import execute, prepare
    from graphc.distributed.threads import run_threads

    with tempfile.TemporaryDirectory(prefix="graphc-train-") as name:
        several = job.processes > 1 and alone
        if several and job.transport != "threads":
            job = _on_disk(job, Path(name))
            if prepared is None:
                prepare(job)  # every error in the arguments shows here, once, and before any worker starts
            return _launch(job, Path(name))
        ready = prepared or prepare(job)
        try:
            if several:
                run_threads(job.processes, lambda comm: execute(job, ready, comm), deadline=job.deadline)
            else:
                execute(job, ready)
        except KeyboardInterrupt:
            output.note("interrupted")
            return 130
        return 0


def _on_disk(job: Job, folder: Path) -> Job:
    """Standard input is read once, here; the workers get a file."""
    import dataclasses

    if job.model != "-":
        return job
    target = folder / "model.onnx"
    target.write_bytes(sys.stdin.buffer.read())
    return dataclasses.replace(job, model=str(target))


def _launch(job: Job, folder: Path) -> int:
    from graphc.cli.job import to_json
    from graphc.launch.local import launch

    path = folder / "job.json"
    path.write_text(to_json(job))
    # The workers write into pipes; what they look like on the user's terminal is decided by what this process has.
    environment = {output.TERMINALS: output.terminals(), "COLUMNS": str(shutil.get_terminal_size().columns)}
    argv = ["-m", "graphc.cli.worker", str(path)]
    served = job.processes > job.workers
    return launch(job.processes, argv, transport=job.transport, env=environment, keep_going=served, deadline=job.deadline)
