"""train_mode: switch BatchNormalization and Dropout to training; inference_mode: to inference.

    before   y = BatchNormalization(x, scale, bias, mean, var)          z = Dropout(y, 0.5)
    after    y, m, v, _ = graphc.BatchNormalizationTraining(x, scale, bias)
             mean' = graphc.RunningAverage(mean, m·samples, samples);  var' = graphc.RunningAverage(var, v·samples, samples)
             z = Mul(y, graphc.DropoutMask(shape of y, seed, step, sample_offset; ratio=0.5))

Running statistics follow ONNX: the running variance averages the **biased** variance of each batch (PyTorch's own modules
average the unbiased one, n/(n-1) times as large), and ``momentum`` weighs the old value. ``samples`` is the number of samples
of this rank's share, 0 where it is empty (``graphc.live``): statistics of several shares are weighted by it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from graphc.errors import counted
from graphc.ir import DOMAIN
from graphc.ir.builder import Builder
from graphc.ir.facts import constant, dims, input_of, is_parameter
from graphc.ir.names import BATCHNORM, LIVE, SEED, STEP
from graphc.ir.parameters import check_patterns, matches
from graphc.ir.state import scalar
from graphc.ir.subgraphs import bodies
from graphc.passes.optimize.simplify import replace
from graphc.passes.training.draws import first_row
from graphc.passes.training.own_gradients import drop_stand_ins
from graphc.pipeline import Context, graph_pass


@graph_pass("train_mode", requires=("legalize",), changes="training")
def train_mode(
    model: ir.Model,
    ctx: Context,
    *,
    batchnorm: bool = True,
    dropout: bool = True,
    freeze: Sequence[str] | None = None,
    seed: int = 0,
) -> bool:
    """Put BatchNormalization and Dropout into training mode.

    Args:
        batchnorm: normalise with the statistics of the batch, and update the running ones if they are initializers.
        dropout: drop elements. Masks depend on seed, step, the node's name and the sample's place in the global batch.
        freeze: glob patterns of parameters. A BatchNormalization stays in inference mode if its scale or statistics match. In a
            PyTorch module it does if its statistics match, or if the module has it in evaluation mode.
        seed: of masks, unless a Trainer is given another.

    Raises:
        UsageError: a pattern that matches no initializer.
    """
    graph = model.graph
    check_patterns(graph, freeze=freeze)
    op = Builder(graph)
    averages: dict[ir.Value, _Average] = {}
    following: dict[ir.Value, ir.Value] = {}
    normalised = dropped = 0
    for node in list(graph):
        op.before, op.scope = node, node.name or node.op_type
        if batchnorm and node.op_type == "BatchNormalization" and node.domain == "":
            if not _averages_running_statistics(node):
                continue
            if _is_frozen(node, freeze or ()):
                _batchnorm_inference(graph, op, node)
                continue
            _batchnorm_training(graph, op, node, averages)
            normalised += 1
        elif dropout and node.op_type == "Dropout" and node.domain == "":
            if _dropout_training(graph, op, node, seed):
                dropped += 1
            else:
                ctx.note(f"train_mode: {node.name} keeps its inference behaviour, for its ratio is no constant")
        elif node.op_type == "BufferValue" and node.domain == DOMAIN:
            _buffer_training(graph, op, node, freeze or (), following)
    op.before = None
    for state, value in following.items():
        if is_parameter(state):
            averages[state] = _Average([(value, 0.0)])  # nothing of the old value stays
        else:
            op.scope = state.name or ""
            op.graphc.Assign(state, value)
    if averages:
        op.scope = "samples"
        samples = _samples(graph, op)
        counts: dict[ir.DataType | None, ir.Value] = {}
    for running, average in averages.items():
        # one count for all statistics of a type: updates with the same scalars share a bucket
        if running.dtype not in counts:
            counts[running.dtype] = op.cast_like(samples, running)
        _update(graph, op, running, average, counts[running.dtype])
    for owner in graph:
        _note_bodies(owner, ctx, batchnorm, dropout)
    ctx.note(f"train_mode: {normalised} BatchNormalization and {dropped} Dropout nodes train")
    if following:
        ctx.note(f"train_mode: {counted(len(following), 'buffer')} of the module change with every step")
    return bool(normalised or dropped or following)


def _note_bodies(owner: ir.Node, ctx: Context, batchnorm: bool, dropout: bool) -> None:
    """Log which nodes inside ``owner`` stay unchanged: subgraphs hold no state and draw no masks."""
    asked = {"BatchNormalization"} if batchnorm else set()
    asked |= {"Dropout"} if dropout else set()
    for body in bodies(owner):
        for inner in body.all_nodes():
            if inner.op_type in asked and inner.domain == "":
                ctx.note(
                    f"train_mode: {inner.name or inner.op_type} keeps its inference behaviour, for it is inside the"
                    f" {owner.op_type} {owner.name}"
                )


@graph_pass("inference_mode", requires=("legalize",), changes="form")
def inference_mode(model: ir.Model, ctx: Context) -> bool:
    """Put BatchNormalization and Dropout of a file exported in training mode into inference mode."""
    graph = model.graph
    op = Builder(graph)
    changed = drop_stand_ins(graph)
    for node in list(graph):
        op.before, op.scope = node, node.name or node.op_type
        if node.domain == "" and node.op_type == "BatchNormalization":
            changed |= _batchnorm_inference(graph, op, node)
        elif node.domain == "" and node.op_type == "Dropout":
            _without_dropout(graph, op, node)
            changed = True
        elif node.domain == DOMAIN and node.op_type == "BufferValue":
            replace(graph, op, node.outputs[0], input_of(node, 0))
            graph.remove(node, safe=True)
            changed = True
    return changed


@dataclass
class _Average:
    """The batches that feed one running statistic in a step, and the outputs that hold its next value."""

    batches: list[tuple[ir.Value, float]] = field(default_factory=list)
    stands_for: list[ir.Value] = field(default_factory=list)


def _averages_running_statistics(node: ir.Node) -> bool:
    """Whether the node's statistics are initializers that only BatchNormalization nodes use."""
    return all(
        value is not None
        and is_parameter(value)
        and all(user.op_type == "BatchNormalization" and index in (3, 4) for user, index in value.uses())
        for value in node.inputs[3:5]
    )


def _is_frozen(node: ir.Node, patterns: Sequence[str]) -> bool:
    mean = node.inputs[3]
    mode = mean.metadata_props.get(BATCHNORM) if mean is not None else None
    if mode == "inference":
        return True
    telling = (1, 3, 4) if mode is None else (3, 4)  # a framework's module has a mode besides its frozen parameters
    names = [v.name or "" for k, v in enumerate(node.inputs) if v is not None and k in telling]
    return any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _batchnorm_training(graph: ir.Graph, op: Builder, node: ir.Node, averages: dict[ir.Value, _Average]) -> None:
    x, scale, bias, *running = node.inputs
    momentum = node.attributes.get_float("momentum", 0.9)
    y, mean, var, _ = op.graphc.BatchNormalizationTraining(x, scale, bias, epsilon=node.attributes.get_float("epsilon", 1e-5))
    for k, (state, batch) in enumerate(zip(running, (mean, var), strict=True), 1):
        assert state is not None
        average = averages.setdefault(state, _Average())
        average.batches.append((op.cast_like(batch, state), momentum))
        if len(node.outputs) > k and (node.outputs[k].uses() or node.outputs[k].is_graph_output()):
            average.stands_for.append(node.outputs[k])
    replace(graph, op, node.outputs[0], y)
    if not any(out.uses() or out.is_graph_output() for out in node.outputs):
        graph.remove(node, safe=True)


def _buffer_training(
    graph: ir.Graph, op: Builder, node: ir.Node, freeze: Sequence[str], following: dict[ir.Value, ir.Value]
) -> None:
    """Read the current value of a buffer, unless it is frozen, and note it if it is the one that stays."""
    stored, current = input_of(node, 0), input_of(node, 1)
    frozen = matches(stored.name or "", freeze)
    if node.attributes.get_int("updates", 0) and not frozen:
        following[stored] = op.cast_like(current, stored)
    replace(graph, op, node.outputs[0], stored if frozen else current)
    graph.remove(node, safe=True)


def _update(graph: ir.Graph, op: Builder, running: ir.Value, average: _Average, samples: ir.Value) -> None:
    """Emit one update for all batches of a step: r ← m·r + (1 - m)·b for each in turn, as a single average."""
    kept, weighted = 1.0, []
    for batch, momentum in reversed(average.batches):
        weighted.append((batch, (1.0 - momentum) * kept))
        kept *= momentum
    if kept == 1.0:
        following = running
    else:
        op.scope = running.name or ""
        total = weighted[-1][0]
        if len(weighted) > 1:
            parts = [op.Mul(batch, share / (1.0 - kept)) for batch, share in reversed(weighted)]
            total = op.Sum(*parts)
        following = op.graphc.RunningAverage(running, op.Mul(total, samples), samples, momentum=kept)
    for out in average.stands_for:
        producer = out.producer()
        replace(graph, op, out, following)
        if producer is not None and not any(o.uses() or o.is_graph_output() for o in producer.outputs):
            graph.remove(producer, safe=True)


def _samples(graph: ir.Graph, op: Builder) -> ir.Value:
    """The number of samples of this rank's share as a float32 scalar."""
    live, batch = scalar(graph, LIVE, 1, np.float32), _batch(graph)
    first = (dims(batch) or (1,))[0] if batch is not None else 1
    if isinstance(first, int):
        return op.Mul(live, np.float32(first))  # type: ignore[no-any-return]
    rows = op.Cast(op.Shape(batch, start=0, end=1), to=int(ir.DataType.FLOAT))
    return op.Mul(live, op.Squeeze(rows, [0]))  # type: ignore[no-any-return]


def _batchnorm_inference(graph: ir.Graph, op: Builder, node: ir.Node) -> bool:
    if not node.attributes.get_int("training_mode", 0):
        return False
    attributes = {name: node.attributes[name] for name in ("epsilon", "momentum") if name in node.attributes}
    (y,) = op.emit("BatchNormalization", list(node.inputs), attributes, outputs=1)
    for out, new in zip(node.outputs, (y, *node.inputs[3:5]), strict=False):
        if new is not None and (out.uses() or out.is_graph_output()):
            replace(graph, op, out, new)
    graph.remove(node, safe=True)
    return True


def _dropout_training(graph: ir.Graph, op: Builder, node: ir.Node, seed: int) -> bool:
    x = node.inputs[0]
    ratio_value = node.inputs[1] if len(node.inputs) > 1 else None
    known = constant(ratio_value)
    if ratio_value is not None and known is None:
        return False
    ratio = float(known.reshape(-1)[0]) if known is not None else 0.5
    if ratio == 0.0:
        _without_dropout(graph, op, node)
        return True
    assert x is not None
    assert x.dtype is not None
    mask = op.graphc.DropoutMask(
        op.shape(x),
        scalar(graph, SEED, seed),
        scalar(graph, STEP, 0),
        first_row(graph, op, dims(x), x),
        ratio=ratio,
        tag=node.name or "",
        dtype=int(x.dtype),
    )
    replace(graph, op, node.outputs[0], op.Mul(x, mask))
    if len(node.outputs) > 1 and (node.outputs[1].uses() or node.outputs[1].is_graph_output()):
        replace(graph, op, node.outputs[1], op.Greater(mask, 0.0))
    graph.remove(node, safe=True)
    return True


def _without_dropout(graph: ir.Graph, op: Builder, node: ir.Node) -> None:
    x = input_of(node, 0)
    replace(graph, op, node.outputs[0], x)
    if len(node.outputs) > 1 and (node.outputs[1].uses() or node.outputs[1].is_graph_output()):
        replace(graph, op, node.outputs[1], op.Expand(np.bool_(True), op.shape(x)))
    graph.remove(node, safe=True)


def _batch(graph: ir.Graph) -> ir.Value | None:
    """The first input with a batch axis."""
    return next((v for v in graph.inputs if dims(v)), None)
