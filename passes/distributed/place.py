"""place: put nodes of the forward pass on devices of the pipe axis by hand.

    before   x ─► MatMul ─► a,   x ─► MatMul ─► b,   Add(a, b)
    after    the same nodes with metadata graphc.stage = 0, 1 and 0

There are no micro-batches: all devices work on one batch, each in the order of the graph, and what does not depend on another
device runs at the same time. The backward pass of a node runs where the node does.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

import onnx_ir as ir

from graphc.errors import UsageError, counted, nearest
from graphc.ir.names import PLACED, SCHEDULE, STAGE
from graphc.ir.subgraphs import captured
from graphc.pipeline import Context, graph_pass


@graph_pass("place", requires=("loss",), changes="training")
def place(model: ir.Model, ctx: Context, *, devices: int, place: Sequence[str]) -> bool:
    """Mark the device of every node.

    Args:
        devices: extent of the pipe axis.
        place: ``GLOB=DEVICE``: nodes by their name, or by that of a result. Others go where their first operand is made, or
            their first reader runs; a later pattern overrides an earlier one.

    Raises:
        UsageError: a pattern that matches nothing, or a device that is none.
    """
    graph = model.graph
    nodes = [n for n in graph if n.op_type != "Constant" or n.domain]
    names = {node: [node.name or "", *(v.name or "" for v in node.outputs)] for node in nodes}
    device_of: dict[ir.Node, int] = {}
    for text in place:
        pattern, equals, number = text.rpartition("=")
        if not equals or not number.strip().isdecimal() or not int(number) < devices:
            raise UsageError(
                f"place={text!r}: write GLOB=DEVICE, where DEVICE is one of 0 … {devices - 1}, the places on the pipe axis"
            )
        found = [node for node in nodes if any(fnmatch.fnmatchcase(name, pattern) for name in names[node])]
        if not found:
            known = [name for each in names.values() for name in each if name]
            raise UsageError(f"place={text!r} matches no node of the forward pass{nearest(pattern, known)}")
        device_of.update(dict.fromkeys(found, int(number)))
    for node in nodes:
        if node not in device_of:
            values = [v for v in (*node.inputs, *captured(node)) if v is not None]
            before = [device_of[p] for v in values if (p := v.producer()) is not None and p in device_of]
            if before:
                device_of[node] = before[0]
    for node in reversed(nodes):
        if node not in device_of:
            users = [device_of[user] for out in node.outputs for user in out.consumers() if user in device_of]
            device_of[node] = users[0] if users else 0
    for node, device in device_of.items():
        node.metadata_props[STAGE] = str(device)
    used = {device_of[node] for node in nodes}
    idle = sorted(set(range(devices)) - used)
    if idle:
        raise UsageError(f"no node is placed on device {idle[0]} of 0 … {devices - 1}; take a smaller pipe axis")
    model.metadata_props[SCHEDULE] = PLACED
    ctx.note(f"place: {counted(len(nodes), 'node')} on {counted(devices, 'device')}")
    return True
