"""Recognises the ways in which exporters write an unknown size: -1, an empty name, "?", "None"."""

from __future__ import annotations

import re
from collections.abc import Iterable

import onnx_ir as ir

from graphc.ir.facts import Dim

_NO_NAME = re.compile(r"[\W\d_]*|(?i:none|null|nan|any|unk|unknown|dyn|dynamic)")
"""Texts that stand for several sizes at once; a symbol stands for one."""


def forget_unknown_sizes(graph: ir.Graph) -> None:
    """Make such sizes None, everywhere in the graph; and an empty first axis of a graph input, the batch."""
    for value in graph.inputs:
        if not value.is_initializer() and value.shape is not None and len(value.shape) and value.shape[0] == 0:
            value.shape = ir.Shape([None, *value.shape.dims[1:]])
    _forget((*graph.inputs, *graph.outputs))
    _forget(v for body in graph.subgraphs() for v in body.inputs)
    _forget(out for node in graph.all_nodes() for out in node.outputs)


def _forget(values: Iterable[ir.Value]) -> None:
    for value in values:
        if value.shape is None:
            continue
        sizes = [_known(d if isinstance(d, int) else d.value) for d in value.shape.dims]
        if sizes != [d if isinstance(d, int) else d.value for d in value.shape.dims]:
            value.shape = ir.Shape(sizes)


def _known(size: Dim) -> Dim:
    unknown = size < 0 if isinstance(size, int) else size is not None and _NO_NAME.fullmatch(size)
    return None if unknown else size
