"""What a file says about its values, as far as it can be trusted: types and ranks where inference finds none.

Exporters write wrong shapes of outputs and intermediate values, and runtimes ignore them. So all annotations of computed values
are taken off before conversion, and ``legalize`` warns of those that inference contradicts. Graph inputs keep their shapes.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from graphc.ir.facts import dims
from graphc.ir.infer import propagate
from graphc.passes.legalize.ranks import Ranks

_SHOWN = 3
"""Contradictions that a warning names."""


class Annotations:
    """The types and shapes that the file gives the values of a graph; they are removed from the values themselves."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._ranks: Ranks | None = None
        self._said: dict[str, tuple[ir.TypeProtocol | None, ir.Shape | None]] = {}
        self._guessed: set[ir.Value] = set()
        self._wrong: dict[str, str] = {}
        for node in graph.all_nodes():
            if node.op_type == "Constant":
                continue
            for value in node.outputs:
                if value.name and (value.type is not None or value.shape is not None):
                    self._said[value.name] = (value.type, value.shape)
                    value.type = value.shape = None
        for value in graph.inputs:
            if _open(value) and (rank := self.rank(value)) is not None:
                value.shape = ir.Shape([None] * rank)

    def complete(self, values: Sequence[ir.Value], operands: Sequence[ir.Value | None] = ()) -> None:
        """Give values that inference left open a type and a rank: by the ops around them, else as the file says."""
        guess = any(v in self._guessed for v in operands)
        for value in values:
            type_, shape = self._said.get(value.name or "", (None, None))
            if value.type is None:
                value.type = type_
            if value.shape is None and isinstance(value.type, ir.TensorType):
                rank = self.rank(value)
                if rank is None and shape is not None:
                    rank = len(shape)
                    self._guessed.add(value)
                if rank is not None:
                    value.shape = ir.Shape([None] * rank)
            if guess:
                self._guessed.add(value)

    def doubt(self, operands: Sequence[ir.Value | None]) -> bool:
        """Forget the ranks of operands that only the file told; returns whether there were any."""
        found = [v for v in operands if v is not None and v in self._guessed and v.shape is not None]
        for value in found:
            value.shape = None
        return bool(found)

    def rank(self, value: ir.Value) -> int | None:
        """The rank that the ops around a value tell."""
        if self._ranks is None:
            self._ranks = Ranks(self._graph)
        return self._ranks[value]

    def finish(self, version: int) -> None:
        """Find further ranks after conversion, which has folded arithmetic on shapes, and infer what follows from them."""
        found: dict[ir.Value, int] = {}
        while any(_open(v) for node in self._graph.all_nodes() for v in node.outputs):
            ranks = Ranks(self._graph)
            values = [v for node in self._graph.all_nodes() for v in node.outputs if _open(v)]
            learnt = {v: rank for v in values if (rank := ranks[v]) is not None}
            for value, rank in learnt.items():
                value.shape = ir.Shape([None] * rank)
            # Inference of a node with bodies forgets what it cannot find in them; that is no reason for another round.
            if learnt.keys() <= found.keys():
                return
            found |= learnt
            propagate(self._graph, version=version)

    def compare(self, name: str | None, value: ir.Value) -> None:
        """Note a contradiction between what the file says of ``name`` and what was inferred."""
        type_, shape = self._said.get(name or "", (None, None))
        if not isinstance(type_, ir.TensorType) or not isinstance(value.type, ir.TensorType):
            return
        wrong = type_ != value.type
        have = dims(value)
        if not wrong and shape is not None and have is not None:
            pairs = zip(shape.dims, have, strict=False)
            wrong = len(shape) != len(have) or any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in pairs)
        if wrong:
            self._wrong[name or ""] = f"{name!r} is {_show(type_, shape)}, but its node makes {_show(value.type, value.shape)}"

    def warning(self) -> str | None:
        """One line about all contradictions; None when there are none."""
        if not self._wrong:
            return None
        shown = list(self._wrong.values())
        more = f", and {len(shown) - _SHOWN} more such" if len(shown) > _SHOWN else ""
        return f"the file says that {'; '.join(shown[:_SHOWN])}{more}; what the nodes make is used"


def _open(value: ir.Value) -> bool:
    return value.shape is None and isinstance(value.type, ir.TensorType)


def _show(type_: ir.TypeProtocol | None, shape: ir.Shape | None) -> str:
    dtype = type_.dtype.name.lower() if isinstance(type_, ir.TensorType) else str(type_)
    return dtype + ("" if shape is None else "[" + ", ".join("?" if d is None else str(d) for d in _plain(shape)) + "]")


def _plain(shape: ir.Shape) -> list[int | str | None]:
    return [d if isinstance(d, int) else d.value for d in shape.dims]
