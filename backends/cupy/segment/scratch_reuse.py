"""The memory of results that lies idle until they are written: room for values of the segment that are gone by then.

    gradients      dW₁₂ …… dW₂ dW₁      written one after the other while the backward pass runs
    in their room  activations of the last layers, which it reads first

The results must be the segment's alone from its first call on, and nobody may care for what is in them until they are written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from graphc.backends.cupy.device.cuda_memory import ALIGNMENT, address
from graphc.device import Array

LEAST = 64 << 10
"""Bytes of a value that is worth a place."""


@dataclass(frozen=True, slots=True)
class Range:
    """Addresses that hold a result from call ``written`` on."""

    start: int
    stop: int
    written: int


@dataclass(frozen=True, slots=True)
class _Taken:
    start: int
    stop: int
    until: int


class Idle:
    """Hands out places in the room of results.

    Args:
        reusable_buffers: the arrays of bytes in which results lie.
        results: the array of each result, and the call that writes it.
        others: arrays that the segment reads: nothing is put where one of them lies.
    """

    def __init__(
        self, reusable_buffers: Sequence[Array], results: Iterable[tuple[Array, int]], others: Iterable[Array]
    ) -> None:
        self._reusable = [(address(room), address(room) + room.nbytes) for room in reusable_buffers]
        barred = [(address(array), address(array) + array.nbytes) for array in others]
        ranges = sorted((address(array), address(array) + array.nbytes, written) for array, written in results)
        self._runs: list[list[Range]] = []
        end = 0
        for start, stop, written in ranges:
            if start == stop or start < end or any(start < b and a < stop for a, b in barred):
                end = max(end, stop)  # several results in one place, or what is read there
                continue
            run = self._runs[-1] if self._runs else None
            if run is not None and start == run[-1].stop and self._room(start) == self._room(run[0].start):
                run.append(Range(start, stop, written))
            else:
                self._runs.append([Range(start, stop, written)])
            end = stop
        self._taken: list[_Taken] = []

    def _room(self, address: int) -> int | None:
        return next((k for k, (start, stop) in enumerate(self._reusable) if start <= address < stop), None)

    def take(self, nbytes: int, now: int, until: int) -> tuple[int, int] | None:
        """(room, offset) of ``nbytes`` that are free from call ``now`` to call ``until``; None: there is no such place.

        Of several, the first is taken: results of one bucket lie in the order in which they are written.
        """
        if nbytes < LEAST:
            return None
        self._taken = [t for t in self._taken if t.until >= now]
        for run in self._runs:
            room = self._room(run[0].start)
            if room is None or run[-1].stop - run[0].start < nbytes:
                continue
            begin = self._reusable[room][0]
            starts = [*(r.start for r in run), *(t.stop for t in self._taken if run[0].start <= t.start < run[-1].stop)]
            for start in sorted(begin + -(-(start - begin) // ALIGNMENT) * ALIGNMENT for start in starts):
                if self._is_free(run, start, start + nbytes, until):
                    self._taken.append(_Taken(start, start + nbytes, until))
                    return room, start - begin
        return None

    def _is_free(self, run: Sequence[Range], start: int, stop: int, until: int) -> bool:
        if stop > run[-1].stop or any(t.start < stop and start < t.stop for t in self._taken):
            return False
        return all(r.written > until for r in run if r.start < stop and start < r.stop)
