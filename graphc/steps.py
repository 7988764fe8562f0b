"""What a plan is made of: steps, update groups, and the places of values in buffers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.ir.declare import declaration_of

ALIGNMENT = 64
"""Bytes to which every slice of a flat buffer and of the arena is aligned: a cache line, and an AVX-512 register."""


@dataclass(slots=True)
class Slice:
    """Where a value lives: ``count`` elements at byte ``offset`` of buffer ``buffer``."""

    buffer: str
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(slots=True)
class Step:
    """One entry of the plan.

    Attributes:
        kind: ``segment``, ``kernel``, ``start``, ``wait``, ``check`` or ``update``.
        name: what it is called in prints and traces.
        nodes: the graph's nodes it executes.
        inputs: values read from buffers (for a segment: its graph inputs).
        outputs: values written.
        tag, reduce: of a collective.
        group: the update group of an ``update`` step.
    """

    kind: str
    name: str
    nodes: list[ir.Node]
    inputs: list[ir.Value] = field(default_factory=list)
    outputs: list[ir.Value] = field(default_factory=list)
    tag: str = ""
    reduce: str = ""
    group: UpdateGroup | None = None


@dataclass(slots=True)
class UpdateGroup:
    """Update nodes of one bucket with equal op and attributes: one call over flat buffers.

    Attributes:
        name: the bucket, or the state's name for an update of its own.
        nodes: the update nodes in layout order.
        offsets: element offset of each node's slice in every flat buffer of the group.
        elements: length of the flat buffers in elements, padding included.
        flat: input indices that are per-parameter (state and gradient); the others are shared scalars.
    """

    name: str
    nodes: list[ir.Node]
    offsets: list[int]
    elements: int
    flat: tuple[int, ...]

    def buffer(self, index: int) -> str:
        """The flat buffer of input ``index``."""
        declaration = declaration_of(self.nodes[0])
        assert declaration is not None
        return f"{self.name}/{declaration.inputs[index].name}"
