"""Computes with symbolic sizes: integer tensors whose elements are partly known by name only.

    shape = Shape(x: [batch, 16, 32])            holds (batch, 16, 32)
    Concat(Gather(shape, 0), [4, -1])            holds (batch, 4, -1)
    Reshape(y: [8*batch, 16, 4], …)              has shape [batch, 4, 128]

ONNX's inference of a single node knows constants only, and its whole-graph inference gives every unknown size a new
name. Here a size is a number, a product such as ``8*batch``, or None; a size that proves to be a number folds to a constant.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from graphc.ir.facts import HELD, Dim, constant, dims

LIMIT = 64
"""Elements of a tensor whose elements are followed."""

_FACTOR = re.compile(r"[0-9]{1,18}|[^\d\W][\w.\-]*")

_LONGEST = 1000
"""Characters of a symbolic size; a longer one is a name that says nothing."""


def held(value: ir.Value | None) -> tuple[Dim, ...] | None:
    """The elements of an integer tensor, unknown ones as None; None when all are unknown."""
    known = constant(value)
    if known is not None:
        return tuple(int(d) for d in known.reshape(-1)) if known.size <= LIMIT and known.dtype.kind in "iub" else None
    if value is None:
        return None
    producer = value.producer()
    if HELD not in value.meta and producer is not None and producer.op_type == "Shape":
        found = _shape(producer)
        return tuple(found) if found is not None else None
    return value.meta.get(HELD)


def dims_of(value: ir.Value | None) -> Sequence[Dim] | None:
    """The sizes of an operand; None where it is left out, too."""
    return dims(value) if value is not None else None


def product(sizes: Sequence[Dim]) -> Dim:
    """The product of sizes; None when one is unknown."""
    number, names = 1, []
    for size in sizes:
        if size is None:
            return None
        count, symbols = factors(size)
        number *= count
        names += symbols
        if len(names) > LIMIT or abs(number) >= 2**63:
            return None  # no tensor has such a size
    return _text(number, names)


def quotient(a: Dim, b: Dim) -> Dim:
    """a / b if exact, else None."""
    if a is None or b is None or b == 0:
        return None
    (number, names), (divisor, others) = factors(a), factors(b)
    left = list(names)
    for name in others:
        if name not in left:
            return None
        left.remove(name)
    return _text(number // divisor, left) if number % divisor == 0 else None


def substituted(size: Dim, name: str, number: int) -> Dim:
    """``size`` with ``number`` for every factor ``name``: ``8*batch`` with 2 for ``batch`` is 16."""
    if not isinstance(size, str):
        return size
    known, names = factors(size)
    return _text(known * number ** names.count(name), [n for n in names if n != name])


def factors(size: int | str) -> tuple[int, list[str]]:
    """The number and the symbols whose product a size is: ``4*batch`` is 4 and ``batch``; a sum is one symbol."""
    if isinstance(size, int):
        return size, []
    if len(size) > _LONGEST:
        return 1, [size]
    parts = size.split("*")
    if not all(_FACTOR.fullmatch(p) for p in parts):
        return 1, [size]  # a sum or similar: one opaque name
    return math.prod(int(p) for p in parts if p[0] in _DIGITS), [p for p in parts if p[0] not in _DIGITS]


_DIGITS = frozenset("0123456789")


def _text(number: int, names: Sequence[str]) -> Dim:
    if not names or number == 0:
        return number
    return "*".join(([] if number == 1 else [str(number)]) + sorted(names))


def follow(node: ir.Node) -> np.ndarray | None:
    """Store the known elements of the integer output of ``node``; returns an array when all are numbers."""
    rule = _CONTENTS.get(node.op_type)
    if rule is None or node.domain != "" or len(node.outputs) != 1:
        return None
    out = node.outputs[0]
    out.meta.pop(HELD, None)
    found = dims(out)
    if out.dtype not in (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL) or found is None or len(found) > 1:
        return None
    elements = rule(node)
    if elements is None or len(elements) > LIMIT or (not found and len(elements) != 1):
        return None
    if found and isinstance(found[0], int) and found[0] != len(elements):
        return None  # of an operand that says nothing of its shape, or an impossible model
    numbers = [e for e in elements if isinstance(e, int)]
    if any(not -(2**63) <= e < 2**63 for e in numbers):
        return None
    if len(numbers) == len(elements):
        return np.array(elements, dtype=out.dtype.numpy()).reshape(() if not found else -1)
    out.meta[HELD] = tuple(elements)
    return None


# The elements of an output ---------------------------------------------------------------------------------------------


def _shape(node: ir.Node) -> Sequence[Dim] | None:
    found = dims_of(node.inputs[0])
    start = node.attributes["start"].as_int() if "start" in node.attributes else None
    end = node.attributes["end"].as_int() if "end" in node.attributes else None
    return found[start:end] if found is not None else None


def _size(node: ir.Node) -> Sequence[Dim] | None:
    found = dims_of(node.inputs[0])
    return [product(found)] if found is not None else None


def _same(node: ir.Node) -> Sequence[Dim] | None:
    return held(node.inputs[0])


def _line(value: ir.Value | None) -> Sequence[Dim] | None:
    """The elements of an integer tensor of one dimension."""
    found = dims_of(value)
    return held(value) if found is not None and len(found) == 1 else None


def _gather(node: ir.Node) -> Sequence[Dim] | None:
    data, indices = _line(node.inputs[0]), constant(node.inputs[1])
    if data is None or indices is None or any(not -len(data) <= int(i) < len(data) for i in indices.reshape(-1)):
        return None
    return [data[int(i)] for i in indices.reshape(-1)]


def _slice(node: ir.Node) -> Sequence[Dim] | None:
    data = _line(node.inputs[0])
    bounds = [held(v) if v is not None else None for v in node.inputs[1:]]
    first = [b[0] if b else None for b in bounds] + [None] * 4
    start, end, _, step = first[:4]
    if data is None or not isinstance(start, int) or not isinstance(end, int):
        return None
    return data[slice(start, end, step if isinstance(step, int) else 1)]


def _concat(node: ir.Node) -> Sequence[Dim] | None:
    parts = [held(v) for v in node.inputs]
    return None if any(p is None for p in parts) else [d for p in parts if p is not None for d in p]


def _reduce_product(node: ir.Node) -> Sequence[Dim] | None:
    data = _line(node.inputs[0])
    return [product(data)] if data is not None else None


def _elementwise(function: Callable[..., Dim]) -> Callable[[ir.Node], Sequence[Dim] | None]:
    def rule(node: ir.Node) -> Sequence[Dim] | None:
        operands = [held(v) for v in node.inputs]
        if any(o is None for o in operands):
            return None
        known = [o for o in operands if o is not None]
        length = max(len(o) for o in known)
        if any(len(o) not in (1, length) for o in known):
            return None
        return [function(*(o[k if len(o) > 1 else 0] for o in known)) for k in range(length)]

    return rule


def _add(a: Dim, b: Dim) -> Dim:
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    return a if b == 0 else b if a == 0 else None


def _subtract(a: Dim, b: Dim) -> Dim:
    if isinstance(a, int) and isinstance(b, int):
        return a - b
    return a if b == 0 else 0 if a is not None and a == b else None


def _equal(a: Dim, b: Dim) -> Dim:
    if isinstance(a, int) and isinstance(b, int):
        return int(a == b)
    if a is not None and a == b:
        return 1
    numbers = [d for d in (a, b) if isinstance(d, int)]
    return 0 if numbers and numbers[0] < 0 and None not in (a, b) else None  # sizes are never negative


_CONTENTS: dict[str, Callable[[ir.Node], Sequence[Dim] | None]] = {
    "Add": _elementwise(_add),
    "Cast": _same,
    "Concat": _concat,
    "Div": _elementwise(quotient),
    "Equal": _elementwise(_equal),
    "Gather": _gather,
    "Identity": _same,
    "Mul": _elementwise(lambda a, b: product([a, b])),
    "ReduceProd": _reduce_product,
    "Reshape": _same,
    "Shape": _shape,
    "Size": _size,
    "Slice": _slice,
    "Squeeze": _same,
    "Sub": _elementwise(_subtract),
    "Unsqueeze": _same,
    "Where": _elementwise(lambda condition, a, b: None if not isinstance(condition, int) else a if condition else b),
}
