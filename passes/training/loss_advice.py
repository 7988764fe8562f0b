"""Suggests losses for a model from the names, shapes and last ops of its outputs.

    a scalar output                                     output
    … ─► Softmax                                        softmax_cross_entropy of what the Softmax reads
    … ─► Sigmoid                                        bce_with_logits of what the Sigmoid reads
    scores [n,10]; [n,t,1000] of token ids; [b,b]       softmax_cross_entropy
    anything else                                       mse

An output that is no float tensor (a class index, a sequence) stands for the float values that it is computed from.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from graphc.ir.facts import constant, dims, is_float, is_parameter, static_dims
from graphc.passes.gradients.reverse_mode import ancestors
from graphc.passes.training.loss_request import producer_behind_views

LABELS = ("label", "target", "labels", "targets", "expected")
"""Names of a new label; the first that the model does not use."""

_CLASSES = re.compile(r"logit|prob|score|class|categor|softmax", re.IGNORECASE)
_FEATURES = re.compile(
    r"emb|feat|hidden|pool|latent|box|coord|offset|regress|state|mask|wav|audio|mel|image|recon", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class LossAdvice:
    """A loss that fits a value of the model.

    Attributes:
        kind: of the loss.
        value: name of the scored value.
        label: name of the new label; None: the loss needs none.
        default: whether the loss finds the value without its name.
        elements: elements of the parameters in front of the value.
    """

    kind: str
    value: str
    label: str | None
    default: bool
    elements: int

    def options(self) -> dict[str, str]:
        """Options of the ``loss`` pass besides its kind."""
        found = {} if self.default else {_OPTION_OF.get(self.kind, "prediction"): self.value}
        return found if self.label is None else {**found, "label": self.label}


_OPTION_OF = {"softmax_cross_entropy": "logits", "bce_with_logits": "logits", "output": "name"}


def advise(graph: ir.Graph) -> list[LossAdvice]:
    """List losses for a legalised graph, the best first: for the value with most parameters in front of it, then for others."""
    taken = {v.name for v in graph.inputs} | {v.name for node in graph for v in node.outputs} | set(graph.initializers)
    label = next((name for name in LABELS if name not in taken), "graphc_label")
    values = list(dict.fromkeys(_scored_values(graph)))[:16]
    size = {value: _elements_before(graph, value) for value in values}
    kinds = {value: _kinds(graph, value) for value in values}
    values.sort(key=lambda value: (not _is_loss(value), -size[value], kinds[value] == ["mse"]))
    first: list[LossAdvice] = []
    second: list[LossAdvice] = []
    for value in values:
        default = len(graph.outputs) == 1 and value is graph.outputs[0]
        for rank, kind in enumerate(kinds[value]):
            target = None if kind == "output" else label
            (second if rank else first).append(LossAdvice(kind, value.name or "", target, default, size[value]))
    return first[:1] + second[:1] + first[1:] + second[1:]


def _scored_values(graph: ir.Graph) -> Iterator[ir.Value]:
    """The float values of known rank that outputs are or are computed from."""
    for output in graph.outputs:
        pending, seen = [output], set[ir.Value]()
        while pending:
            value = pending.pop(0)
            if value in seen:
                continue
            seen.add(value)
            node = value.producer()
            if isinstance(value.type, ir.TensorType) and is_float(value):
                if value.shape is not None and node is not None and constant(value) is None:
                    yield value
            elif node is not None:
                pending.extend(v for v in node.inputs if v is not None)


def _elements_before(graph: ir.Graph, value: ir.Value) -> int:
    parameters = (v for v in ancestors(graph, [value]) if v.is_initializer() and is_parameter(v))
    return sum(int(np.prod(static_dims(v) or (0,), dtype=np.int64)) for v in parameters)


def _is_scalar(value: ir.Value) -> bool:
    return static_dims(value) in ((), (1,), (1, 1))


def _is_loss(value: ir.Value) -> bool:
    return _is_scalar(value) and "loss" in (value.name or "").lower()


def _kinds(graph: ir.Graph, value: ir.Value) -> list[str]:
    """Kinds of losses of a value, the best first."""
    if static_dims(value) == () or _is_loss(value):
        return ["output"]
    if producer_behind_views(value, ("Softmax", "LogSoftmax")) is not None and _has_classes(value):
        return ["softmax_cross_entropy", "mse"]
    if producer_behind_views(value, ("Sigmoid",)) is not None:
        return ["bce_with_logits", "mse"]
    return ["softmax_cross_entropy", "mse"] if _are_scores(graph, value) else ["mse"]


def _has_classes(value: ir.Value) -> bool:
    return any(not isinstance(size, int) or size > 1 for size in (dims(value) or ())[1:])


def _are_scores(graph: ir.Graph, value: ir.Value) -> bool:
    """Whether a value seems to hold scores of classes, by its name and shape."""
    sizes, name = dims(value) or (), value.name or ""
    if len(sizes) < 2 or not _has_classes(value):
        return False
    if _CLASSES.search(name):
        return True
    if _FEATURES.search(name):
        return False
    if len(sizes) == 2:
        return True
    tokens = any(v.dtype in (ir.DataType.INT64, ir.DataType.INT32) and len(dims(v) or ()) == 2 for v in graph.inputs)
    return len(sizes) == 3 and tokens and isinstance(sizes[-1], int)
