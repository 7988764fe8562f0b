"""Types and trip counts of ``If``, ``Loop``, ``Scan`` and ``SequenceMap``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.ir.facts import Dim, constant, dims
from graphc.ir.symbolic_dims import held

Types = tuple[ir.TypeProtocol | None, ir.Shape | None]


def infer_control(
    op_type: str,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping[str, ir.Attr],
    propagate: Callable[[ir.Graph], None],
) -> list[Types]:
    """Types of the outputs of a node with bodies; re-infers the values of the bodies.

    Args:
        propagate: infers all values of a body from its inputs and captured values.
    """

    def run(body: ir.Graph) -> None:
        for node in body:
            if node.op_type != "Constant":
                for out in node.outputs:
                    out.shape = None
        propagate(body)

    if op_type == "If":
        return _infer_if(inputs[0], attributes, run)
    body = attributes["body"].as_graph()
    type_body_inputs(op_type, inputs, attributes)
    if op_type == "Loop":
        return _infer_loop(inputs, body, run)
    run(body)
    if op_type == "SequenceMap":
        return [(ir.SequenceType(v.type) if v.type is not None else None, None) for v in body.outputs]
    return _infer_scan(inputs, attributes, body)


def type_body_inputs(op_type: str, inputs: Sequence[ir.Value | None], attributes: Mapping[str, ir.Attr]) -> None:
    """Give the inputs of a body the types of their operands."""
    if op_type == "If":
        return
    formal = attributes["body"].as_graph().inputs
    axes: list[int | None] = [None] * len(formal)
    first = 0
    if op_type == "Loop":
        first = 2
        for value, dtype in zip(formal, (ir.DataType.INT64, ir.DataType.BOOL), strict=False):
            value.type, value.shape = ir.TensorType(dtype), ir.Shape([])
    elif op_type == "Scan":
        count = attributes["num_scan_inputs"].as_int()
        axes[len(formal) - count :] = int_list(attributes, "scan_input_axes", count)
    for value, operand, axis in zip(formal[first:], inputs[first:], axes[first:], strict=False):
        if operand is None or operand.type is None:
            continue
        found = dims(operand)
        if op_type == "SequenceMap" and isinstance(operand.type, ir.SequenceType):
            value.type, value.shape = operand.type.elem_type, None
            continue
        value.type = operand.type
        if axis is not None and found is not None:
            found = tuple(d for k, d in enumerate(found) if k != axis % len(found))
        value.shape = ir.Shape(found) if found is not None else None


def int_list(attributes: Mapping[str, ir.Attr], name: str, count: int) -> list[int]:
    """An attribute of ``Scan`` with one number per operand; zeros when absent."""
    return list(attributes[name].as_ints()) if name in attributes else [0] * count


def _infer_if(condition: ir.Value | None, attributes: Mapping[str, ir.Attr], run: Callable[[ir.Graph], None]) -> list[Types]:
    branches = [attributes[name].as_graph() for name in ("then_branch", "else_branch")]
    decided = constant(condition)
    if decided is not None:  # what the other branch makes of these shapes does not matter
        branches = [branches[0 if bool(np.all(decided)) else 1]]
    for branch in branches:
        run(branch)
    found: list[Types] = []
    for a, b in zip(branches[0].outputs, branches[-1].outputs, strict=True):
        found.append((a.type if a.type is not None else b.type, _common(a.shape, b.shape)))
    return found


def _common(a: ir.Shape | None, b: ir.Shape | None) -> ir.Shape | None:
    """The most specific shape that covers both: sizes that differ become unknown."""
    if a is None or b is None or len(a) != len(b):
        return None
    return ir.Shape([x if x == y else None for x, y in zip(_plain(a), _plain(b), strict=True)])


def _plain(shape: ir.Shape) -> list[Dim]:
    return [d if isinstance(d, int) else d.value for d in shape.dims]


def _infer_loop(inputs: Sequence[ir.Value | None], body: ir.Graph, run: Callable[[ir.Graph], None]) -> list[Types]:
    carried = len(body.inputs) - 2
    for _ in range(3):  # a size that changes in one iteration is unknown in the next
        run(body)
        stable = True
        for value, result in zip(body.inputs[2:], body.outputs[1 : carried + 1], strict=True):
            if not isinstance(value.type, ir.TensorType) or value.shape is None:
                continue
            common = _common(value.shape, result.shape)
            if common is None or _plain(common) != _plain(value.shape):
                value.shape, stable = common, False
        if stable:
            break
    runs, results = _runs(inputs), body.outputs[1 : carried + 1]
    found: list[Types] = [
        (r.type, r.shape) if runs and is_only_written(v) else (v.type, v.shape)
        for v, r in zip(body.inputs[2:], results, strict=True)
    ]
    count = trip_count(inputs, body)
    for value in body.outputs[carried + 1 :]:
        shape = ir.Shape([count, *_plain(value.shape)]) if value.shape is not None else None
        found.append((value.type, shape))
    return found


def is_only_written(value: ir.Value) -> bool:
    """Whether no iteration reads ``value``, an input of the body: the Loop only returns what its last iteration assigned."""
    return not value.uses() and not value.is_graph_output()


def _runs(inputs: Sequence[ir.Value | None]) -> bool:
    """Whether a ``Loop`` has at least one iteration for certain."""
    limit, first = max_trip_count(inputs), inputs[1] if len(inputs) > 1 else None
    known = constant(first)
    begins = first is None or (known is not None and bool(np.all(known)))
    return begins and (not inputs or inputs[0] is None or (isinstance(limit, int) and limit > 0))


def trip_count(inputs: Sequence[ir.Value | None], body: ir.Graph) -> Dim:
    """The trip count of a ``Loop``: a number, a symbol, or None when it depends on data."""
    if _never_breaks(inputs, body):
        return max_trip_count(inputs)
    return _counted_trips(inputs, body) if not inputs or inputs[0] is None else None


def static_trip_count(node: ir.Node) -> int | None:
    """The trip count of a ``Loop``, or None when it is only known at run time."""
    count = trip_count(node.inputs, node.attributes["body"].as_graph())
    return count if isinstance(count, int) else None


def _counted_trips(inputs: Sequence[ir.Value | None], body: ir.Graph) -> Dim:
    """The trip count of ``while k < n`` with ``k += 1`` per iteration, a form that exporters write.

    They compare k and n as they are or as floats. Where n is known, the first comparison may be a constant.
    """
    end = in_front_of(body.outputs[0], {"Identity"})
    test = end.producer() if end is not None else None
    if test is None or test.op_type != "Less" or len(inputs) < 2 or inputs[1] is None:
        return None
    counter, limit = (_as_integer(v) for v in test.inputs)
    place = next((k for k, out in enumerate(body.outputs[1:]) if _as_integer(out) is counter), None)
    if counter is None or place is None or place + 2 >= len(inputs):
        return None
    step, start, begins = counter.producer(), inputs[2 + place], constant(inputs[1])
    if step is None or step.op_type != "Add" or body.inputs[2 + place] not in step.inputs:
        return None
    other = next((v for v in step.inputs if v is not body.inputs[2 + place]), None)
    one = constant(in_front_of(other, {"Identity", "CastLike", "Cast"}))
    if one is None or int(one.reshape(-1)[0]) != 1:
        return None
    if begins is None:
        first = inputs[1].producer()
        if first is None or first.op_type != "Less" or _as_integer(first.inputs[1]) is not limit:
            return None
        if not _same(_as_integer(first.inputs[0]), start):
            return None
    elif not bool(np.all(begins)):
        return 0
    lowest, most = _single(start), _single(limit)
    if isinstance(lowest, int) and isinstance(most, int):
        return max(0 if begins is None else 1, most - lowest)
    return most if lowest == 0 and begins is None else None


def _as_integer(value: ir.Value | None) -> ir.Value | None:
    """The integer that nodes Identity and Cast made ``value`` of, or ``value`` itself."""
    while value is not None and (producer := value.producer()) is not None and producer.op_type in _CASTS:
        source = producer.inputs[0]
        keeps = source is not None and source.dtype in _INTEGERS and value.dtype in _HOLD_COUNTS
        if producer.op_type != "Identity" and not keeps:
            break
        value = source
    return value


_CASTS = frozenset({"Identity", "Cast", "CastLike"})
_INTEGERS = frozenset({ir.DataType.INT32, ir.DataType.INT64})
_HOLD_COUNTS = _INTEGERS | {ir.DataType.FLOAT, ir.DataType.DOUBLE}
"""Types that hold the numbers of iterations there are."""


def _same(a: ir.Value | None, b: ir.Value | None) -> bool:
    """Whether both are one value, or constants of one number."""
    known = constant(a), constant(b)
    return a is b or (known[0] is not None and known[1] is not None and bool(np.all(known[0] == known[1])))


def in_front_of(value: ir.Value | None, ops: set[str]) -> ir.Value | None:
    """The value in front of the nodes of type ``ops`` that produced ``value``."""
    while value is not None and (producer := value.producer()) is not None and producer.op_type in ops:
        value = producer.inputs[0]
    return value


def max_trip_count(inputs: Sequence[ir.Value | None]) -> Dim:
    """The trip count operand of a ``Loop``; None when unknown or negative."""
    limit = _single(inputs[0]) if inputs else None
    return None if isinstance(limit, int) and limit < 0 else limit


def _single(value: ir.Value | None) -> Dim:
    """The value of an integer scalar, a symbol, or None when unknown."""
    found = held(value)
    return found[0] if found is not None and len(found) == 1 else None


def _never_breaks(inputs: Sequence[ir.Value | None], body: ir.Graph) -> bool:
    """Whether the condition of a ``Loop`` is always true."""
    first = inputs[1] if len(inputs) > 1 else None
    known = constant(first)
    if first is not None and (known is None or not bool(np.all(known))):
        return False
    value = in_front_of(body.outputs[0], {"Identity"})
    last = constant(value)
    return value is body.inputs[1] or (last is not None and bool(np.all(last)))


def _infer_scan(inputs: Sequence[ir.Value | None], attributes: Mapping[str, ir.Attr], body: ir.Graph) -> list[Types]:
    count = attributes["num_scan_inputs"].as_int()
    states = len(inputs) - count
    axes = int_list(attributes, "scan_input_axes", count)
    length: Dim = None
    for value, axis in zip(inputs[states:], axes, strict=True):
        found = dims(value) if value is not None else None
        size = found[axis] if found is not None else None
        length = size if length is None or isinstance(size, int) else length
    found_types: list[Types] = []
    for formal, result in zip(body.inputs[:states], body.outputs[:states], strict=True):
        found_types.append((result.type, result.shape if formal.shape is None else formal.shape))
    out_axes = int_list(attributes, "scan_output_axes", len(body.outputs) - states)
    for value, axis in zip(body.outputs[states:], out_axes, strict=True):
        sizes: list[Any] | None = None
        if value.shape is not None:
            sizes = _plain(value.shape)
            sizes.insert(axis % (len(sizes) + 1), length)
        found_types.append((value.type, ir.Shape(sizes) if sizes is not None else None))
    return found_types
