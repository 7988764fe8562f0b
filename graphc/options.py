"""The options of ``graphc.compile`` that are plain values, each declared once.

``graphc.compile`` takes them as keyword arguments, ``graphc train`` and ``graphc compile`` as command-line options, and a
training job writes them into its file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from graphc.errors import UsageError

if TYPE_CHECKING:
    from graphc.ir.bound_inputs import Scale


@dataclass(frozen=True, slots=True)
class Option:
    """What the command line says about a field.

    Attributes:
        help: its line in ``--help``.
        metavar: what stands for its value there; empty: the type.
        minimum: the smallest number that it takes.
        flags: its names; empty: ``--`` and the field's.
    """

    help: str
    metavar: str | None = None
    minimum: int | None = None
    flags: tuple[str, ...] = ()


def key_values(text: str) -> dict[str, str]:
    """``"key=value,flag"`` → ``{"key": "value", "flag": "true"}``."""
    pairs = [item.partition("=") for item in text.split(",") if item.strip()]
    return {key.strip(): value.strip() if equals else "true" for key, equals, value in pairs}


Shapes: TypeAlias = Mapping[str, Sequence[int | str | None]] | Sequence[str] | None
"""Input → its dimensions (None: as the file says), or texts such as ``"x=2,3,48,192"``."""


def shape_texts(shapes: Shapes) -> list[str] | None:
    """Shapes in the form that a pipeline holds: ``x=2;3;48;192``."""
    if not shapes:
        return None
    if isinstance(shapes, Mapping):
        return [f"{name}={';'.join('?' if d is None else str(d) for d in given)}" for name, given in shapes.items()]
    return [text.replace(",", ";") for text in ([shapes] if isinstance(shapes, str) else shapes)]


Inputs: TypeAlias = Mapping[str, Any] | Sequence[str] | None
"""Input → its constant value (an array, a number or text), or texts such as ``"state=zeros:2,1,128"``."""

Scales: TypeAlias = Mapping[str, float | str] | Sequence[str] | None
"""Input → the factor of its integers, or texts such as ``"image=1/255"``; see :class:`graphc.ir.bound_inputs.Scale`."""

Axes: TypeAlias = Mapping[str, int] | Sequence[str] | None
"""Input → an axis, or texts such as ``"state=1"``."""


def constants_of(inputs: Inputs) -> dict[str, Any]:
    """Inputs with their constant values.

    Raises:
        UsageError: a text without ``=``.
    """
    return dict(inputs) if isinstance(inputs, Mapping) else dict(_named(text, "sr=16000") for text in inputs or ())


def axes_of(axes: Axes) -> dict[str, int]:
    """Inputs with an axis each.

    Raises:
        UsageError: a text without ``=`` and a whole number.
    """
    if isinstance(axes, Mapping):
        return dict(axes)
    found = dict(_named(text, "state=1") for text in axes or ())
    for name, text in found.items():
        if not text.isdecimal():
            raise UsageError(f"{name}={text} names no axis; write it as in state=1")
    return {name: int(text) for name, text in found.items()}


def scales_of(scales: Scales) -> dict[str, Scale]:
    """Inputs that are fed as integers, with the scale of each.

    Raises:
        UsageError: a text that is no scale.
    """
    from graphc.ir.bound_inputs import Scale  # numpy and onnx: a help page needs neither

    pairs = scales.items() if isinstance(scales, Mapping) else (_named(text, "image=1/255") for text in scales or ())
    return {name: Scale.parse(name, given) for name, given in pairs}


def _named(text: str, example: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise UsageError(f"{text!r} says nothing of an input; write it as in {example}")
    return name, value


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """What a model file may ask for when it is read."""

    max_model_bytes: Annotated[
        int | None,
        Option(
            "Bytes that constants of the model may expand to. Default: 2 GiB, or four times its tensors if that is more.",
            "N",
            minimum=1,
        ),
    ] = None
    external_data: Annotated[
        Sequence[str] | None,
        Option("A folder that external data may lie in, besides the model's own (repeatable).", "FOLDER"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ParameterChoice:
    """Which parameters train, as glob patterns over their names."""

    freeze: Annotated[Sequence[str] | None, Option("Parameters that do not train (repeatable).", "GLOB")] = None
    train: Annotated[
        Sequence[str] | None,
        Option("Constants that train although the rules leave them out; exceptions to --freeze (repeatable).", "GLOB"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class CompileOptions(ParameterChoice, ReadOptions):
    """How a model becomes a training graph, as plain values."""

    batch: Annotated[int | str | None, Option("New batch dimension of a model exported with a fixed one.", "N|SYMBOL")] = None
    shapes: Annotated[
        Shapes,
        Option("Fix dimensions of an input, '?' as the file says: x=?,3,48,192 (repeatable).", "NAME=N,…", flags=("--shape",)),
    ] = None
    inputs: Annotated[
        Inputs,
        Option(
            "An input with a constant value in every step: sr=16000, state=zeros:2,1,128, ones:SHAPE or FILE.npy (repeatable).",
            "NAME=VALUE",
            flags=("--input",),
        ),
    ] = None
    batch_axis: Annotated[
        Axes, Option("Axis of an input's samples, if it is not 0: state=1 (repeatable).", "NAME=AXIS", flags=("--batch-axis",))
    ] = None
    scale: Annotated[
        Scales,
        Option(
            "An input fed as integers (uint8 images), times a factor: x=1/255; then mean and deviation of channels: "
            "x=1/255,mean=0.485:0.456:0.406,std=0.229:0.224:0.225 (repeatable).",
            "NAME=FACTOR",
            flags=("--scale",),
        ),
    ] = None
    dequantize: Annotated[
        str,
        Option(
            "Quantised files: auto trains float weights behind rounded activations, always rounds nothing, never leaves the"
            " integers alone.",
            "MODE",
        ),
    ] = "auto"
    initialize: Annotated[
        str | None,
        Option("Fresh weights: he, glorot, normal, uniform or zeros, for a file without trained ones.", "METHOD"),
    ] = None
    seed: Annotated[int, Option("Of initialisation, shuffling and Dropout.", "N")] = 0
    bucket_mb: Annotated[float, Option("Size of a gradient bucket in megabytes.", "N")] = 25.0
    precision: Annotated[
        str | None, Option("bf16 or fp16: mixed precision; with options: 'bf16:deny=Conv|head/*'.", "TYPE")
    ] = None
    recompute: Annotated[
        str | None, Option("cheap, all or budget_mb=N: keep fewer activations, compute them again.", "MODE")
    ] = None
    shard: Annotated[
        Sequence[str] | None,
        Option(
            "What the tensor axis of the mesh divides: auto (default), auto:sequence (norms and residual sums too, along the"
            " sequence), or GLOB=AXIS (repeatable).",
            "GLOB=AXIS",
        ),
    ] = None
    strategy: Annotated[
        str,
        Option(
            "NAME:option=value,…  mirrored, zero:stage=1|2|3 (shard_size=N|node: among the N workers of a node), "
            "central_storage, parameter_server:servers=1,staleness=N "
            "(asynchronous, servers are processes beside the workers), local_sgd:every=N or adasum.",
            "STRATEGY",
        ),
    ] = "mirrored"
    allreduce: Annotated[
        str | None,
        Option(
            "flat, or hierarchical[:per_node=N]: inside each node of N workers, between the nodes, inside again. Default of N:"
            " the workers of a machine.",
            "HOW",
        ),
    ] = None
    accumulate: Annotated[int, Option("Micro-batches of a step.", "K", minimum=1)] = 1
    schedule: Annotated[
        str | None,
        Option("Order of a pipeline's micro-batches: gpipe, 1f1b (default), interleaved:stages=N or zero-bubble.", "NAME"),
    ] = None
    cut: Annotated[Sequence[str] | None, Option("Value behind which a pipeline stage ends (repeatable).", "NAME")] = None
    place: Annotated[
        Sequence[str] | None,
        Option("Put nodes, by name or result, on a device of the pipe axis: 'branch1/*=1' (repeatable).", "GLOB=DEVICE"),
    ] = None
    balance: Annotated[str, Option("What pipeline stages have equal parts of: time or memory.", "WHAT")] = "time"
    stage_memory_mb: Annotated[float | None, Option("The most memory of a pipeline stage in megabytes.", "N")] = None
    sync_batchnorm: Annotated[bool, Option("BatchNormalization over the global batch, not each worker's share.")] = False
    clip_norm: Annotated[float | None, Option("Bound of the global norm of the gradient.", "N")] = None
    clip_value: Annotated[float | None, Option("Bound of every element of the gradient.", "N")] = None
    compress: Annotated[str | None, Option("What travels: fp16, bf16, powersgd:rank=4 or topk:ratio=0.01.", "METHOD")] = None
    deterministic: Annotated[
        str | None, Option("run: equal runs have equal bits; any-world: on 1, 2 and 4 workers too.", "MODE")
    ] = None
    nonfinite: Annotated[str, Option("A step with a NaN or infinity: stop, or skip it and go on.", "MODE")] = "stop"

    def __post_init__(self) -> None:
        if not -(2**63) <= self.seed < 2**63:
            raise UsageError(f"seed={self.seed} does not fit 64 bits; take a smaller number")
