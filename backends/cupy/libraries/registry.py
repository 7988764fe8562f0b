"""Registers calls that run a node without codegen: library calls and handwritten kernels.

    @node_kernel("CumSum", dtypes=NUMBERS)               text for one or more launches, for CUDA and for the host's compiler
    def cum_sum(node): return [Launch(body, reads={"x": …}, writes={"y": …}, rows=…)]

    @library("Gemm", "MatMul", when=is_product)          bound on the GPU through one object per device
    def product(device, node, inputs, outputs): return device.library(Products).bind(node, inputs, outputs)

They are stored in the op's record (:mod:`graphc.backends.fusion.op_kernels`); importing :mod:`graphc.backends.cupy` registers
all. A node without one that codegen cannot handle runs on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import onnx_ir as ir

from graphc.backends.fusion import expressions
from graphc.backends.fusion.graph_queries import results
from graphc.backends.fusion.kernel_source import KernelSource
from graphc.backends.fusion.op_kernels import op_kernel, record
from graphc.device import Array, Run
from graphc.ir.facts import dtype_of, static_dims

FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
STORED = tuple(expressions.STORAGE)
"""Every element type that kernels can hold."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a handwritten kernel.

    Attributes:
        body: C statements for one ``row`` (``0 <= row < rows``) over the names of ``reads``, ``updates`` and ``writes``, which
            are pointers to the storage types of :data:`.expressions.STORAGE`. ``LANES`` threads share a row when it has
            columns; :mod:`.prelude` lists the names that it may use.
        reads: values that are only read, by the name of their pointer.
        updates: values that an earlier launch wrote and this one reads and overwrites.
        writes: values that this launch writes first.
        rows, columns: the work to spread over threads.
        block: a whole block of threads works on a row and may use ``SHARED`` and ``SYNC``; loops step by ``THREADS``.
        lanes: threads that share a row; 0: chosen by the columns.
        head: functions and types in front of the kernel.
        moved: bytes moved, if the kernel touches only a part of its operands; else 0.
    """

    body: str
    reads: Mapping[str, ir.Value]
    writes: Mapping[str, ir.Value]
    rows: int
    columns: int = 1
    updates: Mapping[str, ir.Value] = field(default_factory=dict)
    block: bool = False
    lanes: int = 0
    head: str = ""
    moved: int = 0

    def source(self) -> KernelSource:
        """The launch as a kernel source; its operands are the reads, the updates and the writes."""
        read = [f"const {_storage(v)}* {name}" for name, v in self.reads.items()]
        changed = [f"{_storage(v)}* {name}" for name, v in (*self.updates.items(), *self.writes.items())]
        text = f"{self.head}\nKERNEL $name({', '.join([*read, *changed])}) {{\nFOR_ROWS(row) {{\n{self.body}\n}}\n}}"
        values = (*self.reads.values(), *self.updates.values(), *self.writes.values())
        return KernelSource(text, values, len(self.reads) + len(self.updates), self.rows, self.columns, moved=self.moved)


KernelRule: TypeAlias = Callable[[ir.Node], Sequence[Launch]]
Condition: TypeAlias = Callable[[ir.Node], bool]
BindRule: TypeAlias = Callable[[Any, ir.Node, Sequence["Array | None"], Sequence[Array]], Run]


@dataclass(frozen=True, slots=True)
class NodeKernel:
    """A handwritten kernel of an op.

    Attributes:
        dtypes: the supported element types of the first operand.
        when: further condition on the node, whose shapes are static.
    """

    op: str
    build: KernelRule
    dtypes: Sequence[ir.DataType]
    when: Condition | None = None


@dataclass(frozen=True, slots=True)
class LibraryOp:
    """An op that a vendor library runs.

    Attributes:
        bind: (device, node, inputs, outputs) → closure that queues the call.
        cost: ``convolution`` or ``attention``, the model that predicts its time; empty: predicted by the bytes it moves.
        workspace: name and bytes of the library's workspace on a device; calls with the same name share it.
        launches_kernels: whether the call launches kernels of this package, which every device runs.
    """

    op: str
    bind: BindRule
    dtypes: Sequence[ir.DataType]
    when: Condition | None = None
    workspace: tuple[str, int] | None = None
    launches_kernels: bool = False
    cost: str = ""


def node_kernel(
    *ops: str, dtypes: Sequence[ir.DataType] = FLOATS, when: Condition | None = None
) -> Callable[[KernelRule], KernelRule]:
    """Register a kernel of ``ops`` (``"CumSum"``, ``"graphc::MaxPoolGrad"``); the first one that accepts a node runs it."""

    def register(function: KernelRule) -> KernelRule:
        for op in ops:
            record(op).kernels.append(NodeKernel(op, function, dtypes, when))
        return function

    return register


def library(
    *ops: str,
    dtypes: Sequence[ir.DataType] = FLOATS,
    when: Condition | None = None,
    workspace: tuple[str, int] | None = None,
    launches_kernels: bool = False,
    cost: str = "",
) -> Callable[[BindRule], BindRule]:
    """Register the library call of ``ops``."""

    def register(function: BindRule) -> BindRule:
        for op in ops:
            record(op).libraries.append(LibraryOp(op, function, dtypes, when, workspace, launches_kernels, cost))
        return function

    return register


def special(node: ir.Node) -> NodeKernel | LibraryOp | None:
    """The library call or handwritten kernel that runs the node, in this order of preference; None: neither."""
    found = op_kernel(node)
    return next((call for call in (*found.libraries, *found.kernels) if _accepts(call, node)), None)


def _accepts(entry: NodeKernel | LibraryOp, node: ir.Node) -> bool:
    present = [v for v in node.inputs if v is not None] + results(node)
    if any(v.dtype is None or static_dims(v) is None for v in present) or not present:
        return False
    return present[0].dtype in entry.dtypes and (entry.when is None or entry.when(node))


def temporary(dtype: ir.DataType, shape: Sequence[int], name: str) -> ir.Value:
    """A buffer between the launches of one node, in the segment's scratch."""
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(list(shape)))


def _storage(value: ir.Value) -> str:
    return expressions.STORAGE[dtype_of(value)]
