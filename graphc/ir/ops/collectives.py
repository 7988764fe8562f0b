"""Collectives: variadic ops; one node is one bucket.

Ranks run them in the same order, and passes neither merge nor delete them. Each may be split into ``…Start`` (returns at
once; its outputs are in flight) and ``…Wait``. The operands of one node form one flat buffer in memory, their **bucket**, and
the collective works on it in place. On one rank every collective is the identity, which is its decomposition.

``ReduceScatter`` and ``AllGather`` divide the buffer among the ranks by ``owner``: ``even`` gives rank r the r-th of N equal
parts, ``root`` gives all of it to rank 0. Their outputs have the types and shapes of their inputs and differ only in which
elements hold the result, so the graph does not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import onnx_ir as ir

from graphc.ir.builder import Builder
from graphc.ir.declare import REQUIRED, Spec, declare_primitive, spec_of

OWNERS = ("even", "root")
"""How the elements of a flat buffer are divided among the ranks of a group."""

Kind: TypeAlias = Literal[
    "allreduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all", "barrier", "send", "recv"
]
"""The communicator's name of a collective."""

COMMON: Mapping[str, Any] = {"tag": REQUIRED, "group": "data", "bucket": ""}

COLLECTIVES: Mapping[str, tuple[Kind, Mapping[str, Any], str]] = {
    "AllReduce": (
        "allreduce",
        {"reduce": "sum", "every": 1, "since": 0, "first": 1, "last": 0, "nonzero": 0},
        """y_k = reduction of x_k over the ranks of mesh axis ``group``; ``reduce`` is sum, mean, min, max, prod or adasum.

    ``tag`` is unique in the graph and names the collective in errors; ``bucket`` names the flat buffer of the operands.
    With ``every`` = n it runs in every n-th step only, counted by ``graphc.step``, and is the identity in the others;
    the first ``since`` steps count as such n-th steps. Of all steps only those from number ``first`` (1 is the first of a run)
    to number ``last`` (0: no end) count. ``nonzero`` above 0 promises that no rank's operands have more elements
    that are not zero, of which the exchange may make use.
    """,
    ),
    "ReduceScatter": (
        "reduce_scatter",
        {"reduce": "sum", "owner": "even", "transient": 0},
        """The elements of y_k that this rank owns are the reduction of x_k over the ranks; the others are undefined.

    With ``transient`` the operands take memory only until the wait, and what this rank owns of the results is kept.
    """,
    ),
    "AllGather": (
        "all_gather",
        {"owner": "even"},
        "y_k is x_k put together from the elements that each rank owns; x_k need only be right there.",
    ),
    "Broadcast": ("broadcast", {"root": 0}, "y_k is x_k of rank ``root``."),
}
"""Op → its name at the communicator, its own attributes and what it computes."""


def collective_of(node: ir.Node) -> str | None:
    """``AllReduce`` for an ``AllReduce``, ``AllReduceStart`` or ``AllReduceWait`` node, and so on; None for other nodes."""
    if node.domain != "graphc":
        return None
    name = node.op_type.removesuffix("Start").removesuffix("Wait")
    return name if name in COLLECTIVES else None


def _same(inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> Sequence[Spec]:
    if attributes.get("owner", "even") not in OWNERS:
        raise ValueError(f"owner={attributes['owner']!r} must be one of {', '.join(OWNERS)}")
    return [spec_of(v) for v in inputs]


def _alone(op: Builder, *inputs: ir.Value, **attributes: Any) -> tuple[ir.Value, ...]:
    return inputs


for _name, (_, _own, _doc) in COLLECTIVES.items():
    for _suffix, _text in (
        ("", _doc),
        ("Start", f"Begin the {_name}. The outputs may only be used by the ``{_name}Wait`` with the same tag."),
        ("Wait", f"Wait for the ``{_name}Start`` with the same tag; its results are those of {_name}."),
    ):
        declare_primitive(
            f"{_name}{_suffix}",
            inputs="*x",
            outputs="*y",
            attributes={**COMMON, **_own},
            infer=_same,
            effect=True,
            passes_through=True,
            decompose=_alone,
            origin=__name__,
            doc=_text,
        )
