"""Collectives: variadic ops; one node is one bucket.

Ranks run them in the same order, and passes neither merge nor delete them. Each may be split into ``…Start`` (returns at
once; its outputs are in flight) and ``…Wait``. The operands of one node form one flat buffer in memory, their **bucket**, and
the collective works on it in place. In a group of one rank every collective is the identity, which is its decomposition.

``group`` names axes of the mesh (:mod:`graphc.mesh`); the ranks of one group run its collectives in the same order. ``Send``
and ``Recv`` are the two ends of a channel between two ranks of a group, on which the order is the same too.

**Gradients** need to know what the ranks do with a result y (``adjoint``):

=========== ============================================================ ==========================================
``partial`` The adjoints of y differ by rank, and their sum counts: the  AllReduce ↔ AllReduce, AllGatherStack ↔
            loss is the sum of the ranks' losses, or the ranks compute   ReduceScatterStack
            different things with y.
``whole``   All ranks compute the same with y, so that each holds its    AllReduce ↔ identity, AllGatherStack ↔
            whole adjoint.                                               OwnPart
=========== ============================================================ ==========================================

Shards of one layer (Megatron-LM, Shoeybi et al. 2019) need both: ``Fork`` is its *f*, the identity, whose gradient is an
AllReduce; an ``AllReduce`` with ``adjoint=whole`` is its *g*, whose gradient is the identity.

``ReduceScatter`` and ``AllGather`` divide the buffer among the ranks by ``owner``: ``even`` gives rank r the r-th of N equal
parts, ``root`` gives all of it to rank 0. Their outputs have the types and shapes of their inputs and differ only in which
elements hold the result, so the graph does not depend on the number of ranks. The ``…Stack`` ops and ``AllToAll`` work on
values whose first axis counts the ranks of the group: ``size``, which the mesh must agree with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import onnx_ir as ir

from graphc.errors import ModelError
from graphc.ir.builder import Builder
from graphc.ir.declare import REQUIRED, InferFunction, Spec, declare, declare_primitive, spec_of

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
        {"reduce": "sum", "within": "", "every": 1, "since": 0, "first": 1, "last": 0, "nonzero": 0, "adjoint": "partial"},
        """y_k = reduction of x_k over the ranks of mesh axis ``group``; ``reduce`` is sum, mean, min, max, prod or adasum.

    ``tag`` is unique in the graph and names the collective in errors; ``bucket`` names the flat buffer of the operands.
    With ``every`` = n it runs in every n-th step only, counted by ``graphc.step``, and is the identity in the others;
    the first ``since`` steps count as such n-th steps. Of all steps only those from number ``first`` (1 is the first of a run)
    to number ``last`` (0: no end) count. ``nonzero`` above 0 promises that no rank's operands have more elements
    that are not zero, of which the exchange may make use. With ``within``, another group, only the elements that this rank owns
    of the bucket in that group (``owner=even``) are reduced; the others are undefined. For ``adjoint`` see the module.
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
    "Reduce": (
        "reduce",
        {"reduce": "sum", "root": 0},
        "y_k of rank ``root`` is the reduction of x_k over the ranks; on the others y_k is zero.",
    ),
    "Barrier": ("barrier", {}, "y_k is x_k, once every rank has come here."),
    "AllGatherStack": (
        "all_gather",
        {"size": REQUIRED, "adjoint": "partial"},
        "y[r] is x of rank r of the group, which has ``size`` ranks. For ``adjoint`` see the module.",
    ),
    "ReduceScatterStack": (
        "reduce_scatter",
        {"size": REQUIRED, "reduce": "sum"},
        "y of rank r is the reduction of x[r] over the ranks; x has ``size`` entries along its first axis.",
    ),
    "AllToAll": (
        "all_to_all",
        {"size": REQUIRED},
        "y[k] of rank r is x[r] of rank k; x has ``size`` entries along its first axis.",
    ),
    "Send": (
        "send",
        {"peer": REQUIRED},
        """Send x to the place ``peer`` of the group, where the ``Recv`` with the same tag is; y is x.

    The adjoint of x is that of y here, plus that of what the peer receives: build its gradient where y takes part in the loss.
    """,
    ),
    "Recv": (
        "recv",
        {"peer": REQUIRED, "shape": REQUIRED, "dtype": int(ir.DataType.FLOAT)},
        "y, of these ``shape`` and ``dtype``, is what the place ``peer`` of the group sends with the same tag.",
    ),
}
"""Op → its name at the communicator, its own attributes and what it computes."""


VARIADIC = frozenset({"AllReduce", "ReduceScatter", "AllGather", "Broadcast", "Reduce", "Barrier"})
"""Collectives of several operands, which form a bucket."""

ADJOINTS = ("partial", "whole")
"""What ranks hold of the adjoint of a result that all of them have."""


def collective_of(node: ir.Node) -> str | None:
    """``AllReduce`` for an ``AllReduce``, ``AllReduceStart`` or ``AllReduceWait`` node, and so on; None for other nodes."""
    if node.domain != "graphc":
        return None
    name = node.op_type.removesuffix("Start").removesuffix("Wait")
    return name if name in COLLECTIVES else None


def collective_groups(graph: ir.Graph) -> set[str]:
    """The groups over which collectives of the graph run."""
    return {node.attributes.get_string("group", "data") or "data" for node in graph if collective_of(node) is not None}


def _same(inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> Sequence[Spec]:
    for name, known in (("owner", OWNERS), ("adjoint", ADJOINTS)):
        if attributes.get(name, known[0]) not in known:
            raise ValueError(f"{name}={attributes[name]!r} must be one of {', '.join(known)}")
    return [spec_of(v) for v in inputs]


def _stacked(inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> Sequence[Spec]:
    dtype, shape = spec_of(inputs[0])
    return [(dtype, None if shape is None else ir.Shape([attributes["size"], *shape.dims]))]


def _one_of_a_stack(inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> Sequence[Spec]:
    dtype, shape = spec_of(inputs[0])
    return [(dtype, None if shape is None else ir.Shape(_checked(shape, attributes["size"]).dims[1:]))]


def _exchanged(inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> Sequence[Spec]:
    dtype, shape = spec_of(inputs[0])
    return [(dtype, None if shape is None else _checked(shape, attributes["size"]))]


def _checked(shape: ir.Shape, size: int) -> ir.Shape:
    if not len(shape) or (isinstance(shape[0], int) and shape[0] != size):
        raise ValueError(f"the first axis of {shape} must count the {size} ranks of the group")
    return shape


def _received(inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> Sequence[Spec]:
    return [(ir.DataType(int(attributes["dtype"])), ir.Shape([int(d) for d in attributes["shape"]]))]


_INFER: Mapping[str, InferFunction] = {
    "AllGatherStack": _stacked,
    "ReduceScatterStack": _one_of_a_stack,
    "AllToAll": _exchanged,
    "Recv": _received,
}


def _alone(op: Builder, *inputs: ir.Value, **attributes: Any) -> tuple[ir.Value, ...]:
    return inputs


def _alone_stacked(op: Builder, x: ir.Value, *, tag: str, size: int, **attributes: Any) -> ir.Value:
    _require_one(tag, size)
    return op.Unsqueeze(x, [0])  # type: ignore[no-any-return]


def _alone_of_a_stack(op: Builder, x: ir.Value, *, tag: str, size: int, **attributes: Any) -> ir.Value:
    _require_one(tag, size)
    return op.Squeeze(x, [0])  # type: ignore[no-any-return]


def _alone_received(op: Builder, *, tag: str, **attributes: Any) -> ir.Value:
    raise ModelError(f"nobody sends {tag!r}: the group has one rank")


def _require_one(tag: str, size: int) -> None:
    if size != 1:
        raise ModelError(f"the collective {tag!r} was made for a group of {size} ranks; this one has one")


_ALONE = {"AllGatherStack": _alone_stacked, "ReduceScatterStack": _alone_of_a_stack, "Recv": _alone_received}

for _name, (_, _own, _doc) in COLLECTIVES.items():
    _one = "" if _name == "Recv" else "x"
    for _suffix, _text in (
        ("", _doc),
        ("Start", f"Begin the {_name}. The outputs may only be used by the ``{_name}Wait`` with the same tag."),
        ("Wait", f"Wait for the ``{_name}Start`` with the same tag; its results are those of {_name}."),
    ):
        _waits = _suffix == "Wait"
        declare_primitive(
            f"{_name}{_suffix}",
            inputs="*x" if _name in VARIADIC else "x" if _waits else _one,
            outputs="*y" if _name in VARIADIC else "y",
            attributes={**COMMON, **_own},
            infer=_same if _waits else _INFER.get(_name, _same),
            effect=True,
            passes_through=_name in VARIADIC or _name == "Send",
            decompose=_alone if _waits else _ALONE.get(_name, _alone),
            origin=__name__,
            doc=_text,
        )


@declare("Fork", inputs="x", outputs="y", attributes={"tag": REQUIRED, "group": REQUIRED}, infer=_same)
def fork(op: Builder, x: ir.Value, **attributes: Any) -> ir.Value:
    """y = x, which all ranks of the group hold alike and with which they compute different things; ∂x = Σ∂y over the ranks."""
    return x


@declare(
    "OwnPart", inputs="x", outputs="y", attributes={"tag": REQUIRED, "group": REQUIRED, "size": REQUIRED}, infer=_one_of_a_stack
)
def own_part(op: Builder, x: ir.Value, *, tag: str, group: str, size: int) -> ir.Value:
    """y = x[r] on rank r of the group; all ranks hold x alike, whose ``size`` entries along the first axis count them."""
    return op.Gather(x, op.graphc.Coordinate(group=group), axis=0)  # type: ignore[no-any-return]


@declare(
    "Coordinate",
    inputs="",
    outputs="r",
    attributes={"group": REQUIRED},
    infer=lambda inputs, attributes: [(ir.DataType.INT64, ir.Shape([]))],
)
def coordinate(op: Builder, *, group: str) -> ir.Value:
    """The place of this rank in the group, an int64 scalar, which a plan knows; 0 where the group has one rank."""
    return op.const(np.int64(0))
