"""Collectives: variadic, so that one node is one bucket. Ranks run them in the same order; none is merged or deleted.

``AllReduce`` may be split into ``AllReduceStart`` (returns at once; its outputs are in flight) and ``AllReduceWait``.
On one rank every collective is the identity, which is its decomposition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from graphc.ir.builder import Builder
from graphc.ir.declare import REQUIRED, Spec, declare_primitive, spec_of

ATTRIBUTES: Mapping[str, Any] = {"tag": REQUIRED, "group": "data", "reduce": "sum", "bucket": ""}


def _same(inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> Sequence[Spec]:
    return [spec_of(v) for v in inputs]


def _alone(op: Builder, *inputs: ir.Value, **attributes: Any) -> tuple[ir.Value, ...]:
    return inputs


declare_primitive(
    "AllReduce",
    inputs="*x",
    outputs="*y",
    attributes=ATTRIBUTES,
    infer=_same,
    effect=True,
    decompose=_alone,
    doc="""y_k = reduction of x_k over the ranks of mesh axis ``group``; ``reduce`` is sum, mean, min, max or prod.

    ``tag`` is unique in the graph and names the collective in errors; ``bucket`` names the flat buffer of the operands.
    """,
)
declare_primitive(
    "AllReduceStart",
    inputs="*x",
    outputs="*y",
    attributes=ATTRIBUTES,
    infer=_same,
    effect=True,
    decompose=_alone,
    doc="Begin an AllReduce. The outputs may only be used by the ``AllReduceWait`` with the same tag.",
)
declare_primitive(
    "AllReduceWait",
    inputs="*x",
    outputs="*y",
    attributes=ATTRIBUTES,
    infer=_same,
    effect=True,
    decompose=_alone,
    doc="Wait for the ``AllReduceStart`` with the same tag; y_k is the reduced x_k.",
)

COLLECTIVES = frozenset({"AllReduce", "AllReduceStart", "AllReduceWait"})
