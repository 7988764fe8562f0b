"""PowerSGD: sends a gradient matrix as two thin factors.

    M = dW + residual                      n × m, this rank's
    P = AllReduce(M·Q)                     n × r
    P̂ = Orthogonalize(P)
    S = AllReduce(Mᵀ·P̂)                    m × r
    the update takes P̂·Sᵀ, and Q' = S (warm start), residual' = M − P̂·(Mᵀ·P̂)ᵀ (error feedback)

Source: T. Vogels, S. P. Karimireddy, M. Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization", NeurIPS 2019, algorithms 1 and 2. This code sums where the paper averages; the divisor of the update makes the
mean. The residual is the error of this rank's own projection; the paper's code takes M − P̂·Sᵀ/ranks. The sum over the ranks,
which is all that later steps depend on, is the same, and ours cannot grow without bound when ranks see different data.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from graphc.ir.builder import Builder
from graphc.ir.facts import input_of, static_dims
from graphc.ir.names import BUCKET, STEP
from graphc.ir.state import add_initializer, scalar

FACTOR, RESIDUAL = "powersgd", "residual"
"""State of a parameter W: ``W::powersgd`` is Q, ``W::residual`` is the residual."""


class _Matrix(NamedTuple):
    """A compressed gradient: its AllReduce, its parameter, and n, m, r."""

    reduction: ir.Node
    name: str
    n: int
    m: int
    r: int


def low_rank(
    graph: ir.Graph, reductions: Sequence[ir.Node], names: Sequence[str], rank: int, start: int, mb: float
) -> tuple[int, float]:
    """Replace the AllReduces of matrices where it saves bytes; returns their number and the part of all elements sent.

    Args:
        reductions: AllReduces of single gradients, in node order.
        names: names of their parameters.
        rank: r, at most; never more than the smaller side of a matrix.
        start: number of initial steps with uncompressed gradients.
        mb: megabytes of gradients (10⁶ bytes, uncompressed) whose factors travel together.
    """
    chosen: list[_Matrix] = []
    total = sent = 0
    for node, name in zip(reductions, names, strict=True):
        count = int(np.prod(static_dims(node.outputs[0]) or (1,), dtype=np.int64))
        n, m = matrix_shape(node.outputs[0])
        r = min(rank, n, m)
        pays = r * (n + m) < n * m
        total += count
        sent += r * (n + m) if pays else count
        if pays:
            chosen.append(_Matrix(node, name, n, m, r))
    order = list(graph)
    following = dict(itertools.pairwise(order))
    for k, part in enumerate(_portions(chosen, mb)):
        _compress(graph, part, k, start, following)
    graph.remove([matrix.reduction for matrix in chosen], safe=True)
    return len(chosen), sent / max(total, 1)


def matrix_shape(value: ir.Value) -> tuple[int, int]:
    """(n, m) of a gradient as a matrix: one row per output channel of a convolution's weight, one row below rank 2."""
    shape = static_dims(value) or (1,)
    count = int(np.prod(shape, dtype=np.int64))
    return (shape[0], count // max(shape[0], 1)) if len(shape) > 1 else (1, count)


def _portions(chosen: Sequence[_Matrix], mb: float) -> Iterator[list[_Matrix]]:
    part: list[_Matrix] = []
    filled = 0
    for matrix in chosen:
        size = 4 * matrix.n * matrix.m
        if part and filled + size > mb * 1e6:
            yield part
            part, filled = [], 0
        part.append(matrix)
        filled += size
    if part:
        yield part


def _compress(graph: ir.Graph, part: Sequence[_Matrix], number: int, start: int, following: Mapping[ir.Node, ir.Node]) -> None:
    """Compress one portion: its P travel together, starting during the backward pass, then its S."""
    op = Builder(graph)
    group = part[0].reduction.attributes.get_string("group", "data")

    def reduce(values: Sequence[ir.Value], letter: str, **steps: int) -> tuple[ir.Value, ...]:
        name = f"powersgd{number}.{letter}"
        attributes = {"tag": f"{group}/{name}", "group": group, BUCKET: name, **steps}
        return op.emit("AllReduce", values, attributes, domain="graphc", name=f"allreduce/{name}")

    matrices, factors, residuals, thin = [], [], [], []
    for reduction, name, n, m, r in part:
        residuals.append(add_initializer(graph, f"{name}::{RESIDUAL}", np.zeros((n, m), np.float32)))
        rng = np.random.default_rng([zlib.crc32(name.encode()), r])
        factors.append(add_initializer(graph, f"{name}::{FACTOR}", rng.standard_normal((m, r)).astype(np.float32)))
        gradient = input_of(reduction, 0)
        producer = gradient.producer()
        op.scope, op.before = f"compress/{name}", reduction if producer is None else following[producer]
        matrices.append(op.Add(op.Reshape(gradient, [n, m]), residuals[-1]))
        thin.append(op.MatMul(matrices[-1], factors[-1]))
    op.before = part[-1].reduction
    bases, wide = [], []
    for matrix, value, total in zip(part, matrices, reduce(thin, "P", first=start + 1), strict=True):
        op.scope = f"compress/{matrix.name}"
        bases.append(op.graphc.Orthogonalize(total))
        wide.append(op.MatMul(op.Transpose(value, perm=[1, 0]), bases[-1]))
    sums = reduce(wide, "S", first=start + 1)
    early: ir.Value | None = None
    full: Sequence[ir.Value | None] = [None] * len(part)
    if start:
        early = op.Less(scalar(graph, STEP, 0), start)
        full = reduce([v for m in part if (v := m.reduction.inputs[0]) is not None], "full", last=start)
    for k, matrix in enumerate(part):
        op.scope, result = f"compress/{matrix.name}", matrix.reduction.outputs[0]
        own, both = (op.MatMul(bases[k], op.Transpose(factor, perm=[1, 0])) for factor in (wide[k], sums[k]))
        result.replace_all_uses_with(_choose(op, early, full[k], op.reshape_like(both, result)))
        # A zero column would stay zero for ever. Keep the old column, unused in this step: it may serve later ones.
        unused = op.Equal(op.ReduceSumSquare(sums[k], [0], keepdims=1), 0.0)
        unused = unused if early is None else op.Or(unused, early)
        _update(op, "Residual", residuals[k], _choose(op, early, residuals[k], op.Sub(matrices[k], own)))
        _update(op, "Assign", factors[k], op.Where(unused, factors[k], sums[k]))


def _choose(op: Builder, early: ir.Value | None, first: ir.Value | None, later: ir.Value) -> ir.Value:
    """``first`` in the steps with uncompressed gradients, else ``later``."""
    return later if early is None or first is None else op.Where(early, first, later)


def _update(op: Builder, kind: str, state: ir.Value, value: ir.Value) -> None:
    op.emit(kind, [state, value], domain="graphc", outputs=[f"{state.name}::next"], name=f"update/{state.name}")
