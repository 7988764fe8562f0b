"""Reuses output buffers as scratch until they are written.

    gradients         dW₁₂ …… dW₂ dW₁      written one after the other while the backward pass runs
    in their buffers  activations of the last layers, which it reads first

Nothing else may use these outputs between the segment's first call and the call that writes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from graphc.backends.cupy.device.cuda_memory import ALIGNMENT, address
from graphc.device import Array

MIN_BYTES = 64 << 10
"""Smallest value in bytes that is put into an output buffer."""


@dataclass(frozen=True, slots=True)
class OutputRange:
    """The address range of an output that call ``written`` writes."""

    start: int
    stop: int
    written: int


@dataclass(frozen=True, slots=True)
class _Allocation:
    start: int
    stop: int
    until: int


class OutputScratch:
    """Allocates scratch in outputs that are not written yet.

    Args:
        reusable_buffers: the byte arrays that hold the outputs.
        outputs: the array of each output, and the call that writes it.
        inputs: arrays that the segment reads; their memory is never used as scratch.
    """

    def __init__(
        self, reusable_buffers: Sequence[Array], outputs: Iterable[tuple[Array, int]], inputs: Iterable[Array]
    ) -> None:
        self._reusable = [(address(buffer), address(buffer) + buffer.nbytes) for buffer in reusable_buffers]
        read = [(address(array), address(array) + array.nbytes) for array in inputs]
        ranges = sorted((address(array), address(array) + array.nbytes, written) for array, written in outputs)
        self._runs: list[list[OutputRange]] = []
        end = 0
        for start, stop, written in ranges:
            if start == stop or start < end or any(start < b and a < stop for a, b in read):
                end = max(end, stop)  # several outputs share memory, or an input lies there
                continue
            run = self._runs[-1] if self._runs else None
            if run is not None and start == run[-1].stop and self._buffer(start) == self._buffer(run[0].start):
                run.append(OutputRange(start, stop, written))
            else:
                self._runs.append([OutputRange(start, stop, written)])
            end = stop
        self._allocations: list[_Allocation] = []

    def _buffer(self, address: int) -> int | None:
        return next((k for k, (start, stop) in enumerate(self._reusable) if start <= address < stop), None)

    def take(self, nbytes: int, now: int, until: int) -> tuple[int, int] | None:
        """Allocate ``nbytes`` from call ``now`` to call ``until``: (buffer, offset), or None if nothing is free.

        The first fit is taken: outputs of one bucket lie in the order in which they are written.
        """
        if nbytes < MIN_BYTES:
            return None
        self._allocations = [t for t in self._allocations if t.until >= now]
        for run in self._runs:
            buffer = self._buffer(run[0].start)
            if buffer is None or run[-1].stop - run[0].start < nbytes:
                continue
            begin = self._reusable[buffer][0]
            starts = [*(r.start for r in run), *(t.stop for t in self._allocations if run[0].start <= t.start < run[-1].stop)]
            for start in sorted(begin + -(-(start - begin) // ALIGNMENT) * ALIGNMENT for start in starts):
                if self._is_free(run, start, start + nbytes, until):
                    self._allocations.append(_Allocation(start, start + nbytes, until))
                    return buffer, start - begin
        return None

    def _is_free(self, run: Sequence[OutputRange], start: int, stop: int, until: int) -> bool:
        if stop > run[-1].stop or any(t.start < stop and start < t.stop for t in self._allocations):
            return False
        return all(r.written > until for r in run if r.start < stop and start < r.stop)
