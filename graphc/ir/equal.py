"""Compares the structure of models: the same nodes in the same order.

Names that a user can reach (inputs, outputs, initializers, metadata of the model) must agree. Names of intermediate
values and of nodes may differ. Metadata counts if its key starts with ``graphc.``; value names in it are mapped through the
renaming.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.ir.facts import describe, describe_value, dims
from graphc.ir.names import GRADIENT_OF
from graphc.ir.text import ELIDED_ABOVE, graph_metadata


def difference(a: ir.Model, b: ir.Model, *, weights: bool = True) -> str | None:
    """Describe the first difference between two models; None when they are structurally equal.

    Args:
        weights: compare the content of every tensor; else only of those that the text form always holds (at most 16
            elements).
    """
    for what, left, right in (
        ("opset imports", dict(sorted(a.opset_imports.items())), dict(sorted(b.opset_imports.items()))),
        ("model metadata", graph_metadata(a.metadata_props), graph_metadata(b.metadata_props)),
        ("local functions", sorted(map(str, a.functions)), sorted(map(str, b.functions))),
    ):
        if left != right:
            return f"{what}: {left} and {right}"
    return _Comparison(weights).graphs(a.graph, b.graph)


def assert_equal(a: ir.Model, b: ir.Model, *, weights: bool = True) -> None:
    """Raise AssertionError with the first difference."""
    found = difference(a, b, weights=weights)
    assert found is None, found


class _Comparison:
    def __init__(self, weights: bool) -> None:
        self.weights = weights
        self.partner: dict[ir.Value, ir.Value] = {}
        self.renamed: dict[str, str] = {}

    def graphs(self, a: ir.Graph, b: ir.Graph) -> str | None:
        return (
            self.interface("graph inputs", a.inputs, b.inputs)
            or self.initializers(a, b)
            or self.nodes(a, b)
            or self.interface("graph outputs", a.outputs, b.outputs)
            or self.outputs(a, b)
        )

    def interface(self, what: str, a: Sequence[ir.Value], b: Sequence[ir.Value]) -> str | None:
        if names := _different([v.name for v in a], [v.name for v in b]):
            return f"{what}: {names}"
        for left, right in zip(a, b, strict=True):
            if what == "graph inputs":
                self.pair(left, right)
            if found := _types(left, right) or self.metadata(left.metadata_props, right.metadata_props):
                return f"{what}: {left.name!r}: {found}"
        return None

    def initializers(self, a: ir.Graph, b: ir.Graph) -> str | None:
        if names := _different(list(a.initializers), list(b.initializers)):
            return f"initializers: {names}"
        for name, left in a.initializers.items():
            right = b.initializers[name]
            self.pair(left, right)
            found = (
                _types(left, right)
                or self.metadata(left.metadata_props, right.metadata_props)
                or self.tensors(left.const_value, right.const_value)
            )
            if found is not None:
                return f"initializer {name!r}: {found}"
        return None

    def nodes(self, a: ir.Graph, b: ir.Graph) -> str | None:
        left_nodes, right_nodes = list(a), list(b)
        for k, (left, right) in enumerate(zip(left_nodes, right_nodes, strict=False)):
            found = self.node(left, right)
            if found is not None:
                return f"node {k}: {found}\n    {describe(left)}\n    {describe(right)}"
        if len(left_nodes) != len(right_nodes):
            longer, which = (left_nodes, "first") if len(left_nodes) > len(right_nodes) else (right_nodes, "second")
            extra = longer[min(len(left_nodes), len(right_nodes))]
            return f"{len(left_nodes)} and {len(right_nodes)} nodes; the {which} model goes on with\n    {describe(extra)}"
        return None

    def node(self, a: ir.Node, b: ir.Node) -> str | None:
        if (a.domain, a.op_type, a.overload) != (b.domain, b.op_type, b.overload):
            return "different ops"
        if len(a.inputs) != len(b.inputs):
            return f"{len(a.inputs)} and {len(b.inputs)} inputs"
        for k, (left, right) in enumerate(zip(a.inputs, b.inputs, strict=True)):
            if (self.partner.get(left) if left is not None else None) is not right:
                shown = [describe_value(v) if v is not None else "nothing" for v in (left, right)]
                return f"input {k} is {shown[0]} and {shown[1]}, which do not correspond"
        for name in {**a.attributes, **b.attributes}:
            if name not in a.attributes or name not in b.attributes:
                return f"attribute {name!r} is only on the {'first' if name in a.attributes else 'second'}"
            if found := self.attribute(a.attributes[name], b.attributes[name]):
                return f"attribute {name!r}: {found}"
        if [bool(v.name) for v in a.outputs] != [bool(v.name) for v in b.outputs]:
            return "different outputs are in use"
        for left, right in zip(a.outputs, b.outputs, strict=True):
            self.pair(left, right)
            if found := _types(left, right) or self.metadata(left.metadata_props, right.metadata_props):
                return f"output {left.name!r}: {found}"
        return self.metadata(a.metadata_props, b.metadata_props)

    def outputs(self, a: ir.Graph, b: ir.Graph) -> str | None:
        for left, right in zip(a.outputs, b.outputs, strict=True):
            if self.partner.get(left) is not right:
                return f"graph output {left.name!r} is made by different nodes:\n    {_origin(left)}\n    {_origin(right)}"
        return None

    def pair(self, a: ir.Value, b: ir.Value) -> None:
        self.partner[a] = b
        self.renamed[a.name or ""] = b.name or ""

    def metadata(self, a: Mapping[str, str], b: Mapping[str, str]) -> str | None:
        left, right = graph_metadata(a), graph_metadata(b)
        if GRADIENT_OF in left:
            left[GRADIENT_OF] = self.renamed.get(left[GRADIENT_OF], left[GRADIENT_OF])
        return f"metadata {graph_metadata(a)} and {right}" if left != right else None

    def attribute(self, a: ir.Attr, b: ir.Attr) -> str | None:
        if a.type != b.type or a.ref_attr_name != b.ref_attr_name:
            return f"{a.type.name} and {b.type.name}"
        if a.type == ir.AttributeType.TENSOR:
            return self.tensors(a.as_tensor(), b.as_tensor())
        if a.type == ir.AttributeType.GRAPH:
            return self.graphs(a.as_graph(), b.as_graph())
        if a.type == ir.AttributeType.GRAPHS:
            return next((f for x, y in zip(a.as_graphs(), b.as_graphs(), strict=True) if (f := self.graphs(x, y))), None)
        left, right = _plain(a.value), _plain(b.value)
        return None if left == right else f"{left} and {right}"

    def tensors(self, a: ir.TensorProtocol | None, b: ir.TensorProtocol | None) -> str | None:
        if a is None or b is None:
            return None if a is b else "data on one side only"
        if a.dtype != b.dtype or a.shape != b.shape:
            return f"{a.dtype.name}{list(a.shape)} and {b.dtype.name}{list(b.shape)}"
        if not self.weights and a.size > ELIDED_ABOVE:
            return None
        left, right = np.asarray(a.numpy()), np.asarray(b.numpy())
        if left.dtype.kind != "O" and left.tobytes() == right.tobytes():
            return None
        differs = np.flatnonzero((left != right).reshape(-1))  # NaNs compare unequal here, but their bytes were compared above
        if not len(differs):
            return None
        k = int(differs[0])
        return f"{len(differs)} of {left.size} elements differ, first [{k}]: {left.reshape(-1)[k]} and {right.reshape(-1)[k]}"


def _plain(value: Any) -> Any:
    """Attribute values as a file holds them: floats in single precision, lists as tuples."""
    if isinstance(value, float):
        return float(np.float32(value))
    return tuple(_plain(v) for v in value) if isinstance(value, (list, tuple)) else value


def _types(a: ir.Value, b: ir.Value) -> str | None:
    if a.type == b.type and dims(a) == dims(b):
        return None
    return f"{describe_value(a)} and {describe_value(b)}"


def _different(a: Iterable[str | None], b: Iterable[str | None]) -> str | None:
    """The difference between two lists of names, in a few words."""
    left, right = list(a), list(b)
    if left == right:
        return None
    only_left = [n for n in left if n not in set(right)]
    only_right = [n for n in right if n not in set(left)]
    if not only_left and not only_right:
        return f"the same names in another order: {left[:8]} and {right[:8]}"
    return "; ".join(
        f"only the {side} model has {names[:8]}" for side, names in (("first", only_left), ("second", only_right)) if names
    )


def _origin(value: ir.Value) -> str:
    producer = value.producer()
    return describe(producer) if producer is not None else describe_value(value)
