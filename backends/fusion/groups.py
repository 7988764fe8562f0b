"""Launches under construction: their results and reads, and the values they may recompute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from graphc.backends.fusion.expressions import stored_bytes
from graphc.backends.fusion.graph_queries import operands
from graphc.backends.fusion.kernel_source import KernelSpec, NotFusibleError
from graphc.backends.fusion.op_kernels import op_kernel
from graphc.backends.fusion.reads_cache import Reads
from graphc.ir.facts import dtype_of, size_of

OPERANDS = 32
"""Most arrays of one kernel: with more, addresses displace values in registers."""

WORK = 40
"""Most operations worth repeating instead of reading a value; a few hundred cost as much as the memory."""

AGAIN = 64
"""Most variables of a kernel beyond those of its parts.

A kernel that needs a value of its own at other places computes all that makes it once more for each. A chain of such values, as
a running product in steps of 1, 2, 4, …, takes LLVM a minute then, and its steps ten times as long.
"""

SMALL = 1 << 16
"""Elements below which the launch costs more than the memory, so that unrelated values may share a kernel."""


@dataclass(slots=True, eq=False)
class FusedKernel:
    """A fused kernel under construction.

    Attributes:
        recomputed: values in memory that the kernel recomputes instead of reading them.
        variables: that it computes, as of the last :meth:`Launches.reads_of`.
        skewed: offsets for which it divides, as of then.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...] = ()
    reductions: list[ir.Node] = field(default_factory=list)
    stores: list[ir.Value] = field(default_factory=list)
    reads: set[ir.Value] = field(default_factory=set)
    recomputed: set[ir.Value] = field(default_factory=set)
    variables: int = 0
    skewed: int = 0

    @property
    def spec(self) -> KernelSpec:
        return KernelSpec(self.shape, self.axes, tuple(self.reductions), tuple(self.stores))


@dataclass(slots=True, eq=False)
class Opaque:
    """A node that is not part of a fused kernel."""

    node: ir.Node


Launch = FusedKernel | Opaque


class Launches:
    """The launches of a graph so far, and the values written to memory.

    Args:
        may_skew: whether a kernel may read at offsets that it has to divide, rather than that values are in memory.

    Attributes:
        aliases: value → the value of another shape whose memory it shares.
        made: value → the launch that writes it.
        straight: values in memory that readers see in lines of another length: they are never recomputed.
    """

    def __init__(self, graph: ir.Graph, may_skew: bool) -> None:
        self.graph, self.may_skew = graph, may_skew
        self.opaque: set[ir.Node] = set()
        self.aliases: dict[ir.Value, ir.Value] = {}
        self.memory: set[ir.Value] = set()
        self.launches: list[Launch] = []
        self.made: dict[ir.Value, int] = {}
        self.straight: set[ir.Value] = set()
        self._costs: dict[ir.Value, tuple[frozenset[ir.Value], int]] = {}
        self._reads = Reads()

    def made_of(self, value: ir.Value) -> tuple[frozenset[ir.Value], int]:
        """The values in memory from which ``value`` is computed, and the number of operations."""
        node = value.producer()
        if node is None or value in self.memory or node in self.opaque or op_kernel(node).reduction is not None:
            return frozenset([value]), 0
        if is_constant(node):
            return frozenset(), 0
        if value not in self._costs:
            parts = [self.made_of(v) for v in node.inputs if v is not None]
            work = sum(w for _, w in parts) + op_kernel(node).work
            self._costs[value] = frozenset().union(*(leaves for leaves, _ in parts)), work
        return self._costs[value]

    def reads_of(self, kernel: FusedKernel, at: int) -> set[ir.Value] | None:
        """The reads of a kernel at position ``at``; None if it cannot be generated."""
        own = set(kernel.stores) | {out for node in kernel.reductions for out in node.outputs}

        def in_memory(value: ir.Value) -> bool:
            if value in own or value in kernel.recomputed:
                return False
            made = self.made.get(value)
            return made < at if made is not None else value.producer() is None or is_constant(value.producer())

        found = self._reads.of(kernel.spec, in_memory)
        if found is None:
            return None
        kernel.variables, kernel.skewed = found[1:]
        return set(found[0])

    def needed_reads(self, kernel: FusedKernel, at: int) -> set[ir.Value]:
        """The reads of a kernel at position ``at``; NotFusibleError if it cannot be generated."""
        found = self.reads_of(kernel, at)
        if found is None:
            raise NotFusibleError(f"{', '.join(v.name or '' for v in kernel.stores)} cannot be computed from memory")
        return found

    # Cleanup --------------------------------------------------------------------------------------------------------------

    def strip(self) -> None:
        """Remove stores that are never read."""
        while True:
            needed = set(self.graph.outputs)
            for launch in self.launches:
                if isinstance(launch, Opaque):
                    needed.update(self.aliases.get(v, v) for v in operands(launch.node) if v is not None)
                else:
                    needed |= launch.reads
            before = sum(len(written(launch)) for launch in self.launches)
            for k, launch in enumerate(self.launches):
                if isinstance(launch, FusedKernel) and any(v not in needed for v in launch.stores):
                    self.launches[k] = self._without(launch, k, needed)
            if sum(len(written(launch)) for launch in self.launches) == before:
                break
        self.launches = [launch for launch in self.launches if isinstance(launch, Opaque) or launch.stores]
        self.made = {v: k for k, launch in enumerate(self.launches) for v in written(launch)}

    def _without(self, kernel: FusedKernel, at: int, needed: set[ir.Value]) -> FusedKernel:
        less = FusedKernel(kernel.shape, kernel.axes, list(kernel.reductions), [v for v in kernel.stores if v in needed])
        if not less.stores:
            return less
        less.reads = self.needed_reads(less, at)
        return less

    def forget(self) -> None:
        """Remove values from memory if recomputing them in every reader moves fewer bytes."""
        fixed = {*self.graph.outputs, *self.aliases.values(), *self.straight}
        for launch in self.launches:
            if isinstance(launch, Opaque):
                fixed.update(v for v in operands(launch.node) if v is not None)
        for launch in self.launches:
            if isinstance(launch, FusedKernel):
                for value in [v for v in launch.stores if v not in fixed and size_of(v) > SMALL]:
                    self._try_to_forget(value)

    def _try_to_forget(self, value: ir.Value) -> None:
        readers = [(k, n) for k, n in enumerate(self.launches) if isinstance(n, FusedKernel) and value in n.reads]
        found = [self._without_reading(value, kernel) for _, kernel in readers]
        again = [values for values, _ in found]
        if not all(again) or sum(nbytes for _, nbytes in found) >= (1 + len(readers)) * nbytes_of(value):
            return
        before = [(frozenset(kernel.recomputed), kernel.variables, kernel.skewed) for _, kernel in readers]
        reads = []
        for (k, kernel), values in zip(readers, again, strict=True):
            kernel.recomputed |= values
            reads.append(self.reads_of(kernel, k))
        fit = (
            r is not None
            and len(r) + len(n.stores) <= OPERANDS
            and n.variables <= variables + AGAIN
            and (self.may_skew or n.skewed <= skewed)
            for r, (_, n), (_, variables, skewed) in zip(reads, readers, before, strict=True)
        )
        if not all(fit):
            for (_, kernel), (values, *facts) in zip(readers, before, strict=True):
                kernel.recomputed, (kernel.variables, kernel.skewed) = set(values), facts
            return
        for (_, kernel), found_reads in zip(readers, reads, strict=True):
            kernel.reads = found_reads or set()
        self.memory.discard(value)
        self._costs.clear()

    def _without_reading(self, value: ir.Value, kernel: FusedKernel, depth: int = 2) -> tuple[frozenset[ir.Value], int]:
        """(values to recompute so that a kernel need not read ``value``, bytes of the additional reads).

        No values if that is impossible or not worthwhile.
        """
        node = value.producer()
        if node is None or node in self.opaque or op_kernel(node).reduction is not None:
            return frozenset(), 0
        parts = [self.made_of(v) for v in node.inputs if v is not None]
        if sum(work for _, work in parts) > WORK:
            return frozenset(), 0
        again, total = frozenset([value]), 0
        for leaf in frozenset().union(*(leaves for leaves, _ in parts)) - kernel.reads - set(kernel.stores):
            nbytes = bytes_read(leaf, size_of(value))
            more, less = self._without_reading(leaf, kernel, depth - 1) if nbytes and depth > 1 else (frozenset(), 0)
            cheap = bool(more) and less * 4 <= nbytes
            again, total = (again | more, total + less) if cheap else (again, total + nbytes)
        return again, total

    def lighten(self) -> None:
        """Recompute values that follow from other operands of the same kernel.

        For example, a mask from the normalised value.
        """
        for k, launch in enumerate(self.launches):
            if isinstance(launch, FusedKernel):
                for value in sorted(launch.reads, key=lambda v: v.name or ""):
                    if value in self.made and size_of(value) > SMALL and value not in self.straight:
                        self._try_without(launch, k, value)

    def _try_without(self, kernel: FusedKernel, at: int, value: ir.Value) -> None:
        again, nbytes = self._without_reading(value, kernel, 1)
        if not again or nbytes * 4 > nbytes_of(value):
            return
        kernel.recomputed.add(value)
        variables, skewed, reads = kernel.variables, kernel.skewed, self.reads_of(kernel, at)
        more = kernel.variables > variables + AGAIN or (kernel.skewed > skewed and not self.may_skew)
        if reads is None or len(reads) + len(kernel.stores) > OPERANDS or more:
            kernel.recomputed.discard(value)
            kernel.variables, kernel.skewed = variables, skewed
        else:
            kernel.reads = reads


def written(launch: Launch) -> Sequence[ir.Value]:
    return launch.stores if isinstance(launch, FusedKernel) else launch.node.outputs


def is_constant(node: ir.Node | None) -> bool:
    return node is not None and node.op_type == "Constant" and node.domain == ""


def nbytes_of(value: ir.Value) -> int:
    return size_of(value) * stored_bytes(dtype_of(value))


def bytes_read(value: ir.Value, size: int) -> int:
    """Bytes of ``value`` that a kernel over ``size`` elements reads; a small value stays in the caches."""
    return 0 if size_of(value) * 32 <= size else min(size_of(value), size) * stored_bytes(dtype_of(value))
