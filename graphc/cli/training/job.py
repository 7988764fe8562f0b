"""One training run of the command line: compiled, checked, executed by every worker.

The command checks everything once before it starts workers, so a wrong file or option gives one message. The workers repeat the
same deterministic compilation and check that they agree.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc import compiler, frontends, losses, optim
from graphc.backend import backend_of
from graphc.cli.terminal import options, output
from graphc.cli.terminal.summary import collectives, per_step
from graphc.cli.training.arrays import check_labels, match_inputs, read_arrays, samples_first
from graphc.cli.training.batching import SAMPLE_WEIGHT, fill_last_batch, fit_batch
from graphc.cli.training.interrupt import Progress
from graphc.cli.training.last_good import LastGood
from graphc.cli.training.places import check_checkpoint, check_named, check_place
from graphc.cli.training.report import Reporter
from graphc.compiler import Program
from graphc.data import Shards, shard
from graphc.device import Array
from graphc.distributed.communicator import Communicator
from graphc.errors import GraphcError, NonFiniteError, UsageError, counted
from graphc.ir.bound_inputs import bind_inputs
from graphc.ir.names import SKIPPED
from graphc.ir.ops.losses import label_checks
from graphc.mesh import Mesh
from graphc.options import CompileOptions, axes_of, constants_of, scales_of
from graphc.parallel import servers
from graphc.pipeline import PassCall, warnings_in
from graphc.report.trace import Summary, Trace
from graphc.training.microbatch import micro_batches
from graphc.training.progress import Log
from graphc.training.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Job(options.RunOptions):
    """One run of ``graphc train``.

    Attributes:
        batch_size: samples of one step over all workers.
        workers: processes that compute.
    """

    batch_size: int
    workers: int
    compilation: CompileOptions = dataclasses.field(default_factory=CompileOptions)

    @property
    def axes(self) -> Mesh:
        """The mesh of the workers."""
        return Mesh.parse(self.mesh) if self.mesh is not None else Mesh(data=self.workers)

    @property
    def shares(self) -> int:
        """Parts of a batch, one for each replica of the model."""
        return self.axes.replicas

    @property
    def processes(self) -> int:
        """The workers, and the parameter servers beside them."""
        return self.workers + servers(self.compilation)


@dataclass(frozen=True)
class Prepared:
    """A job that is ready to run: the program and its checked data.

    Attributes:
        job: the job, with options that follow from the model.
        weight: the input of sample weights, if there is one.
        fixed: the fixed batch of a model that is trained as it is; None: any batch.
    """

    job: Job
    program: Program
    arrays: Mapping[str, Array]
    evaluation: Mapping[str, Array] | None
    schedule: optim.Schedule | None = None
    weight: str | None = None
    fixed: int | None = None


def prepare(job: Job, *, quiet: bool = False, after: Callable[[PassCall, ir.Model, float], None] | None = None) -> Prepared:
    """Compile the model and read the data.

    Args:
        quiet: omit the notes, which the starting command has printed already.
        after: called with (step, model, seconds) after each pass.

    Raises:
        GraphcError: an error in the model, options, data or output paths.
    """
    note = (lambda text: None) if quiet else output.note
    optimizer, loss = optim.parse(job.optimizer), options.loss_of(job.loss, metrics=True)
    if job.backend != "auto":
        backend_of(job.backend)
    _check_places(job)
    if job.output is None and job.checkpoint is None:
        note("neither -o FILE nor --checkpoint DIR is given: the trained weights will not be written")
    model = frontends.load(job.model, reading=job.compilation)
    _check_weights(job, model)
    axes, bound = axes_of(job.compilation.batch_axis), model.clone()
    bind_inputs(bound, constants_of(job.compilation.inputs), axes, scales_of(job.compilation.scale))
    job, fixed = fit_batch(job, bound, note)
    data = samples_first(read_arrays(job.data), axes)
    evaluated = samples_first(read_arrays(job.eval_data), axes) if job.eval_data is not None else {}
    job, loss = fill_last_batch(job, loss, fixed, _samples(data), _samples(evaluated), note)
    data, evaluated = _weighed(data, loss), _weighed(evaluated, loss)
    program = compiler.compile(
        model,
        loss=_with_label_shape(loss, data),
        optimizer=optimizer,
        mesh=job.axes,
        backend=job.backend,
        after=after,
        **vars(job.compilation),
    )
    for text in warnings_in(program.log):
        note(f"warning: {text}")
    for line in program.log:
        if line.startswith("dequantize: "):  # the graph computes something else than the file
            note(line)
    graph = program.model.graph
    if not servers(job.compilation):
        micro_batches(graph, job.shares).check_divides(job.batch_size, job.shares)
    arrays = match_inputs(data, graph, job.data, note)
    _training_batches(job, program, arrays, 0, loss.sample_weight)
    evaluation = None
    if job.eval_data is not None:
        evaluation = match_inputs(evaluated, program.inference.graph, job.eval_data, note)
        check_labels(graph, evaluation, job.eval_data)
    prepared = Prepared(job, program, arrays, evaluation, _schedule(job, optimizer.lr), loss.sample_weight, fixed)
    if evaluation is not None:
        _batches(prepared, evaluation, 0, job.shares)
    return prepared


def _with_label_shape(loss: losses.Loss, data: Mapping[str, Array]) -> losses.Loss:
    """Tell a loss over classes the shape of the data's labels, so that it finds the class axis."""
    if not isinstance(loss, losses.SoftmaxCrossEntropy | losses.NLL) or loss.label not in data or loss.label_shape is not None:
        return loss
    return dataclasses.replace(loss, label_shape=[-1, *data[loss.label].shape[1:]])


def _samples(arrays: Mapping[str, Array]) -> int:
    """The number of samples of a data file."""
    return len(next(iter(arrays.values()), ()))


def _weighed(arrays: dict[str, Array], loss: losses.Loss) -> dict[str, Array]:
    """Add sample weights of 1 if the loss needs weights that the file lacks."""
    if loss.sample_weight == SAMPLE_WEIGHT and SAMPLE_WEIGHT not in arrays and arrays:
        arrays[SAMPLE_WEIGHT] = np.ones(len(next(iter(arrays.values()))), np.float32)
    return arrays


def _schedule(job: Job, lr: float) -> optim.Schedule | None:
    """Make the schedule of ``--scale-lr-from`` and ``--warmup-steps``."""
    if job.scale_lr_from is None and job.warmup_steps == 0:
        return None
    batch = job.batch_size if job.scale_lr_from is not None else None
    return optim.Schedule(lr, global_batch=batch, base_batch=job.scale_lr_from, warmup_steps=job.warmup_steps)


def _check_places(job: Job) -> None:
    """Fail before training if an output cannot be written or would replace an input file."""
    for what, name in (("MODEL", job.model), ("--data", job.data), ("--eval-data", job.eval_data), ("--resume", job.resume)):
        check_named(what, name)
    data = {"the data": job.data, "the data of --eval-data": job.eval_data}
    for option, place in (("--output", job.output), ("--checkpoint", job.checkpoint), ("--trace", job.trace)):
        if place == "-":
            raise UsageError(f"{option}: standard output carries the events of the training; name a file")
    check_place("--output", job.output, data)
    check_place("--trace", job.trace, {**data, "the model": job.model, "the file of --output": job.output})
    if job.checkpoint is not None:
        check_checkpoint("--checkpoint", job.checkpoint)
    if job.resume is not None and not Path(job.resume).exists():
        raise UsageError(f"--resume {job.resume}: there is no such checkpoint")


def _check_weights(job: Job, model: ir.Model) -> None:
    """Refuse to overwrite the file with the model's external weights."""
    weights = frontends.files_of(model)[1:]
    for option, place in (("--output", job.output), ("--trace", job.trace)):
        check_place(option, place, {f"the weights of the model, {Path(file).name}": file for file in weights})


def _batches(prepared: Prepared, arrays: Mapping[str, Array], rank: int, size: int) -> Shards:
    """Yield this rank's shares of data to evaluate: every sample once, in file order."""
    job, fixed = prepared.job, prepared.fixed
    cut = "pad" if fixed is not None and (prepared.weight is not None or _ignored(prepared.program)) else "keep"
    return shard(
        arrays,
        global_batch=job.batch_size if fixed is None else fixed * size,
        rank=rank,
        size=size,
        shuffle=False,
        tail="drop" if fixed is not None and cut == "keep" else cut,
        weight=prepared.weight if cut == "pad" else None,
        padding=_ignored(prepared.program),
    )


def _ignored(program: Program) -> dict[str, float]:
    """Label → the value that the loss ignores."""
    return {name: ignore for name, (_, _, ignore) in label_checks(program.model.graph).items() if ignore is not None}


def _training_batches(job: Job, program: Program, arrays: Mapping[str, Array], rank: int, weight: str | None) -> Shards:
    return shard(
        arrays,
        global_batch=job.batch_size,
        rank=rank,
        size=job.shares,
        shuffle=not job.no_shuffle,
        seed=job.compilation.seed,
        tail=job.tail,
        prefetch=job.prefetch,
        weight=weight,
        padding=_ignored(program),
    )


def execute(prepared: Prepared, comm: Communicator | None = None, progress: Progress | None = None) -> None:
    """Train as one worker: the rank of ``comm``, or else of the environment.

    Args:
        progress: rank 0 notes in it how far the run is.

    Raises:
        NonFiniteError: on every rank, after the last good state is exported.
    """
    start = time.perf_counter()
    failure: NonFiniteError | None = None
    job, program = prepared.job, prepared.program
    trace = Trace(job.trace, steps=job.trace_steps) if job.trace is not None else None
    with (
        Trainer(
            program,
            comm=comm,
            seed=job.compilation.seed,
            schedule=prepared.schedule,
            trace=trace,
            deadline=job.deadline,
            transport=job.transport,
        ) as trainer,
        without_tracebacks(),
    ):
        rank = 0 if trainer.servers else trainer.data_rank
        batches = _training_batches(job, program, prepared.arrays, rank, prepared.weight)
        trainer.attach(batches)
        if job.resume is not None:
            trainer.restore(job.resume)
            if trainer.steps_done and batches.position == (0, 0):  # a checkpoint of a custom loop, without a position
                epoch, done = divmod(trainer.steps_done, len(batches))
                batches.load_state_dict(batches.state_dict() | {"epoch": epoch, "samples": done * job.batch_size})
            if batches.position[0] >= job.epochs:
                finished = counted(batches.position[0], "finished epoch")
                output.note(
                    f"--resume {job.resume} holds {finished}, and --epochs {job.epochs} counts them: nothing is left to train;"
                    f" say --epochs {batches.position[0] + 1} or more"
                )
        before, last_good = trainer.steps_done, LastGood(job, trainer)
        steps = job.epochs * len(batches) * trainer.strategy.steps_per_batch
        progress = progress or Progress()
        progress.steps = steps
        with Reporter(job.form, steps, job.log_every, _columns(program, prepared), done=before) as reporter:
            try:
                _train(prepared, trainer, batches, reporter, last_good, progress)
                last_good.export(_batches(prepared, prepared.arrays, trainer.data_rank, trainer.data_size))
            except NonFiniteError as error:
                failure = last_good.after_failure(error)
            else:
                event = _end_event(job, trainer, before, time.perf_counter() - start)
                communication = trainer.write_trace()
                if communication is not None:
                    event |= _traced(job, communication)
                # Inside the block: on a terminal these lines go through the progress bar and keep their order.
                reporter.end(event)
    if failure is not None:
        raise failure


def _columns(program: Program, prepared: Prepared) -> list[str]:
    """What an epoch reports besides its number and time."""
    names = [value.name or "" for value in program.model.graph.outputs]
    evaluated = [f"eval_{name}" for name in names] if prepared.evaluation is not None else []
    return [*names, *evaluated, *(["skipped"] if SKIPPED in program.model.graph.initializers else [])]


def _end_event(job: Job, trainer: Trainer, before: int, seconds: float) -> dict[str, Any]:
    """Make the last event; its state hash checks that all ranks hold the same state.

    Args:
        before: steps of earlier runs.
    """
    number, _ = per_step(collectives(trainer.program.model.graph)) if trainer.size > 1 else (0, 0)
    return {
        "event": "end",
        "steps": trainer.steps_done,
        "steps_of_run": trainer.steps_done - before,
        "state_sha256": trainer.state_sha256(),
        "world_size": trainer.size,
        **({"servers": trainer.servers, "lost": sorted(trainer.lost)} if trainer.servers else {}),
        "allreduces_per_step": number,
        "seconds": round(seconds, 3),
        **({"output": job.output} if job.output else {}),
    }


def _traced(job: Job, found: Summary) -> dict[str, Any]:
    """Fields of a traced run in the last event; times are milliseconds per step, means over the workers."""
    return {
        "trace": job.trace,
        "traced_steps": found.steps,
        "communication_ms": round(found.in_flight, 4),
        "waited_ms": round(found.waited, 4),
        "hidden_percent": round(found.hidden_percent, 1),
        "communication": str(found),
    }


@contextlib.contextmanager
def without_tracebacks() -> Iterator[None]:
    """Turn an unexpected exception into one line instead of a traceback from every worker."""
    try:
        yield
    except GraphcError:
        raise
    except Exception as error:
        if os.environ.get(output.DEBUG):
            raise
        raise GraphcError(output.unexpected(error)) from None


def _train(
    prepared: Prepared,
    trainer: Trainer,
    batches: Shards,
    reporter: Reporter,
    last_good: LastGood,
    progress: Progress,
) -> None:
    """Train up to ``job.epochs`` epochs in total, from the data's position on."""
    job = prepared.job
    start = time.perf_counter()
    rank, size = (0, 1) if trainer.servers else (trainer.data_rank, trainer.data_size)  # of an evaluation

    def report(event: dict[str, Any]) -> None:
        nonlocal start
        if trainer.rank == 0:
            progress.step = trainer.steps_done
        match event:
            case {"event": "step", "step": step, **metrics}:
                reporter.step(step, metrics)
            case {"event": "skipped", "step": step, "skipped": count}:
                reporter.skipped(step, count)
            case {"event": "lost", "worker": worker, "step": step}:
                output.note(f"worker {worker} was lost after step {step}; the others go on")
            case _:
                event["skipped"] = trainer.skipped_steps
                if prepared.evaluation is not None:
                    found = trainer.evaluate(_batches(prepared, prepared.evaluation, rank, size))
                    event |= {f"eval_{name}": value for name, value in found.items()}
                now = time.perf_counter()
                reporter.epoch(event | {"seconds": round(now - start, 3)}, trainer.steps_done)
                start = now
                last_good.end_epoch(event["epoch"])

    trainer.fit(batches, epochs=job.epochs - batches.position[0], callbacks=[Log(report)], log_every=1)


def to_json(job: Job) -> str:
    """The job as text."""
    return json.dumps(dataclasses.asdict(job))


def from_json(text: str) -> Job:
    """Read the job that :func:`to_json` wrote."""
    fields = json.loads(text)
    return Job(**{**fields, "form": output.Format(fields["form"]), "compilation": CompileOptions(**fields["compilation"])})
