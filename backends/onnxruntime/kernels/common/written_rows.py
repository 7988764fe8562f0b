"""Which rows of large gradients are zero, so that a step neither clears nor checks all of them.

The gradient of an embedding is zero but for the rows that the batch looked up. Where one kernel alone writes its memory, the
zeros of one step are still there in the next one: the kernel clears the rows of the last step, and the check for NaN and
infinity reads the rows of this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from graphc.device import Array


@dataclass(frozen=True, slots=True, eq=False)
class WrittenRows:
    """The rows of an array that are not zero.

    Attributes:
        array: held, so that no other array gets its address.
        touched: uint8, 1 for a row that may hold another number than zero; all ones at first.
        alone: uint8[1], 0 once something else may write the array: a run then clears all of it.
        nonfinite: int64, NaN and infinities that the last run wrote, a part of the rows each.
    """

    array: Array
    touched: Array
    alone: Array
    nonfinite: Array

    @staticmethod
    def of(array: Array, threads: int, *, alone: bool) -> WrittenRows:
        """The record of an array with at least one axis, nothing of which is known to be zero."""
        touched, flag = np.ones(array.shape[0], dtype=np.uint8), np.array([alone], dtype=np.uint8)
        return WrittenRows(array, touched, flag, np.zeros(min(threads, array.shape[0]), dtype=np.int64))

    @property
    def range(self) -> tuple[int, int]:
        return _range(self.array)


class RowLedger:
    """Records of the arrays that one kernel alone writes, for the plans that share these arrays.

    Args:
        threads: that kernels run in.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._records: dict[tuple[int, tuple[int, ...]], WrittenRows] = {}
        self._shared: list[tuple[int, int]] = []

    def note_writers(self, alone: Sequence[Array], others: Sequence[Array]) -> None:
        """Learn who writes which arrays (:meth:`graphc.backend.Backend.note_writers`)."""
        new = [_range(array) for array in others]
        self._shared += new
        for record in self._records.values():
            if _overlap(record.range, new):
                record.alone[0] = 0
        for array in alone:
            if self.record(array) is None:
                record = WrittenRows.of(array, self._threads, alone=not _overlap(_range(array), self._shared))
                self._records[array.ctypes.data, array.shape] = record

    def record(self, array: Array) -> WrittenRows | None:
        """The record of an array, None for one that has none."""
        return self._records.get((array.ctypes.data, array.shape))

    def records(self, array: Array) -> list[WrittenRows]:
        """The records of parts of a 1-D array, in order."""
        start, stop = _range(array)
        return sorted((r for r in self._records.values() if start <= r.range[0] and r.range[1] <= stop), key=lambda r: r.range)

    def clear(self) -> None:
        """Forget everything."""
        self._records.clear()
        self._shared.clear()


def _range(array: Array) -> tuple[int, int]:
    start = int(array.ctypes.data)
    return start, start + array.nbytes


def _overlap(one: tuple[int, int], others: Sequence[tuple[int, int]]) -> bool:
    return any(start < one[1] and one[0] < stop for start, stop in others)
