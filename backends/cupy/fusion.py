"""Grouping the nodes of a segment into launches: fused kernels, and nodes that a library or a kernel of their own runs.

    Add ─► ReduceMean ─► Sub ─► Mul ─► … ─► Gemm        becomes        [Add … normalisation] , [Gemm]

What several kernels need is written to memory; everything else lives in registers. A value joins the last kernel that walks
over the same elements, shares an operand with it, and stands behind everything the value depends on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from graphc.backends.cupy import views
from graphc.backends.cupy.alike import Reads
from graphc.backends.cupy.expressions import stored_bytes
from graphc.backends.cupy.generator import Generator
from graphc.backends.cupy.launch import BLOCKS
from graphc.backends.cupy.nodes import operands, results
from graphc.backends.cupy.reductions import REDUCTIONS, reduced_axes
from graphc.backends.cupy.source import NotFusibleError, Spec
from graphc.backends.cupy.views import shape_of
from graphc.ir.facts import constant, static_dims

OPERANDS = 24
"""Most arrays one kernel touches: beyond, addresses crowd out values in registers."""

LOOK_BACK = 12
"""How many earlier kernels a value may join."""

WORK = 40
"""Most operations that are worth doing again in place of reading a value; a few hundred cost as much as the memory."""

SPREAD = 6
"""Operations that are worth a place in memory where each element would repeat them."""

COSTLY = {"Exp": 4, "Erf": 8, "Tanh": 8, "Gelu": 12, "Log": 4, "Sigmoid": 6, "Div": 4, "Sqrt": 4, "Pow": 12, "Sin": 9, "Cos": 9}
"""Operations that take several instructions."""

SMALL = 1 << 16
"""Elements below which a kernel costs its launch more than its memory, so that unrelated values may share one."""


@dataclass(slots=True, eq=False)
class Kernel:
    """A fused kernel in the making.

    Attributes:
        again: values in memory that are computed again from others in place of being read.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...] = ()
    reductions: list[ir.Node] = field(default_factory=list)
    stores: list[ir.Value] = field(default_factory=list)
    reads: set[ir.Value] = field(default_factory=set)
    again: set[ir.Value] = field(default_factory=set)

    @property
    def spec(self) -> Spec:
        return Spec(self.shape, self.axes, tuple(self.reductions), tuple(self.stores))


@dataclass(slots=True, eq=False)
class Opaque:
    """A node that is no fused kernel."""

    node: ir.Node


Launch = Kernel | Opaque


@dataclass(slots=True)
class Grouping:
    """The launches of a segment in order.

    Attributes:
        memory: the values that are written to memory.
        aliases: value → the value of another shape whose memory it is.
    """

    launches: list[Launch]
    memory: set[ir.Value]
    aliases: dict[ir.Value, ir.Value]


def in_place_of(value: ir.Value) -> ir.Value:
    """The value whose memory this one shares because only reshapes stand between them; a result has memory of its own."""
    producer = value.producer()
    while producer is not None and producer.domain == "" and producer.op_type in views.RESHAPES:
        if value.is_graph_output():
            break
        (value, *_) = (v for v in producer.inputs if v is not None)
        producer = value.producer()
    return value


def group(graph: ir.Graph, opaque: Callable[[ir.Node], bool]) -> Grouping:
    """Group the nodes of ``graph``, whose shapes are static.

    Args:
        opaque: nodes that must not be fused because a library runs them better; what cannot be fused is opaque anyway.
    """
    return _Grouper(graph, opaque).run()


class _Grouper:
    def __init__(self, graph: ir.Graph, opaque: Callable[[ir.Node], bool]) -> None:
        self.graph = graph
        self.nodes = [n for n in graph if not _is_constant(n)]
        self._reads = Reads()
        self.opaque = {n for n in self.nodes if opaque(n) or not fusible(n, self._reads)}
        self.aliases: dict[ir.Value, ir.Value] = {}
        self.memory: set[ir.Value] = set()
        self.costs: dict[ir.Value, tuple[frozenset[ir.Value], int]] = {}
        self._choose_memory()
        self.launches: list[Launch] = []
        self.made: dict[ir.Value, int] = {}

    def run(self) -> Grouping:
        for node in self.nodes:
            if node in self.opaque:
                self.launches.append(Opaque(node))
                self.made.update((out, len(self.launches) - 1) for out in node.outputs)
            else:
                for out in node.outputs:
                    if out in self.memory and _size(out):
                        self._place(node, out)
        self._strip()
        self._lighten()
        kept = {v for launch in self.launches for v in _written(launch)}
        return Grouping(self.launches, kept, self.aliases)

    # What is written to memory ------------------------------------------------------------------------------------------

    def _choose_memory(self) -> None:
        """Find the values that cannot or should not live in registers only."""
        found: set[ir.Value] = set(self.graph.outputs)
        for node in self.opaque:
            found.update(node.outputs)
            for value in operands(node):
                if value is None or constant(value) is not None:
                    continue
                base = in_place_of(value)
                found.add(base)
                if base is not value:
                    self.aliases[value] = base
        self.memory = {v for v in found if v.producer() is not None and v not in self.aliases}
        for node in self.nodes:
            if node not in self.opaque:
                for out in node.outputs:
                    kept = node.op_type in REDUCTIONS or self._is_shared(node, out) or self._is_spread(out)
                    if kept and out not in self.aliases:
                        self.memory.add(out)

    def _is_shared(self, node: ir.Node, out: ir.Value) -> bool:
        """Whether several nodes use a value that costs something to compute again."""
        users = list(out.uses())
        if len(users) < 2 or (node.domain == "" and node.op_type in views.RULES) or node.op_type == "Cast":
            return False
        size = _size(out)
        if size <= SMALL and all(_size(o) >= 8 * size for user, _ in users for o in user.outputs[:1]):
            return False
        return not self._is_cheap(out)

    def _is_spread(self, value: ir.Value) -> bool:
        """Whether every element of something large would compute this anew: a factor for each channel, say."""
        shape = shape_of(value)
        if not shape or shape[-1] == 1 or self._made_of(value)[1] < SPREAD:
            return False
        made = [shape_of(out) for user, _ in value.uses() if user not in self.opaque for out in user.outputs[:1]]
        return any(_size_of(s) > max(SMALL, 8 * _size_of(shape)) for s in made)

    def _is_cheap(self, value: ir.Value) -> bool:
        """Whether each reader had better compute the value again: what it is made of takes no more memory than itself."""
        leaves, work = self._made_of(value)
        return work <= WORK and sum(_bytes_read(leaf, _size(value)) for leaf in leaves) <= _nbytes(value)

    def _made_of(self, value: ir.Value) -> tuple[frozenset[ir.Value], int]:
        """The values in memory from which ``value`` is computed, and how many operations that takes."""
        node = value.producer()
        if node is None or value in self.memory or node in self.opaque or node.op_type in REDUCTIONS:
            return frozenset([value]), 0
        if _is_constant(node):
            return frozenset(), 0
        if value not in self.costs:
            parts = [self._made_of(v) for v in node.inputs if v is not None]
            work = sum(w for _, w in parts) + (0 if node.op_type in views.RULES else COSTLY.get(node.op_type, 1))
            self.costs[value] = frozenset().union(*(leaves for leaves, _ in parts)), work
        return self.costs[value]

    # Placing values -------------------------------------------------------------------------------------------------------

    def _place(self, node: ir.Node, value: ir.Value) -> None:
        if node.op_type in REDUCTIONS and node not in self.opaque:
            axes = reduced_axes(node)
            assert axes is not None
            wanted = Kernel(shape_of(node.inputs[0]), axes, [node], [value])
        else:
            wanted = Kernel(shape_of(value), (), [], [value])
        found = self._operands(wanted, len(self.launches))
        if found is None:
            raise NotFusibleError(f"{node.op_type} {node.name} cannot be computed from memory")
        wanted.reads = found
        first = max((self.made.get(v, 0) for v in wanted.reads), default=0)
        for k in range(len(self.launches) - 1, max(first - 1, len(self.launches) - 1 - LOOK_BACK), -1):
            launch = self.launches[k]
            if isinstance(launch, Kernel):
                merged = self._joined(launch, k, wanted)
                if merged is not None:
                    self.launches[k] = merged
                    self.made[value] = k
                    return
        self.made[value] = len(self.launches)
        self.launches.append(wanted)

    def _joined(self, kernel: Kernel, at: int, new: Kernel) -> Kernel | None:
        """``kernel`` with the result of ``new``, or None where they do not go together."""
        found = _common_walk(kernel, new)
        if found is None:
            return None
        shape, axes = found
        if _size_of(shape) > SMALL:
            shared = new.reads & (kernel.reads | set(kernel.stores))
            least = min(_size_of(shape) // 4, _size_of(new.shape))
            if not any(_size(v) >= least for v in shared):
                return None
        both = Kernel(shape, axes, [*kernel.reductions, *new.reductions], [*kernel.stores, *new.stores])
        reads = self._operands(both, at)
        if reads is None or len(reads) + len(both.stores) > OPERANDS:
            return None
        if axes and not (_walks_well(both) or Generator(both.spec, lambda v: v in reads).divides()):
            return None
        both.reads = reads
        return both

    def _operands(self, kernel: Kernel, at: int) -> set[ir.Value] | None:
        """What a kernel that would stand at position ``at`` reads; None where it cannot be generated."""
        own = set(kernel.stores) | {out for node in kernel.reductions for out in node.outputs}

        def in_memory(value: ir.Value) -> bool:
            if value in own or value in kernel.again:
                return False
            made = self.made.get(value)
            return made < at if made is not None else value.producer() is None or _is_constant(value.producer())

        found = self._reads.of(kernel.spec, in_memory)
        return None if found is None else set(found)

    # Clearing up ----------------------------------------------------------------------------------------------------------

    def _strip(self) -> None:
        """Take out what is written and never read."""
        while True:
            needed = set(self.graph.outputs)
            for launch in self.launches:
                if isinstance(launch, Opaque):
                    needed.update(self.aliases.get(v, v) for v in operands(launch.node) if v is not None)
                else:
                    needed |= launch.reads
            before = sum(len(_written(launch)) for launch in self.launches)
            for k, launch in enumerate(self.launches):
                if isinstance(launch, Kernel) and any(v not in needed for v in launch.stores):
                    self.launches[k] = self._without(launch, k, needed)
            if sum(len(_written(launch)) for launch in self.launches) == before:
                break
        kept = [launch for launch in self.launches if isinstance(launch, Opaque) or launch.stores]
        self.launches = kept

    def _without(self, kernel: Kernel, at: int, needed: set[ir.Value]) -> Kernel:
        less = Kernel(kernel.shape, kernel.axes, list(kernel.reductions), [v for v in kernel.stores if v in needed])
        if not less.stores:
            return less
        reads = self._operands(less, at)
        assert reads is not None
        less.reads = reads
        return less

    def _lighten(self) -> None:
        """Compute again what follows from other operands of the same kernel: a mask from what was normalised, say."""
        for k, launch in enumerate(self.launches):
            if isinstance(launch, Kernel):
                for value in sorted(launch.reads, key=lambda v: v.name or ""):
                    if value in self.made and _size(value) > SMALL:
                        self._try_without(launch, k, value)

    def _try_without(self, kernel: Kernel, at: int, value: ir.Value) -> None:
        node = value.producer()
        if node is None or node in self.opaque or node.op_type in REDUCTIONS:
            return
        parts = [self._made_of(v) for v in node.inputs if v is not None]
        extra = frozenset().union(*(leaves for leaves, _ in parts)) - kernel.reads - set(kernel.stores)
        if sum(w for _, w in parts) > WORK or sum(_bytes_read(v, _size(value)) for v in extra) * 4 > _nbytes(value):
            return
        kernel.again.add(value)
        reads = self._operands(kernel, at)
        if reads is None or len(reads) + len(kernel.stores) > OPERANDS:
            kernel.again.discard(value)
        else:
            kernel.reads = reads


def _common_walk(kernel: Kernel, new: Kernel) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """(shape, axes) over which both can walk together."""
    rows, size = kernel.spec.rows, _size_of(kernel.shape)
    if new.axes:
        if new.shape != kernel.shape:
            return None
        if new.axes == kernel.axes:
            return kernel.shape, kernel.axes
        return None if kernel.axes else (new.shape, new.axes)
    if new.shape == kernel.shape or (not kernel.axes and _size_of(new.shape) == size):
        return kernel.shape, kernel.axes
    if kernel.axes and _size_of(new.shape) in (rows, size):
        return kernel.shape, kernel.axes
    return None


def _walks_well(kernel: Kernel) -> bool:
    """Whether one pass over rows keeps the device busy, so that a kernel may do several things one after another.

    Where neighbouring rows are neighbours in memory, threads take vectors of rows: many more are needed.
    """
    if _size_of(kernel.shape) <= SMALL:
        return True
    return kernel.spec.rows >= (BLOCKS // 2 if len(kernel.shape) - 1 in kernel.axes else BLOCKS * 256)


def fusible(node: ir.Node, reads: Reads | None = None) -> bool:
    """Whether a fused kernel can compute the node's results from its operands in memory.

    Args:
        reads: what is known of other kernels of the graph.
    """
    if any(v is not None and static_dims(v) is None for v in (*node.inputs, *results(node))):
        return False
    if not any(_size(v) for v in results(node)) or len(results(node)) < len(node.outputs):
        return False
    if node.op_type in REDUCTIONS and node.domain == "":
        axes = reduced_axes(node)
        if not axes:
            return False
        specs = [Spec(shape_of(node.inputs[0]), axes, (node,), (node.outputs[0],))]
    else:
        specs = [Spec(shape_of(out), (), (), (out,)) for out in node.outputs if _size(out)]
    own, known = set(node.outputs), reads or Reads()
    try:
        return all(known.of(spec, lambda v: v not in own) is not None for spec in specs)
    except (KeyError, ZeroDivisionError):  # the last: an index into nothing
        return False


def _written(launch: Launch) -> Sequence[ir.Value]:
    return launch.stores if isinstance(launch, Kernel) else launch.node.outputs


def _is_constant(node: ir.Node | None) -> bool:
    return node is not None and node.op_type == "Constant" and node.domain == ""


def _nbytes(value: ir.Value) -> int:
    assert value.dtype is not None
    return _size(value) * stored_bytes(value.dtype)


def _bytes_read(value: ir.Value, size: int) -> int:
    """Bytes of ``value`` that a kernel over ``size`` elements reads; what is small stays in the caches."""
    assert value.dtype is not None
    return 0 if _size(value) * 32 <= size else min(_size(value), size) * stored_bytes(value.dtype)


def _size(value: ir.Value) -> int:
    return _size_of(shape_of(value))


def _size_of(shape: Sequence[int]) -> int:
    return math.prod(shape)
