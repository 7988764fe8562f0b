"""Cuts a worker's share of a batch into micro-batches.

Every rank takes part in every collective. A rank without samples runs a sample of an earlier step (at first ones, and zeros for
integers) with ``graphc.live`` = 0: its loss, loss weight and batch-statistics counts are then 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from graphc.data import Batch, share
from graphc.device import Array
from graphc.distributed.communicator import Communicator
from graphc.errors import FeedError, UsageError, counted
from graphc.ir.batch import batched_input
from graphc.ir.facts import Dim, dims
from graphc.ir.names import LIVE, SAMPLE_OFFSET
from graphc.ir.ops.accumulation import accumulation_steps, reduces_within, sums_by_tree
from graphc.pipe.tasks import number_of_stages
from graphc.runtime.scalars import Scalars
from graphc.training.feeds import batches_of, feed_shape


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Feeds of one run of the forward and backward pass.

    Attributes:
        feeds: one array per graph input, at least one sample each.
        offset: index of the first sample in the global batch.
        live: whether the samples count.
    """

    feeds: Mapping[str, Array]
    offset: int
    live: bool

    def set_scalars(self, scalars: Scalars) -> None:
        """Write the samples' offset in the global batch, and whether they count, into the state."""
        for name, value in ((SAMPLE_OFFSET, self.offset), (LIVE, float(self.live))):
            if name in scalars:
                scalars.set(name, value)


class MicroBatches:
    """Cuts feeds along the batch axis: the first axis of the first input, and of inputs that share its symbol.

    Args:
        graph: the training graph.
        steps: micro-batches of a step.
        aligned: whether every rank runs every micro-batch, even an empty one, because it contains collectives.
        equal: whether all micro-batches must have one size, for the same bits on any number of ranks.

    Attributes:
        steps: as given.
        first: the first input with axes.
        batched: the inputs whose first axis is the batch.
    """

    def __init__(self, graph: ir.Graph, steps: int, *, aligned: bool, equal: bool = False) -> None:
        self.steps, self._aligned, self._equal = steps, aligned, equal
        self._shapes = {v.name or "": dims(v) or () for v in graph.inputs}
        self._types = {v.name or "": v.dtype.numpy() for v in graph.inputs if v.dtype is not None}
        first = batched_input(graph)
        self.first = "" if first is None else first.name or ""
        self._axis = self._shapes[self.first][0] if first is not None else None
        self.batched = [name for name, shape in self._shapes.items() if shape and (shape[0] is None or shape[0] == self._axis)]
        self._last: Mapping[str, Array] = {}

    def check_divides(self, global_batch: int, workers: int) -> None:
        """Refuse a batch that does not divide into equal micro-batches; an epoch's shorter last batch may be uneven.

        Raises:
            UsageError: micro-batches of different size, or of another size than the model is fixed at.
        """
        if isinstance(self._axis, int) and global_batch != self._axis * self.steps * workers:
            raise UsageError(
                f"the model is fixed at batches of {self._axis}, and {global_batch} samples over"
                f" {counted(workers, 'worker')} in {counted(self.steps, 'micro-batch', 'micro-batches')} are others:"
                f" take a batch of {self._axis * self.steps * workers}, or compile(batch='N') for any batch"
            )
        if self.steps > 1 and global_batch % (self.steps * workers):
            raise UsageError(
                f"accumulate={self.steps} does not divide the batch: {global_batch} samples over "
                f"{counted(workers, 'worker')} give {global_batch / workers:g} each; make the batch a multiple of "
                f"{self.steps * workers}"
            )

    def has_sample_rows(self, shape: Sequence[Dim]) -> bool:
        """Whether a value of ``shape`` has one row for each sample of the batch."""
        return bool(shape) and self._axis is not None and shape[0] == self._axis

    def rows(self, feeds: Mapping[str, Array]) -> int:
        """Count the samples of ``feeds``; 1 if no input has a batch axis.

        Raises:
            FeedError: the batched input is missing, or not an array.
        """
        if not self.first:
            return 1
        if self.first not in feeds:
            raise FeedError(f"the feed {self.first!r} is missing; the inputs are {', '.join(self._shapes)}")
        shape = feed_shape(feeds[self.first])
        if not shape:
            raise FeedError(f"feed {self.first!r} is a single number, the model wants an array")
        return shape[0]

    def empty(self) -> dict[str, Array]:
        """Return feeds without samples, for a rank whose data have ended."""
        shapes = {name: [d if isinstance(d, int) else 1 for d in shape] for name, shape in self._shapes.items()}
        for name in self.batched:
            shapes[name][0] = 0
        known = {name: (self._last[name][:0] if name in self.batched else self._last[name]) for name in self._last}
        return {name: known.get(name, np.zeros(shape, self._types[name])) for name, shape in shapes.items()}

    def split(self, feeds: Mapping[str, Array], offset: int) -> list[MicroBatch]:
        """Cut a share whose first sample has index ``offset`` in the global batch into micro-batches.

        Raises:
            FeedError: a share of another size than the model is fixed at.
            UsageError: a share that does not divide into shards of one size.
        """
        count = self.rows(feeds)
        if count:
            self._last = feeds
        if self._equal and (count == 0 or count % self.steps):
            raise UsageError(
                f"a share of {count} samples does not divide into {self.steps} shards of one size, which equal bits on any"
                " number of workers need: make the global batch a multiple of the shards, and drop a shorter last one"
            )
        if isinstance(self._axis, int) and count not in (0, self._axis * self.steps):
            raise FeedError(
                f"feed {self.first!r} has {counted(count, 'sample')}, and the model is fixed at batches of {self._axis}"
                + (f", {self.steps} a step" if self.steps > 1 else "")
                + ": fill a smaller last batch up (tail='pad'), drop it (tail='drop'), or make the batch free with"
                " compile(batch='N')"
            )
        if self.steps == 1 or not self.batched:
            return [self._whole(feeds, offset, count)]
        parts = [share(count, k, self.steps) for k in range(self.steps)]
        parts = parts if self._aligned else [p for p in parts if p.start < p.stop] or parts[:1]
        cut = ({**feeds, **{name: feeds[name][part] for name in self.batched}} for part in parts)
        return [self._whole(piece, offset + part.start, part.stop - part.start) for piece, part in zip(cut, parts, strict=True)]

    def _whole(self, feeds: Mapping[str, Array], offset: int, count: int) -> MicroBatch:
        return MicroBatch(feeds, offset, True) if count else MicroBatch(self._stand_in(feeds), 0, False)

    def _stand_in(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        found = dict(feeds)
        size = self._axis if isinstance(self._axis, int) else 1
        for name in self.batched:
            shape, last = feed_shape(feeds[name]), self._last.get(name)
            if last is not None and feed_shape(last)[1:] == shape[1:] and len(last) >= size:
                found[name] = last[-size:]
            else:
                floating = self._types[name].kind not in "biu"  # a model may divide by it, or take its logarithm
                found[name] = np.full((size, *shape[1:]), int(floating), self._types[name])
        return found


def until_all_end(items: Iterable[Mapping[str, Array] | Batch], micro: MicroBatches, comm: Communicator) -> Iterator[Batch]:
    """Yield this rank's batches, then empty ones until every rank has run out.

    Ranks exchange their sample counts, so offsets and global sizes are exact for any shares.
    """
    walk = batches_of(items)
    while True:
        item = next(walk, None)
        if isinstance(item, Batch) and comm.size == 1:
            yield item
            continue
        feeds = item.feeds if isinstance(item, Batch) else item
        mine = None if feeds is None else micro.rows(feeds)
        counts: list[int | None] = comm.allgather_object(mine) if comm.size > 1 else [mine]
        if all(count is None for count in counts):
            return
        sizes = [count or 0 for count in counts]
        yield Batch(micro.empty() if feeds is None else feeds, sum(sizes[: comm.rank]), sum(sizes))


def micro_batches(graph: ir.Graph, workers: int) -> MicroBatches:
    """Make the micro-batching of a training graph on one worker.

    Raises:
        UsageError: shards that cannot be divided among the workers.
    """
    steps = accumulation_steps(graph)
    if number_of_stages(graph):
        return MicroBatches(graph, steps, aligned=True)
    if not sums_by_tree(graph):
        return MicroBatches(graph, steps, aligned=reduces_within(graph))
    if steps % workers:
        raise UsageError(
            f"deterministic='any-world' has {steps} shards for {workers} workers: take a power of two up to {steps}"
        )
    return MicroBatches(graph, steps // workers, aligned=True, equal=True)
