"""Assigns offsets in one buffer by liveness, with a best-fit allocator."""

from __future__ import annotations

from graphc.device import ALIGNMENT


class Arena:
    """Allocates ranges of one buffer by best fit and frees each after a given step.

    Args:
        alignment: of every range, in bytes.
    """

    def __init__(self, alignment: int = ALIGNMENT) -> None:
        self.size = 0
        self._alignment = alignment
        self._free: list[tuple[int, int]] = []
        self._expiring: dict[int, list[tuple[int, int]]] = {}

    def take(self, nbytes: int, until: int) -> int:
        """Allocate ``nbytes`` until after step ``until``; returns the offset."""
        needed = -(-max(nbytes, 1) // self._alignment) * self._alignment
        offset, self.size = _allocate(self._free, needed, self.size)
        self._expiring.setdefault(until, []).append((offset, needed))
        return offset

    def keep(self, offset: int, step: int, until: int) -> None:
        """Hold the range at ``offset``, which was to be free after ``step``, until after step ``until``."""
        taken = next(taken for taken in self._expiring[step] if taken[0] == offset)
        self._expiring[step].remove(taken)
        self._expiring.setdefault(until, []).append(taken)

    def free_after(self, step: int) -> None:
        for offset, nbytes in self._expiring.pop(step, []):
            _release(self._free, offset, nbytes)


def _allocate(free: list[tuple[int, int]], needed: int, size: int) -> tuple[int, int]:
    """Best fit: the smallest free range that holds ``needed`` bytes, else grow the arena."""
    best = min((r for r in free if r[1] >= needed), key=lambda r: r[1], default=None)
    if best is not None:
        free.remove(best)
        if best[1] > needed:
            free.append((best[0] + needed, best[1] - needed))
        return best[0], size
    tail = next((r for r in free if r[0] + r[1] == size), None)
    if tail is not None:
        free.remove(tail)
        return tail[0], tail[0] + needed
    return size, size + needed


def _release(free: list[tuple[int, int]], offset: int, count: int) -> None:
    for neighbour in [r for r in free if r[0] + r[1] == offset or r[0] == offset + count]:
        free.remove(neighbour)
        offset, count = min(offset, neighbour[0]), count + neighbour[1]
    free.append((offset, count))
