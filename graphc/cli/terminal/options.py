"""Options that several commands share; :func:`takes_options` makes options of the fields of dataclasses."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_type_hints

import typer
from typer.models import OptionInfo

from graphc.cli.terminal.output import Format as Formats
from graphc.options import Axes, Inputs, Option, Scales, Shapes

if TYPE_CHECKING:
    from graphc.losses import Loss

R = TypeVar("R")

Model = Annotated[str, typer.Argument(metavar="MODEL", help="An ONNX file; '-' reads standard input.", show_default=False)]
Format = Annotated[Formats, typer.Option("--format", help="Tables and text, or JSON; --json is short for it.")]
LossText = Annotated[
    str,
    Option(
        "KIND:option=value,…  e.g. softmax_cross_entropy:logits=L,label=Y; kinds: softmax_cross_entropy, nll, ctc, "
        "bce_with_logits, mse, l1, huber, output, model.",
        "LOSS",
    ),
]
OptimizerText = Annotated[
    str, Option("NAME:option=value,…  e.g. adam:lr=1e-3; names: sgd, adam, adamw, adagrad, rmsprop.", "OPTIMIZER")
]
Deadline = Annotated[float | None, Option("A collective may take so long; default GRAPHC_DEADLINE, or 300.", "SECONDS")]
Transport = Annotated[
    str,
    Option(
        "How workers talk. auto: processes, by MPI or as their launcher says, and GPUs by NCCL where every worker has its"
        " own; nccl: that or an error; mpi, tcp: GPUs through host memory too; threads: all workers in one process.",
        "HOW",
    ),
]
Batch = Annotated[
    int,
    Option("Samples of one worker: the size of every symbolic dimension.", "N", minimum=1, flags=("--batch-size", "--batch")),
]
DumpDir = Annotated[Path | None, Option("Save the model after each pass here.", "FOLDER")]
Backend = Annotated[str, Option("'auto', or a name that 'graphc backends' lists; options: 'cupy:tf32=true'.", "NAME")]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of ``graphc train`` beyond those of compilation."""

    model: Model
    data: Annotated[
        str,
        Option(
            "One array per graph input plus the label; axis 0 = sample. Or a folder of NAME.npy files, left on disk.",
            "D.npz|FOLDER",
        ),
    ]
    loss: LossText
    optimizer: OptimizerText
    epochs: Annotated[int, Option("In total, those before --resume included.", "N", minimum=1)] = 1
    mesh: Annotated[str | None, Option("Axes over the workers: data=2,pipe=2. Default: all on the data axis.", "AXES")] = None
    transport: Transport = "auto"
    backend: Backend = "auto"
    no_shuffle: Annotated[bool, Option("Take the samples in the order of the file.")] = False
    tail: Annotated[str, Option("What becomes of samples that fill no batch: keep, drop, pad or weight-zero.", "TAIL")] = "keep"
    prefetch: Annotated[int, Option("Batches that a thread reads ahead.", "N", minimum=0)] = 0
    scale_lr_from: Annotated[
        int | None, Option("The learning rate is meant for batches of B0: scale it linearly.", "B0", minimum=1)
    ] = None
    warmup_steps: Annotated[int, Option("Reach the learning rate on a straight line.", "N", minimum=0)] = 0
    log_every: Annotated[int, Option("Report every K steps; 0: every 10 in JSON, never in text.", "K", minimum=0)] = 0
    eval_data: Annotated[str | None, Option("Evaluate on it, in inference mode, after each epoch.", "E.npz")] = None
    checkpoint: Annotated[str | None, Option("Save all state after each epoch.", "DIR")] = None
    trace: Annotated[str | None, Option("Timeline of all workers, for Perfetto or chrome://tracing.", "FILE.json")] = None
    trace_steps: Annotated[int, Option("Steps that --trace records.", "N", minimum=1)] = 200
    resume: Annotated[str | None, Option("Go on from this checkpoint.", "DIR")] = None
    output: Annotated[
        str | None, Option("The trained model: your file with new weights.", "FILE", flags=("-o", "--output"))
    ] = None
    deadline: Deadline = None
    form: Format = Formats.text


def help_unless_named(context: typer.Context) -> None:
    """The callback of a group of commands: without one of them, print the help."""
    if context.invoked_subcommand is None:
        print(context.get_help())


def takes_options(command: Callable[..., R]) -> Callable[..., R]:
    """Give ``command`` typer's options for its parameters, and for each field of those that are dataclasses.

    Required options come first.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if dataclasses.is_dataclass(parameter.annotation):
            groups[parameter.name] = parameter.annotation
            parameters += _parameters(parameter.annotation)
        elif parameter.annotation is typer.Context:
            parameters.append(parameter)
        else:
            parameters.append(_parameter(parameter.name, parameter.annotation, parameter.default))

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
    """The fields of a dataclass as keyword parameters."""
    hints = get_type_hints(group, include_extras=True)
    for field in dataclasses.fields(group):
        default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
        yield _parameter(field.name, hints[field.name], default)


def _parameter(name: str, hint: Any, default: Any) -> inspect.Parameter:
    """A keyword parameter with typer's annotation in place of ours."""
    kind, shown = get_args(hint)
    if isinstance(shown, Option):
        flags = shown.flags or (f"--{name.replace('_', '-')}",)
        option = typer.Option(*flags, metavar=shown.metavar, help=shown.help, min=shown.minimum)
        hint = Annotated[_TEXT_TYPES.get(kind, kind), option]
        shown = option
    if isinstance(shown, OptionInfo) and shown.metavar is None and {int, float} & {kind, *get_args(kind)}:
        shown.metavar = "N"
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def as_arguments(group: Any) -> list[str]:
    """The command-line arguments that give the fields of a dataclass of options their values; none for defaults."""
    hints, words = get_type_hints(type(group), include_extras=True), list[str]()
    for field in dataclasses.fields(group):
        value, option = getattr(group, field.name), get_args(hints[field.name])[1]
        if value == field.default:
            continue
        flag = option.flags[0] if option.flags else f"--{field.name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(flag)
        else:
            values = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
            words += [word for item in values for word in (flag, str(item))]
    return words


_TEXT_TYPES: dict[Any, Any] = {
    Sequence[str] | None: list[str] | None,
    Shapes: list[str] | None,
    Inputs: list[str] | None,
    Axes: list[str] | None,
    Scales: list[str] | None,
    int | str | None: str | None,
}
"""Option types that typer does not know → the type that it parses instead."""


def loss_of(text: str, *, metrics: bool = False) -> Loss:
    """Parse the loss; with ``metrics`` it also reports accuracy if it has one."""
    from graphc import losses

    loss = losses.parse(text)
    if metrics and any(f.name == "metrics" for f in dataclasses.fields(loss)):
        loss = dataclasses.replace(loss, metrics=True)  # type: ignore[call-arg]
    return loss
