"""What the repairs of :mod:`graphc.passes.rebatch.rebatch` share: where the batch is, and operands made for one batch size.

before  mask[20, 1] = the same 5 rows for each of 4 samples           after  mask[5*batch, 1] = those 5 rows, repeated
before  index[4] = (0, 5, 10, 15)                                     after  index[batch] = Range(batch) · 5
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from graphc.errors import ModelError
from graphc.ir.builder import Builder
from graphc.ir.evaluate import computed
from graphc.ir.facts import HELD, Dim, constant, describe_value, dims, is_parameter
from graphc.ir.infer import infer_outputs
from graphc.ir.symbolic_dims import held, product, substituted

_SAMPLES = (7, 11)
"""Batch sizes at which :meth:`Change.sharpen` infers a node to find out how its sizes follow the batch."""


@dataclass(frozen=True, slots=True)
class Change:
    """The context of a repair.

    Attributes:
        op: builds nodes before the node to repair.
        symbol: name of the new batch dimension.
        declared: the old batch size.
        before: shape that each value had for the old batch size.
        source: a graph input whose first dimension is the batch.
        outer: for values that share the batch axis with an outer dimension (time × batch): the size of that dimension.
        known: arrays of values that depend on no graph input.
        doubts: nodes whose repair only a comparison of results can confirm.
    """

    op: Builder
    symbol: str
    declared: int
    before: Mapping[ir.Value, tuple[Dim, ...] | None]
    source: ir.Value
    outer: dict[ir.Value, int] = field(default_factory=dict)
    known: dict[ir.Value, np.ndarray | None] = field(default_factory=dict)
    doubts: list[ir.Node] = field(default_factory=list)

    # Where the batch is ----------------------------------------------------------------------------------------------

    def is_batch(self, dim: Dim) -> bool:
        """Whether a dimension is the batch, or a multiple of it."""
        return isinstance(dim, str) and self.symbol in dim.split("*")

    def axes(self, value: ir.Value | None) -> list[int]:
        """Return the axes of ``value`` that hold the batch."""
        found = dims(value) if value is not None else None
        return [k for k, d in enumerate(found or ()) if self.is_batch(d)]

    def axis(self, value: ir.Value | None) -> int | None:
        """Return the axis of ``value`` that holds the batch; None when there is none.

        Raises:
            ModelError: the batch is in several axes.
        """
        axes = self.axes(value)
        if len(axes) > 1 and value is not None:
            raise ModelError(f"the batch is in several dimensions of {describe_value(value)}")
        return axes[0] if axes else None

    def old_size(self, dim: Dim) -> int | None:
        """The size of a dimension at the old batch size."""
        return found if isinstance(found := substituted(dim, self.symbol, self.declared), int) else None

    def old(self, value: ir.Value) -> list[int] | None:
        """The old shape, when all its dimensions are numbers."""
        found = self.before.get(value) or dims(value)
        sizes = [self.old_size(d) for d in found or ()]
        return None if found is None or None in sizes else [s for s in sizes if s is not None]

    def inner(self, value: ir.Value, axis: int) -> int:
        """How many consecutive entries along the batch axis belong to one sample."""
        size = self.old_size((dims(value) or ())[axis]) or 0
        return max(1, size // (self.declared * self.outer.get(value, 1)))

    def inherit(self, node: ir.Node) -> None:
        """Record the outer size of an output whose batch axis is as long as an input's: its order is the same."""
        for out in node.outputs:
            axes = self.axes(out) if out not in self.outer else []
            for value in node.inputs if len(axes) == 1 else ():
                place = self.axes(value) if value in self.outer else []
                if value is not None and place and (dims(value) or ())[place[0]] == (dims(out) or ())[axes[0]]:
                    self.outer[out] = self.outer[value]

    def sharpen(self, node: ir.Node) -> None:
        """Find unknown sizes of the outputs: infer the node at two batch sizes, and see which sizes are multiples."""
        unknown = [out for out in node.outputs if None in (dims(out) or ())]
        if not unknown or not any(self.axes(v) or self._holds_batch(v) for v in node.inputs):
            return
        try:
            found = [
                infer_outputs(
                    node.op_type,
                    node.domain,
                    [self._at(v, size) for v in node.inputs],
                    node.attributes,
                    num_outputs=len(node.outputs),
                )
                for size in _SAMPLES
            ]
        except ModelError:
            return  # the node fits one batch only: what it makes stays unknown
        for k, out in enumerate(node.outputs):
            shapes = [tuple(made[k][1] or ()) for made in found]
            have = dims(out)
            if have is None or any(len(shape) != len(have) for shape in shapes):
                continue
            out.shape = ir.Shape([self._multiple(*sizes) if d is None else d for d, *sizes in zip(have, *shapes, strict=True)])

    def _holds_batch(self, value: ir.Value | None) -> bool:
        return value is not None and any(self.is_batch(d) for d in value.meta.get(HELD) or ())

    def _at(self, value: ir.Value | None, size: int) -> ir.Value | None:
        """A stand-in for ``value`` with the batch ``size``."""
        if value is None:
            return None
        shape = dims(value)
        sizes = [substituted(d, self.symbol, size) for d in shape or ()]
        made = ir.Value(name=value.name, type=value.type, shape=ir.Shape(sizes) if shape is not None else None)
        elements = [substituted(d, self.symbol, size) for d in held(value) or ()]
        if elements and all(isinstance(d, int) for d in elements) and value.dtype is not None:
            array = np.array(elements, value.dtype.numpy()).reshape([d for d in sizes if isinstance(d, int)])
            made.const_value = ir.Tensor(array)
        elif (fixed := constant(value)) is not None:
            made.const_value = ir.Tensor(fixed)
        return made

    def _multiple(self, *sizes: Dim) -> Dim:
        numbers = [d for d in sizes if isinstance(d, int)]
        if len(numbers) < len(sizes):
            return None
        if len(set(numbers)) == 1:
            return numbers[0]
        each = {number // size if number % size == 0 else -1 for number, size in zip(numbers, _SAMPLES, strict=True)}
        return product([self.symbol, each.pop()]) if len(each) == 1 and -1 not in each else None

    # Operands made for the old batch size ----------------------------------------------------------------------------

    def number(self, value: ir.Value | None) -> np.ndarray | None:
        """The array of a value that depends on no graph input, from the file's weights; None for any other."""
        return computed(value, self.known) if value is not None else None

    def rows(
        self, value: ir.Value, axis: int, *, outer: int = 1, exact: bool = False, step: np.ndarray | int | None = None
    ) -> ir.Value:
        """Make ``value``, which has entries for each sample of the old batch along ``axis``, follow the new batch.

        The entries must be the same for every sample, or, for integers, grow by the same step from sample to sample.

        Args:
            outer: product of the sizes that share the axis with the batch and vary more slowly.
            exact: return the whole new batch, where the op does not broadcast an axis of 1.
            step: the growth from sample to sample, where the file has one sample, which cannot tell.

        Raises:
            ModelError: the entries differ, or follow from a graph input.
        """
        shape, batch, axis = self.old(value), self.declared, axis % self.op.rank(value)
        array = self.number(value)
        if shape is None or array is None:
            raise ModelError(f"{describe_value(value)} has entries for {batch} samples, and no constant says which")
        inner = shape[axis] // (outer * batch)
        if inner * outer * batch != array.shape[axis]:
            raise ModelError(f"{describe_value(value)} does not have the same number of entries for each of {batch} samples")
        plain = outer == inner == 1
        parts = shape if plain else [*shape[:axis], outer, batch, inner, *shape[axis + 1 :]]
        place = axis if plain else axis + 1
        split = array.reshape(parts)
        first, growth = np.take(split, [0], place), _growth(split, place)
        if growth is None:
            raise ModelError(
                f"{describe_value(value)} has other entries for each of the {batch} samples, so it fits no other batch"
            )
        if step is not None and batch == 1:
            growth = np.broadcast_to(np.asarray(step, array.dtype), first.shape)
        base = self._first(value, first, parts, place)
        if growth.any():
            base = self.op.Add(base, self.op.Mul(self._counter(value, len(parts), place), self.op.const(growth)))
        elif plain and not exact:
            return base
        else:
            base = self.op.Expand(base, self._sizes([1] * place + [None] + [1] * (len(parts) - place - 1)))
        if plain:
            return base  # type: ignore[no-any-return]
        result = self.op.Reshape(base, self.op.const([-1 if k == axis else d for k, d in enumerate(shape)]))
        if outer > 1:
            self.outer[result] = outer
        return result  # type: ignore[no-any-return]

    def _first(self, value: ir.Value, first: np.ndarray, parts: Sequence[int], place: int) -> ir.Value:
        """The entries of the first sample: ``value`` in the shape ``parts``, cut to 1 along ``place``."""
        if not self._trains(value):
            return self.op.const(first)
        apart = value if len(parts) == self.op.rank(value) else self.op.Reshape(value, self.op.const(list(parts)))
        if apart is value and is_parameter(value) and len(value.uses()) == 1:
            value.const_value = ir.Tensor(np.ascontiguousarray(first), name=value.name)
            value.shape = ir.Shape(first.shape)  # one row trains; the exported file gets it as often as it had it
            return value
        return self.op.Slice(apart, [0], [1], [place])  # type: ignore[no-any-return]

    def _trains(self, value: ir.Value) -> bool:
        """Whether a value is computed from parameters."""
        pending, seen = [value], set[ir.Value]()
        while pending:
            last = pending.pop()
            if is_parameter(last):
                return True
            if last not in seen and (producer := last.producer()) is not None:
                seen.add(last)
                pending.extend(v for v in producer.inputs if v is not None)
        return False

    def _counter(self, like: ir.Value, rank: int, place: int) -> ir.Value:
        """The index of each sample, with ``rank`` axes of which ``place`` holds the batch."""
        size = self.op.Squeeze(self.batch(), [0])
        numbers = self.op.Range(np.int64(0), size, np.int64(1))
        if like.dtype is not None and like.dtype != ir.DataType.INT64:
            numbers = self.op.Cast(numbers, to=int(like.dtype))
        return self.op.Reshape(numbers, self.op.const([-1 if k == place else 1 for k in range(rank)]))  # type: ignore[no-any-return]

    def batch(self) -> ir.Value:
        """The batch size, int64[1]."""
        return self.op.Shape(self.source, start=0, end=1)  # type: ignore[no-any-return]

    def _sizes(self, sizes: Sequence[int | None]) -> ir.Value:
        """A shape in which None stands for the batch size."""
        if len(sizes) == 1:
            return self.batch()
        return self.op.Concat(*(self.batch() if d is None else np.array([d]) for d in sizes), axis=0)  # type: ignore[no-any-return]


def _growth(split: np.ndarray, place: int) -> np.ndarray | None:
    """By how much entries grow from sample to sample along axis ``place``: zeros if they repeat; None if they differ."""
    first = np.take(split, [0], place)
    if np.array_equal(split, np.broadcast_to(first, split.shape), equal_nan=split.dtype.kind == "f"):
        return np.zeros_like(first)
    if split.dtype.kind not in "iu":
        return None
    steps = np.diff(split, axis=place)
    each = np.take(steps, [0], place)
    return each if np.array_equal(steps, np.broadcast_to(each, steps.shape)) else None
