"""Parameter server ops: what workers read from servers and send to them; the identity in a single process.

``server`` is the index of the server that holds the operands, or -1: every server (``Pull`` then reads from the first).
``staleness`` is how many steps a worker may run ahead of the slowest live one, or -1 for no bound; 0 is synchronous.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from graphc.ir.builder import Builder
from graphc.ir.declare import REQUIRED, Spec, declare_primitive, spec_of

EVERY = -1
"""Value of ``server`` for operands of every server."""

UNBOUNDED = -1
"""Value of ``staleness`` without a bound."""

COMMON: Mapping[str, Any] = {"tag": REQUIRED, "server": 0, "servers": 1, "staleness": UNBOUNDED}


def _same(inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> Sequence[Spec]:
    if not EVERY <= attributes.get("server", 0) < attributes.get("servers", 1):
        raise ValueError(f"there is no server {attributes['server']} among {attributes['servers']}")
    return [spec_of(v) for v in inputs]


def _alone(op: Builder, *inputs: ir.Value, **attributes: Any) -> tuple[ir.Value, ...]:
    return inputs


declare_primitive(
    "Pull",
    inputs="*x",
    outputs="*y",
    attributes=COMMON,
    infer=_same,
    effect=True,
    decompose=_alone,
    origin=__name__,
    doc="""y_k is the state x_k as its server holds it now. ``servers`` is the number of servers.""",
)
declare_primitive(
    "Push",
    inputs="*x",
    outputs="*y",
    attributes={**COMMON, "reduce": "sum", "bucket": ""},
    infer=_same,
    effect=True,
    decompose=_alone,
    origin=__name__,
    doc="""y_k is x_k of one worker as it arrived at the servers, or with ``staleness`` 0 the reduction over the live workers.

    What depends on y_k is the servers' part of the graph. ``reduce`` is sum, mean, min, max or prod.
    """,
)


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Number of parameter servers of a graph, and its staleness bound (None: no bound)."""

    servers: int
    staleness: int | None


def server_options(graph: ir.Graph) -> ServerOptions | None:
    """The options of the ``parameter_server`` pass that built ``graph``; None for a graph without servers."""
    for node in exchanges(graph, "Push"):
        staleness = node.attributes["staleness"].as_int()
        return ServerOptions(node.attributes["servers"].as_int(), None if staleness == UNBOUNDED else staleness)
    return None


def exchanges(graph: ir.Graph, op_type: str) -> Iterator[ir.Node]:
    """The nodes of type ``Pull`` or ``Push``, in order."""
    return (node for node in graph if node.op_type == op_type and node.domain == "graphc")
