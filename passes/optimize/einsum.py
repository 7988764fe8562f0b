"""einsum: write an Einsum as transposes, reshapes and matrix products.

    before   s = Einsum(q, k; "bqhd,bkhd->bhqk")
    after    s = MatMul(Transpose(q, perm=[0, 2, 1, 3]), Transpose(k, perm=[0, 2, 3, 1]))

Products have fast kernels, gradients that are products, and the attention pass knows them. Several operands are multiplied
from left to right. Sizes of a label that both operands and the result have may differ, as 4·batch and a size of no known name
do where the exporter lost it: a MatMul repeats a size of one there as an Einsum does. Of an operand with a label twice, as in
"bd,dd->bd", the diagonal is taken. An Einsum stays as it is if the length of such a label is not known, if sizes of a summed
label may differ, if sizes cannot be written as the shape of a reshape, or if its operands are integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from graphc.ir.builder import Builder
from graphc.ir.facts import Dim, describe, dims, inputs_of, is_float
from graphc.passes.gradients.linear import einsum_terms
from graphc.passes.optimize.axis_order import View
from graphc.passes.optimize.simplify import dead_code_elimination, replace
from graphc.pipeline import Context, graph_pass


@graph_pass("einsum", requires=("legalize",), changes="form")
def einsum(model: ir.Model, ctx: Context) -> bool:
    """Replace every Einsum of floats that a few products can compute."""
    graph = model.graph
    nodes = [node for node in graph if node.domain == "" and node.op_type == "Einsum"]
    if not nodes:
        return False
    op, count = Builder(graph), 0
    for node in nodes:
        op.before, op.scope = node, node.name or node.op_type
        found = _written(op, node)
        if found is None or not replace(graph, op, node.outputs[0], found):
            ctx.note(f"einsum: stays as it is: {describe(node)}")
            continue
        count += 1
    dead_code_elimination(graph)
    ctx.note(f"einsum: {count} of {len(nodes)} are products")
    return count > 0


@dataclass(frozen=True)
class _Term:
    """A value with the label of each axis."""

    value: ir.Value
    labels: str


def _written(op: Builder, node: ir.Node) -> ir.Value | None:
    """The result of the node, by other ops; None when it has to stay."""
    inputs = inputs_of(node)
    if any(dims(value) is None or not is_float(value) for value in inputs):
        return None
    terms, result = einsum_terms(node, inputs)
    if len(set(result)) != len(result):
        return None
    apart = [_diagonal(op, _Term(value, labels)) for value, labels in zip(inputs, terms, strict=True)]
    if any(term is None for term in apart):
        return None
    inputs, terms = [term.value for term in apart if term], [term.labels for term in apart if term]
    sizes = _sizes(terms, inputs)
    if sizes is None:
        return None
    writer = _Writer(op, sizes)
    found, *rest = (_Term(value, labels) for value, labels in zip(inputs, terms, strict=True))
    for index, term in enumerate(rest):
        later = "".join(t.labels for t in rest[index + 1 :])
        kept = "".join(c for c in dict.fromkeys(found.labels + term.labels) if c in result + later) if later else result
        product = writer.product(found, term, kept)
        if product is None:
            return None
        found = product
    return writer.ordered(writer.summed(found, result), result)


def _diagonal(op: Builder, term: _Term) -> _Term | None:
    """The elements whose places along all axes of a label are the same; None when the length of those axes is not known."""
    shape = dims(term.value) or ()
    if len(shape) != len(term.labels):
        return None
    for label in dict.fromkeys(c for c in term.labels if term.labels.count(c) > 1):
        places = [k for k, c in enumerate(term.labels) if c == label]
        others = [k for k in range(len(term.labels)) if k not in places]
        lengths = {(dims(term.value) or ())[k] for k in places}
        length = lengths.pop()
        if lengths or not isinstance(length, int):
            return None
        last = op.Transpose(term.value, perm=[*others, *places]) if others else term.value
        step = sum(length**k for k in range(len(places)))
        flat = op.Reshape(last, [*[0] * len(others), length ** len(places)])
        found = op.Slice(flat, [0], [length ** len(places)], [len(others)], [step])
        term = _Term(found, "".join(term.labels[k] for k in others) + label)
    return term


def _sizes(terms: Sequence[str], inputs: Sequence[ir.Value]) -> dict[str, Dim] | None:
    """The length of each label, None for one that is unknown or may differ; None when one is empty or a label is repeated."""
    sizes: dict[str, Dim] = {}
    for term, value in zip(terms, inputs, strict=True):
        found = dims(value) or ()
        if len(found) != len(term) or len(set(term)) != len(term) or 0 in found:
            return None
        for label, size in zip(term, found, strict=True):
            if sizes.setdefault(label, size) != size:
                sizes[label] = None
    return sizes


class _Writer:
    """Emits the steps of one Einsum."""

    def __init__(self, op: Builder, sizes: dict[str, Dim]) -> None:
        self.op, self.sizes = op, sizes

    def ordered(self, term: _Term, labels: str) -> ir.Value:
        """The value with its axes in this order."""
        if term.labels == labels:
            return term.value
        return self.op.Transpose(term.value, perm=[term.labels.index(c) for c in labels])  # type: ignore[no-any-return]

    def summed(self, term: _Term, wanted: str) -> _Term:
        """The sum over all axes that are not wanted."""
        axes = [k for k, c in enumerate(term.labels) if c not in wanted]
        if not axes:
            return term
        kept = "".join(c for c in term.labels if c in wanted)
        return _Term(self.op.ReduceSum(term.value, axes, keepdims=0), kept)

    def product(self, a: _Term, b: _Term, result: str) -> _Term | None:
        """Σ a·b over the labels that are not in ``result``; None when a shape cannot be written."""
        a, b = self.summed(a, b.labels + result), self.summed(b, a.labels + result)
        batch = "".join(c for c in result if c in a.labels and c in b.labels)
        if not batch and len(set(a.labels) - set(b.labels)) < len(set(b.labels) - set(a.labels)):
            a, b = b, a  # axes of the right operand become one
        rows, columns = ("".join(c for c in result if c in own and c not in other) for own, other in _pairs(a, b))
        if batch and result == batch + columns + rows:
            a, b, rows, columns = b, a, columns, rows
        along = "".join(c for c in b.labels if c in a.labels and c not in result)
        if not along or not rows + columns:
            return self._elementwise(a, b, result, along)
        if any(self.sizes[label] is None for label in along):
            return None  # a MatMul repeats no row or column
        if not batch:
            rows = "".join(c for c in a.labels if c in rows)
        lead = [*batch, rows] if batch or not rows else [*rows]
        left = self._view(self.ordered(a, batch + rows + along), [*lead, along])
        right = self._view(self.ordered(b, batch + along + columns), [*batch, along, columns])
        if not all(_is_one_shape(view) for view in (left, right, self._view(a.value, [*lead, columns]))):
            return None
        value = self.op.MatMul(left.reshaped(self.op, left.value), right.reshaped(self.op, right.value))
        apart = self._view(value, [*lead, columns]).emit(self.op)
        return _Term(self.ordered(_Term(apart, batch + rows + columns), result), result)

    def _elementwise(self, a: _Term, b: _Term, result: str, along: str) -> _Term:
        labels = result + along
        value = self.op.Mul(self._spread(a, labels), self._spread(b, labels))
        return _Term(self.op.ReduceSum(value, list(range(len(result), len(labels))), keepdims=0) if along else value, result)

    def _spread(self, term: _Term, labels: str) -> ir.Value:
        """The value with an axis of one for every label that it lacks."""
        missing = [k for k, c in enumerate(labels) if c not in term.labels]
        value = self.ordered(term, "".join(c for c in labels if c in term.labels))
        return self.op.Unsqueeze(value, missing) if missing else value

    def _view(self, value: ir.Value, axes: list[str]) -> View:
        return View(value, axes, self.sizes)


def _pairs(a: _Term, b: _Term) -> tuple[tuple[str, str], tuple[str, str]]:
    return (a.labels, b.labels), (b.labels, a.labels)


def _is_one_shape(view: View) -> bool:
    """Whether a Reshape can merge the axes of this view, and split them: one size that is not a number at most."""
    merged = sum(len(axis) > 1 and not isinstance(View.extent(axis, view.sizes), int) for axis in view.axes)
    return merged <= 1 and view.expressible()
