"""The results of a step that is queued on a device, on their way to the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from graphc.device import Array, Event, Run
from graphc.plan.buffers import RESULTS
from graphc.runtime.buffers import BufferMap
from graphc.runtime.nonfinite import Check

PENDING = 0xFF
"""In place of the flag in results that have not arrived."""


@dataclass(slots=True, eq=False)
class Results:
    """The results of a queued step on their way to the host.

    They are copied behind the step and not recorded with it, because a recorded copy has one target only.

    Attributes:
        outputs: where they arrive, by name: in pinned memory.
        copies: queue the copies; that of the flag is the last.
        stops: whether the step, which has run, met a NaN or an infinity that must stop the run.
        flag: where the flag of the NaN arrives; None: the plan has none.
        event: passes when all have arrived; None: the host waits for everything that is queued.
    """

    outputs: dict[str, Array]
    copies: list[Run]
    stops: Callable[[], bool] | None
    flag: Array | None
    event: Event | None = None

    @property
    def arrived(self) -> bool:
        """Whether the flag, and so all results before it, is here."""
        return self.flag is not None and int(self.flag[0]) != PENDING


def bind_results(places: BufferMap, check: Check | None, scale: Callable[[], float]) -> Results:
    """Copies of a step's results to memory of their own on the host.

    Args:
        places: the arrays of the plan.
        check: its check for NaN and infinity, if it has one.
        scale: the loss scale before the step.
    """
    memory, plan = places.memory, places.plan
    copies: list[Run] = []

    def mirror(array: Array) -> Array:
        held: Array = memory.pinned(array.nbytes).view(array.dtype).reshape(array.shape)
        copies.append(memory.bind_copy(held, array))
        return held

    together = mirror(places.buffers[RESULTS]) if RESULTS in places.buffers else None

    def held(value: ir.Value) -> Array:
        place = plan.places.get(value)
        if place is None or place.buffer != RESULTS or together is None:
            return mirror(places.array(value))
        return together[place.offset : place.offset + place.nbytes].view(place.dtype).reshape(place.shape)

    outputs = {value.name or "": held(value) for value in plan.model.graph.outputs}
    if plan.stop is not None:
        flag = mirror(places.stop.reshape((1,)).view(np.uint8))
        return Results(outputs, copies, lambda: bool(flag[0]), flag)
    if check is None or check.scaled is None:
        return Results(outputs, copies, None, None)
    overflow, least = mirror(check.scaled[0]), check.scaled[2]
    return Results(outputs, copies, lambda: bool(overflow) and scale() <= least, None)
