"""Explains a node that failed while it ran: what it read, and which feeds decided that."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from graphc.device import Array
from graphc.errors import ExecutionError
from graphc.ir.facts import describe_value

_NEAR = 50
"""Values that are followed back from the node; the feeds behind its indices are mostly close."""


def explain_failure(error: ExecutionError, graph: ir.Graph, feeds: Mapping[str, Array], *, updated: bool) -> ExecutionError:
    """The error with the operands of the node, the feeds that these depend on, and what became of the state."""
    node = next((n for n in graph if n.name == error.node), None) if error.node else None
    parts = [str(error)]
    if node is not None:
        parts.append(f"it reads {', '.join(describe_value(v) for v in node.inputs if v is not None)}")
    behind = _feeds_behind(node, feeds) if node is not None else []
    given = ", ".join(f"{name} {list(feeds[name].shape)}" for name in (behind or feeds))
    parts.append(f"look at the {'feeds behind it' if behind else 'feeds'}: {given}" if given else "it depends on no feed")
    parts.append("some updates of this step had run: go back to a checkpoint" if updated else "no update has changed anything")
    return ExecutionError("; ".join(parts), op=error.op, node=error.node)


def _feeds_behind(node: ir.Node, feeds: Mapping[str, Array]) -> list[str]:
    """The feeds that the node's integer operands depend on; of all its operands where it has none."""
    integers = [v for v in node.inputs if v is not None and v.dtype is not None and v.dtype.is_integer()]
    pending = integers or [v for v in node.inputs if v is not None]
    seen: list[ir.Value] = []
    while pending and len(seen) < _NEAR:
        value = pending.pop(0)
        if value in seen:
            continue
        seen.append(value)
        producer = value.producer()
        pending += [v for v in producer.inputs if v is not None] if producer is not None else []
    return [v.name or "" for v in seen if v.name in feeds]
