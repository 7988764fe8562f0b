"""Names shared by passes: reserved state, metadata keys; selects the parameters that train."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

import onnx_ir as ir

from graphc.errors import UsageError, listed, nearest
from graphc.ir.declare import Role
from graphc.ir.facts import is_parameter
from graphc.ir.updates import has_role

STEP = "graphc.step"
"""int64 scalar initializer: number of finished steps."""

SEED = "graphc.seed"
"""int64 scalar initializer: seed of every random op."""

LEARNING_RATE = "graphc.lr"
"""float32 scalar initializer: the learning rate, which schedules write between steps."""

SAMPLE_OFFSET = "graphc.sample_offset"
"""int64 scalar initializer, different on each rank: index of this rank's first sample in the global batch."""

LIVE = "graphc.live"
"""float32 scalar initializer, different on each rank: 1, or 0 where this rank's share of the batch is empty."""

BY_RANK = (SAMPLE_OFFSET, LIVE)
"""State that differs between ranks: neither broadcast nor compared."""

LOSS_SCALE = "graphc.loss_scale"
"""float32 scalar initializer: factor on the differentiated loss in float16 training."""

SKIPPED = "graphc.skipped"
"""int64 scalar initializer: number of steps skipped because of a NaN or an infinity."""

GOOD_STEPS = "graphc.good_steps"
"""int64 scalar initializer: number of consecutive steps without overflow."""

RESERVED = (STEP, SEED, LEARNING_RATE, SAMPLE_OFFSET, LIVE, LOSS_SCALE, GOOD_STEPS, SKIPPED)

LOSS_TOTAL = "graphc.loss_total"
"""Metadata key on the value that autodiff differentiates: the sum over this rank's samples, before any division."""

GRADIENT_OF = "graphc.gradient_of"
"""Metadata key on a gradient: name of the value that it belongs to."""

BUFFER = "graphc.buffer"
"""Metadata key on the output of a ``Constant`` that holds a framework's buffer: it never trains."""

BATCHNORM = "graphc.batchnorm"
"""Metadata key on a running mean: ``train`` or ``inference``, the mode of the framework's module during training."""

BUCKET = "bucket"
"""Attribute of update and AllReduce nodes: name of the flat buffer that holds their operands."""

CLIP_VALUE = "clip_value"
"""Attribute of optimizers' update nodes: limit of the gradient's elements, 0 for none."""

MESH = "graphc.mesh"
"""Metadata key of the model: the mesh as text, ``"data=2"``."""

DETERMINISTIC = "graphc.deterministic"
"""Metadata key of the model: ``run`` or ``any-world``, the scope in which two equal runs must have equal bits."""


def find_value(graph: ir.Graph, name: str) -> ir.Value:
    """The value called ``name``; UsageError with the nearest match when it does not exist."""
    known: dict[str, ir.Value] = {v.name: v for v in graph.inputs if v.name}
    known.update(graph.initializers)
    for node in graph:
        known.update({v.name: v for v in node.outputs if v.name})
    if name not in known:
        outputs = [v.name for v in graph.outputs if v.name]
        raise UsageError(f"the graph has no value {name!r}{nearest(name, known)}; {listed('output', outputs, most=8)}")
    return known[name]


def select_trainable(
    graph: ir.Graph, *, train: Sequence[str] | None = None, freeze: Sequence[str] | None = None
) -> list[ir.Value]:
    """The parameters that train, in the order of the file.

    By default these are all float initializers of rank ≥ 1 except running statistics; ``freeze`` removes those that its globs
    match and ``train`` adds those that its globs match (even against ``freeze``).

    Raises:
        UsageError: a pattern that matches nothing.
    """
    return [value for value, reason in explain_trainable(graph, train=train, freeze=freeze) if reason == "trains"]


def explain_trainable(
    graph: ir.Graph, *, train: Sequence[str] | None = None, freeze: Sequence[str] | None = None
) -> list[tuple[ir.Value, str]]:
    """Every initializer with ``"trains"`` or the reason why it does not train."""
    for pattern in [*(train or ()), *(freeze or ())]:
        if not fnmatch.filter(graph.initializers, pattern):
            known = graph.initializers
            raise UsageError(f"no parameter matches {pattern!r}{nearest(pattern, known)}; {listed('parameter', known, most=8)}")
    result = []
    for name, value in graph.initializers.items():
        if not is_parameter(value):
            reason = "not a float tensor of rank ≥ 1"
        elif is_running_statistic(value):
            reason = "running statistic"
        elif any(fnmatch.fnmatchcase(name, p) for p in freeze or ()) and not any(
            fnmatch.fnmatchcase(name, p) for p in train or ()
        ):
            reason = "frozen"
        else:
            reason = "trains"
        result.append((value, reason))
    return result


def is_running_statistic(value: ir.Value) -> bool:
    """Whether the value is a running mean or variance of a BatchNormalization, or another running statistic."""
    normalises = any(node.op_type == "BatchNormalization" and index in (3, 4) for node, index in value.uses())
    return normalises or has_role(value, Role.STATISTIC)
