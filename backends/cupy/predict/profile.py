"""Measures every call of a step on the GPU and compares it with the cost model.

The step is not captured: each call is queued between two events on the compute stream. Before every row of calls a kernel keeps
the device busy while the host queues the row, so that no event waits for the host.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from graphc.backend import Backend
from graphc.backends.cupy.device.cuda_device import CudaDevice
from graphc.backends.cupy.device.cuda_graph import Recording
from graphc.backends.cupy.device.device_timer import hold_kernel
from graphc.backends.cupy.predict.cost_model import CostModel
from graphc.backends.cupy.predict.hardware import gpu_named
from graphc.backends.cupy.segment.bind import BoundSegment
from graphc.backends.cupy.updates.multi_tensor import Launched
from graphc.device import Run
from graphc.report.step_time import TIMERS, Cost, Timed

if TYPE_CHECKING:
    from graphc.runtime.executor import Executor

ROW = 200
"""Calls queued after one hold kernel; few enough, with their events, that the stream does not block the host."""


class ProfiledRecording:
    """Replaces a recording: runs its calls one by one, each between two events.

    Attributes:
        calls: the predicted cost of each call, and the closure that runs it.
    """

    def __init__(self, device: CudaDevice, recording: Recording) -> None:
        self.calls = list(calls_of(recording.runs, CostModel(gpu_named(device.name))))
        self._stream = device.stream
        event = device.cupy.cuda.Event
        self._elapsed = device.cupy.cuda.get_elapsed_time
        self._events = [(event(), event()) for _ in range(len(self.calls) + 1)]  # the last pair of events encloses no call
        self._hold = hold_kernel(device)
        self._holds = 0

    def __call__(self) -> None:
        runs = [run for _, run in self.calls] + [_nothing]
        longest = 0.0
        for start in range(0, len(runs), ROW):
            for _ in range(self._holds):
                self._hold()
            begin = time.perf_counter()
            for (before, after), run in zip(self._events[start : start + ROW], runs[start : start + ROW], strict=True):
                before.record(self._stream)
                run()
                after.record(self._stream)
            longest = max(longest, time.perf_counter() - begin)
        if not self._holds:
            self._holds = 1 + int(1.5 * longest / 2e-3)

    def seconds(self) -> list[float]:
        """Seconds of each call in the last step, less the time of two events; call it after the step has finished."""
        *found, nothing = (self._elapsed(before, after) * 1e-3 for before, after in self._events)
        return [max(0.0, one - nothing) for one in found]


def calls_of(runs: Sequence[Run], costs_on: CostModel) -> Iterator[tuple[Cost, Run]]:
    """Every call of a recording with its predicted cost; 0 if there is no prediction."""
    for run in runs:
        if isinstance(run, BoundSegment):
            yield from ((costs_on.call(call), one) for call, one in run.calls())
        elif isinstance(run, Launched) and run.name:
            yield costs_on.update(run.name, len(run.rows), run.traffic), run
        else:
            yield Cost("other", getattr(run, "__qualname__", type(run).__name__).removesuffix(".<locals>.run"), 0.0), run


def measure(backend: Backend, executor: Executor, step: Callable[[], Any], steps: int = 12) -> list[Timed]:
    """The calls of a step in order, each with its median time.

    Args:
        backend: the executor's backend; it must have a GPU.
        executor: its recordings run call by call during the measurement.
        step: runs one step and returns when it has finished.
        steps: measured steps; two warm-up steps precede them.
    """
    device: Any = getattr(backend, "device", None)
    if not isinstance(device, CudaDevice):
        return []
    held = executor.runs
    watched = [ProfiledRecording(device, run) if isinstance(run, Recording) else run for run in held]
    executor.runs = list(watched)
    times: list[list[float]] = []
    try:
        for _ in range(2):
            step()
        for _ in range(steps):
            step()
            times.append([t for run in watched if isinstance(run, ProfiledRecording) for t in run.seconds()])
    finally:
        executor.runs = held
    costs = [cost for run in watched if isinstance(run, ProfiledRecording) for cost, _ in run.calls]
    return [Timed(cost, statistics.median(column)) for cost, column in zip(costs, zip(*times, strict=True), strict=True)]


def _nothing() -> None:
    """The empty call that measures the time of two events."""


TIMERS.register("cupy", measure, origin=__name__)
