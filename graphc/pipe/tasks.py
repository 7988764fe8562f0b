"""Assigns the nodes of a training graph to tasks: what a stage computes for a micro-batch, and what runs once a step.

    F   the forward pass of a stage            results go to the same stage and to later ones
    B   its backward pass                      results go to the same stage and to earlier ones
    W   weight gradients that can wait: no other stage reads them, and only one sum over micro-batches does
    U   reductions and updates, once a step    on the rank of the parameter; what depends on no stage runs on every rank
    P   values of state that another stage reads, once at the beginning of a step

Marks of the pass ``pipe_stages``, which ``autodiff`` and decompositions hand on, say the stage; nodes without one go where
their operands are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import onnx_ir as ir

from graphc.ir.declare import Role, is_update, required_declaration
from graphc.ir.facts import constant, is_state, size_of, static_dims
from graphc.ir.names import PHASE, PLACED, SCHEDULE, STAGE
from graphc.ir.ops.accumulation import is_accumulation, run_once
from graphc.ir.ops.collectives import collective_of
from graphc.ir.subgraphs import captured
from graphc.ir.updates import copies_of, role_of, trains

TaskKind: TypeAlias = Literal["P", "F", "B", "W", "U"]


@dataclass(frozen=True, slots=True, order=True)
class Task:
    """A part of a rank's plan; ``stage`` is 0 for P and U, of which a rank has one each."""

    kind: TaskKind
    stage: int = 0

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}" if self.kind in "FBW" else self.kind


def number_of_stages(graph: ir.Graph) -> int:
    """The number of stages that nodes are marked with; 0 without stages."""
    return 1 + max((int(n.metadata_props[STAGE]) for n in graph if STAGE in n.metadata_props), default=-1)


def is_placed(model: ir.Model) -> bool:
    """Whether nodes were put on devices by hand."""
    return model.metadata_props.get(SCHEDULE) == PLACED


def mark_updates(model: ir.Model) -> dict[ir.Node, str]:
    """Mark every update with the stage of its parameter; returns update → stage, nothing where there are no stages."""
    stages = number_of_stages(model.graph)
    if not stages:
        return {}
    found = Assignment(model.graph, stages, placed=is_placed(model))
    marked = {node: str(stage) for node, stage in found.stage.items() if is_update(node)}
    for node, stage in marked.items():
        node.metadata_props[STAGE] = stage
    return marked


class Assignment:
    """The task of every node.

    Args:
        graph: a training graph in which every reduction follows an ``Accumulate``; or, with ``owners``, one in inference.
        stages: number of stages.
        owners: name of a parameter → its stage; where it is given the graph has no marks and no updates.
        placed: stages are devices on which nodes were put by hand: there are no micro-batches, and results go to any device.

    Attributes:
        stage: node → stage; not of constants and of nodes in ``everywhere``.
        backward: nodes of the backward pass.
        once: nodes that run once a step.
        everywhere: nodes that run once a step on every rank.
        owner: state → stage of its update.
    """

    def __init__(self, graph: ir.Graph, stages: int, owners: Mapping[str, int] | None = None, *, placed: bool = False) -> None:
        self.graph, self.stages, self._placed = graph, stages, placed
        self._given = owners or {}
        if owners is not None:
            self.once: set[ir.Node] = set()
        else:
            self.once = _behind_updates(graph) if placed else run_once(graph)
        self.stage: dict[ir.Node, int] = {}
        self.backward: set[ir.Node] = set()
        self.everywhere: set[ir.Node] = set()
        self.owner: dict[ir.Value, int] = {}
        self._within()
        self._after()
        self._waiting = self._can_wait()

    def task(self, node: ir.Node, *, splits_weights: bool = False) -> Task:
        """The task of a node that is not a constant."""
        if node in self.once or self._placed:
            return Task("U")
        if node not in self.backward:
            return Task("F", self.stage[node])
        return Task("W" if splits_weights and node in self._waiting else "B", self.stage[node])

    # Nodes that run for every micro-batch -----------------------------------------------------------------------------

    def _within(self) -> None:
        nodes = [n for n in self.graph if n not in self.once and not _is_constant(n)]
        waiting = []
        for node in nodes:
            before = [p for p in producers(node) if p in self.stage]
            behind = [p for p in before if p in self.backward]
            if node.metadata_props.get(PHASE) == "backward" or behind:
                self.backward.add(node)
            marked = node.metadata_props.get(STAGE)
            if self._placed and (marked is not None or behind):
                self.stage[node] = int(marked) if marked is not None else self.stage[behind[0]]
                continue
            if is_accumulation(node):
                found = self.stage[before[0]] if before else self.stages - 1
            elif node in self.backward:
                highest = min((self.stage[p] for p in behind), default=self.stages - 1)
                found = min(int(marked), highest) if marked is not None else highest
                if marked is None and not behind:
                    waiting.append(node)
                    continue
            else:
                held = [self._given[v.name or ""] for v in reads(node) if v.name in self._given]
                lowest = max([self.stage[p] for p in before] + held, default=0)
                if self._placed:
                    lowest = next(iter([*held, *(self.stage[p] for p in before)]), 0)
                found = max(int(marked), lowest) if marked is not None else lowest
                if marked is None and not before and not held and not _reads_feeds(node, self.graph):
                    waiting.append(node)
                    continue
            self.stage[node] = found
        for node in reversed(waiting):
            users = [self.stage[user] for out in node.outputs for user in out.consumers() if user in self.stage]
            self.stage[node] = min(users, default=self.stages - 1)

    def _can_wait(self) -> set[ir.Node]:
        """Nodes of the backward pass whose results reach no other stage, and at most one sum over micro-batches.

        What reads gathered parameters does not wait, since they would be whole in every micro-batch that waits.
        """
        reached: dict[ir.Node, frozenset[ir.Node] | None] = {}
        found: set[ir.Node] = set()
        gathered = self._gathered()
        for node in reversed(self.graph):
            if node not in self.backward:
                continue
            if any(p in gathered for p in producers(node)):
                sums: frozenset[ir.Node] | None = None
            elif is_accumulation(node):
                sums = frozenset([node])
            else:
                sums = frozenset()
                for user in (u for out in node.outputs for u in out.consumers()):
                    theirs = reached.get(user)
                    if theirs is None or self.stage.get(user) != self.stage[node]:
                        sums = None
                        break
                    sums |= theirs
            reached[node] = None if sums is None or len(sums) > 1 else sums
            if reached[node] is not None:
                found.add(node)
        return found

    def _gathered(self) -> set[ir.Node]:
        """Nodes of the backward pass that make gathered parameters, whole or in another form."""
        found: set[ir.Node] = set()
        for node in self.graph:
            if node in self.backward:
                gathers = collective_of(node) == "AllGather" and any(is_state(v) for v in reads(node))
                before = [p for p in producers(node) if not _is_constant(p)]
                if gathers or (before and all(p in found for p in before) and not _reads_feeds(node, self.graph)):
                    found.add(node)
        return found

    # Nodes that run once a step ---------------------------------------------------------------------------------------

    def _after(self) -> None:
        later = [n for n in self.graph if n in self.once and not _is_constant(n)]
        for node in reversed([n for n in later if is_update(n)]):
            if role_of(node) in (Role.COUNTER, Role.SCALE):  # every rank has its own, and changes it as the others do
                self.everywhere.add(node)
            else:
                self._place_update(node)
        for node in later:
            if node in self.stage or node in self.everywhere:
                continue
            weight: dict[int, int] = {}
            for value in reads(node):
                stage = self.made_on(value)
                if stage is not None:
                    size = size_of(value) if static_dims(value) is not None else 1
                    weight[stage] = weight.get(stage, 0) + size
            if is_update(node):
                self._settle(node, min(weight, default=None))
            elif weight:
                self.stage[node] = min(weight, key=lambda s: (-weight[s], s))
            else:
                self.everywhere.add(node)

    def _place_update(self, node: ir.Node) -> None:
        """Put an update on the stage that first reads its state, or copies of it in a lower type, which go there too; else on
        that of the update which reads its result.
        """
        if role_of(node) is Role.COPY:
            return  # goes with the update that it copies
        marked = node.metadata_props.get(STAGE)
        if marked is not None:  # by the bucket pass, so that all plans have the state on one rank
            for update in (node, *(copies_of(node) if trains(node) else ())):
                self._settle(update, int(marked))
            return
        if not any(self._is_staged(v) for k, v in enumerate(node.inputs) if v is not None and k not in _states(node)):
            return  # counters: every rank has its own
        together = [node, *(copies_of(node) if trains(node) else ())]
        readers = [
            self.stage[user]
            for update in together
            for k in _states(update)
            if (state := update.inputs[k]) is not None
            for user in state.consumers()
            if user in self.stage and user not in self.once
        ]
        following = [self.stage[u] for out in node.outputs for u in out.consumers() if is_update(u) and u in self.stage]
        if readers or following:
            for update in together:
                self._settle(update, min(readers or following))

    def _settle(self, node: ir.Node, stage: int | None) -> None:
        if stage is None:
            self.everywhere.add(node)
            return
        self.stage[node] = stage
        for k in _states(node):
            state = node.inputs[k]
            if state is not None:
                self.owner[state] = stage

    def _is_staged(self, value: ir.Value) -> bool:
        """Whether the value depends on a stage."""
        pending, seen = [value], {value}
        while pending:
            producer = pending.pop().producer()
            if producer is None:
                continue
            if producer in self.stage and producer not in self.once:
                return True
            for other in reads(producer):
                if other not in seen:
                    seen.add(other)
                    pending.append(other)
        return False

    def made_on(self, value: ir.Value) -> int | None:
        """The stage that has the value; None: every rank has it."""
        producer = value.producer()
        if producer is None:
            return self.owner.get(value)
        return self.stage.get(producer)


def reads(node: ir.Node) -> Iterator[ir.Value]:
    """The values that a node reads, in its subgraphs too."""
    yield from (v for v in (*node.inputs, *captured(node)) if v is not None)


def producers(node: ir.Node) -> Iterator[ir.Node]:
    """The nodes whose results a node reads."""
    yield from (p for v in reads(node) if (p := v.producer()) is not None)


def _states(node: ir.Node) -> set[int]:
    return set(required_declaration(node).next_value.values()) & set(range(len(node.inputs)))


def _behind_updates(graph: ir.Graph) -> set[ir.Node]:
    """Updates, collectives, and what depends on them."""
    found: set[ir.Node] = set()
    for node in graph:
        if is_update(node) or collective_of(node) is not None or any(p in found for p in producers(node)):
            found.add(node)
    return found


def _is_constant(node: ir.Node) -> bool:
    return node.op_type == "Constant" and not node.domain


def _reads_feeds(node: ir.Node, graph: ir.Graph) -> bool:
    return any(v.is_graph_input() for v in reads(node) if constant(v) is None)
