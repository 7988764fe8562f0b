"""Joins a kernel that reduces rows with one that reduces columns, as in a normalisation's gradient.

    rows    Σ dy·s and Σ dy·s·x̂ of each row           one kernel: threads take a row at a time, keep it in registers
    sums    dx, and Σ dy·x̂ and Σ dy of each column    for its sums and for dx, and add to those of the columns

Alone, the second kernel reads again all that the first has read. Joined, each block leaves a total of each column for its rows;
a small kernel adds these up in a fixed order. Sums over the columns of what the joined kernel writes, such as the gradient of a
bias before the normalisation, are added to its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from graphc.backends.cupy.codegen import vectorize
from graphc.backends.cupy.codegen.device_functions import needed
from graphc.backends.cupy.codegen.launch_shape import BLOCKS, WARP, Shape
from graphc.backends.fusion.expressions import compute_type, stored_bytes
from graphc.backends.fusion.generator import Generator
from graphc.backends.fusion.graph_queries import operands
from graphc.backends.fusion.grouping import Grouping
from graphc.backends.fusion.groups import SMALL, FusedKernel, Launch
from graphc.backends.fusion.kernel_source import Form, KernelSource, KernelSpec, NotFusibleError
from graphc.backends.fusion.op_kernels import reduction_of
from graphc.ir.facts import constant, dtype_of, size_of

REGISTERS = 128
"""Most registers of a thread for its part of a row and its column sums."""

SHARED = 40 << 10
"""Bytes of a block's shared memory for the totals of its columns."""

OTHERS, COSTLY = 44, 28
"""Further registers of a thread, and those of random numbers or a slope of Gelu beside them. The compiler keeps to it."""

MULTIPROCESSORS, FILE = 132, 1 << 16
"""Multiprocessors of the device, and registers of each."""

InMemory = Callable[[ir.Value], bool]


@dataclass(slots=True, eq=False)
class Crossed:
    """Two fused kernels that become one: ``rows`` sums along rows, ``sums`` across them."""

    rows: FusedKernel
    sums: FusedKernel


def cross(grouping: Grouping) -> list[Launch | Crossed]:
    """The launches of a segment; pairs of kernels that read one large array are joined."""
    found: list[Launch | Crossed] = []
    for launch in grouping.launches:
        if isinstance(launch, FusedKernel):
            at = _partner(found, launch, grouping)
            if at is not None:
                first = found.pop(at)
                assert isinstance(first, FusedKernel)
                found.append(Crossed(first, launch))
                continue
            last = found[-1] if found else None
            if isinstance(last, Crossed) and (sums := _joined(last, launch, grouping)) is not None:
                found[-1] = Crossed(last.rows, sums)
                continue
        found.append(launch)
    return found


def _joined(pair: Crossed, more: FusedKernel, grouping: Grouping) -> FusedKernel | None:
    """The sums of a joined kernel with ``more`` over the same columns, of what it writes; None if they cannot be its own."""
    own = pair.sums
    if (more.shape, more.axes) != (own.shape, own.axes) or not more.reads & set(pair.rows.stores):
        return None
    reductions, stores = [*own.reductions, *more.reductions], [*own.stores, *more.stores]
    both = FusedKernel(own.shape, own.axes, reductions, stores, own.reads | more.reads, own.recomputed | more.recomputed)
    return both if _source(pair.rows, both, grouping.memory, wide=True) is not None else None


def _partner(before: Sequence[Launch | Crossed], sums: FusedKernel, grouping: Grouping) -> int | None:
    """The position of the last launch that can be delayed and joined with ``sums``.

    No launch between them reads its results.
    """
    if not sums.axes or vectorize.contiguous(sums.spec) or _elements(sums) <= SMALL:
        return None
    for k in reversed(range(max(0, len(before) - 4), len(before))):
        rows = before[k]
        if not isinstance(rows, FusedKernel):
            continue
        if _goes_with(rows, sums) and not any(_reads(b, grouping) & set(rows.stores) for b in before[k + 1 :]):
            return k if _source(rows, sums, grouping.memory, wide=True) is not None else None
    return None


def _elements(kernel: FusedKernel) -> int:
    return kernel.spec.rows * kernel.spec.columns


def _goes_with(rows: FusedKernel, sums: FusedKernel) -> bool:
    if rows.shape != sums.shape or not rows.axes or not vectorize.contiguous(rows.spec) or rows.spec.rows < BLOCKS // 2:
        return False
    wide = {k for k, size in enumerate(rows.shape) if size > 1}
    if set(rows.axes) & set(sums.axes) & wide or (set(rows.axes) | set(sums.axes)) & wide != wide:
        return False
    return any(size_of(v) == _elements(sums) for v in rows.reads & sums.reads)


def _reads(launch: Launch | Crossed, grouping: Grouping) -> set[ir.Value]:
    if isinstance(launch, FusedKernel):
        return launch.reads
    if isinstance(launch, Crossed):
        return launch.rows.reads | launch.sums.reads
    return {grouping.aliases.get(v, v) for v in operands(launch.node) if v is not None}


def sources(launch: Crossed, memory: set[ir.Value], *, wide: bool) -> tuple[KernelSource, KernelSource, Shape]:
    """The joined kernel, the kernel that adds up its totals, and the launch shape of the first.

    Args:
        memory: the values in memory.
        wide: for a device; on the host a single thread runs the kernel.
    """
    found = _source(launch.rows, launch.sums, memory, wide=wide)
    if found is None:
        raise NotFusibleError(f"{launch.rows.stores[0].name} and {launch.sums.stores[0].name} cannot be joined in one kernel")
    first, shape = found
    sums = launch.sums
    _, second = Generator(sums.spec, _in_memory([sums], memory), Form(strided=True)).halves()
    return first, second, shape


def _in_memory(kernels: Sequence[FusedKernel], memory: set[ir.Value]) -> InMemory:
    own = {v for kernel in kernels for v in (*kernel.stores, *(out for node in kernel.reductions for out in node.outputs))}
    again = {v for kernel in kernels for v in kernel.recomputed}

    def found(value: ir.Value) -> bool:
        producer = value.producer()
        if value in own or value in again:
            return False
        return value in memory or producer is None or producer.op_type == "Constant"

    return found


def _source(rows: FusedKernel, sums: FusedKernel, memory: set[ir.Value], *, wide: bool) -> tuple[KernelSource, Shape] | None:
    """The joined kernel with its launch shape; None if it cannot be generated or needs too many registers."""
    if not Generator(sums.spec, _in_memory([sums], memory)).divides():
        return None
    whole = [v for v in (*rows.stores, *sums.stores) if size_of(v) == _elements(rows)]
    single = [v for v in rows.stores if v not in whole]
    if any(size_of(v) not in (sums.spec.rows, _elements(rows)) for v in sums.stores):
        return None
    spec = KernelSpec(rows.shape, rows.axes, tuple(rows.reductions), (*whole, *single))
    in_memory = _in_memory([rows, sums], memory)
    plain = _Crossing(spec, in_memory, sums.reductions)
    try:
        source = plain.crossed()
    except NotFusibleError:
        return None
    vector, variable = vectorize.vector_of(plain, source, "columns")
    held = frozenset(key for key, loops in plain.uses.items() if len(loops) > 1 and _is_of_row(key[0], spec))
    if not held:
        return None
    sizes = [max(4, stored_bytes(dtype_of(node.outputs[0]))) for node in sums.reductions]
    words = sum(stored_bytes(dtype_of(value)) for value, _ in held) + sum(sizes)
    lanes = 1 if not wide else next((n for n in (WARP, 128, 256, 512) if _registers(spec, n, vector, words) <= REGISTERS), 0)
    together = sum(
        {compute_type(dtype_of(node.outputs[0])): size for node, size in zip(sums.reductions, sizes, strict=True)}.values()
    )
    each = -(-spec.columns // (max(1, lanes) * vector)) * vector
    if not lanes or (wide and (spec.columns * together > SHARED or each > vectorize.UNROLLED)):
        return None
    form = Form(vector, "columns", variable, held=held)
    found = _Crossing(spec, in_memory, sums.reductions, form).crossed()
    if not wide:
        return found, _host_shape(spec)
    others = OTHERS + (COSTLY if needed(found.body) else 0)
    return found, _shape(spec, lanes, _registers(spec, lanes, vector, words) + others)


def _is_of_row(value: ir.Value, spec: KernelSpec) -> bool:
    """Whether each row has elements of its own; what all rows share comes from the cache, and needs no registers."""
    return constant(value) is None and size_of(value) > spec.columns


def _registers(spec: KernelSpec, lanes: int, vector: int, words: int) -> int:
    return -(-spec.columns // (lanes * vector)) * vector * words // 4


def _shape(spec: KernelSpec, lanes: int, registers: int) -> Shape:
    """Only as many blocks as run at once, with many rows each, so that few totals remain to be added up."""
    threads = max(128, lanes)
    across = threads // lanes
    resident = max(1, FILE // (registers * threads))
    span = -(-spec.rows // (MULTIPROCESSORS * resident * across)) * across
    return Shape(threads, lanes, span, 1, -(-spec.rows // span), resident)


def _host_shape(spec: KernelSpec) -> Shape:
    span = -(-spec.rows // 3)
    return Shape(1, 1, span, 1, -(-spec.rows // span))


class _Crossing(Generator):
    """Generates the joined kernel: ``down`` are the sums over the rows."""

    def __init__(self, spec: KernelSpec, in_memory: InMemory, down: Sequence[ir.Node], form: Form | None = None) -> None:
        super().__init__(spec, in_memory, form)
        self._down = down

    def crossed(self) -> KernelSource:
        stores = [(value, f"y{k}") for k, value in enumerate(self.spec.stores)]
        whole = [s for s in stores if size_of(s[0]) != self.spec.rows]
        body: list[str] = []
        for level in self._levels():
            body += self._reduce(level)
        names = [self._name("s") for _ in self._down]

        def inside() -> list[str]:
            lines = [self._store(value, name) for value, name in whole]
            for node, name in zip(self._down, names, strict=True):
                rule = reduction_of(node)
                each = rule.each(self._pull(node.inputs[0], self._index, None), dtype_of(node.outputs[0]))
                lines.append(f"{name}[k][v] = {rule.combine}::of({name}[k][v], {each});")
            return lines

        body += self._loop([], inside, [])
        body += self._row_stores([s for s in stores if s not in whole])
        types = tuple(dtype_of(node.outputs[0]) for node in self._down)
        before, after = [], [f"SHARED {kind} all_{kind}[COLUMNS];" for kind in dict.fromkeys(map(compute_type, types))]
        for k, (node, name, dtype) in enumerate(zip(self._down, names, types, strict=True)):
            rule, kind = reduction_of(node), compute_type(dtype)
            total, own = f"all_{kind}[column]", f"{name}[k][v]"
            before.append(f"{kind} {name}[HOLD ? HOLD : 1][VECTOR];")
            before.append(f"UNROLL for (int k = 0; k < HOLD; ++k) EACH(v) {own} = {rule.start(dtype)};")
            after += [
                "for (int group = 0; group < ACROSS; ++group) {",
                "if (THREAD / LANES == group) {",
                "UNROLL for (int k = 0; k < HOLD; ++k) EACH(v) {",
                "const int column = (k * LANES + LANE) * VECTOR + v;",
                f"if (column < COLUMNS) {total} = group ? {rule.combine}::of({total}, {own}) : {own};",
                "} }",
                "SYNC;",
                "}",
                f"for (int c = THREAD; c < COLUMNS; c += THREADS) p{k}[(INDEX)BLOCK * COLUMNS + c] = all_{kind}[c];",
                "SYNC;",
            ]
        return self._source(body, stores, types, before=before, after=after, totals=self.spec.columns)
