"""Defines the losses under their public names: ``graphc.losses.SoftmaxCrossEntropy(logits="logits", label="label")``.

Each is one call of the ``loss`` pass. On the command line the same loss is
``softmax_cross_entropy:logits=logits,label=label``; :func:`parse` reads that form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from graphc.errors import UsageError, listed, nearest
from graphc.pipeline import PASSES, PassCall

__all__ = [
    "CTC",
    "L1",
    "LOSSES",
    "MSE",
    "NLL",
    "BCEWithLogits",
    "Huber",
    "Loss",
    "Model",
    "Output",
    "SoftmaxCrossEntropy",
    "parse",
]


def __dir__() -> list[str]:
    return sorted(__all__)


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Base of the losses.

    Attributes:
        reduction: ``mean`` over all counted elements, exact for uneven shares of the workers, or ``sum``.
        keep_outputs: keep the model's own outputs beside the loss; ``Trainer.step`` returns them as arrays.
        sample_weight: value of the graph, or name of a new float32 input (N,), that multiplies each sample's loss; a
            mean divides by the sum of the weights, and metrics are weighted too. None: every sample weighs 1.
    """

    kind: ClassVar[str]
    reduction: str = "mean"
    keep_outputs: bool = False
    sample_weight: str | None = None

    def step(self) -> PassCall:
        """The pipeline step that appends this loss to a model."""
        options: dict[str, Any] = {"kind": self.kind}
        options.update({f.name: getattr(self, f.name) for f in fields(self)})
        return PassCall("loss", {key: value for key, value in options.items() if value is not None})

    def __str__(self) -> str:
        """The form that :func:`parse` reads, without defaults: ``mse:prediction=y``."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        options = ",".join(f"{key}={_as_text(value)}" for key, value in given.items())
        return f"{self.kind}:{options}" if options else self.kind


def _as_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, str) or not isinstance(value, Sequence) else "|".join(map(str, value))


@dataclass(frozen=True)
class SoftmaxCrossEntropy(Loss):
    """``torch.nn.functional.cross_entropy`` of scores (N, C, d1, …) and class indices (N, d1, …) or probabilities (N, C, …).

    A Softmax or LogSoftmax that ends the model is absorbed.

    Attributes:
        logits: value with the scores; None: the model's only output.
        label: value of the graph, or name of a new input.
        ignore_index: label that does not count; None: every label counts.
        axis: class axis; None: that of an absorbed Softmax, else the only one that fits the label, else the feature axis of
            the layer that computes the scores (last of a MatMul, 1 of a convolution), else 1.
        label_shape: sizes of a new label, −1 where they vary, to find the class axis with; ``graphc train`` takes them from
            the data.
        label_smoothing: share in [0, 1] of each label that is spread evenly over the classes.
        class_weight: one number per class, or the name of an initializer.
        label_kind: ``class``, ``probabilities`` or ``auto`` (by the type of an existing label; else ``class``).
        metrics: also report ``accuracy``.
    """

    kind: ClassVar[str] = "softmax_cross_entropy"
    logits: str | None = None
    label: str = "label"
    ignore_index: int | None = None
    axis: int | None = None
    label_shape: Sequence[int] | None = None
    label_smoothing: float = 0.0
    class_weight: Sequence[float] | str | None = None
    label_kind: str = "auto"
    metrics: bool = False


@dataclass(frozen=True)
class NLL(Loss):
    """``torch.nn.functional.nll_loss`` of log-probabilities; attributes as those of :class:`SoftmaxCrossEntropy`."""

    kind: ClassVar[str] = "nll"
    logits: str | None = None
    label: str = "label"
    ignore_index: int | None = None
    axis: int | None = None
    label_shape: Sequence[int] | None = None
    class_weight: Sequence[float] | str | None = None
    metrics: bool = False


@dataclass(frozen=True)
class CTC(Loss):
    """``torch.nn.functional.ctc_loss`` of scores or log-probabilities, (T, N, C) or (N, T, C), and label sequences (N, S).

    A row of labels ends at its first negative number, such as −100 or −1. The mean divides each sample's loss by its number of
    labels, then by the samples. A Softmax that ends the model is absorbed.

    Attributes:
        logits: value with the scores; None: the model's only output.
        label: value of the graph, or name of a new int64 input.
        lengths: value of the graph, or name of a new int64 input (N,): frames that count; None: all of them.
        time_axis: 0 or 1; None: the axis that is not the batch, where the batch is free.
        blank: the class that stands for no label.
        zero_infinity: a label sequence that fits into no path costs 0 instead of infinity.
    """

    kind: ClassVar[str] = "ctc"
    logits: str | None = None
    label: str = "label"
    lengths: str | None = None
    time_axis: int | None = None
    blank: int = 0
    zero_infinity: bool = False


@dataclass(frozen=True)
class BCEWithLogits(Loss):
    """``torch.nn.functional.binary_cross_entropy_with_logits``; a Sigmoid that ends the model is absorbed.

    The label has the shape of the logits; ``metrics`` reports the accuracy at logits above 0.
    """

    kind: ClassVar[str] = "bce_with_logits"
    logits: str | None = None
    label: str = "label"
    metrics: bool = False


@dataclass(frozen=True)
class MSE(Loss):
    """Mean over all elements of (prediction − label)²."""

    kind: ClassVar[str] = "mse"
    prediction: str | None = None
    label: str = "label"


@dataclass(frozen=True)
class L1(Loss):
    """Mean over all elements of |prediction − label|."""

    kind: ClassVar[str] = "l1"
    prediction: str | None = None
    label: str = "label"


@dataclass(frozen=True)
class Huber(Loss):
    """``torch.nn.functional.huber_loss``: quadratic up to ``delta``, linear beyond."""

    kind: ClassVar[str] = "huber"
    prediction: str | None = None
    label: str = "label"
    delta: float = 1.0


@dataclass(frozen=True)
class Output(Loss):
    """A scalar that the model computes itself; several workers give what one gives on the whole batch.

    Each worker computes the scalar over its share of the batch, and shares may be uneven. A mean is weighted: by ``weight``, or
    by what the model's last ops divide by (``Σ a / b``, or the labels that count in a cross-entropy), or else by the samples of
    the share. A sum over the batch (``reduction="sum"``, or a model that ends in one) is added up.

    Attributes:
        name: name of the scalar; None: the model's only output.
        weight: name of a scalar that the loss was divided by, such as the number of tokens; None: see above.
    """

    kind: ClassVar[str] = "output"
    name: str | None = None
    weight: str | None = None


@dataclass(frozen=True)
class Model(Loss):
    """The scalar output of another ONNX file; workers with uneven shares combine theirs as for :class:`Output`.

    Attributes:
        path: path of the file. Its inputs are values of the model if their names match, else new inputs; its weights are
            constant.
        weight: name of a second output of the file, a scalar that the loss was divided by.
    """

    kind: ClassVar[str] = "model"
    path: str
    weight: str | None = None


LOSSES: Mapping[str, type[Loss]] = {
    loss.kind: loss for loss in (SoftmaxCrossEntropy, NLL, CTC, BCEWithLogits, MSE, L1, Huber, Output, Model)
}
"""Name on the command line → loss."""


def parse(text: str) -> Loss:
    """Parse ``kind`` or ``kind:option=value,…``, as in ``softmax_cross_entropy:logits=L,label=Y,ignore_index=-100``.

    Several class weights are separated by ``|``.

    Raises:
        UsageError: an unknown loss or option (with the nearest match), or a value of the wrong type.
    """
    kind, options = split_choice("loss", text, LOSSES)
    if kind == "model" and "path" not in options:
        raise UsageError("loss 'model' needs path=FILE.onnx")
    return LOSSES[kind](**PASSES["loss"].bind(options))


def split_choice(what: str, text: str, known: Mapping[str, type[Any]]) -> tuple[str, dict[str, str]]:
    """Split ``name:key=value,…`` and check name and keys against the dataclasses of ``known``.

    A bool without a value is ``true``.

    Raises:
        UsageError: an unknown name or key, with the nearest match; a key given twice or without a value.
    """
    name, _, body = (part.strip() for part in text.partition(":"))
    if name not in known:
        raise UsageError(f"unknown {what} {name!r}{nearest(name, known)}; {listed(what, known)}")
    kinds = {field.name: field.type for field in fields(known[name])}
    options: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in body.split(","))):
        key, equals, value = (part.strip() for part in item.partition("="))
        last = next(reversed(options), "")
        if not equals and key not in kinds and "str" in str(kinds.get(last)):
            options[last] += f",{item}"  # names of values may hold commas
            continue
        if key not in kinds:
            raise UsageError(f"{what} {name!r} has no option {key!r}{nearest(key, kinds)}; its options are {', '.join(kinds)}")
        if key in options:
            raise UsageError(f"{what} {name!r}: option {key!r} is given twice")
        if not value and (equals or kinds[key] not in (bool, "bool")):
            raise UsageError(f"{what} {name!r}: option {key!r} has no value; write {key}=VALUE, or leave it out")
        options[key] = value if equals else "true"
    return name, options
