"""Options that several commands share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from graphc.cli.output import Format as Formats

if TYPE_CHECKING:
    from graphc.losses import Loss

Model = Annotated[str, typer.Argument(metavar="MODEL", help="An ONNX file; '-' reads standard input.", show_default=False)]
Format = Annotated[Formats, typer.Option("--format", help="Tables and text, or JSON.")]
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
Freeze = Annotated[
    list[str] | None, typer.Option("--freeze", metavar="GLOB", help="Parameters that do not train (repeatable).")
]
Train = Annotated[list[str] | None, typer.Option("--train", metavar="GLOB", help="Parameters that train even so (repeatable).")]
Batch = Annotated[
    str | None,
    typer.Option("--batch", metavar="N|SYMBOL", help="New batch dimension of a model exported with a fixed one."),
]
Initialize = Annotated[
    str | None,
    typer.Option(
        "--initialize",
        metavar="METHOD",
        help="Fresh weights: he, glorot, normal, uniform or zeros, for a file without trained ones.",
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
        help="How workers talk. auto: processes, by MPI or as their launcher says, and GPUs by NCCL where every worker has its"
        " own; nccl: that or an error; mpi, tcp: GPUs through host memory too; threads: all workers in one process.",
    ),
]
Seed = Annotated[int, typer.Option("--seed", help="Of initialisation, shuffling and Dropout.")]
BucketMB = Annotated[float, typer.Option("--bucket-mb", help="Size of a gradient bucket in megabytes.")]
Precision = Annotated[
    str | None,
    typer.Option("--precision", metavar="TYPE", help="bf16 or fp16: mixed precision; with options: 'bf16:deny=Conv|head/*'."),
]
Recompute = Annotated[
    str | None,
    typer.Option("--recompute", metavar="MODE", help="cheap, all or budget_mb=N: keep fewer activations, compute them again."),
]
Strategy = Annotated[
    str,
    typer.Option(
        "--strategy",
        metavar="STRATEGY",
        help="NAME:option=value,…  mirrored, zero:stage=1|2|3, central_storage, parameter_server:servers=1,staleness=N "
        "(asynchronous, servers are processes beside the workers), local_sgd:every=N or adasum.",
    ),
]
Accumulate = Annotated[int, typer.Option("--accumulate", metavar="K", help="Micro-batches of a step.", min=1)]
SyncBatchnorm = Annotated[
    bool, typer.Option("--sync-batchnorm", help="BatchNormalization over the global batch, not each worker's share.")
]
ClipNorm = Annotated[float | None, typer.Option("--clip-norm", help="Bound of the global norm of the gradient.")]
ClipValue = Annotated[float | None, typer.Option("--clip-value", help="Bound of every element of the gradient.")]
Compress = Annotated[
    str | None,
    typer.Option("--compress", metavar="METHOD", help="What travels: fp16, bf16, powersgd:rank=4 or topk:ratio=0.01."),
]
Deterministic = Annotated[
    str | None,
    typer.Option(
        "--deterministic", metavar="MODE", help="run: equal runs have equal bits; any-world: on 1, 2 and 4 workers too."
    ),
]
Nonfinite = Annotated[
    str, typer.Option("--nonfinite", metavar="MODE", help="A step with a NaN or infinity: stop, or skip it and go on.")
]
Backend = Annotated[
    str, typer.Option("--backend", help="'auto', or a name that 'graphc backends' lists; with options: 'cupy:tf32=true'.")
]


def batch_of(text: str | None) -> int | str | None:
    """``"8"`` → 8, ``"N"`` → ``"N"``.

    Raises:
        UsageError: neither a positive number nor an identifier.
    """
    from graphc.errors import UsageError

    if text is None or text.isidentifier():
        return text
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise UsageError(f"--batch {text!r} is neither a positive whole number nor the name of a symbol")


def loss_of(text: str, *, metrics: bool = False) -> Loss:
    """The loss; with ``metrics`` it also reports the accuracy where it has one."""
    import dataclasses

    from graphc import losses

    loss = losses.parse(text)
    if metrics and any(f.name == "metrics" for f in dataclasses.fields(loss)):
        loss = dataclasses.replace(loss, metrics=True)  # type: ignore[call-arg]
    return loss
