"""Runs unsupported nodes on the host within a segment, and reports what runs where."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from graphc.backend import BACKENDS, COVERAGE, Fallback, host_backend
from graphc.backends.cupy.segment.program import Segment
from graphc.backends.fusion import expressions
from graphc.backends.fusion.graph_queries import operands, results
from graphc.backends.fusion.op_kernels import OP_KERNELS, OpKernel
from graphc.device import Array, Run
from graphc.errors import UnsupportedOpError
from graphc.ir import DOMAIN
from graphc.ir.declare import OPS
from graphc.ir.facts import constant, dtype_of, shape_of, size_of, static_dims
from graphc.ir.functions import has_body
from graphc.ir.subgraphs import CONTROL
from graphc.plan.segment_model import segment_model
from graphc.plan.steps import PlanStep

LOG = logging.getLogger("graphc.cupy")

FOLDED = frozenset({"Constant", "Shape", "Size"})
"""Ops whose results are known at compile time."""


class HostNode:
    """Computes one node on host arrays, with onnxruntime, or numpy if onnxruntime does not support the op.

    Attributes:
        reads: the node's operands in order, without constants, which are in the model.
    """

    def __init__(self, node: ir.Node) -> None:
        self.reads = [v for v in dict.fromkeys(operands(node)) if v is not None and constant(v) is None]
        self._writes = results(node)
        self._model = segment_model(PlanStep("segment", node.op_type, [node], self.reads, self._writes))

    def __call__(self, inputs: Sequence[Array]) -> list[Array]:
        held, results, run = self._bound
        for array, given in zip(held, inputs, strict=True):
            np.copyto(array, given)
        run()
        return results

    @functools.cached_property
    def _bound(self) -> tuple[list[Array], list[Array], Run]:
        """Operand arrays, result arrays, and the closure that computes the results."""
        arrays = {v.name or "": np.zeros(shape_of(v), dtype_of(v).numpy()) for v in (*self.reads, *self._writes)}
        inputs, outputs = ({v.name or "": arrays[v.name or ""] for v in part} for part in (self.reads, self._writes))
        try:
            run = host_backend(threads=1).bind_segment(self._model, inputs, outputs)
        except UnsupportedOpError:
            run = BACKENDS["numpy"](threads=1).bind_segment(self._model, inputs, outputs)
        return list(inputs.values()), list(outputs.values()), run


def fallbacks_of(segment: Segment) -> list[Fallback]:
    """The nodes of a segment that the host runs, with the bytes copied for each."""
    found = []
    for node in segment.fallbacks:
        moved = [v for v in operands(node) if v is not None and constant(v) is None] + results(node)
        sizes = [size_of(v) * expressions.stored_bytes(v.dtype) for v in moved if v.dtype and static_dims(v) is not None]
        found.append(Fallback(node.op_type, node.name or "", sum(sizes)))
    return found


def warn(segments: Sequence[Segment]) -> None:
    """Log one line about every node that the host runs in these segments of a plan."""
    found = [fallback for segment in segments for fallback in fallbacks_of(segment)]
    if found:
        counts = Counter(fallback.op for fallback in found)
        ops = ", ".join(f"{op} ×{n}" if n > 1 else op for op, n in sorted(counts.items()))
        moved = sum(fallback.nbytes for fallback in found) / 1e6
        LOG.warning(
            "on the host in every step, with %.3f MB copied to and fro: %s;"
            " 'graphc show plan --backend cupy' lists them",
            moved, ops,
        )  # fmt: skip


def how(key: str) -> str:
    """How the backend runs an op: generated, library, kernel, decomposed, folded, loop or host; the best first."""
    domain, _, name = key.rpartition("::")
    found = []
    if name in FOLDED and not domain:
        found.append("folded")
    kernel = OP_KERNELS.get(key, OpKernel())
    if kernel.is_generated:
        found.append("generated")
    if kernel.libraries:
        found.append("library")
    declaration = OPS.get(name) if domain == DOMAIN else None
    if kernel.kernels or (declaration is not None and declaration.next_value):
        found.append("kernel")
    if name in CONTROL and not domain and name != "SequenceMap":
        found.append("loop")
    if declaration is not None and declaration.effect:
        return "collective"
    if not found and (kernel.decomposition is not None or has_body(name, domain)):
        found.append("decomposed")
    if not found and declaration is not None and declaration.decompose is not None:
        found.append("decomposed")
    return ", ".join(found) or "host"


COVERAGE["cupy"] = how
