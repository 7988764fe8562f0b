"""Transfers between the ranks of a pipeline; a plan puts them where edges between stages were cut.

A ``PipeSend`` and the ``PipeRecv`` with the same tag on the rank ``peer`` are one transfer of several values. On one rank the
whole training graph has neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from graphc.ir import DOMAIN
from graphc.ir.declare import REQUIRED, Spec, declare_primitive

SEND, RECV = "PipeSend", "PipeRecv"


def is_transfer(node: ir.Node) -> bool:
    """Whether the node sends values to another stage, or receives them."""
    return node.domain == DOMAIN and node.op_type in (SEND, RECV)


def shape_text(shape: Sequence[int]) -> str:
    """A shape as an attribute of a ``PipeRecv``."""
    return ",".join(map(str, shape))


def _nothing(inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> Sequence[Spec]:
    return []


def _received(inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> Sequence[Spec]:
    shapes = [[int(d) for d in text.split(",") if d] for text in attributes["shapes"]]
    return [(ir.DataType(t), ir.Shape(shape)) for t, shape in zip(attributes["types"], shapes, strict=True)]


declare_primitive(
    SEND,
    inputs="*x",
    outputs="",
    attributes={"tag": REQUIRED, "peer": REQUIRED},
    infer=_nothing,
    effect=True,
    origin=__name__,
    doc="Send the values to place ``peer`` of the pipe axis.",
)
declare_primitive(
    RECV,
    inputs="",
    outputs="*y",
    attributes={"tag": REQUIRED, "peer": REQUIRED, "types": REQUIRED, "shapes": REQUIRED},
    infer=_received,
    effect=True,
    origin=__name__,
    doc="The values that place ``peer`` of the pipe axis sends; ``types`` and ``shapes`` are theirs.",
)
