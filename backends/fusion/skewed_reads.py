"""Finds values that kernels should read from memory because readers see them in lines of another length.

    Pad [512, 770] ─► Reshape [394240] ─► Slice [393728] ─► Reshape [512, 769] ─► Slice [512, 768]

shears a band into columns, as attention to near positions does. One pass would divide the offset of each element by 770 to
find which rows and columns are padding; from a padded copy, element (i, j) is at 769 · i + j.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from graphc.backends.fusion.indexing import Linear, Map, Variable, flatten
from graphc.backends.fusion.op_kernels import op_kernel
from graphc.backends.fusion.views import broadcast
from graphc.ir.facts import constant, shape_of

STEPS = 64
"""Nodes that are followed from one reader; what needs more stays as it is."""


def skewed_reads(value: ir.Value, in_memory: Callable[[ir.Value], bool]) -> list[ir.Value]:
    """The reshaped values behind ``value`` whose elements a loop over ``value`` finds by a division for each of them.

    Args:
        value: what a node that moves elements makes.
        in_memory: whether a value is read rather than computed.
    """
    index = tuple(Linear.of(Variable(f"i{k}", size)) for k, size in enumerate(shape_of(value)))
    variables = [variable for part in index for variable, _ in part.variables()]
    if not variables:
        return []
    walk = _Walk(lambda v: v is not value and in_memory(v), variables[-1])
    walk.follow(value, index, None)
    return walk.found


class _Walk:
    def __init__(self, in_memory: Callable[[ir.Value], bool], inner: Variable) -> None:
        self._in_memory, self._inner, self._steps = in_memory, inner, 0
        self.found: list[ir.Value] = []

    def follow(self, value: ir.Value, index: Map, reshaped: ir.Value | None) -> None:
        """Follow element ``index`` of ``value`` to memory; ``reshaped`` is the operand of the last reshape on the way."""
        node = value.producer()
        self._steps += 1
        if self._steps > STEPS or constant(value) is not None:
            return
        if node is None or self._in_memory(value):
            self._check([flatten(index, shape_of(value))], reshaped)
            return
        kernel = op_kernel(node)
        pieces = kernel.index_map(node, value.index() or 0, index) if kernel.index_map is not None else None
        for piece in pieces or ():
            self._check([linear for linear, _, _ in piece.when], reshaped)
            if piece.operand is not None and (operand := node.inputs[piece.operand]) is not None:
                self.follow(operand, piece.index, operand if kernel.same_memory else reshaped)
        if pieces is not None or reshaped is None:
            return
        if kernel.expression is None:
            self._check(index, reshaped)
            return
        for operand in node.inputs:
            if operand is not None:
                self.follow(operand, broadcast(index, shape_of(operand)), reshaped)

    def _check(self, linears: Sequence[Linear], reshaped: ir.Value | None) -> None:
        if reshaped is not None and reshaped not in self.found and any(part.is_skewed(self._inner) for part in linears):
            self.found.append(reshaped)
