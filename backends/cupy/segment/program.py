"""A compiled segment as data: its calls in order, with what each reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from graphc.backends.cupy.codegen.launch_shape import Shape
from graphc.backends.cupy.libraries import registry
from graphc.backends.fusion.graph_queries import operands, results
from graphc.backends.fusion.kernel_source import KernelSource
from graphc.ir.control_flow import static_trip_count
from graphc.ir.facts import shape_of

MOST_ITERATIONS = 4096
"""Most iterations of a loop for which each iteration is bound separately."""


@dataclass(frozen=True, slots=True)
class KernelCall:
    """A launch of a generated or handwritten kernel.

    Attributes:
        source: its operands, and the partial totals it shares with the call before or after it.
        name, text: the name and text to compile.
        shape: the launch shape.
        parts: partial totals per row; 1 if the call has none.
    """

    source: KernelSource
    name: str
    text: str
    shape: Shape
    parts: int = 1


@dataclass(frozen=True, slots=True)
class NodeCall:
    """A node that a library runs, or the host if ``library`` is None."""

    node: ir.Node
    library: registry.LibraryOp | None = None


@dataclass(frozen=True, slots=True)
class Control:
    """An If, Loop or Scan.

    Attributes:
        bodies: one segment per body, in the order of the attributes.
    """

    node: ir.Node
    bodies: tuple[Segment, ...]

    @property
    def iterations(self) -> int:
        """How often the bodies run; 1 if only the run can tell."""
        if self.node.op_type == "Scan":
            return shape_of(self.node.inputs[-1])[0]
        return (trip_count(self.node) or 1) if self.node.op_type == "Loop" else 1

    @property
    def queued(self) -> bool:
        """Whether the node runs without the host reading any result."""
        known = self.node.op_type == "Scan" or (self.node.op_type == "Loop" and trip_count(self.node) is not None)
        return known and all(body.queued for body in self.bodies)


Call = KernelCall | NodeCall | Control


@dataclass(frozen=True, slots=True)
class Segment:
    """The calls of a segment, in order.

    Attributes:
        graph: the values that calls refer to.
        aliases: value → the value whose memory it shares: one of another shape, or the operand that it replaces in place.
    """

    graph: ir.Graph
    calls: list[Call]
    aliases: dict[ir.Value, ir.Value]

    @property
    def fallbacks(self) -> list[ir.Node]:
        """The nodes that run on the host; every run fetches their operands and copies their results back."""
        own = [call.node for call in self.calls if isinstance(call, NodeCall) and call.library is None]
        inner = [body for call in self.calls if isinstance(call, Control) for body in call.bodies]
        return [*own, *(node for body in inner for node in body.fallbacks)]

    @property
    def queued(self) -> bool:
        """Whether a run only queues work for the device, so that it can be captured."""
        return not self.fallbacks and all(call.queued for call in self.calls if isinstance(call, Control))


def reads(call: Call) -> Sequence[ir.Value]:
    """The values that the call reads."""
    if isinstance(call, KernelCall):
        return call.source.operands[: call.source.reads]
    return [v for v in operands(call.node) if v is not None]


def writes(call: Call) -> Sequence[ir.Value]:
    """The values that the call writes."""
    return call.source.operands[call.source.reads :] if isinstance(call, KernelCall) else results(call.node)


def trip_count(node: ir.Node) -> int | None:
    """The number of iterations of a Loop that are bound one by one; None if the host reads the condition after each."""
    count = static_trip_count(node)
    return count if count is not None and count <= MOST_ITERATIONS else None
