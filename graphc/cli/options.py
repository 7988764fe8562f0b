"""Options that several commands share; :func:`takes_options` makes options of the fields of dataclasses."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_type_hints

import typer

from graphc.cli.output import Format as Formats
from graphc.options import Option

if TYPE_CHECKING:
    from graphc.losses import Loss

R = TypeVar("R")

Model = Annotated[str, typer.Argument(metavar="MODEL", help="An ONNX file; '-' reads standard input.", show_default=False)]
Format = Annotated[Formats, typer.Option("--format", help="Tables and text, or JSON; --json is short for it.")]
LossText = Annotated[
    str,
    typer.Option(
        "--loss",
        metavar="LOSS",
        show_default=False,
        help="KIND:option=value,…  e.g. softmax_cross_entropy:logits=L,label=Y; kinds: softmax_cross_entropy, nll, "
        "bce_with_logits, mse, l1, huber, output, model.",
    ),
]
OptimizerText = Annotated[
    str,
    typer.Option(
        "--optimizer",
        metavar="OPTIMIZER",
        show_default=False,
        help="NAME:option=value,…  e.g. adam:lr=1e-3; names: sgd, adam, adamw, adagrad, rmsprop.",
    ),
]
Deadline = Annotated[
    float | None,
    typer.Option("--deadline", metavar="SECONDS", help="A collective may take so long; default GRAPHC_DEADLINE, or 300."),
]
Transport = Annotated[
    str,
    typer.Option(
        "--transport",
        metavar="HOW",
        help="How workers talk. auto: processes, by MPI or as their launcher says, and GPUs by NCCL where every worker has its"
        " own; nccl: that or an error; mpi, tcp: GPUs through host memory too; threads: all workers in one process.",
    ),
]
Batch = Annotated[
    int,
    typer.Option(
        "--batch-size", "--batch", metavar="N", help="Samples of one worker: the size of every symbolic dimension.", min=1
    ),
]
DumpDir = Annotated[Path | None, typer.Option("--dump-dir", metavar="FOLDER", help="Save the model after each pass here.")]
Backend = Annotated[
    str,
    typer.Option(
        "--backend", metavar="NAME", help="'auto', or a name that 'graphc backends' lists; options: 'cupy:tf32=true'."
    ),
]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of ``graphc train`` beyond those of compilation."""

    model: Model
    data: Annotated[
        str,
        typer.Option(
            "--data",
            metavar="D.npz|FOLDER",
            show_default=False,
            help="One array per graph input plus the label; axis 0 = sample. Or a folder of NAME.npy files, left on disk.",
        ),
    ]
    loss: LossText
    optimizer: OptimizerText
    epochs: Annotated[int, typer.Option("--epochs", metavar="N", help="In total, those before --resume included.", min=1)] = 1
    transport: Transport = "auto"
    backend: Backend = "auto"
    no_shuffle: Annotated[bool, typer.Option("--no-shuffle", help="Take the samples in the order of the file.")] = False
    tail: Annotated[
        str,
        typer.Option(
            "--tail", metavar="TAIL", help="What becomes of samples that fill no batch: keep, drop, pad or weight-zero."
        ),
    ] = "keep"
    prefetch: Annotated[int, typer.Option("--prefetch", metavar="N", help="Batches that a thread reads ahead.", min=0)] = 0
    scale_lr_from: Annotated[
        int | None,
        typer.Option(
            "--scale-lr-from", metavar="B0", help="The learning rate is meant for batches of B0: scale it linearly.", min=1
        ),
    ] = None
    warmup_steps: Annotated[
        int, typer.Option("--warmup-steps", metavar="N", help="Reach the learning rate on a straight line.", min=0)
    ] = 0
    log_every: Annotated[
        int, typer.Option("--log-every", metavar="K", help="Report every K steps; 0: every 10 in JSON, never in text.", min=0)
    ] = 0
    eval_data: Annotated[
        str | None, typer.Option("--eval-data", metavar="E.npz", help="Evaluate on it, in inference mode, after each epoch.")
    ] = None
    checkpoint: Annotated[str | None, typer.Option("--checkpoint", metavar="DIR", help="Save all state after each epoch.")] = (
        None
    )
    trace: Annotated[
        str | None,
        typer.Option("--trace", metavar="FILE.json", help="Timeline of all workers, for Perfetto or chrome://tracing."),
    ] = None
    trace_steps: Annotated[int, typer.Option("--trace-steps", metavar="N", help="Steps that --trace records.", min=1)] = 200
    resume: Annotated[str | None, typer.Option("--resume", metavar="DIR", help="Go on from this checkpoint.")] = None
    output: Annotated[
        str | None, typer.Option("-o", "--output", metavar="FILE", help="The trained model: your file with new weights.")
    ] = None
    deadline: Deadline = None
    form: Format = Formats.text


def help_unless_named(context: typer.Context) -> None:
    """The callback of a group of commands: without one of them, print the help."""
    if context.invoked_subcommand is None:
        print(context.get_help())


def takes_options(command: Callable[..., R]) -> Callable[..., R]:
    """Give ``command`` one option for each field of its parameters that are dataclasses; required options come first."""
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if dataclasses.is_dataclass(parameter.annotation):
            groups[parameter.name] = parameter.annotation
            parameters += _parameters(parameter.annotation)
        else:
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY))

    def call(**given: Any) -> R:
        for name, group in groups.items():
            fields = {field.name: given.pop(field.name) for field in dataclasses.fields(group)}
            given[name] = group(**fields)
        return command(**given)

    parameters.sort(key=lambda p: p.default is not p.empty)
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__doc__ = command.__doc__
    return call


def _parameters(group: Any) -> Iterator[inspect.Parameter]:
    """The fields of a dataclass as keyword parameters with typer's annotations."""
    hints = get_type_hints(group, include_extras=True)
    for field in dataclasses.fields(group):
        hint, default = hints[field.name], field.default
        kind, shown = get_args(hint)
        if isinstance(shown, Option):
            name = f"--{field.name.replace('_', '-')}"
            option = typer.Option(name, metavar=shown.metavar, help=shown.help, min=shown.minimum)
            hint = Annotated[_TEXT_TYPES.get(kind, kind), option]
        default = inspect.Parameter.empty if default is dataclasses.MISSING else default
        yield inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


_TEXT_TYPES: dict[Any, Any] = {Sequence[str] | None: list[str] | None, int | str | None: str | None}
"""Option types that typer does not know → the type that it parses instead."""


def loss_of(text: str, *, metrics: bool = False) -> Loss:
    """Parse the loss; with ``metrics`` it also reports accuracy if it has one."""
    import dataclasses

    from graphc import losses

    loss = losses.parse(text)
    if metrics and any(f.name == "metrics" for f in dataclasses.fields(loss)):
        loss = dataclasses.replace(loss, metrics=True)  # type: ignore[call-arg]
    return loss
