"""Losses and maxima over a sharded axis of classes: the vocabulary-parallel cross-entropy of Megatron-LM.

    loss = log Σ_c exp(logit_c) − logit_label

The first term is a log-sum-exp over the ranks of each rank's own; the second is held by one rank, and zero on the others. So
ranks exchange two numbers a position instead of all logits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphc.errors import UsageError
from graphc.ir import DOMAIN
from graphc.ir.builder import Builder
from graphc.ir.declare import required_declaration
from graphc.ir.facts import describe, dims, dtype_of, input_of, required
from graphc.passes.optimize.simplify import replace

if TYPE_CHECKING:
    from graphc.passes.sharding.rewrite import Rewriter


def is_over_classes(node: ir.Node) -> bool:
    """Whether the op has a form for sharded classes."""
    return (node.domain, node.op_type) in ((DOMAIN, "SoftmaxCrossEntropy"), ("", "ArgMax"))


def class_axis(node: ir.Node) -> int:
    """The axis of classes of the first operand."""
    given = node.attributes.get_int("axis", 0 if node.op_type == "ArgMax" else 1)
    return given % len(required(dims(input_of(node))))


def obstacle(node: ir.Node) -> str:
    """Why the classes of the node cannot be sharded; empty where they can."""
    if node.op_type == "ArgMax":
        return "" if not node.attributes.get_int("select_last_index", 0) else "it selects the last of equal ones"
    values = required_declaration(node).attribute_values(node)
    if values["label_smoothing"]:
        return "label smoothing reads all classes"
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        return "class weights are whole"
    return "its log-probabilities are read" if list(node.outputs[2].uses()) or node.outputs[2].is_graph_output() else ""


def rewrite_over_classes(rewriter: Rewriter, node: ir.Node) -> None:
    """Replace ``node``, whose classes are sharded, by its form for shards.

    Raises:
        UsageError: the classes of a rank are not consecutive.
    """
    if rewriter.shards[input_of(node)].blocks != 1:
        raise UsageError(f"the classes of {describe(node)} are fused with others; name the shards with --shard GLOB=AXIS")
    if node.op_type == "ArgMax":
        _argmax(rewriter, node)
    else:
        _cross_entropy(rewriter, node)
    rewriter.graph.remove(node, safe=True)


def _first_class(rewriter: Rewriter, node: ir.Node) -> tuple[ir.Value, int]:
    """The first class of this rank, and how many it has."""
    size = required(dims(input_of(node)))[class_axis(node)]
    assert isinstance(size, int)
    each = size // rewriter.ranks
    return rewriter.op.Mul(rewriter.op.graphc.Coordinate(group=rewriter.group), np.int64(each)), each


def _stack(rewriter: Rewriter, value: ir.Value, tag: str) -> ir.Value:
    attributes = {"tag": tag, "group": rewriter.group, "size": rewriter.ranks, "adjoint": "whole"}
    return rewriter.op.emit("AllGatherStack", [value], attributes, domain=DOMAIN)[0]


def _cross_entropy(rewriter: Rewriter, node: ir.Node) -> None:
    op, axis, name = rewriter.op, class_axis(node), f"{rewriter.group}/{node.name}"
    scores, label = input_of(node), input_of(node, 1)
    first, each = _first_class(rewriter, node)
    ignored = required_declaration(node).attribute_values(node)["ignore_index"]
    own = op.ReduceLogSumExp(scores, [axis], keepdims=0)
    whole = op.ReduceLogSumExp(_stack(rewriter, own, f"{name}/classes"), [0], keepdims=0)
    known = {"ignore_index": ignored} if ignored is not None else {}
    index = op.int64(op.graphc.ClassIndices(label, classes=each * rewriter.ranks, **known))
    here, at = local_index(op, index, first, each)
    picked = op.Squeeze(op.GatherElements(scores, op.Unsqueeze(at, [axis]), axis=axis), [axis])
    zero = np.zeros((), dtype_of(scores).numpy())
    target = rewriter.all_reduce(op.Where(here, picked, zero), f"{node.name}/label")
    losses = op.Sub(whole, target)
    if ignored is not None:
        counts = op.Not(op.Equal(index, np.int64(ignored)))
        losses = op.Where(counts, losses, zero)
        weight = op.ReduceSum(op.Cast(counts, to=int(dtype_of(scores))), keepdims=0)
    else:
        weight = op.Cast(op.Size(label), to=int(dtype_of(scores)))
    replace(rewriter.graph, op, node.outputs[0], op.ReduceSum(losses, keepdims=0))
    replace(rewriter.graph, op, node.outputs[1], weight)


def local_index(op: Builder, index: ir.Value, first: ir.Value, each: int) -> tuple[ir.Value, ir.Value]:
    """Whether this rank has ``index``, and its place among the rank's own; 0 where it has not."""
    local = op.Sub(index, first)
    here = op.And(op.GreaterOrEqual(local, np.int64(0)), op.Less(local, np.int64(each)))
    return here, op.Where(here, local, np.int64(0))


def _argmax(rewriter: Rewriter, node: ir.Node) -> None:
    """The first of the ranks' maxima that is the largest."""
    op, axis, name = rewriter.op, class_axis(node), f"{rewriter.group}/{node.name}"
    scores, (first, _) = input_of(node), _first_class(rewriter, node)
    best = op.ArgMax(scores, axis=axis, keepdims=1)
    values = _stack(rewriter, op.GatherElements(scores, best, axis=axis), f"{name}/maxima")
    indices = _stack(rewriter, op.Add(best, first), f"{name}/indices")
    winner = op.ArgMax(values, axis=0, keepdims=1)
    found = op.Squeeze(op.GatherElements(indices, winner, axis=0), [0])
    result = found if node.attributes.get_int("keepdims", 1) else op.Squeeze(found, [axis])
    replace(rewriter.graph, op, node.outputs[0], result)
