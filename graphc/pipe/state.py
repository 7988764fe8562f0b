"""Which rank of a pipeline holds which state."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from graphc.ir.declare import is_update
from graphc.ir.names import BY_RANK, LEARNING_RATE, SEED
from graphc.pipe.split import Pipe
from graphc.pipe.tasks import Assignment, reads


@dataclass(frozen=True, slots=True)
class StateShare:
    """The state of one rank.

    Attributes:
        model: a graph with the updates and initializers of the rank; other nodes are of no use.
        owners: name of a state → rank on the pipe axis that keeps it; state of all ranks is missing.
        stages: name of a state → stage that updates it, or first reads it where it is frozen.
    """

    model: ir.Model
    owners: dict[str, int]
    stages: dict[str, int]


def state_of_rank(model: ir.Model, pipe: Pipe) -> StateShare:
    """Find the state of ``pipe``'s rank in a training graph; frozen weights lie on every rank that reads them."""
    copy = model.clone()
    graph = copy.graph
    found = Assignment(graph, pipe.stages, placed=pipe.placed)
    stages = {value.name or "": stage for value, stage in found.owner.items()}
    owners = {name: pipe.rank_of(stage) for name, stage in stages.items()}

    def is_mine(node: ir.Node) -> bool:
        stage = found.stage.get(node)
        return stage is None or pipe.rank_of(stage) == pipe.rank

    read: dict[str, set[int]] = {}  # frozen weights, by the stages that read them
    for node in graph:
        stage = found.stage.get(node)
        for value in reads(node):
            if value.is_initializer() and stage is not None and value.name not in owners:
                read.setdefault(value.name or "", set()).add(stage)
    for value in (v for node in found.everywhere for v in reads(node)):
        read.pop(value.name or "", None)
    for name in (*BY_RANK, LEARNING_RATE, SEED):
        read.pop(name, None)
    for name in list(graph.initializers):
        readers = {pipe.rank_of(stage) for stage in read.get(name, ())}
        if owners.get(name, pipe.rank) != pipe.rank or (readers and pipe.rank not in readers):
            del graph.initializers[name]
    stages |= {name: min(by) for name, by in read.items()}
    owners |= {name: pipe.rank_of(min(by)) for name, by in read.items()}
    graph.remove([n for n in reversed(graph) if is_update(n) and not is_mine(n)], safe=False)
    return StateShare(copy, owners, stages)
