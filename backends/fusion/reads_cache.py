"""Caches the operands that equal kernels read from memory.

Grouping checks for every candidate kernel whether it can be generated, and what it reads. A network repeats its layers: the
same
computation over values of the same shapes and types reads the corresponding operands.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from graphc.backends.fusion.generator import Generator
from graphc.backends.fusion.kernel_source import KernelSpec, NotFusibleError
from graphc.ir.facts import constant, shape_of

InMemory = Callable[[ir.Value], bool]

SHORT = 64
"""Largest constant that is compared by its elements; a larger one equals only itself."""


@dataclass(slots=True)
class Reads:
    """The operands of kernels, cached by what the kernels compute.

    The nodes of the graph must not change meanwhile.
    """

    _known: dict[Hashable, tuple[tuple[int, ...], int, int] | None] = field(default_factory=dict)
    _nodes: dict[ir.Node, Hashable] = field(default_factory=dict)
    _values: dict[ir.Value, Hashable] = field(default_factory=dict)

    def of(self, spec: KernelSpec, in_memory: InMemory) -> tuple[tuple[ir.Value, ...], int, int] | None:
        """The reads of a kernel in parameter order, its ``variables`` and ``skewed``; None: it cannot be generated."""
        walk = _Walk(self, in_memory)
        key = walk.key(spec)
        if key not in self._known:
            try:
                generator = Generator(spec, in_memory)
                reads = tuple(walk.numbers[v] for v in generator.reads())
                self._known[key] = reads, generator.variables, generator.skewed
            except NotFusibleError:
                self._known[key] = None
        found = self._known[key]
        return None if found is None else (tuple(walk.values[k] for k in found[0]), *found[1:])

    def node(self, node: ir.Node) -> Hashable:
        """A node's operation, without its operands."""
        found = self._nodes.get(node)
        if found is None:
            attributes = [(name, str(attr.type), _plain(attr)) for name, attr in sorted(node.attributes.items())]
            found = self._nodes[node] = (node.domain, node.op_type, tuple(attributes))
        return found

    def value(self, value: ir.Value) -> Hashable:
        """Shape, type and, for a constant, the elements."""
        found = self._values.get(value)
        if found is None:
            known = constant(value)
            held: Hashable = None if known is None else known.tobytes() if known.size <= SHORT else id(value)
            found = self._values[value] = (shape_of(value), value.dtype, held)
        return found


class _Walk:
    """One walk from a kernel's results to memory; values are numbered in the order of the walk."""

    def __init__(self, reads: Reads, in_memory: InMemory) -> None:
        self._reads, self._in_memory = reads, in_memory
        self.values: list[ir.Value] = []
        self.numbers: dict[ir.Value, int] = {}
        self._met: list[Hashable] = []

    def key(self, spec: KernelSpec) -> Hashable:
        stores = self._all(spec.stores)
        reductions = self._all([node.outputs[0] for node in spec.reductions])
        return (spec.shape, spec.axes, stores, reductions, tuple(self._met))

    def _all(self, roots: Sequence[ir.Value]) -> tuple[int, ...]:
        return tuple(self._number(value, root=True) for value in roots)

    def _number(self, value: ir.Value | None, *, root: bool = False) -> int:
        if value is None:
            return -1
        found = self.numbers.get(value)
        if found is not None:
            return found
        found = self.numbers[value] = len(self.values)
        self.values.append(value)
        self._met.append(None)
        stored, producer = self._in_memory(value), value.producer()
        if producer is None or (stored and not root):
            self._met[found] = (self._reads.value(value), stored)
        else:
            operands = tuple([self._number(operand) for operand in producer.inputs])
            self._met[found] = (self._reads.value(value), stored, self._reads.node(producer), value.index(), operands)
        return found


def _plain(attr: ir.Attr) -> Hashable:
    """The value of an attribute; tensors and graphs count by identity."""
    value = attr.value
    if isinstance(value, (int, float, str, bytes)):
        return value
    if isinstance(value, (list, tuple)) and all(isinstance(item, (int, float, str, bytes)) for item in value):
        return tuple(value)
    return id(value)
