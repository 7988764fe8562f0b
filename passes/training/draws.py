"""draws: random numbers that depend on the seed, the step and the sample's place in the global batch alone.

    before   n = RandomNormalLike(x)
    after    u, v = graphc.Uniform(shape of x, seed, step, sample_offset) of two tags
             n = Sqrt(Log(1 - u) · -2) · Cos(v · 2π)                       (G. Box, M. Muller, 1958)

A runtime's own generator would draw other numbers on every start and rank, and onnxruntime has no kernel for the random ops of
the present opset. RandomUniform, Bernoulli and Multinomial are compositions of :func:`graphc.ir.ops.random.uniform` as well.
The attribute ``seed`` of a node takes the place of the program's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from graphc.errors import UnsupportedOpError
from graphc.ir.builder import Builder
from graphc.ir.evaluate import NOT_DETERMINED
from graphc.ir.facts import Dim, describe, dims, dtype_of, input_of
from graphc.ir.names import SAMPLE_OFFSET, SEED, STEP
from graphc.ir.state import scalar
from graphc.ir.subgraphs import bodies
from graphc.passes.optimize.simplify import replace
from graphc.pipeline import Context, graph_pass

Draw: TypeAlias = "Callable[[str, Any, ir.Value], Any]"
"""(purpose, shape, first row) → uniform float32 numbers; each purpose of a node has a stream of its own."""


@graph_pass("draws", requires=("legalize",), changes="training")
def draws(model: ir.Model, ctx: Context, *, seed: int = 0) -> bool:
    """Draw the numbers of RandomNormal, RandomUniform, their Like forms, Bernoulli and Multinomial by counters.

    Args:
        seed: of all numbers, unless a Trainer is given another.

    Raises:
        UnsupportedOpError: a random op inside a loop or branch.
    """
    graph = model.graph
    op, count = Builder(graph), 0
    for node in list(graph):
        for inner in (inner for body in bodies(node) for inner in body.all_nodes()):
            if _is_random(inner):
                raise UnsupportedOpError(
                    f"{describe(inner)} is inside the {node.op_type} {node.name!r}, where numbers are not drawn; give them to"
                    " the model as an input, or export it with the loop unrolled"
                )
        if _is_random(node):
            op.before, op.scope = node, node.name or node.op_type
            replace(graph, op, node.outputs[0], _drawn(graph, op, node, seed))
            graph.remove(node, safe=True)
            count += 1
    if count:
        ctx.note(f"draws: {count} random nodes follow seed, step and sample")
    return bool(count)


def _is_random(node: ir.Node) -> bool:
    return node.domain == "" and node.op_type in NOT_DETERMINED


def _drawn(graph: ir.Graph, op: Builder, node: ir.Node, start: int) -> ir.Value:
    own = node.attributes.get("seed")
    # the bits of a float, which tell all seeds apart
    seed = scalar(graph, SEED, start) if own is None else op.const(np.int64(np.float32(own.as_float()).view(np.int32)))
    name = node.name or node.outputs[0].name or ""

    def uniform(purpose: str, shape: Any, first: ir.Value) -> Any:
        return op.graphc.Uniform(shape, seed, scalar(graph, STEP, 0), first, tag=f"{name}{purpose}")

    if node.op_type == "Multinomial":
        return _multinomial(graph, op, node, uniform)
    if node.op_type in ("RandomNormal", "RandomUniform"):
        sizes = tuple(node.attributes["shape"].as_ints())
        shape, first = op.const(np.array(sizes, dtype=np.int64)), first_row(graph, op, sizes)
    else:
        x = input_of(node)
        shape, first = op.shape(x), first_row(graph, op, dims(x), x)
    if node.op_type == "Bernoulli":
        x = input_of(node)
        yes = op.Less(uniform("", shape, first), op.Cast(x, to=int(ir.DataType.FLOAT)))
        return op.Cast(yes, to=_dtype(node, dtype_of(x)))  # type: ignore[no-any-return]
    number = node.attributes.get_float
    if node.op_type.startswith("RandomUniform"):
        y, shift = uniform("", shape, first), number("low", 0.0)
        factor = number("high", 1.0) - shift
    else:
        radius = op.Sqrt(op.Mul(op.Log(op.Sub(np.float32(1), uniform("/radius", shape, first))), np.float32(-2)))
        y = op.Mul(radius, op.Cos(op.Mul(uniform("/angle", shape, first), np.float32(2 * math.pi))))
        factor, shift = number("scale", 1.0), number("mean", 0.0)
    y = op.Mul(y, np.float32(factor)) if factor != 1 else y
    y = op.Add(y, np.float32(shift)) if shift != 0 else y
    own_type = ir.DataType.FLOAT if node.op_type in ("RandomNormal", "RandomUniform") else dtype_of(input_of(node))
    dtype = _dtype(node, own_type)
    return op.Cast(y, to=dtype) if dtype != ir.DataType.FLOAT else y  # type: ignore[no-any-return]


def _multinomial(graph: ir.Graph, op: Builder, node: ir.Node, uniform: Draw) -> ir.Value:
    """The number of classes whose cumulative probability is at most a uniform number: batch × samples."""
    x, samples = input_of(node), node.attributes.get_int("sample_size", 1)
    sums = op.CumSum(op.Softmax(op.Cast(x, to=int(ir.DataType.FLOAT)), axis=1), np.int64(1))
    shape = op.Concat(op.Shape(x, start=0, end=1), [samples], axis=0)
    drawn = uniform("", shape, first_row(graph, op, dims(x), x))
    below = op.LessOrEqual(op.Unsqueeze(sums, [1]), op.Unsqueeze(drawn, [2]))
    chosen = op.ReduceSum(op.Cast(below, to=int(ir.DataType.INT64)), [2], keepdims=0)
    last = op.Sub(op.Squeeze(op.Shape(x, start=1, end=2), [0]), np.int64(1))
    return op.Cast(op.Min(chosen, last), to=_dtype(node, ir.DataType.INT32))  # type: ignore[no-any-return]


def _dtype(node: ir.Node, otherwise: ir.DataType) -> int:
    return int(node.attributes.get_int("dtype", int(otherwise)))


def first_row(graph: ir.Graph, op: Builder, shape: tuple[Dim, ...] | None, x: ir.Value | None = None) -> ir.Value:
    """Index of this rank's first row of a value ``x`` of this shape in the global batch.

    That is the sample offset times the rows of a sample; a value whose first axis is batch · heads, as in attention exported
    by PyTorch, has several. A value without the batch's axis belongs to all samples: its first row is 0 on every rank. Where
    another axis is the batch's, every rank has rows of its own.
    """
    batch = next((v for v in graph.inputs if dims(v)), None)  # the first input with a batch axis
    offset = scalar(graph, SAMPLE_OFFSET, 0)
    if batch is None or shape == ():
        return offset
    rows, samples = (shape or (None,))[0], (dims(batch) or (None,))[0]
    if rows is not None and rows == samples:
        return offset
    if isinstance(rows, int) and isinstance(samples, int):
        each = rows // samples if samples and rows % samples == 0 else rows
        return op.Mul(offset, np.int64(each)) if each != 1 else offset
    if isinstance(rows, int):
        everywhere = shape is not None and samples is not None and None not in shape and samples not in shape
        return op.const(np.int64(0)) if everywhere else op.Mul(offset, np.int64(rows))
    first = [op.Squeeze(op.Shape(v, start=0, end=1), [0]) for v in (x, batch)]
    return op.Mul(offset, op.Div(*first))  # type: ignore[no-any-return]
