"""Feeding workers: shares of a global batch, and batches over arrays.

One global batch of B samples over W workers gives each worker B // W samples, and the first B % W workers one more.
Shuffling is seeded by (seed, epoch) and the same for every number of workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from graphc.backend import Array
from graphc.errors import FeedError, UsageError


def share(count: int, rank: int, size: int) -> slice:
    """The part of ``count`` consecutive samples that worker ``rank`` of ``size`` takes."""
    base, extra = divmod(count, size)
    start = rank * base + min(rank, extra)
    return slice(start, start + base + (1 if rank < extra else 0))


@dataclass(frozen=True, slots=True)
class Batch:
    """This worker's share of a global batch; ``offset`` is the index of its first sample in the global batch."""

    feeds: Mapping[str, Array]
    offset: int
    global_size: int


class ArrayBatches:
    """Global batches over arrays that share their first axis, cut into this worker's shares.

    Args:
        arrays: one array per graph input, first axis = sample.
        batch_size: samples of a global batch.
        rank, size: this worker and the number of workers.
        shuffle: a new order each epoch, the same for every number of workers.

    A last batch smaller than the number of workers joins the batch before it, so that no sample is lost and no worker
    goes without.

    Raises:
        UsageError: a batch smaller than the world, or fewer samples than workers.
        FeedError: arrays of different length.
    """

    def __init__(
        self,
        arrays: Mapping[str, Array],
        batch_size: int,
        *,
        rank: int = 0,
        size: int = 1,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        lengths = {name: len(a) if a.ndim else -1 for name, a in arrays.items()}
        if len(set(lengths.values())) != 1 or -1 in lengths.values():
            raise FeedError(f"arrays must have one entry per sample along axis 0; their lengths are {lengths}")
        self.samples = next(iter(lengths.values()))
        if batch_size < 1:
            raise UsageError(f"the batch size must be positive, not {batch_size}")
        if batch_size < size:
            raise UsageError(
                f"the global batch of {batch_size} is smaller than the {size} workers; each needs at least one sample"
            )
        if self.samples < size:
            raise UsageError(f"{self.samples} samples are fewer than the {size} workers")
        self._arrays = dict(arrays)
        self._size, self._rank, self._shuffle, self._seed = size, rank, shuffle, seed
        edges = [*range(0, self.samples, batch_size), self.samples]
        if len(edges) > 2 and edges[-1] - edges[-2] < size:
            del edges[-2]
        self._edges = edges

    def __len__(self) -> int:
        return len(self._edges) - 1

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """The batches of one epoch, in its own order."""
        order = np.arange(self.samples)
        if self._shuffle:
            order = np.random.Generator(np.random.Philox(key=[self._seed, epoch])).permutation(self.samples)
        for start, stop in zip(self._edges[:-1], self._edges[1:], strict=True):
            mine = share(stop - start, self._rank, self._size)
            rows = order[start + mine.start : start + mine.stop]
            yield Batch({name: a[rows] for name, a in self._arrays.items()}, mine.start, stop - start)
