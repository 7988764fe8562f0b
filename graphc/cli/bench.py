"""``graphc bench``: step and compile times compared with PyTorch's in one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphc.cli.terminal import options, output
from graphc.cli.terminal.output import Format
from graphc.options import Option

if TYPE_CHECKING:
    from graphc.bench.run import ScalingRow

EXAMPLES = (
    "graphc bench",
    "graphc bench mlp --rounds 1",
    "graphc bench lenet --threads 1,2",
)


@options.takes_options
def command(
    models: Annotated[list[str] | None, typer.Argument(metavar="[MODEL]…", help="Which models; all by default.")] = None,
    destination: Annotated[
        Path | None, Option("Also write the rows as JSON to this file.", "FILE", flags=("-o", "--output"))
    ] = None,
    rounds: Annotated[
        int, typer.Option(metavar="N", min=1, help="Measure graphc and PyTorch N times in turn; the median counts.")
    ] = 3,
    seconds: Annotated[float, typer.Option(metavar="S", min=0.0, help="Seconds of one measurement.")] = 3.0,
    workers: Annotated[bool, typer.Option(help="Also measure two workers, against DistributedDataParallel and MPI.")] = True,
    zoo: Annotated[bool, typer.Option(help="Also measure how long the zoo models take to compile.")] = True,
    threads: Annotated[
        str | None, Option("Measure steps of one worker with these numbers of threads, and how well they are used.", "LIST")
    ] = None,
    predict: Annotated[
        bool, Option("Predict step times on a GPU, without measuring, for jobs of 'make gpu-bench' or training graphs.")
    ] = False,
    gpu: Annotated[
        str, typer.Option(metavar="NAME", help="GPU that --predict is about: a100, h100, h200, b200, l4 or rtx4090.")
    ] = "h200",
    profile: Annotated[
        str | None, Option("With --predict: times of a CPU instead, from a file that 'plan --profile' wrote.", "FILE.json")
    ] = None,
    start: Annotated[
        bool, Option("Measure the host's work up to the first step of the jobs of 'make gpu-bench', without a GPU.")
    ] = False,
    batch: options.Batch = 1,
    form: options.Format = Format.text,
) -> None:
    """Measure training steps against PyTorch (needs the torch extra) and compile times against their limit."""
    if predict:
        _predict(models, batch, gpu, profile, form)
        return
    if start:
        _start(models, form)
        return
    from graphc.bench.gpu_specs import write_json
    from graphc.bench.run import run_scaling, run_suite
    from graphc.bench.specs import TIMED
    from graphc.errors import UsageError, nearest

    for model in models or ():
        if model not in TIMED:
            raise UsageError(f"there is no benchmark model {model!r}{nearest(model, TIMED)}; there are {', '.join(TIMED)}")
    if threads is not None:
        scaling = run_scaling(models or TIMED, _counts(threads), rounds=rounds, seconds=seconds, say=output.note)
        if destination is not None:
            write_json(destination, [asdict(row) for row in scaling])
        _show_scaling(scaling, form)
        return
    rows = run_suite(models or TIMED, workers=workers, zoo=zoo, rounds=rounds, seconds=seconds, say=output.note)
    if destination is not None:
        write_json(destination, [asdict(row) for row in rows])
    if form is Format.json:
        output.document([asdict(row) for row in rows])
        return
    output.table(
        ("what", "graphc ms", "beside", "ms", "times as fast", "goal", ""),
        [
            (
                row.name,
                f"{row.ours_ms:.2f}",
                row.peer,
                f"{row.peer_ms:.2f}",
                f"{row.ratio:.2f}",
                f"{row.goal:g}",
                "" if row.ratio >= row.goal else "missed",
            )
            for row in rows
        ],
    )


def _start(models: list[str] | None, form: Format) -> None:
    """Print processor seconds of both starts of each job."""
    from graphc.bench.gpu_specs import JOBS, check_jobs
    from graphc.bench.start import starts

    check_jobs(models or ())
    found = {model: {"first": first, "second": second} for model, first, second in starts(models or list(JOBS))}
    if form is Format.json:
        output.document(found)
        return
    parts = ("import", "compile", "trainer", "step", "total")
    output.table(
        ("job", "start", *(f"{part} s" for part in parts)),
        [
            (model, which, *(f"{seconds[part]:.2f}" for part in parts))
            for model, both in found.items()
            for which, seconds in both.items()
        ],
    )


def _predict(models: list[str] | None, batch: int, gpu: str, profile: str | None, form: Format) -> None:
    """Print a table of cost centres for each model."""
    from graphc.bench.gpu_specs import JOBS
    from graphc.bench.predicted import predicted, profiled

    if profile is not None:
        found = {model: profiled(model, batch=batch, profile=profile) for model in models or ()}
    else:
        found = {model: predicted(model, batch=batch, gpu=gpu) for model in models or JOBS}
    if form is Format.json:
        rows = {
            name: {
                "machine": p.machine,
                "ms": p.seconds * 1e3,
                "low_ms": p.low * 1e3,
                "high_ms": p.high * 1e3,
                "scratch_bytes": p.scratch,
                "calls": [asdict(c) for c in p.costs],
            }
            for name, p in found.items()
        }
        output.document(rows)
        return
    for name, p in found.items():
        output.say(
            f"{name}: {p.low * 1e3:.2f} to {p.high * 1e3:.2f} ms a step predicted for one {p.machine}, "
            f"{p.scratch / 1e9:.2f} GB of scratch"
        )
        output.table(
            ("cost centre", "calls", "ms", "GB", "TFLOP"),
            [
                (c.centre, c.name, f"{c.low * 1e3:.3f} to {c.high * 1e3:.3f}", f"{c.nbytes / 1e9:.2f}", f"{c.flops / 1e12:.2f}")
                for c in p.centres()
            ],
        )


def _counts(text: str) -> list[int]:
    """The numbers in ``1,2,4``, ascending."""
    from graphc.errors import UsageError

    try:
        return sorted({int(item) for item in text.split(",")})
    except ValueError:
        raise UsageError(f"--threads {text}: give numbers with commas between them, as in 1,2,4") from None


def _show_scaling(rows: Sequence[ScalingRow], form: Format) -> None:
    if form is Format.json:
        output.document([asdict(row) for row in rows])
        return
    output.table(
        ("model", "threads", "graphc ms", "efficiency", "PyTorch ms", "efficiency"),
        [
            (
                row.model,
                str(row.threads),
                f"{row.ours_ms:.2f}",
                f"{row.ours_efficiency:.2f}",
                f"{row.peer_ms:.2f}",
                f"{row.peer_efficiency:.2f}",
            )
            for row in rows
        ],
    )
