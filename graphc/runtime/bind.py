"""Binds the steps of a plan that compute to a backend and to the arrays of their values."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import onnx
import onnx_ir as ir

from graphc.backend import Backend
from graphc.device import Run
from graphc.errors import GraphcError, InternalError
from graphc.ir.declare import SHARD
from graphc.ir.facts import describe, required
from graphc.plan.segment_model import segment_model
from graphc.plan.steps import PlanStep
from graphc.runtime.accumulators import MicroBatchCursor, bind_sums
from graphc.runtime.buffers import BufferMap
from graphc.runtime.nonfinite import Check
from graphc.runtime.updates import Updates


@dataclass(frozen=True, slots=True)
class StepBinder:
    """Binds segments, kernels, updates, sums and the check.

    Attributes:
        places: the arrays.
        turn: the micro-batch that runs now, for sums.
        check: tests loss and gradients before the updates; None: they are not tested.
    """

    places: BufferMap
    backend: Backend
    updates: Updates
    turn: MicroBatchCursor
    check: Check | None
    _models: dict[int, onnx.ModelProto] = field(default_factory=dict)

    def prepare(self, steps: Sequence[PlanStep], *, varying: bool) -> None:
        """Let the backend begin to compile the segments among ``steps``; see :meth:`Backend.prepare_segments`."""
        for step in steps:
            if step.kind == "segment":
                with contextlib.suppress(Exception):  # bind meets it again, and names the nodes
                    self._models[id(step)] = segment_model(step)
        self.backend.prepare_segments(list(self._models.values()), varying=varying)

    def bind(self, step: PlanStep) -> Run | None:
        """A closure that runs ``step``; None where nothing is to be done.

        Raises:
            InternalError: a backend on the host fails in a way that nobody foresaw; it names the nodes.
        """
        try:
            return self._bound(step)
        except (GraphcError, MemoryError):
            raise
        except Exception as error:
            if not self.backend.memory.on_host:
                raise  # the errors of a device's driver have their own handling
            nodes = "; ".join(describe(node) for node in step.nodes[:3])
            more = f" and {len(step.nodes) - 3} more" if len(step.nodes) > 3 else ""
            what = " ".join(str(error).split())
            raise InternalError(
                f"the {self.backend.name} backend cannot prepare {nodes}{more}: {type(error).__name__}: {what};"
                " report it with the model"
            ) from error

    def _bound(self, step: PlanStep) -> Run | None:
        array, backend = self.places.array, self.backend
        if step.kind == "segment":
            model = self._models.pop(id(step), None)
            return backend.bind_segment(
                segment_model(step) if model is None else model,
                {v.name or "": self.places.within_reach(v) for v in step.inputs},
                {v.name or "": array(v) for v in step.outputs},
                reusable_buffers=self.places.reusable_buffers,
            )
        if step.kind == "kernel":
            (node,) = step.nodes
            if node.attributes.get_string(SHARD, "") and self.places.plan.mesh.data > 1:
                return self.updates.bind_over_parts(node)
            inputs, outputs = [None if v is None else array(v) for v in node.inputs], [array(v) for v in node.outputs]
            return backend.bind_kernel(node, inputs, outputs, self._in_place(node))
        if step.kind == "update":
            return self.updates.bind(required(step.group))
        if step.kind == "accumulate":
            return bind_sums(step.nodes, self.places, backend, self.turn)
        return self.check.bind() if self.check is not None else None

    def _in_place(self, node: ir.Node) -> dict[int, int]:
        """Output index → index of the input in whose memory the plan has put that output."""
        places = self.places.plan.places

        def start(values: Sequence[ir.Value | None], index: int) -> tuple[str, int] | None:
            place = places.get(value) if index < len(values) and (value := values[index]) is not None else None
            return (place.buffer, place.offset) if place is not None else None

        pairs = self.backend.inplace(node).items()
        return {k: i for k, i in pairs if (place := start(node.outputs, k)) is not None and place == start(node.inputs, i)}
