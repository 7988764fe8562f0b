"""Rewrites the graph of one rank so that regions between divided products hold a part of the positions of a sequence.

    before   AllReduce ─► Add ─► LayerNormalization ─► Fork ─► MatMul(columns)
    after    ReduceScatter ─► Add ─► LayerNormalization ─► AllGather ─► MatMul(columns)

Both move the same bytes, an AllReduce being a ReduceScatter and an AllGather. In the backward pass the two change places. What
every rank holds whole and a region reads in part passes through OwnPart, as a dropout mask does. What reads a region whole gets
an AllGather, whose gradient is the rank's own part. Weights of a region are marked, and ``tensor_measures`` adds up their
gradients.
"""

from __future__ import annotations

import onnx_ir as ir

from graphc.errors import counted
from graphc.ir.facts import input_of, is_parameter, required
from graphc.ir.shards import PARTIAL
from graphc.passes.optimize.simplify import replace
from graphc.passes.sharding.axis_classes import AxisShard
from graphc.passes.sharding.rewrite import Rewriter
from graphc.passes.sharding.sequence_regions import find_regions, is_fork, is_sum


class SequenceRewriter(Rewriter):
    """Rewrites one graph, in which products are divided already.

    Args:
        group, ranks: the axis of the mesh, and how many ranks it has.
    """

    fork = "fork::sequence"

    def __init__(self, graph: ir.Graph, group: str, ranks: int) -> None:
        self.regions = find_regions(graph, group, ranks)
        super().__init__(graph, self.regions.values, group, ranks)
        self.scattered = self.gathered = 0
        self.partial: set[ir.Value] = set()
        self._parts: dict[tuple[ir.Value, AxisShard], ir.Value] = {}
        self._wholes: dict[ir.Value, ir.Value] = {}

    def summary(self) -> list[str]:
        """What was divided and what was not, one line each."""
        sums = counted(len(self.partial) + len(self.forks), "whole value")
        lines = [
            f"{counted(self.scattered, 'ReduceScatter')} in the place of AllReduces, {counted(self.gathered, 'AllGather')}"
            f" forward; gradients of {sums} are sums over the parts"
        ]
        reasons: dict[str, list[str]] = {}
        for value, reason in self.regions.whole.items():
            reasons.setdefault(reason, []).append(value.name or "")
        for reason, names in reasons.items():
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            lines.append(f"whole on every rank: {names[0]}{others}, for {reason}")
        return lines

    def _rewrite(self, node: ir.Node) -> None:
        if is_sum(node, self.group) and node.outputs[0] in self.shards:
            self._scatter(node)
        elif is_fork(node, self.group) and input_of(node) in self.shards:
            replace(self.graph, self.op, node.outputs[0], self._gather(input_of(node), "partial"))
            self.graph.remove(node, safe=True)
        elif node in self.regions.nodes:
            for index, value in enumerate(node.inputs):
                if value is not None and (node, value) in self.regions.entries:
                    node.replace_input_with(index, self._part(value, self.regions.entries[node, value]))
            super()._rewrite(node)
        elif node.op_type in ("Shape", "Size") and node.domain == "":
            super()._rewrite(node)
        else:
            for index, value in enumerate(node.inputs):
                if value is not None and value in self.shards:
                    node.replace_input_with(index, self._whole(value))

    def _fork(self, value: ir.Value) -> ir.Value:
        """A parameter that only regions read is marked: its gradients are summed once a step, together with all others."""
        if not is_parameter(value) or not self.regions.nodes.issuperset(value.consumers()):
            return super()._fork(value)
        value.metadata_props[PARTIAL] = self.group
        self.partial.add(value)
        return value

    def _scatter(self, node: ir.Node) -> None:
        """Put a ReduceScatter in the place of an AllReduce."""
        out, tag = node.outputs[0], node.attributes["tag"].as_string()
        attributes = {"tag": f"{tag}::scatter", "group": self.group, "size": self.ranks, "reduce": "sum"}
        part = self.part_of_stack("ReduceScatterStack", input_of(node), self.shards[out], attributes)
        self.shards[part] = self.shards[out]
        replace(self.graph, self.op, out, part)
        self.graph.remove(node, safe=True)
        self.scattered += 1

    def _part(self, value: ir.Value, shard: AxisShard) -> ir.Value:
        """This rank's part of a value that every rank holds."""
        if (value, shard) not in self._parts:
            before, producer = self.op.before, value.producer()
            self.op.before = self._after(producer) if producer is not None else before
            part = self._parts[value, shard] = self._own_part(value, shard)
            self.shards[part] = shard
            self.op.before = before
        return self._parts[value, shard]

    def _whole(self, value: ir.Value) -> ir.Value:
        """The value for those that every rank computes alike."""
        if value not in self._wholes:
            self._wholes[value] = self._gather(value, "whole")
        return self._wholes[value]

    def _gather(self, value: ir.Value, adjoint: str) -> ir.Value:
        """Put the ranks' parts together."""
        self.gathered += 1
        tag = f"{self.group}/{value.name}::gather" + ("" if adjoint == "partial" else "::whole")
        attributes = {"tag": tag, "group": self.group, "size": self.ranks, "adjoint": adjoint}
        return self.whole_of_stack(value, required(self.shards.get(value)), attributes)
