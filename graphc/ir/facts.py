"""Reads facts about values and nodes: shapes, constants, element types, operands. Never changes a graph."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias, TypeVar

import numpy as np
import onnx_ir as ir

from graphc.errors import InternalError, ModelError, UnknownRankError
from graphc.ir.declare import declaration_of
from graphc.ir.names import BUFFER

T = TypeVar("T")

Dim: TypeAlias = "int | str | None"
"""A dimension: a static size, a symbol's name, or None when nothing is known."""

HELD = "graphc.held"
"""Key in ``value.meta`` under which :mod:`graphc.ir.symbolic_dims` keeps the partly known elements of an integer tensor."""

_MOST_AXES = 64
"""Elements of a tensor that can be a shape."""

FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def dims(value: ir.Value) -> tuple[Dim, ...] | None:
    """The dimensions of a value, or None when its rank is unknown."""
    shape = value.shape
    if shape is None:
        return None
    return tuple([d if type(d) is int else d.value for d in shape.dims])  # type: ignore[union-attr]


def static_dims(value: ir.Value) -> tuple[int, ...] | None:
    """The dimensions of a value when all are known integers, else None."""
    shape = value.shape
    if shape is None:
        return None
    found = shape.dims
    for d in found:
        if type(d) is not int:
            return None
    return found  # type: ignore[return-value]


def batch_dim(graph: ir.Graph) -> Dim:
    """The batch dimension: the first one of the first graph input that has any; None when unknown or there is none."""
    fed = (dims(value) for value in graph.inputs if not value.is_initializer())
    return next((found[0] for found in fed if found), None)


def shape_of(value: ir.Value | None) -> tuple[int, ...]:
    """The static shape of a value.

    Raises:
        ModelError: the shape is not static.
        InternalError: the value is absent.
    """
    if value is None:
        raise InternalError("an operand that is left out has no shape")
    found = static_dims(value)
    if found is None:
        raise ModelError(f"{value.name!r} has no static shape: {describe_value(value)}")
    return found


def size_of(value: ir.Value | None) -> int:
    """The number of elements of a value of static shape; raises as :func:`shape_of`."""
    return math.prod(shape_of(value))


def dtype_of(value: ir.Value | None) -> ir.DataType:
    """The element type of a value; InternalError when unknown or the value is absent."""
    if value is None or value.dtype is None:
        raise InternalError(f"the element type of {'an operand' if value is None else repr(value.name)} is not known")
    return value.dtype


def nbytes_of(value: ir.Value) -> int:
    """Bytes of a value of static shape; ModelError when the shape is not static."""
    return size_of(value) * int(dtype_of(value).itemsize)


def known_nbytes(value: ir.Value) -> int:
    """Bytes of a value; 0 where its shape is not static, or its element type not known."""
    return nbytes_of(value) if static_dims(value) is not None and value.dtype is not None else 0


def array_of(value: ir.Value) -> np.ndarray:
    """The tensor of an initializer; InternalError when it has none."""
    if value.const_value is None:
        raise InternalError(f"the initializer {value.name!r} has no value")
    return np.asarray(value.const_value.numpy())


def producer_of(value: ir.Value) -> ir.Node:
    """The node that computes a value; InternalError for a graph input or an initializer."""
    producer = value.producer()
    if producer is None:
        raise InternalError(f"no node computes {value.name!r}")
    return producer


def required(value: T | None) -> T:
    """What is there by the rules of the graph; InternalError where it is not."""
    if value is None:
        raise InternalError("an operand or attribute that the op needs is left out")
    return value


def input_of(node: ir.Node, index: int = 0) -> ir.Value:
    """Input ``index`` of a node; InternalError when it is absent."""
    value = node.inputs[index] if index < len(node.inputs) else None
    if value is None:
        raise InternalError(f"input {index} is left out of {describe(node)}")
    return value


def inputs_of(node: ir.Node) -> list[ir.Value]:
    """The inputs of a node, without absent ones."""
    return [value for value in node.inputs if value is not None]


def rank(value: ir.Value) -> int:
    """The rank of a value.

    Raises:
        UnknownRankError: it depends on sizes that are open.
    """
    if value.shape is None:
        raise unknown_rank(value)
    return len(value.shape)


def unknown_rank(value: ir.Value) -> UnknownRankError:
    """The error that names the node which loses the rank of ``value``, and the inputs whose sizes decide it."""
    first = _loses_its_rank(value)
    inputs = _open_inputs(first)
    producer = first.producer()
    text = f"the rank of {first.name!r} is unknown" + (f": {describe(producer)}" if producer is not None else "")
    if not inputs:
        return UnknownRankError(f"{text}; no size of an input decides it: it depends on data")
    shown = " ".join(f"--shape {v.name}={','.join(_size_to_give(d) for d in dims(v) or ('…',))}" for v in inputs)
    return UnknownRankError(
        f"{text}; it follows from the sizes of {', '.join(map(describe_value, inputs))}: fix those that matter with {shown} "
        "(in Python shapes={'" + (inputs[0].name or "") + "': (…)})"
    )


def _size_to_give(size: Dim) -> str:
    return str(size) if isinstance(size, int) else "?" if size is None else size.upper()


def _loses_its_rank(value: ir.Value) -> ir.Value:
    """The first value without a rank on the way to ``value``."""
    producer = value.producer()
    for source in inputs_of(producer) if producer is not None else ():
        if source.shape is None and isinstance(source.type, ir.TensorType | None):
            return _loses_its_rank(source)
    return value


def _open_inputs(value: ir.Value) -> list[ir.Value]:
    """The graph inputs without a static shape on which ``value`` depends."""
    found: dict[ir.Value, None] = {}
    seen, pending = set(), [value]
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        producer = current.producer()
        if producer is not None:
            pending += inputs_of(producer)
        elif current.is_graph_input() and static_dims(current) is None and not current.is_initializer():
            found[current] = None
    return list(found)


def is_float(value: ir.Value) -> bool:
    return value.dtype in FLOATS


def constant(value: ir.Value | None) -> np.ndarray | None:
    """The value's compile-time constant as a numpy array, or None.

    Never constant are: a float initializer (a parameter, trained or frozen), state that an update node replaces, and an
    initializer that is also a graph input.
    """
    if value is None:
        return None
    tensor = value.const_value
    if tensor is None:
        producer = value.producer()
        if producer is None or producer.op_type != "Constant" or producer.domain != "":
            return None
        held = producer.attributes.get("value")
        known = held is not None and held.type == ir.AttributeType.TENSOR
        tensor = held.value if held is not None and known else ir.convenience.get_const_tensor(value)
        if tensor is None:
            return None
    elif value.is_initializer() and (
        is_parameter(value)
        or value.is_graph_input()
        or is_state(value)
        or BUFFER in value.metadata_props
        or (value.name or "").startswith("graphc.")  # reserved scalars change between steps and differ between ranks
    ):
        return None
    return np.asarray(tensor.numpy())


_COPIES = {"Cast", "CastLike", "Expand", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Tile", "Transpose", "Unsqueeze"}
"""Ops whose results hold elements of their first operand alone."""


def is_zero(value: ir.Value) -> bool:
    """Whether every element is known to be zero."""
    return holds_only(value, 0.0)


def holds_only(value: ir.Value, number: float) -> bool:
    """Whether every element is known to be this number: of a constant, or copied from one. Shapes need not be known."""
    node = value.producer()
    while node is not None and node.domain == "" and node.op_type in _COPIES and node.inputs[0] is not None:
        value = node.inputs[0]
        node = value.producer()
    if node is not None and node.domain == "" and node.op_type == "ConstantOfShape":
        held = node.attributes.get("value")
        return number == 0 if held is None else bool((held.as_tensor().numpy() == number).all())
    known = constant(value)
    return known is not None and bool((known == number).all())


def is_parameter(value: ir.Value) -> bool:
    """Whether the value is a float initializer, and so can train; scalars of reserved names are not."""
    if not value.is_initializer() or value.dtype not in FLOATS or value.shape is None:
        return False
    return len(value.shape) > 0 or not (value.name or "").startswith("graphc.")


def is_state(value: ir.Value) -> bool:
    """Whether some update node computes the next value of this initializer."""
    for node, index in value.uses():
        declaration = declaration_of(node)
        if declaration is not None and index in declaration.next_value.values():
            return True
    return False


def state_updates(graph: ir.Graph) -> Iterator[tuple[ir.Node, ir.Value, ir.Value]]:
    """Every (update node, state initializer, next value) of the graph, in node order."""
    for node in graph:
        declaration = declaration_of(node)
        if declaration is None:
            continue
        for output, index in declaration.next_value.items():
            state = node.inputs[index]
            if state is not None and output < len(node.outputs):
                yield node, state, node.outputs[output]


def shape_of_result(value: ir.Value | None) -> ir.Shape | None:
    """The shape held by an int64 shape tensor, with unknown sizes as None.

    Follows constants, ``Shape`` nodes and ``Concat`` of those; None when even the rank is unknown.
    """
    found = _dims_in(value)
    return ir.Shape(found) if found is not None else None


def _dims_in(value: ir.Value | None) -> list[Dim] | None:
    if value is None:
        return None
    known = constant(value)
    if known is not None:
        return [int(d) for d in known.reshape(-1)]
    if HELD in value.meta:
        return list(value.meta[HELD])
    producer = value.producer()
    if producer is not None and producer.op_type == "Shape" and producer.inputs[0] is not None:
        found = dims(producer.inputs[0])
        if found is not None:
            start = producer.attributes.get_int("start", 0)
            return list(found[start : producer.attributes.get_int("end", len(found))])
    if producer is not None and producer.op_type == "Concat":
        parts = [_dims_in(part) for part in producer.inputs]
        if all(part is not None for part in parts):
            return [d for part in parts if part is not None for d in part]
    if value.shape is not None and len(value.shape) == 1 and isinstance(value.shape[0], int):
        return [None] * value.shape[0] if value.shape[0] <= _MOST_AXES else None
    return None


def same_dims(a: Sequence[Dim] | None, b: Sequence[Dim] | None) -> bool:
    """Whether two shapes are provably the same: equal sizes, or the same named symbols."""
    if a is None or b is None or len(a) != len(b):
        return False
    return all(x is not None and x == y for x, y in zip(a, b, strict=True))


def neighbourhood(node: ir.Node) -> str:
    """The node with its producers and consumers, one per line, for error messages."""
    lines = []
    for value in node.inputs:
        producer = value.producer() if value is not None else None
        if producer is not None:
            lines.append(f"    from  {describe(producer)}")
    lines.append(f"    here  {describe(node)}")
    for out in node.outputs:
        lines.extend(f"    to    {describe(user)}" for user in list(out.consumers())[:3])
    return "\n".join(lines)


def describe(node: ir.Node) -> str:
    """One line: ``name: out:f32[2,3] = domain.Op(in:f32[2,3], …)``."""
    inputs = ", ".join("-" if v is None else describe_value(v) for v in node.inputs)
    outputs = ", ".join(describe_value(v) for v in node.outputs)
    prefix = f"{node.domain}." if node.domain else ""
    return f"{node.name or '(unnamed)'}: {outputs} = {prefix}{node.op_type}({inputs})"


def describe_value(value: ir.Value) -> str:
    found = dims(value)
    shape = "[…]" if found is None else "[" + ",".join("?" if d is None else str(d) for d in found) + "]"
    dtype = value.dtype.name.lower() if value.dtype is not None else "untyped"
    return f"{value.name}:{dtype}{shape}"
