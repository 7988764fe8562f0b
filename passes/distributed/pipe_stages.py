"""pipe_stages: put every node of the forward pass on a pipeline stage.

    before   x ─► MatMul ─► Relu ─► MatMul ─► loss
    after    x ─► MatMul ─► Relu ─► MatMul ─► loss          metadata graphc.stage = 0, 0, 1, 1

Results only go to the same or a later stage. ``autodiff``, which runs next, puts each node of the backward pass on the stage of
the node that it differentiates. A plan takes a rank's stages out of the graph and puts Send and Recv where edges were cut.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from graphc.errors import UsageError, counted, nearest
from graphc.ir.facts import is_float
from graphc.ir.names import SCHEDULE, STAGE, STAGE_SHARES
from graphc.ir.subgraphs import captured
from graphc.passes.distributed.balance import cut_positions
from graphc.pipeline import Context, graph_pass
from graphc.plan.node_costs import nbytes, seconds

BALANCES = ("time", "memory")
COPIES = 4
"""Copies of a parameter that a stage holds: itself, its gradient and two states of an optimizer."""


@graph_pass("pipe_stages", requires=("loss",), changes="training")
def pipe_stages(
    model: ir.Model,
    ctx: Context,
    *,
    stages: int,
    schedule: str,
    cut: Sequence[str] | None = None,
    balance: str = "time",
    memory_mb: float | None = None,
    batch: int = 32,
    in_flight: int = 1,
) -> bool:
    """Mark the stage of every node.

    Args:
        stages: number of stages.
        schedule: the pipeline's schedule, which the plan reads from the model.
        cut: values behind which a stage ends, in order; None: those of the file's annotations, else balanced ones.
        balance: what is equal on all stages: ``time`` (modelled) or ``memory``.
        memory_mb: the most memory of a stage (10⁶ bytes): parameters, gradients, optimizer state, and activations.
        batch: value of symbolic dimensions in the cost model: samples of a micro-batch.
        in_flight: micro-batches whose activations the first stage holds at once.

    Raises:
        UsageError: cuts that are not one behind the other, a stage without parameters, or memory that cannot fit.
    """
    graph = model.graph
    if balance not in BALANCES:
        raise UsageError(f"balance={balance!r}{nearest(balance, BALANCES)}; it is {' or '.join(BALANCES)}")
    row = _Row(graph, batch)
    if cut:
        stage_of = row.by_name(list(cut), stages)
    elif any(STAGE in node.metadata_props for node in row.nodes):
        stage_of = row.as_annotated(stages)
    else:
        limit = None if memory_mb is None else memory_mb * 1e6
        stage_of = row.balanced(stages, balance, limit, in_flight)
    row.place_parameters(stage_of)
    _check(graph, row, stage_of, stages)
    for node, stage in stage_of.items():
        node.metadata_props[STAGE] = str(stage)
    model.metadata_props[SCHEDULE] = schedule
    shares = [sum(row.cost[n] for n in row.nodes if stage_of[n] == s) for s in range(stages)]
    total = sum(shares) or 1.0
    model.metadata_props[STAGE_SHARES] = ",".join(f"{share / total:.4f}" for share in shares)
    sizes = ", ".join(f"{share / total:.0%}" for share in shares)
    ctx.note(f"pipe_stages: {counted(stages, 'stage')} with {sizes} of the modelled time")
    return True


class _Row:
    """The forward pass in order.

    Attributes:
        nodes: nodes that depend on inputs of the graph, in order.
        beside: nodes that depend on initializers and constants only; they go with their first reader.
        cost: node → modelled time, with that of nodes beside it.
        memory: node → bytes of its activations, and of the parameters that it is the first to read.
    """

    def __init__(self, graph: ir.Graph, batch: int) -> None:
        self.graph, self.batch = graph, batch
        fed: set[ir.Value] = set(graph.inputs)
        self.nodes: list[ir.Node] = []
        self.beside: list[ir.Node] = []
        for node in graph:
            if node.op_type == "Constant" and not node.domain:
                continue
            depends = any(v in fed for v in _reads(node))
            (self.nodes if depends else self.beside).append(node)
            if depends:
                fed.update(node.outputs)
        self.cost = {node: seconds(node, batch) for node in self.nodes}
        self.fed = fed
        self.weights: dict[ir.Node, int] = {}
        self.activations = {node: sum(nbytes(v, batch) for v in node.outputs) for node in self.nodes}
        seen: set[ir.Value] = set()
        for node in self.nodes:
            own = [v for v in self._initializers(node) if v not in seen]
            seen.update(own)
            self.weights[node] = sum(nbytes(v, batch) for v in own)

    def _initializers(self, node: ir.Node) -> list[ir.Value]:
        """The float initializers that a node reads, through nodes beside the row too."""
        found: list[ir.Value] = []
        pending = list(_reads(node))
        while pending:
            value = pending.pop()
            producer = value.producer()
            if value.is_initializer() and is_float(value):
                found.append(value)
            elif producer is not None and value not in self.fed:
                pending.extend(_reads(producer))
        return list(dict.fromkeys(found))

    # Cuts by name -----------------------------------------------------------------------------------------------------

    def by_name(self, names: list[str], stages: int) -> dict[ir.Node, int]:
        if len(names) != stages - 1:
            raise UsageError(
                f"{counted(stages, 'stage')} need {counted(stages - 1, 'cut')}, one behind each but the last;"
                f" {counted(len(names), 'name')} given: {', '.join(names)}"
            )
        made = {v.name or "": node for node in self.nodes for v in node.outputs}
        named = {node.name or "": node for node in self.nodes}
        before: list[set[ir.Node]] = []
        for name in names:
            node = made.get(name) or named.get(name)
            if node is None:
                raise UsageError(f"cut {name!r}: no node of the forward pass makes it{nearest(name, [*made, *named])}")
            found = self._ancestors(node)
            if before and not before[-1] < found:
                first = names[len(before) - 1]
                raise UsageError(
                    f"the cuts {first!r} and {name!r} make a cycle between stages: {name!r} does not depend on {first!r}."
                    " Name values that lie one behind the other, in the order of the model"
                )
            before.append(found)
        return {node: sum(node not in found for found in before) for node in self.nodes}

    def _ancestors(self, node: ir.Node) -> set[ir.Node]:
        found, pending = {node}, [node]
        while pending:
            for value in _reads(pending.pop()):
                producer = value.producer()
                if producer is not None and producer in self.cost and producer not in found:
                    found.add(producer)
                    pending.append(producer)
        return found

    def as_annotated(self, stages: int) -> dict[ir.Node, int]:
        """The stages that the file asks for; other nodes go to the first stage that has their operands."""
        stage_of: dict[ir.Node, int] = {}
        for node in self.nodes:
            sources = [p for v in _reads(node) if (p := v.producer()) is not None and p in stage_of]
            lowest = max((stage_of[p] for p in sources), default=0)
            stage = int(node.metadata_props.get(STAGE, lowest))
            if stage < lowest:
                source = next(p for p in sources if stage_of[p] == lowest)
                raise UsageError(
                    f"the file's annotations make a cycle between stages: {node.name!r} on stage {stage} reads from"
                    f" {source.name!r} on stage {lowest}"
                )
            stage_of[node] = stage
        asked = 1 + max(stage_of.values(), default=0)
        if asked != stages:
            raise UsageError(
                f"the file's annotations ask for {counted(asked, 'stage')}, and the mesh and schedule have {stages};"
                f" take Mesh(pipe={asked}), or give cut=NAME instead of the annotations"
            )
        return stage_of

    # Balanced cuts ----------------------------------------------------------------------------------------------------

    def balanced(self, stages: int, balance: str, limit: float | None, in_flight: int) -> dict[ir.Node, int]:
        held = [COPIES * self.weights[n] + in_flight * self.activations[n] for n in self.nodes]
        costs = [float(h) for h in held] if balance == "memory" else [self.cost[n] for n in self.nodes]
        crossing = [2 * c for c in self._crossing()] if balance == "time" else [0.0] * (len(costs) + 1)
        anchors = [int(self.weights[n] > 0) for n in self.nodes]
        if sum(anchors) < stages:
            raise UsageError(
                f"{counted(stages, 'stage')} are too many: each needs a parameter of its own, and the model has"
                f" {counted(sum(anchors), 'node')} with one; take Mesh(pipe={sum(anchors)}) or less"
            )
        limits = None if limit is None else [limit] * stages
        found = cut_positions(costs, crossing, anchors, stages, held if limits else None, limits)
        if found is None:
            raise UsageError(self._too_small(costs, crossing, anchors, held, stages, limit or 0.0))
        starts = set(found)
        stage_of: dict[ir.Node, int] = {}
        stage = 0
        for k, node in enumerate(self.nodes):
            stage += k in starts
            stage_of[node] = stage
        return stage_of

    def _too_small(
        self,
        costs: list[float],
        crossing: list[float],
        anchors: list[int],
        held: list[int],
        stages: int,
        limit: float,
    ) -> str:
        """Say the smallest number of stages whose memory fits."""
        for more in range(stages + 1, sum(anchors) + 1):
            if cut_positions(costs, crossing, anchors, more, held, [limit] * more) is not None:
                few = f"{counted(stages, 'stage')} cannot fit into {limit / 1e6:g} MB each"
                return f"{few}; the smallest number that can is {more}"
        worst = max(range(len(held)), key=held.__getitem__)
        return (
            f"no number of stages fits into {limit / 1e6:g} MB each: {self.nodes[worst].name!r} alone needs"
            f" {held[worst] / 1e6:.3f} MB"
        )

    def _crossing(self) -> list[float]:
        """Bytes that pass each boundary."""
        place = {node: k for k, node in enumerate(self.nodes)}
        change = [0.0] * (len(self.nodes) + 2)
        for k, node in enumerate(self.nodes):
            for value in node.outputs:
                last = max((place[user] for user in value.consumers() if user in place), default=k)
                change[k + 1] += nbytes(value, self.batch)
                change[last + 1] -= nbytes(value, self.batch)
        found, now = [], 0.0
        for delta in change[: len(self.nodes) + 1]:
            now += delta
            found.append(now)
        return found

    def place_parameters(self, stage_of: dict[ir.Node, int]) -> None:
        """Put nodes that depend on initializers only on the stage of their first reader."""
        last = max(stage_of.values(), default=0)
        for node in reversed(self.beside):
            readers = [stage_of[user] for out in node.outputs for user in out.consumers() if user in stage_of]
            stage_of[node] = min(readers, default=last)


def _reads(node: ir.Node) -> list[ir.Value]:
    return [v for v in (*node.inputs, *captured(node)) if v is not None]


def _check(graph: ir.Graph, row: _Row, stage_of: dict[ir.Node, int], stages: int) -> None:
    """Refuse a stage that has no parameters, or to which no gradient can come."""
    for stage in range(stages):
        if not any(row.weights[n] for n in row.nodes if stage_of[n] == stage):
            raise UsageError(
                f"stage {stage} has no parameters of its own, so it only costs time; move the cuts, or take fewer stages"
            )
    for stage in range(stages - 1):
        passed = [
            v
            for node in row.nodes
            if stage_of[node] <= stage
            for v in node.outputs
            if is_float(v) and any(stage_of.get(user, 0) > stage for user in v.consumers())
        ]
        if not passed:
            raise UsageError(
                f"no gradient can pass from stage {stage + 1} to stage {stage}: no float value passes the cut between them"
            )
