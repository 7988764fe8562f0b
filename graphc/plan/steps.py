"""The parts of a plan: steps, update groups, and the places of values in buffers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.ir.declare import OpDeclaration, required_declaration
from graphc.ir.facts import dtype_of, input_of, required
from graphc.ir.ops.collectives import Kind
from graphc.pipe.tasks import Task


@dataclass(slots=True)
class Slice:
    """The place of a value: ``count`` elements at byte ``offset`` of buffer ``buffer``."""

    buffer: str
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(slots=True)
class Transfer:
    """One collective and its memory; its start and its wait step share this.

    Attributes:
        op: the graph's op (``AllReduce``), ``kind`` is the communicator's name of it.
        group, reduce, within, owner, root, peer, every, since, first, last, nonzero, transient: the op's attributes.
        size, place: the number of ranks of the group, and this rank's place among them.
        buffer, offset: place of the flat array that the collective works on (offset in bytes).
        elements, dtype: its length and type.
        own_of: number of ranks of the group ``within``, and this rank's place among them.
        parts: (start, stop) in elements that each rank owns, where ranks own parts.
        source: buffer of this rank's part, which is copied into the array first.
        sink: buffer that gets this rank's part of the array in the end.
        gaps: (start, stop) of elements between operands, which must be finite.
        lengths: elements from the beginning of each operand to that of the next.
    """

    op: str
    kind: Kind
    tag: str
    group: str = "data"
    reduce: str = ""
    within: str = ""
    owner: str = ""
    root: int = 0
    peer: int = -1
    size: int = 1
    place: int = 0
    every: int = 1
    since: int = 0
    first: int = 1
    last: int = 0
    nonzero: int = 0
    transient: bool = False
    buffer: str = ""
    offset: int = 0
    elements: int = 0
    dtype: np.dtype[Any] = field(default_factory=lambda: np.dtype(np.float32))
    own_of: tuple[int, int] = (1, 0)
    parts: list[tuple[int, int]] | None = None
    source: str = ""
    sink: str = ""
    gaps: list[tuple[int, int]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return self.elements * self.dtype.itemsize

    def take_own(self, elements: int) -> None:
        """Work on the elements, of ``elements`` at :attr:`offset`, that this rank owns in the group :attr:`within`."""
        size, place = self.own_of
        start, stop = shares(elements, "even", size)[place]
        self.offset, self.elements = self.offset + start * self.dtype.itemsize, stop - start

    @property
    def sparse(self) -> bool:
        """Whether the ranks save time by exchanging only elements that are not zero."""
        return 0 < self.nonzero * self.size < self.elements

    @property
    def channel(self) -> tuple[str, int, int] | None:
        """Group, and the places in it of the sender and the receiver, of a transfer between two ranks."""
        ends = {"send": (self.place, self.peer), "recv": (self.peer, self.place)}.get(self.kind)
        return None if ends is None else (self.group, *ends)

    def __str__(self) -> str:
        known = ("every", self.every, 2), ("nonzero", self.nonzero, 1), ("root", self.root, 1)
        counts = [f"{name}={n}" for name, n, least in known if n >= least]
        detail = [t for t in (self.reduce, self.owner, self.within and f"own part of {self.within}", *counts) if t]
        return f"{self.op}({','.join(detail)}) {self.tag}"


@dataclass(slots=True)
class PlanStep:
    """One entry of the plan.

    Attributes:
        kind: ``segment``, ``kernel``, ``start``, ``wait``, ``accumulate``, ``check``, ``update``, ``send`` or ``recv``.
        name: what it is called in prints and traces.
        nodes: the graph's nodes it executes.
        inputs: values read from buffers (for a segment: its graph inputs).
        outputs: values written.
        transfer: of a ``start`` or ``wait`` step.
        group: the update group of an ``update`` step.
        once: whether it runs in the last micro-batch of a training step only.
        task: in a pipeline, what it belongs to.
    """

    kind: str
    name: str
    nodes: list[ir.Node]
    inputs: list[ir.Value] = field(default_factory=list)
    outputs: list[ir.Value] = field(default_factory=list)
    transfer: Transfer | None = None
    group: UpdateGroup | None = None
    once: bool = False
    task: Task | None = None

    @property
    def collective(self) -> Transfer:
        """The transfer of a ``start`` or ``wait`` step; InternalError for other steps."""
        return required(self.transfer)

    @property
    def tag(self) -> str:
        """Of the collective; empty for other steps."""
        return self.transfer.tag if self.transfer is not None else ""


@dataclass(slots=True)
class UpdateGroup:
    """Update nodes of one bucket with equal op and attributes, which run as one call over flat buffers.

    Attributes:
        name: the bucket, or the state's name for an update of its own.
        nodes: the update nodes in layout order.
        offsets: element offset of each node's slice in every flat buffer of the group.
        elements: length of the flat arrays in elements, padding included.
        flat: input indices that are per-parameter (state and gradient); the others are shared scalars.
        names: flat input index → name of its buffer.
        parts: (start, stop) in elements that each rank updates; all of it for every rank unless the group is sharded.
        rank: this rank's place in ``parts``.
        scattered: flat input indices of which this rank keeps only its part.
        offload: whether the state lies in the host's memory.
    """

    name: str
    nodes: list[ir.Node]
    offsets: list[int]
    elements: int
    flat: tuple[int, ...]
    names: dict[int, str] = field(default_factory=dict)
    parts: list[tuple[int, int]] = field(default_factory=list)
    rank: int = 0
    scattered: frozenset[int] = frozenset()
    offload: bool = False

    def buffer(self, index: int) -> str:
        """The flat buffer of input ``index``."""
        return self.names[index]

    @property
    def declaration(self) -> OpDeclaration:
        """Of the op of all nodes."""
        return required_declaration(self.nodes[0])

    @property
    def source(self) -> int | None:
        """The flat input that is no state: a gradient, a statistic, what is copied."""
        source = self.declaration.source
        return source if source in self.flat else None

    @property
    def owned(self) -> tuple[int, int]:
        """The elements that this rank updates."""
        return self.parts[self.rank]

    @property
    def sharded(self) -> bool:
        return self.owned != (0, self.elements) or len(set(self.parts)) > 1

    def dtype(self, index: int) -> np.dtype[Any]:
        """The element type of flat input ``index``."""
        return np.dtype(dtype_of(input_of(self.nodes[0], index)).numpy())

    def nbytes(self, index: int) -> int:
        """Bytes of the buffer of flat input ``index`` on this rank."""
        start, stop = self.owned if index in self.scattered else (0, self.elements)
        return (stop - start) * self.dtype(index).itemsize

    def states(self) -> list[int]:
        """The flat inputs that are state, as opposed to gradients."""
        return sorted(set(self.declaration.next_value.values()) & set(self.flat))


def shares(elements: int, owner: str, size: int) -> list[tuple[int, int]]:
    """(start, stop) of the elements that each of ``size`` ranks owns; without ``owner``, every rank has all of them."""
    if owner == "even":
        each = elements // size
        return [(rank * each, (rank + 1) * each) for rank in range(size)]
    if owner == "root":
        return [(0, elements), *[(elements, elements)] * (size - 1)]
    return [(0, elements)] * size
