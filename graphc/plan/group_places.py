"""Gives the collectives of a plan the size of their group and this rank's place in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from graphc.errors import ModelError
from graphc.ir import DOMAIN
from graphc.ir.builder import Builder
from graphc.ir.facts import static_dims
from graphc.mesh import Mesh
from graphc.plan.steps import PlanStep


@dataclass(frozen=True, slots=True)
class CollectiveEvent:
    """The begin or the wait of a collective in the plan of one rank.

    Attributes:
        tag: of the collective.
        begins: whether it begins here; else it is waited for.
        text: what must be equal on all ranks of the group, or at both ends of the channel.
        group: the axes of the mesh.
        source, target: of a channel: the places in the group of the sender and of the receiver; else -1.
    """

    tag: str
    begins: bool
    text: str
    group: str
    source: int = -1
    target: int = -1

    @property
    def lane(self) -> tuple[str, int, int]:
        """The queue in which it runs."""
        return self.group, self.source, self.target


def group_of(node: ir.Node) -> str:
    """The group of a collective; other ops with an effect are the data axis's."""
    return node.attributes.get_string("group", "data") or "data"


def join_group(step: PlanStep, mesh: Mesh, rank: int) -> None:
    """Fill in the size of the group of a collective, and the place in it of ``rank``.

    Raises:
        ModelError: the graph was made for a group of another size, or for a peer that is not in it.
        UsageError: the mesh has no such axis.
    """
    transfer, (node,) = step.collective, step.nodes
    transfer.group = mesh.canonical(transfer.group)
    if transfer.within:
        transfer.own_of = mesh.extent(transfer.within), mesh.coordinate(transfer.within, rank)
    transfer.size, transfer.place = mesh.extent(transfer.group), mesh.coordinate(transfer.group, rank)
    wanted = node.attributes.get_int("size", transfer.size)
    if wanted != transfer.size:
        found = f"the group {transfer.group!r} of the mesh {mesh} has {transfer.size}"
        raise ModelError(f"{transfer} was made for a group of {wanted} ranks, and {found}")
    if transfer.channel is not None and (not 0 <= transfer.peer < transfer.size or transfer.peer == transfer.place):
        raise ModelError(
            f"{transfer} at place {transfer.place} of the group {transfer.group!r} cannot reach place {transfer.peer}; "
            f"the places are 0 … {transfer.size - 1}"
        )


PLACES = ("Coordinate", "OwnPart")
"""Ops that compute with the place of a rank in its group."""


def settle_coordinates(graph: ir.Graph, mesh: Mesh, rank: int) -> None:
    """Replace the place of ``rank`` in its groups by constants, and what takes its own part of a stack by a slice."""
    op = Builder(graph)
    for node in list(graph):
        if node.domain != DOMAIN or node.op_type not in PLACES:
            continue
        place = mesh.coordinate(node.attributes["group"].as_string(), rank)
        op.before, op.scope = node, node.name or node.op_type
        value = op.const(np.int64(place))
        result = value if node.op_type == "Coordinate" else op.Gather(node.inputs[0], value, axis=0)
        node.outputs[0].replace_all_uses_with(result, replace_graph_outputs=True)
        graph.remove(node, safe=True)


def collective_events(steps: Sequence[PlanStep]) -> list[CollectiveEvent]:
    """The begins and waits of all collectives of a plan, in order."""
    found = []
    for step in steps:
        if step.transfer is None:
            continue
        transfer, (node,) = step.transfer, step.nodes
        channel = transfer.channel
        values = node.outputs if channel is not None else node.inputs
        shapes = ",".join(f"{v.dtype.name if v.dtype else '?'}{list(static_dims(v) or ())}" for v in values if v is not None)
        text = f"{transfer} over {transfer.group}: {shapes}" if channel is None else shapes
        found.append(CollectiveEvent(transfer.tag, step.kind == "start", text, *(channel or (transfer.group,))))
    return found
