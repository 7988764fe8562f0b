"""Finds where the operands and results of products lie: views become strides, without a copy.

    q = Transpose(Reshape(Split(x)))  ─►  MatMul(q, k)        q[b, h, t, j] is x at  b·3HD·T + t·3HD + h·D + j

A value is followed through ops that only move elements, as index arithmetic. If an element's place in memory is linear in its
index, the coefficients are the library's strides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from graphc.backends.cupy.libraries.gemm import Product, Strided, matmul
from graphc.backends.fusion.indexing import Linear, Map, Variable, flatten, unflatten
from graphc.backends.fusion.op_kernels import op_kernel
from graphc.ir.facts import constant, input_of, shape_of


@dataclass(frozen=True, slots=True)
class OperandSource:
    """A matrix, or a batch of them: ``factor`` times the elements of ``value`` at ``place``."""

    value: ir.Value
    place: Strided
    factor: float = 1.0


def sources(value: ir.Value) -> list[OperandSource]:
    """Where strides can read the elements of ``value``: in the value itself first, then in the values it is a view of."""
    shape = shape_of(value)
    variables = [Variable(f"d{k}", size) for k, size in enumerate(shape)]
    index: Map = tuple(Linear.of(v) for v in variables)
    place = flatten(index, shape)
    found, factor = [OperandSource(value, Strided.contiguous(shape))], 1.0
    while (producer := value.producer()) is not None and constant(value) is None and not value.is_graph_output():
        scaled = rounded_factor(producer) or scalar_factor(producer)
        if op_kernel(producer).same_memory:
            (value, *_) = (v for v in producer.inputs if v is not None)
            index = unflatten(place, shape_of(value))
        elif scaled is not None and (len(list(value.uses())) == 1 or len(list(scaled[0].uses())) > 1):
            value, by = scaled  # read by others too, so it is in memory anyway
            factor *= by
        else:
            step = _pulled(producer, value, index)
            if step is None:
                break
            value, index = step
            place = flatten(index, shape_of(value))
        steps = _steps(place, variables)
        if steps is not None:
            found.append(OperandSource(value, Strided(shape, steps, place.constant), factor))
    return found


def scalar_factor(node: ir.Node) -> tuple[ir.Value, float] | None:
    """(x, factor) if ``value`` is x times or divided by one constant number, and has x's shape."""
    if node.domain != "" or node.op_type not in ("Mul", "Div"):
        return None
    for k, other in ((0, 1), (1, 0)) if node.op_type == "Mul" else ((0, 1),):
        x, known = node.inputs[k], constant(node.inputs[other])
        if x is not None and known is not None and known.size == 1 and shape_of(x) == shape_of(node.outputs[0]):
            number = float(known.reshape(-1)[0])
            return x, 1.0 / number if node.op_type == "Div" else number
    return None


def rounded_factor(node: ir.Node) -> tuple[ir.Value, float] | None:
    """(x, factor) if the node rounds x, widened to float32 and multiplied by one constant number, to the type of x."""
    product = node.inputs[0].producer() if node.op_type == "Cast" and node.inputs[0] is not None else None
    scaled = None if product is None else scalar_factor(product)
    wide = None if scaled is None else scaled[0].producer()
    if scaled is None or wide is None or wide.op_type != "Cast" or wide.inputs[0] is None:
        return None
    x = wide.inputs[0]
    return (x, scaled[1]) if x.dtype == node.outputs[0].dtype else None


def _pulled(producer: ir.Node, value: ir.Value, index: Map) -> tuple[ir.Value, Map] | None:
    """The operand that ``value`` is a view of, and the index into it."""
    if producer.op_type == "Gather" and not producer.domain:  # a Gather at one constant index is also a view
        return _chosen(producer, index)
    index_map = op_kernel(producer).index_map
    pieces = None if index_map is None else index_map(producer, value.index() or 0, index)
    if pieces is None or len(pieces) != 1 or pieces[0].when or pieces[0].operand is None:
        return None
    return input_of(producer, pieces[0].operand), pieces[0].index


def _chosen(node: ir.Node, index: Map) -> tuple[ir.Value, Map] | None:
    """The single constant index along an axis."""
    data, places = node.inputs[0], constant(node.inputs[1])
    if data is None or places is None or places.size != 1:
        return None
    shape = shape_of(data)
    axis = node.attributes.get_int("axis", 0) % len(shape)
    at = Linear.of(int(places.reshape(-1)[0]) % shape[axis])
    return data, (*index[:axis], at, *index[axis + places.ndim :])


def _steps(place: Linear, variables: Sequence[Variable]) -> tuple[int, ...] | None:
    """The coefficient of each variable; None if the offset has other terms."""
    known = dict(place.terms)
    if any(not isinstance(term, Variable) for term in known):
        return None
    steps = tuple(known.get(v, 0) for v in variables)
    return None if any(step < 0 for step in steps) else steps


def placed(shape: tuple[int, ...], chain: Sequence[ir.Node]) -> Strided | None:
    """Strides of an array of ``shape`` in the result of ``chain``: ops that move elements of a reshape of it.

    None if strides cannot describe it.
    """
    variables = [Variable(f"d{k}", size) for k, size in enumerate(shape)]
    index: Map = tuple(Linear.of(v) for v in variables)
    now = shape
    for node in chain:
        if not op_kernel(node).same_memory:  # a Transpose
            index = unflatten(flatten(index, now), shape_of(node.inputs[0]))
            order = node.attributes["perm"].as_ints() if "perm" in node.attributes else range(len(index) - 1, -1, -1)
            index, now = tuple(index[axis] for axis in order), shape_of(node.outputs[0])
    steps = _steps(flatten(index, now), variables)
    return None if steps is None else Strided(shape, steps)


def fitted(a: Sequence[OperandSource], b: Sequence[OperandSource], d: Strided, result: ir.DataType) -> Fitted | None:
    """The product that reads its operands nearest to their origin."""
    for left, right in _nearest(a, b):
        dtype = left.value.dtype
        if dtype is not None and dtype == right.value.dtype:
            found = matmul(left.place, right.place, d, dtype, result)
            if found is not None:
                product, exchanged = found
                return Fitted(replace(product, alpha=left.factor * right.factor), left, right, exchanged)
    return None


@dataclass(frozen=True, slots=True)
class Fitted:
    """A product and where its operands are read.

    Attributes:
        exchanged: whether the product's a is ``b`` transposed, and its b is ``a`` transposed.
    """

    product: Product
    a: OperandSource
    b: OperandSource
    exchanged: bool

    @property
    def operands(self) -> tuple[ir.Value, ir.Value]:
        """The values that are the operands a and b of the product."""
        return (self.b.value, self.a.value) if self.exchanged else (self.a.value, self.b.value)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result: batch dimensions, rows, columns."""
        a, b = self.a.place.shape, self.b.place.shape
        return (*np.broadcast_shapes(a[:-2], b[:-2]), a[-2], b[-1])


def _nearest(a: Sequence[OperandSource], b: Sequence[OperandSource]) -> Iterator[tuple[OperandSource, OperandSource]]:
    pairs = [(i, j) for i in range(len(a)) for j in range(len(b))]
    for i, j in sorted(pairs, key=lambda pair: -sum(pair)):
        yield a[i], b[j]


def matrices(value: ir.Value, *, turned: bool, left: bool) -> list[OperandSource]:
    """:func:`sources` of an operand, as matrices: a vector is one row on the left, one column on the right."""
    found = sources(value)
    if len(shape_of(value)) == 1:
        return [replace(s, place=_as_matrix(s.place, left)) for s in found]
    return [replace(s, place=s.place.turned()) for s in found] if turned else found


def _as_matrix(x: Strided, left: bool) -> Strided:
    (size,), (step,) = x.shape, x.steps
    shape, steps = ((1, size), (size * step, step)) if left else ((size, 1), (step, 1))
    return Strided(shape, steps, x.offset)
