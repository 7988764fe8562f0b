"""Queued work that is walked through once and then replayed as one.

    first call    every call is launched from Python: libraries measure and load what they need
    second call   the same launches are captured as a graph, which is launched then
    later calls   the graph is launched

Where the capture is refused, every call is launched from Python for good, and why is reported once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from graphc.backends.cupy.device.cuda_memory import explain
from graphc.device import Run
from graphc.errors import GraphcError

if TYPE_CHECKING:
    from graphc.backends.cupy.device.cuda_memory import CudaMemory

Capture = Callable[[Sequence[Run]], Run]
"""Calls the closures while the device only takes note of what they queue; returns what queues all of it."""


class CaptureRefusedWarning(UserWarning):
    """The work of a step is launched call by call, which costs time, not results."""


class Recording:
    """A callable that queues ``runs`` in order.

    Args:
        runs: they only queue work: none of them looks at a result.
        capture: see :data:`Capture`; None: this device has no such thing.

    Attributes:
        runs: what it queues.
        refusal: why the capture was refused.
    """

    def __init__(self, runs: Sequence[Run], capture: Capture | None) -> None:
        self.runs, self._capture = tuple(runs), capture
        self._calls = 0
        self._replay: Run | None = None
        self.refusal: str | None = None

    def __call__(self) -> None:
        try:
            if self._replay is not None:
                self._replay()
                return
            self._calls += 1
            if self._calls == 2 and self._capture is not None:
                self._replay = self._captured(self._capture)
                if self._replay is not None:
                    self._replay()
                    return
            for run in self.runs:
                run()
        except (GraphcError, ValueError, TypeError, ArithmeticError):
            raise
        except Exception as error:
            raise explain(error) from error

    def _captured(self, capture: Capture) -> Run | None:
        try:
            return capture(self.runs)
        except Exception as error:
            self.refusal = f"{type(error).__name__}: {error}"
            warnings.warn(f"a step is not captured as a graph: {self.refusal}", CaptureRefusedWarning, stacklevel=4)
            return None


def capture_graph(memory: CudaMemory, runs: Sequence[Run]) -> Run:
    """Capture what ``runs`` queue on the compute stream, and on streams that it forks to and joins, as a CUDA graph."""
    stream = memory.stream
    memory.trim()
    stream.begin_capture()
    try:
        for run in runs:
            run()
    except BaseException:
        abandon(stream)
        raise
    graph = stream.end_capture()
    graph.upload(stream)

    def launch() -> None:
        graph.launch(stream)

    return launch


def abandon(stream: object) -> None:
    """End a capture that failed; it says once more that it failed."""
    try:
        stream.end_capture()  # type: ignore[attr-defined]
    except RuntimeError:
        return
