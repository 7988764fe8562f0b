"""Records queued work on the first calls and then replays it as a CUDA graph.

    first call    Python launches every call; libraries load and measure what they need
    second call   the same launches are captured as a graph, which is then launched
    later calls   the graph is launched

When CUDA refuses the capture, Python launches every call from then on, and a warning gives the reason once.
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
"""Calls the closures while the device only records what they queue; returns a closure that queues it all."""


class CaptureRefusedWarning(UserWarning):
    """The step runs call by call: slower, with the same results."""


class Recording:
    """A callable that queues ``runs`` in order.

    Args:
        runs: closures that only queue work and never read a result.
        capture: see :data:`Capture`; None: the device cannot capture.

    Attributes:
        runs: the closures it queues.
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
    """Capture ``runs`` as a CUDA graph, on the compute stream and the streams that fork from it and join it."""
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
    """End a failed capture, ignoring the error that CUDA repeats."""
    try:
        stream.end_capture()  # type: ignore[attr-defined]
    except RuntimeError:
        return
