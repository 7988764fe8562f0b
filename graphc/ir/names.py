"""Names shared by passes: reserved state and metadata keys."""

from __future__ import annotations

import json

import onnx_ir as ir

from graphc.errors import UsageError, listed, nearest

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
"""Metadata key on a framework's buffer, which never trains: the output of a ``Constant``, or an initializer if it changes."""

PARAMETER = "graphc.parameter"
"""Metadata key on an initializer that is a framework's parameter: it trains, also if it is a single number."""

BATCHNORM = "graphc.batchnorm"
"""Metadata key on a running mean: ``train`` or ``inference``, the mode of the framework's module during training."""

CLASSES = "graphc.classes"
"""Metadata key on a label that a loss made: where its classes are, ``axis 1 of 'output'``, when no one said."""

BUCKET = "bucket"
"""Attribute of update and AllReduce nodes: name of the flat buffer that holds their operands."""

CLIP_VALUE = "clip_value"
"""Attribute of optimizers' update nodes: limit of the gradient's elements, 0 for none."""

MESH = "graphc.mesh"
"""Metadata key of the model: the mesh as text, ``"data=2"``."""

KEPT_OUTPUTS = "graphc.kept_outputs"
"""Metadata key of a model with a loss: the outputs that stay beside the loss, as a JSON list of names."""

STAGE_SHARES = "graphc.stage_shares"
"""Metadata of a model with pipeline stages: share of each in the modelled time, separated by commas."""

SCHEDULE = "graphc.schedule"
"""Metadata key of the model: the schedule of its pipeline stages as text, ``"1f1b"``; there are stages only where it is."""

PLACED = "placed"
"""The schedule of a model whose nodes were put on devices by hand; there are no micro-batches."""

STAGE = "graphc.stage"
"""Metadata key of a node: number of the pipeline stage on which it runs."""

PHASE = "graphc.phase"
"""Metadata key of a node with a stage: ``backward`` for nodes of the backward pass."""

DETERMINISTIC = "graphc.deterministic"
"""Metadata key of the model: ``run`` or ``any-world``, the scope in which two equal runs must have equal bits."""


def marks_of(node: ir.Node) -> dict[str, str]:
    """Stage and phase of a node, which nodes that take its place inherit; empty where the graph has no stages."""
    return {key: node.metadata_props[key] for key in (STAGE, PHASE) if key in node.metadata_props}


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


def kept_outputs(model: ir.Model) -> list[str]:
    """The model's own outputs that a loss with ``keep_outputs`` left beside it."""
    return list(json.loads(model.metadata_props.get(KEPT_OUTPUTS, "[]")))
