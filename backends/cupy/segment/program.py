"""The calls that a segment is made of, and what each touches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from graphc.backends.cupy.codegen.launch_shape import Shape
from graphc.backends.cupy.libraries import registry
from graphc.backends.cupy.segment.control_flow import Control
from graphc.backends.fusion.kernel_source import KernelSource


@dataclass(frozen=True, slots=True)
class KernelCall:
    """A generated kernel, or a launch of a node's own.

    Attributes:
        source: its operands, and the partial totals it shares with the call before or after it.
        name, text: what is compiled.
        shape: how it is launched.
        parts: partial totals of each row; 1 where nothing is shared.
    """

    source: KernelSource
    name: str
    text: str
    shape: Shape
    parts: int = 1


@dataclass(frozen=True, slots=True)
class NodeCall:
    """A node that a library runs, or, where there is none, the host."""

    node: ir.Node
    library: registry.LibraryOp | None = None


Call = KernelCall | NodeCall | Control


def reads(call: Call) -> Sequence[ir.Value]:
    """What the call reads."""
    if isinstance(call, KernelCall):
        return call.source.operands[: call.source.reads]
    return [v for v in registry.operands(call.node) if v is not None]


def writes(call: Call) -> Sequence[ir.Value]:
    """What the call writes."""
    return call.source.operands[call.source.reads :] if isinstance(call, KernelCall) else registry.results(call.node)
