"""Groups the nodes of a segment into launches.

    Add ─► ReduceMean ─► Sub ─► Mul ─► … ─► Gemm        becomes        [Add … normalisation] , [Gemm]

A launch is a fused kernel, a library call or a handwritten kernel. A value that several kernels need is written to memory; all
others live in registers. A value joins the last kernel that loops over the same elements, shares an operand with it, and comes
after everything the value depends on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from graphc.backends.fusion.expressions import stored_bytes
from graphc.backends.fusion.generator import Generator
from graphc.backends.fusion.graph_queries import is_cast, operands, results
from graphc.backends.fusion.groups import (
    AGAIN,
    OPERANDS,
    SMALL,
    WORK,
    FusedKernel,
    Launch,
    Launches,
    Opaque,
    bytes_read,
    is_constant,
    nbytes_of,
    written,
)
from graphc.backends.fusion.kernel_source import KernelSpec
from graphc.backends.fusion.op_kernels import op_kernel
from graphc.backends.fusion.packed_masks import packs
from graphc.backends.fusion.reads_cache import Reads
from graphc.backends.fusion.reductions import known_axes, reduced_axes
from graphc.backends.fusion.skewed_reads import skewed_reads
from graphc.ir.facts import constant, dtype_of, shape_of, size_of, static_dims

LOOK_BACK = 12
"""Earlier kernels that are tried for a value."""

SPREAD = 6
"""Operations from which a value is written to memory rather than repeated for each element."""

SHARE = 32
"""Elements of a value for each that is picked from it, from which those are picked while a kernel has the value."""


PLACES = 128
"""Most places that a kernel reads for one element of a value that Concat, Pad, Slice and their like put together.

A loop that assigns to parts of a tensor and reads it puts each version together from parts of the one before, which it reads
at two places or more. A kernel for the last of 64 versions, as in delta rules by chunks, would read 2⁶⁴. So versions between
go to memory.
"""


@dataclass(slots=True)
class Grouping:
    """The launches of a segment in order.

    Attributes:
        memory: the values that are written to memory.
        aliases: value → the value of another shape whose memory it shares.
    """

    launches: list[Launch]
    memory: set[ir.Value]
    aliases: dict[ir.Value, ir.Value]


def in_place_of(value: ir.Value) -> ir.Value:
    """The value whose memory this one shares through reshapes; a result has its own."""
    producer = value.producer()
    while producer is not None and op_kernel(producer).same_memory:
        if value.is_graph_output():
            break
        (value, *_) = (v for v in producer.inputs if v is not None)
        producer = value.producer()
    return value


def group(
    graph: ir.Graph, opaque: Callable[[ir.Node], bool], busy: Callable[[KernelSpec], bool], *, may_skew: bool = True
) -> Grouping:
    """Group the nodes of ``graph``, whose shapes are static.

    Args:
        opaque: selects nodes that a library runs better than a fused kernel; nodes that cannot be fused are opaque anyway.
        busy: whether one pass over the rows of a kernel keeps the device busy, so that the kernel may take several steps in
            order.
        may_skew: whether to join what walks the same elements in lines of another length, so that one of them finds its
            operands by divisions.
    """
    return _Grouper(graph, opaque, busy, may_skew).run()


class _Grouper(Launches):
    def __init__(
        self, graph: ir.Graph, opaque: Callable[[ir.Node], bool], busy: Callable[[KernelSpec], bool], may_skew: bool
    ) -> None:
        super().__init__(graph, may_skew)
        self._busy = busy
        nodes = [n for n in graph if not is_constant(n)]
        self.opaque = {n for n in nodes if opaque(n) or not fusible(n, self._reads)}
        self.nodes = _labels_first(nodes, self.opaque)
        self._choose_memory()

    def run(self) -> Grouping:
        for node in self.nodes:
            if node in self.opaque:
                self.launches.append(Opaque(node))
                self.made.update((out, len(self.launches) - 1) for out in node.outputs)
            else:
                for out in node.outputs:
                    if out in self.memory and size_of(out):
                        self._place(node, out)
        self.strip()
        self.forget()
        self.strip()
        self.lighten()
        kept = {v for launch in self.launches for v in written(launch)}
        return Grouping(self.launches, kept, self.aliases)

    # Values in memory ---------------------------------------------------------------------------------------------------

    def _choose_memory(self) -> None:
        """Find the values that must or should be in memory."""
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
        for node in self.nodes:
            if op_kernel(node).neighbours:
                found.update(in_place_of(v) for v in node.inputs if v is not None and constant(v) is None)
        self.memory = {v for v in found if v.producer() is not None and v not in self.aliases}
        for node in self.nodes:
            if node not in self.opaque:
                for out in node.outputs:
                    kept = op_kernel(node).reduction is not None or self._is_shared(node, out) or self._is_spread(out)
                    if (kept or self._is_picked(node, out)) and out not in self.aliases:
                        base = in_place_of(out)  # of another shape: a kernel stores it, and reads it as this value
                        self.memory.update([base] if base.producer() is not None and constant(base) is None else [])
        self._choose_straight()
        self._choose_parted()

    def _choose_parted(self) -> None:
        """Keep values that kernels would put together from more than :data:`PLACES` places."""
        moved: dict[ir.Value, frozenset[ir.Value]] = {}  # value → the results of Concat and its like that it is computed from
        places: dict[ir.Value, int] = {}  # such a result → the places that a kernel reads for an element
        for node in self.nodes:
            if node in self.opaque or op_kernel(node).reduction is not None:
                continue
            found = [moved.get(v, frozenset()) for v in node.inputs if v is not None]
            for out in node.outputs:
                if out in self.memory:
                    continue
                if op_kernel(node).index_map is None:
                    moved[out] = frozenset().union(*found)
                    continue
                places[out] = 1 + sum(max(1, sum(places[v] for v in of)) for of in found)
                moved[out] = frozenset([out])
                base = in_place_of(out)
                if places[out] > PLACES and base.producer() is not None and constant(base) is None:
                    self.memory.add(base)
                    moved[out] = moved[base] = frozenset()

    def _choose_straight(self) -> None:
        """Keep what kernels would read at offsets that they have to divide."""
        for node in self.nodes:
            if node in self.opaque or op_kernel(node).index_map is None:
                continue
            for out in node.outputs:
                moved = [op_kernel(user).index_map is not None for user, _ in out.uses()]
                if size_of(out) <= SMALL or (moved and all(moved)):
                    continue
                for value in skewed_reads(out, lambda v: v in self.memory or v.producer() in self.opaque):
                    base = in_place_of(value)
                    if base.producer() is not None and constant(base) is None:
                        self.memory.add(base)
                        self.straight.add(base)

    def _is_shared(self, node: ir.Node, out: ir.Value) -> bool:
        """Whether several nodes use a value that is expensive to recompute."""
        users = _readers(out)
        if len(users) < 2 or op_kernel(node).index_map is not None or is_cast(node):
            return False
        size = size_of(out)
        if size <= SMALL and all(size_of(o) >= 8 * size for user in users for o in user.outputs[:1]):
            return False
        return not self._is_cheap(out)

    def _is_spread(self, value: ir.Value) -> bool:
        """Whether every element of a much larger value would recompute this one: a factor per channel, for example."""
        shape = shape_of(value)
        if not shape or shape[-1] == 1 or self.made_of(value)[1] < SPREAD:
            return False
        made = [shape_of(out) for user, _ in value.uses() if user not in self.opaque for out in user.outputs[:1]]
        return any(math.prod(s) > max(SMALL, 8 * math.prod(shape)) for s in made)

    def _is_picked(self, node: ir.Node, out: ir.Value) -> bool:
        """Whether the node picks a few elements from what follows from reductions of a large value: a label's log-probability.

        The kernel that reduces can pick them too, after which it may overwrite what it has read.
        """
        if not op_kernel(node).picks or constant(node.inputs[1]) is not None or not _is_summed(out):
            return False
        source = node.inputs[0]
        if source is None or source in self.memory or size_of(source) < max(SMALL, SHARE * size_of(out)):
            return False
        leaves, _ = self.made_of(source)
        made_by = [leaf.producer() for leaf in leaves]
        return any(n is not None and n not in self.opaque and op_kernel(n).reduction is not None for n in made_by)

    def _is_cheap(self, value: ir.Value) -> bool:
        """Whether each reader should recompute the value: its operands take no more memory than the value itself."""
        leaves, work = self.made_of(value)
        return work <= WORK and sum(bytes_read(leaf, size_of(value)) for leaf in leaves) <= nbytes_of(value)

    # Placing values -------------------------------------------------------------------------------------------------------

    def _place(self, node: ir.Node, value: ir.Value) -> None:
        if op_kernel(node).reduction is not None and node not in self.opaque:
            wanted = FusedKernel(shape_of(node.inputs[0]), known_axes(node), [node], [value])
        else:
            wanted = FusedKernel(_walked(value), (), [], [value])
        wanted.reads = self.needed_reads(wanted, len(self.launches))
        first = max((self.made.get(v, 0) for v in wanted.reads), default=0)
        earlier = list(range(len(self.launches) - 1, max(first - 1, len(self.launches) - 1 - LOOK_BACK), -1))
        if wanted.axes:  # reductions with their like: one that needs only some of them may share the pass of one that needs all
            earlier.sort(key=lambda k: not _walks_like(self.launches[k], wanted))
        for k in earlier:
            launch = self.launches[k]
            if isinstance(launch, FusedKernel):
                merged = self._joined(launch, k, wanted)
                if merged is not None:
                    self.launches[k] = merged
                    self.made[value] = k
                    return
        self.made[value] = len(self.launches)
        self.launches.append(wanted)

    def _joined(self, kernel: FusedKernel, at: int, new: FusedKernel) -> FusedKernel | None:
        """``kernel`` extended by the result of ``new``; None if they cannot be joined."""
        found = _common_walk(kernel, new)
        if found is None or not self.straight.isdisjoint(new.reads.intersection(kernel.stores)):
            return None
        shape, axes = found
        if math.prod(shape) > SMALL:
            shared = new.reads & (kernel.reads | set(kernel.stores))
            least = min(math.prod(shape) // 4, math.prod(new.shape))
            totals = {out for node in kernel.reductions for out in node.outputs}
            follows = axes == kernel.axes and not new.reads.isdisjoint(totals)  # it walks the same rows for what follows
            if not follows and not any(size_of(v) >= least for v in shared):
                return None
        both = FusedKernel(shape, axes, [*kernel.reductions, *new.reductions], [*kernel.stores, *new.stores])
        reads = self.reads_of(both, at)
        if reads is None or len(reads) + len(both.stores) > OPERANDS:
            return None
        if both.variables > kernel.variables + new.variables + AGAIN:
            return None
        if both.skewed > kernel.skewed + new.skewed and not self.may_skew:
            return None
        if axes and not (self._busy(both.spec) or Generator(both.spec, lambda v: v in reads).divides()):
            return None
        both.reads = reads
        return both


def _labels_first(nodes: Sequence[ir.Node], opaque: Container[ir.Node]) -> list[ir.Node]:
    """The nodes in an order in which scalars and indices that follow from small inputs alone come first.

    A label picks the element of its row, and the number of labels that count scales the gradient: known first, one kernel
    computes the loss and writes the gradient.
    """
    small: set[ir.Node] = set()
    for node in nodes:
        values = [v for v in (*node.inputs, *results(node)) if v is not None]
        made = [v.producer() for v in node.inputs if v is not None]
        known = all(n is None or is_constant(n) or n in small for n in made)
        if known and node not in opaque and all(size_of(v) <= SMALL for v in values):
            small.add(node)
    first: set[ir.Node] = set()
    for node in reversed(nodes):
        uses = [(user, index) for v in node.outputs for user, index in v.uses()]
        wanted = any(user in first or (index == 1 and op_kernel(user).picks) for user, index in uses)
        if node in small and (wanted or any(size_of(v) == 1 for v in results(node))):
            first.add(node)
    return [*(n for n in nodes if n in first), *(n for n in nodes if n not in first)]


def _is_summed(value: ir.Value) -> bool:
    """Whether a sum adds up what follows from the value element by element."""
    for user, _ in value.uses():
        if op_kernel(user).reduction is not None:
            return True
        if any(size_of(out) == size_of(value) and _is_summed(out) for out in results(user)):
            return True
    return False


def _walked(value: ir.Value) -> tuple[int, ...]:
    """The shape that a kernel loops over to write ``value``; for packed bits, that of their mask."""
    (source, *_) = value.producer().inputs if packs(value) else (value,)  # type: ignore[union-attr]
    return shape_of(source)


def _readers(value: ir.Value) -> list[ir.Node]:
    """The nodes that use a value or a wider copy of it: memory holds the narrow one."""
    found = []
    for user, _ in value.uses():
        wider = user.outputs[0] if is_cast(user) else None
        if wider is not None and not wider.is_graph_output() and stored_bytes(dtype_of(wider)) > stored_bytes(dtype_of(value)):
            found += _readers(wider)
        else:
            found.append(user)
    return found


def _walks_like(launch: Launch, kernel: FusedKernel) -> bool:
    return isinstance(launch, FusedKernel) and (launch.shape, launch.axes) == (kernel.shape, kernel.axes)


def _common_walk(kernel: FusedKernel, new: FusedKernel) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The (shape, axes) of a loop that fits both; None if there is no such loop."""
    rows, size = kernel.spec.rows, math.prod(kernel.shape)
    if new.axes:
        if new.shape != kernel.shape:
            return None
        if new.axes == kernel.axes:
            return kernel.shape, kernel.axes
        return None if kernel.axes else (new.shape, new.axes)
    if new.shape == kernel.shape or (not kernel.axes and math.prod(new.shape) == size):
        return kernel.shape, kernel.axes
    if kernel.axes and math.prod(new.shape) in (rows, size):
        return kernel.shape, kernel.axes
    return None


def fusible(node: ir.Node, reads: Reads | None = None) -> bool:
    """Whether a fused kernel can compute the node's results from its operands in memory.

    Args:
        reads: cached reads of the graph's other kernels.
    """
    if any(v is not None and static_dims(v) is None for v in (*node.inputs, *results(node))):
        return False
    if not any(size_of(v) for v in results(node)) or len(results(node)) < len(node.outputs):
        return False
    if op_kernel(node).reduction is not None:
        axes = reduced_axes(node)
        if not axes:
            return False
        specs = [KernelSpec(shape_of(node.inputs[0]), axes, (node,), (node.outputs[0],))]
    else:
        specs = [KernelSpec(_walked(out), (), (), (out,)) for out in node.outputs if size_of(out)]
    own, known = set(node.outputs), reads or Reads()
    try:
        return all(known.of(spec, lambda v: v not in own) is not None for spec in specs)
    except (KeyError, ZeroDivisionError):  # ZeroDivisionError: an index into an empty array
        return False
