"""Measures every call of a step on the GPU, beside the time that the cost model predicts.

The step is not captured here: each call is queued between two events on the compute stream. Before every row of calls a kernel
keeps the device busy for as long as the host needs to queue the row, so that no event waits for the host.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from graphc.backend import Backend
from graphc.backends.cupy.codegen.launch_shape import Shape
from graphc.backends.cupy.device.cuda_device import CudaDevice
from graphc.backends.cupy.device.cuda_graph import Recording
from graphc.backends.cupy.predict.cost_model import call_cost, update_cost
from graphc.backends.cupy.segment.bind import BoundSegment
from graphc.backends.cupy.updates.multi_tensor import Launched
from graphc.device import Run
from graphc.report.step_time import TIMERS, Cost, Timed

if TYPE_CHECKING:
    from graphc.runtime.executor import Executor

ROW = 200
"""Calls queued after one hold kernel; with their events, few enough for a stream not to block the host."""

CYCLES = 4_000_000
"""Clock cycles of the device for one launch of the hold kernel: 2 ms."""

HOLD = f"""
extern "C" __global__ void hold() {{
  const long long begin = clock64();
  while (clock64() - begin < {CYCLES}LL) {{}}
}}
"""


class ProfiledRecording:
    """Replaces a recording: runs its calls one by one, each between two events.

    Attributes:
        calls: the predicted cost of each call, and the closure that runs it.
    """

    def __init__(self, device: CudaDevice, recording: Recording) -> None:
        self.calls = list(calls_of(recording.runs))
        self._stream = device.stream
        event = device.cupy.cuda.Event
        self._elapsed = device.cupy.cuda.get_elapsed_time
        self._events = [(event(), event()) for _ in range(len(self.calls) + 1)]  # the last pair has nothing between
        self._hold = device.launch(device.compile({"hold": HOLD})["hold"], [], Shape(1, 1, 1, 1, 1))
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
        """Seconds of each call in the last step, minus the time of two events; call it when everything has run."""
        *found, nothing = (self._elapsed(before, after) * 1e-3 for before, after in self._events)
        return [max(0.0, one - nothing) for one in found]


def calls_of(runs: Sequence[Run]) -> Iterator[tuple[Cost, Run]]:
    """Every call of a recording with its predicted cost; 0 where that is not known."""
    for run in runs:
        if isinstance(run, BoundSegment):
            yield from ((call_cost(call), one) for call, one in run.calls())
        elif isinstance(run, Launched) and run.name:
            yield update_cost(run.name, len(run.rows), run.traffic), run
        else:
            yield Cost("other", getattr(run, "__qualname__", type(run).__name__).removesuffix(".<locals>.run"), 0.0), run


def measure(backend: Backend, executor: Executor, step: Callable[[], Any], steps: int = 12) -> list[Timed]:
    """The calls of a step in order, each with the median of its times.

    Args:
        backend: of the executor; it must have a GPU.
        executor: whose recordings are taken apart while this measures.
        step: runs it once, and returns when everything has run.
        steps: how many count; two more are taken before.
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
