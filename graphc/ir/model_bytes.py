"""Limits the sizes that a model may claim, before anything of that size is made.

A file of 200 bytes can ask for terabytes: by ``ConstantOfShape``, ``Expand`` or ``Range`` of a large number. What a
node makes of constants may take :func:`limit_of` bytes; no value may have more than ``MAX_ELEMENTS``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import onnx_ir as ir

from graphc.errors import ModelError
from graphc.ir.facts import describe, dims, inputs_of, static_dims

DEFAULT_BYTES = 2 << 30
"""What constants may take by default: as much as an ONNX file without external data can hold."""

EXPANSION = 4
"""Constants of a model with larger files may take so many times the bytes of its tensors."""

MAX_ELEMENTS = 1 << 40
"""Elements of one value; no machine holds more."""

_LIMIT = "graphc.max_model_bytes"
"""Entry of ``ir.Graph.meta``."""


def set_limit(model: ir.Model, limit: int | None) -> None:
    """Set what the constants of ``model`` may take, in bytes; None: the default, by the size of its tensors.

    Raises:
        ModelError: the tensors that the model holds are larger already.
    """
    graph = model.graph
    if limit is None and _LIMIT in graph.meta:
        return
    held = sum(v.const_value.nbytes for v in graph.initializers.values() if v.const_value is not None)
    graph.meta[_LIMIT] = max(DEFAULT_BYTES, EXPANSION * held) if limit is None else limit
    if limit is not None and held > limit:
        raise ModelError(f"the tensors of the model take {shown(held)}, more than {_allowance(graph)}")


def limit_of(graph: ir.Graph | ir.Function | None) -> int:
    """Bytes that the constants of a graph may take."""
    return int(graph.meta.get(_LIMIT, DEFAULT_BYTES)) if isinstance(graph, ir.Graph) else DEFAULT_BYTES


def check_constant(node: ir.Node, shape: Iterable[int], itemsize: float, taken: int = 0) -> int:
    """Check the size of a constant that ``node`` makes, before it is made; returns its bytes.

    Args:
        taken: bytes of other constants that count too.

    Raises:
        ModelError: it is negative, or the constants would take more than the limit.
    """
    sizes = tuple(shape)
    if any(size < 0 for size in sizes):
        raise ModelError(f"{describe(node)} makes a constant of shape {list(sizes)}; a size is at least 0")
    if len(sizes) > _MOST_AXES:
        raise ModelError(f"{describe(node)} makes a constant of {len(sizes)} axes; at most {_MOST_AXES} are possible")
    nbytes = math.ceil(math.prod(sizes) * itemsize)
    if taken + nbytes > limit_of(node.graph):
        besides = f", with {shown(taken)} of others" if taken else ""
        raise ModelError(
            f"{describe(node)} makes a constant of shape {list(sizes)}, {shown(nbytes)}{besides}; that is more than"
            f" {_allowance(node.graph)}"
        )
    return nbytes


_MOST_AXES = 64
"""Of a NumPy array."""


def check_sizes(graph: ir.Graph) -> None:
    """Check what each value of a typed graph will take, as far as its sizes are known.

    Raises:
        ModelError: a value has more than ``MAX_ELEMENTS``, or a node expands constants to more than the limit.
    """
    fixed = set[ir.Value]()
    for value in graph.inputs:
        _check_elements(value)
    for node in graph:
        for out in node.outputs:
            _check_elements(out)
        read = inputs_of(node)
        if not all(v in fixed or (v.is_initializer() and not v.is_graph_input()) for v in read):
            continue
        if any(attr.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for attr in node.attributes.values()):
            continue
        fixed.update(node.outputs)
        for out in node.outputs:
            sizes = static_dims(out)
            if sizes is not None and out.dtype is not None and math.prod(sizes) > sum(map(_elements, read)) and read:
                check_constant(node, sizes, out.dtype.bitwidth / 8)


def _elements(value: ir.Value) -> int:
    return math.prod(static_dims(value) or ())


def _check_elements(value: ir.Value) -> None:
    elements = 1
    for size in value.shape.dims if value.shape is not None else ():
        elements *= size if type(size) is int and size else 1
    if elements > MAX_ELEMENTS:
        producer = value.producer()
        shape = [d if d is not None else "?" for d in dims(value) or ()]
        where = f"{describe(producer)}: " if producer is not None else ""
        raise ModelError(
            f"{where}the value {value.name!r} of shape {shape} has more than {MAX_ELEMENTS:,} elements, which no machine holds"
        )


def _allowance(graph: ir.Graph | ir.Function | None) -> str:
    return (
        f"the {shown(limit_of(graph))} that constants of this model may take; if the file is from a source that you trust,"
        " allow more with --max-model-bytes N (max_model_bytes=N in Python)"
    )


def shown(nbytes: int) -> str:
    """A number of bytes in a readable unit."""
    size, unit = float(nbytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{nbytes} bytes" if unit == "bytes" else f"{size:,.1f} {unit}"
