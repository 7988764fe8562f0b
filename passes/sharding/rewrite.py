"""Rewrites the forward graph to that of one rank, for the values chosen to be sharded.

Shapes that the graph computes stay those of whole values: a Shape of a shard is multiplied, and ops that take a shape as an
operand divide it. What every rank computes whole and reads in part passes through OwnPart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.ir import DOMAIN
from graphc.ir.builder import Builder
from graphc.ir.facts import FLOATS, HELD, constant, dims, input_of, is_parameter, producer_of, required
from graphc.ir.infer import propagate
from graphc.ir.names import BUCKET
from graphc.ir.shards import cut_initializer
from graphc.ir.subgraphs import captured
from graphc.ir.symbolic_dims import held, product
from graphc.passes.optimize.simplify import replace
from graphc.passes.sharding.axis_classes import AxisShard
from graphc.passes.sharding.channels import groups_of
from graphc.passes.sharding.class_losses import class_axis, is_over_classes, local_index, rewrite_over_classes
from graphc.passes.sharding.relations import RESHAPES, equation_of, is_table, reduced_axes, sliced

Shards = Mapping[ir.Value, AxisShard]

CONVOLUTIONS = ("Conv", "ConvTranspose")


class Rewriter:
    """Rewrites one graph.

    Args:
        shards: the sharded values.
        group, ranks: the axis of the mesh, and how many ranks it has.
    """

    fork = "fork"
    """What the tags of its Forks end in."""

    def __init__(self, graph: ir.Graph, shards: Shards, group: str, ranks: int) -> None:
        self.graph, self.shards, self.group, self.ranks = graph, dict(shards), group, ranks
        self.op = Builder(graph)
        self.forks: dict[ir.Value, ir.Value] = {}
        self.sums = 0
        self.untrained = _without_parameters(graph)
        self.slices: dict[ir.Node, dict[int, tuple[int, int] | None]] = {}

    def run(self) -> None:
        """Rewrite all nodes and the shapes of their results."""
        nodes = list(self.graph)
        self.slices = {node: sliced(node) for node in nodes if node.op_type == "Slice" and dims(input_of(node)) is not None}
        for name in list(self.graph.initializers):
            value = self.graph.initializers[name]
            if value in self.shards:
                shard = self.shards[value]
                assert shard.blocks is not None
                cut_initializer(value, self.group, shard.axis, shard.blocks, self.ranks)
        for node in nodes:
            self.op.before, self.op.scope = node, node.name or node.op_type
            self._rewrite(node)
        for node in self.graph:
            for out in node.outputs:
                if node.op_type != "Constant":
                    out.shape = None
        propagate(self.graph)

    def _rewrite(self, node: ir.Node) -> None:
        inputs = [v for v in node.inputs if v is not None]
        sharded = [v for v in inputs if v in self.shards]
        if not sharded and node.op_type != "Expand":
            for out in node.outputs:
                if out in self.shards:
                    self._take_part(node, out)
            return
        if node.op_type in ("Shape", "Size") and node.domain == "":
            self._whole_shape(node, sharded[0])
            return
        if is_over_classes(node) and input_of(node) in self.shards and self.shards[input_of(node)].axis == class_axis(node):
            rewrite_over_classes(self, node)
            return
        partial = self._is_partial(node)
        if partial:
            self._separate_bias(node)
        for k, value in enumerate(node.inputs):
            reads = sharded or any(out in self.shards for out in node.outputs)
            if value is not None and value not in self.shards and reads and self._is_trained(value):
                node.replace_input_with(k, self._fork(value))
        if node.op_type in RESHAPES | {"Expand"} and len(node.inputs) > 1:
            self._divide_shape(node)
        elif groups_of(node) > 1:
            self._divide_groups(node)
        elif node.op_type == "Slice":
            self._divide_slice(node)
        elif node.op_type == "Split" and len(node.inputs) > 1 and node.inputs[1] is not None:
            self._divide_sizes(node)
        elif node.op_type == "Gather" and self._is_cut_table(node):
            self._look_up(node)
            return
        if partial:
            self._sum(node)

    # Partial sums ------------------------------------------------------------------------------------------------------

    def _is_partial(self, node: ir.Node) -> bool:
        """Whether the node sums over a sharded axis."""
        if node.op_type == "Einsum":
            return self._is_partial_einsum(node)
        shard = self.shards.get(input_of(node))
        if shard is None:
            return False
        rank = len(dims(input_of(node)) or ())
        if node.op_type == "MatMul":
            return shard.axis == rank - 1
        if node.op_type == "Gemm":
            return shard.axis == 1 - node.attributes.get_int("transA", 0)
        if node.op_type in CONVOLUTIONS:
            return shard.axis == 1 and groups_of(node) == 1
        if node.op_type == "ReduceSum":
            return shard.axis in (reduced_axes(node) or ())
        return False

    def _is_partial_einsum(self, node: ir.Node) -> bool:
        equation = equation_of(node)
        if equation is None:
            return False
        cut = [self.shards.get(v) for v in node.inputs if v is not None]
        labels = {term[shard.axis] for term, shard in zip(equation[0], cut, strict=True) if shard is not None}
        return not labels <= set(equation[1])

    def _separate_bias(self, node: ir.Node) -> None:
        """The bias of a product is added once, to the sum."""
        if node.op_type not in ("Gemm", *CONVOLUTIONS) or len(node.inputs) < 3 or node.inputs[2] is None:
            return
        beta, bias, out = node.attributes.get_float("beta", 1.0), node.inputs[2], node.outputs[0]
        node.resize_inputs(2)
        self.op.before = self._after(node)
        if node.op_type in CONVOLUTIONS:
            bias = self.op.Unsqueeze(bias, list(range(1, len(dims(out) or ()) - 1)))
        self._follow(out, self.op.Add(out, bias if beta == 1.0 else self.op.Mul(bias, beta)))
        self.op.before = node

    def _sum(self, node: ir.Node) -> None:
        """Put an AllReduce behind the node."""
        self.op.before = self._after(node)
        self._follow(node.outputs[0], self.all_reduce(node.outputs[0], node.name or node.op_type))

    def _after(self, node: ir.Node) -> ir.Node | None:
        """The node behind ``node``."""
        nodes = list(self.graph)
        place = nodes.index(node) + 1
        return nodes[place] if place < len(nodes) else None

    def _follow(self, value: ir.Value, result: ir.Value) -> None:
        """Let all readers of ``value`` read ``result``, whose node alone keeps it as its first operand."""
        replace(self.graph, self.op, value, result)
        producer_of(result).replace_input_with(0, value)

    def all_reduce(self, value: ir.Value, name: str) -> ir.Value:
        """The sum over the ranks of ``value``, which differs by rank."""
        self.sums += 1
        tag = f"{self.group}/{name}"
        attributes = {"tag": tag, "group": self.group, "reduce": "sum", "adjoint": "whole", BUCKET: tag}
        return self.op.emit("AllReduce", [value], attributes, domain=DOMAIN)[0]

    # Values that all ranks hold ----------------------------------------------------------------------------------------

    def _is_trained(self, value: ir.Value) -> bool:
        """Whether a gradient may flow to the value."""
        return value.dtype in FLOATS and value not in self.untrained and value not in self.forks.values()

    def _fork(self, value: ir.Value) -> ir.Value:
        if value not in self.forks:
            before, producer = self.op.before, value.producer()
            if producer is not None:
                self.op.before = self._after(producer)
            tag = f"{self.group}/{value.name}::{self.fork}"
            self.forks[value] = self.op.graphc.Fork(value, tag=tag, group=self.group)
            self.op.before = before
        return self.forks[value]

    def _take_part(self, node: ir.Node, out: ir.Value) -> None:
        """The part of this rank of a value that every rank computes whole."""
        self.op.before = self._after(node)
        users = list(out.uses())
        part = self._own_part(out, self.shards[out])
        self.shards[part] = self.shards[out]
        for user, index in users:
            user.replace_input_with(index, part)

    def _own_part(self, value: ir.Value, shard: AxisShard) -> ir.Value:
        """The entry of this rank of ``value`` as a stack of the ranks' parts."""
        attributes = {"tag": f"{self.group}/{value.name}::part", "group": self.group, "size": self.ranks}
        return self.part_of_stack("OwnPart", value, shard, attributes)

    def part_of_stack(self, op_type: str, value: ir.Value, shard: AxisShard, attributes: Mapping[str, Any]) -> ir.Value:
        """``value`` is seen as [… blocks, ranks, rest …]; the ranks come first, and ``op_type`` makes a part of that stack."""
        op, axis = self.op, shard.axis
        before, after = self._around(value, axis)
        inner = _inner_sizes(shard, self.ranks)
        stacked = op.Reshape(value, op.Concat(before, inner, after, axis=0))
        place, rank = axis + len(inner) - 2, len(dims(value) or ()) + len(inner) - 1
        order = [place, *(k for k in range(rank) if k != place)]
        stacked = stacked if place == 0 else op.Transpose(stacked, perm=order)
        (own,) = op.emit(op_type, [stacked], attributes, domain=DOMAIN)
        if len(inner) == 2:  # one block
            return own
        size = -1 if shard.blocks is None or shard.each is None else shard.blocks * shard.each
        return op.Reshape(own, op.Concat(before, [size], after, axis=0))  # type: ignore[no-any-return]

    def whole_of_stack(self, value: ir.Value, shard: AxisShard, attributes: Mapping[str, Any]) -> ir.Value:
        """The whole of the ranks' parts, of which ``value`` is this one's: the opposite of :meth:`part_of_stack`."""
        op, axis = self.op, shard.axis
        before, after = self._around(value, axis)
        inner = _inner_sizes(shard, self.ranks)
        if len(inner) == 3:
            value = op.Reshape(value, op.Concat(before, [inner[0], inner[2]], after, axis=0))
        (stacked,) = op.emit("AllGatherStack", [value], attributes, domain=DOMAIN)
        place, rank = axis + len(inner) - 2, len(dims(stacked) or ())
        order = [*range(1, place + 1), 0, *range(place + 1, rank)]
        stacked = stacked if place == 0 else op.Transpose(stacked, perm=order)
        size = -1 if shard.blocks is None or shard.each is None else shard.blocks * self.ranks * shard.each
        return op.Reshape(stacked, op.Concat(before, [size], after, axis=0))  # type: ignore[no-any-return]

    def _around(self, value: ir.Value, axis: int) -> tuple[ir.Value, ir.Value]:
        """The sizes of the axes before and behind ``axis``."""
        whole, rank = self.op.Shape(value), len(dims(value) or ())
        return self.op.Slice(whole, [0], [axis], [0]), self.op.Slice(whole, [axis + 1], [rank], [0])

    # Shapes -------------------------------------------------------------------------------------------------------------

    def _factors(self, rank: int, axis: int) -> np.ndarray:
        factors = np.ones(rank, np.int64)
        factors[axis] = self.ranks
        return factors

    def _whole_shape(self, node: ir.Node, value: ir.Value) -> None:
        """A Shape or Size gives the sizes of the whole value."""
        sizes, rank = list(dims(value) or ()), len(dims(value) or ())
        start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", rank)
        if value.is_initializer():  # a shard by now
            sizes[self.shards[value].axis] = product([sizes[self.shards[value].axis], self.ranks])
        whole = sizes[start:end] if node.op_type == "Shape" else [product(sizes)]
        by = self._factors(rank, self.shards[value].axis)[start:end] if node.op_type == "Shape" else np.int64(self.ranks)
        if all(isinstance(size, int) for size in whole):
            shape = self.op.const(np.array(whole, np.int64).reshape(np.shape(by)))
        else:
            shape = self.op.Mul(self.op.emit(node.op_type, [value], {k: a.value for k, a in node.attributes.items()})[0], by)
            shape.meta[HELD] = tuple(whole)  # the shapes of values are whole until all nodes are rewritten
        replace(self.graph, self.op, node.outputs[0], shape)
        self.graph.remove(node, safe=True)

    def _divide_groups(self, node: ir.Node) -> None:
        """A convolution or normalisation over groups of channels has those of this rank."""
        shard = self.shards.get(input_of(node))
        if shard is not None and shard.axis == 1:
            name = "num_groups" if node.op_type == "GroupNormalization" else "group"
            node.attributes[name] = ir.AttrInt64(name, groups_of(node) // self.ranks)

    def _divide_shape(self, node: ir.Node) -> None:
        """The target of a Reshape or Expand is that of the shard; 0 and -1 keep their meaning, and so does 1."""
        out = node.outputs[0]
        if out not in self.shards or node.op_type not in ("Reshape", "Expand"):
            return
        target, axis = input_of(node, 1), self.shards[out].axis
        rank = len(dims(out) or ())
        known = constant(target)
        if known is not None:
            local = known.astype(np.int64).copy()
            place = axis - (rank - len(local))
            if place >= 0 and local[place] > 1:
                local[place] //= self.ranks
            node.replace_input_with(1, self.op.const(local))
            return
        elements = held(target)
        length = len(elements) if elements is not None else rank
        place = axis - (rank - length)
        if place < 0:
            return
        size = elements[place] if elements is not None else None
        if isinstance(size, int):
            part = self.op.const(np.array([size // self.ranks if size > 1 else size]))
        else:
            own = self.op.Slice(target, [place], [place + 1], [0])
            part = self.op.Div(own, np.int64(self.ranks))
            part = part if size is not None else self.op.Where(self.op.Less(own, np.int64(2)), own, part)
        ends = self.op.Slice(target, [0], [place], [0]), self.op.Slice(target, [place + 1], [length], [0])
        node.replace_input_with(1, self.op.Concat(ends[0], part, ends[1], axis=0))

    def _divide_slice(self, node: ir.Node) -> None:
        """Start and stop along the sharded axis are those of the shard."""
        axis, places = self.shards[input_of(node)].axis, self.slices[node]
        if axis in places:
            known = {cut: place for cut, place in places.items() if place is not None}
            start, stop = known[axis]
            listed = constant(node.inputs[3]) if len(node.inputs) > 3 and node.inputs[3] is not None else None
            at = axis if listed is None else [int(k) % len(dims(input_of(node)) or ()) for k in listed.reshape(-1)].index(axis)
            for index, place in ((1, start), (2, stop)):
                ends = required(constant(required(node.inputs[index]))).astype(np.int64).copy()
                ends.reshape(-1)[at] = place // self.ranks
                node.replace_input_with(index, self.op.const(ends))

    def _divide_sizes(self, node: ir.Node) -> None:
        shard, known = self.shards[input_of(node)], constant(required(node.inputs[1]))
        if known is not None and shard.axis == node.attributes.get_int("axis", 0) % len(dims(input_of(node)) or ()):
            node.replace_input_with(1, self.op.const(known // self.ranks))

    # Embeddings -----------------------------------------------------------------------------------------------------------

    def _is_cut_table(self, node: ir.Node) -> bool:
        shard = self.shards.get(input_of(node))
        return is_table(node) and shard is not None and shard.axis == 0

    def _look_up(self, node: ir.Node) -> None:
        """Look up the rows that this rank has, and zero for the others; the sum over the ranks is the result."""
        op, (table, indices) = self.op, node.inputs[:2]
        each = required(dims(required(table)))[0]  # of this rank: the table is a shard by now
        assert isinstance(each, int)
        first = op.Mul(op.graphc.Coordinate(group=self.group), np.int64(each))
        wide = op.int64(required(indices))
        wrapped = op.Where(op.Less(wide, np.int64(0)), op.Add(wide, np.int64(each * self.ranks)), wide)
        here, inside = local_index(op, wrapped, first, each)
        found = op.Gather(table, inside, axis=0)
        zero = op.const(np.zeros((), required(table).dtype.numpy()))  # type: ignore[union-attr]
        rows_here = op.Where(op.Unsqueeze(here, [-1]), found, zero)
        total = self.all_reduce(rows_here, node.name or "Gather")
        replace(self.graph, op, node.outputs[0], total)
        self.graph.remove(node, safe=True)


def _inner_sizes(shard: AxisShard, ranks: int) -> list[int]:
    """A divided axis as blocks, ranks and the rest; without the blocks where there is one."""
    each = -1 if shard.each is None else shard.each
    if shard.blocks == 1:
        return [ranks, each]
    return [-1 if shard.blocks is None else shard.blocks, ranks, each]


def _without_parameters(graph: ir.Graph) -> set[ir.Value]:
    """The values on which no parameter has an influence, so that they have no gradient."""
    found = {value for value in (*graph.inputs, *graph.initializers.values()) if not is_parameter(value)}
    for node in graph:
        if all(value is None or value in found for value in (*node.inputs, *captured(node))):
            found.update(node.outputs)
    return found
