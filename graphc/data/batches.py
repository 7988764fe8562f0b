"""Cuts global batches into one worker's shares."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from graphc.data.prefetch import prefetched
from graphc.data.sources import ArraySource, Source, StreamSource, is_loader, source_of
from graphc.device import Array
from graphc.distributed.world import find_world
from graphc.errors import DataError, FeedError, UsageError, nearest

TAILS = ("keep", "drop", "pad", "weight-zero")
"""Treatments of an epoch's last batch if it is smaller than a global batch; see :class:`Shards`."""


def share(count: int, rank: int, size: int) -> slice:
    """Return the range of ``count`` consecutive samples that worker ``rank`` of ``size`` takes."""
    base, extra = divmod(count, size)
    start = rank * base + min(rank, extra)
    return slice(start, start + base + (1 if rank < extra else 0))


@dataclass(frozen=True, slots=True)
class Batch:
    """This worker's share of a global batch.

    Attributes:
        feeds: one array per graph input, first axis = sample; zero samples if the share is empty.
        offset: index of the share's first sample in the global batch.
        global_size: samples of the global batch without padding.
        epoch: zero-based epoch of this batch.
        stop: samples of the epoch up to the end of this batch.
    """

    feeds: Mapping[str, Array]
    offset: int
    global_size: int
    epoch: int = 0
    stop: int = 0


class _Piece(NamedTuple):
    """A worker's part of a global batch before it is read; ``real`` counts the global batch's samples without padding."""

    rows: Sequence[Any]
    keep: int
    offset: int
    real: int
    stop: int


class Shards:
    """Global batches over a source, cut into one worker's shares; made by :func:`graphc.data.shard`.

    Iterating continues from the current position to the end of the epoch; the next iteration takes the next epoch.
    :meth:`epoch` iterates over any epoch from its beginning and does not move the position.

    Args:
        source: source of the samples.
        global_batch: samples of one step over all workers.
        rank, size: this worker and the number of workers.
        shuffle: a new order each epoch, equal for every number of workers. For a stream: size of the shuffle buffer in samples.
        seed: seed of the order.
        tail: treatment of a last batch with fewer than ``global_batch`` samples.
            ``keep``: it is a smaller step; with fewer samples than workers it joins the batch before it.
            ``drop``: it is left out. ``pad``: it is filled up with its own samples, which do not count (see ``weight`` and
            ``padding``), so every step has the same shapes. ``weight-zero``: it is a smaller step, in which a worker without
            samples takes part with weight zero.
        prefetch: batches that a thread reads ahead; 0 reads on demand.
        weight: name of the feed of sample weights: 1 for samples and 0 for padding, times the source's array of that name.
        padding: for ``pad``: feed → padding value, such as a label that the loss ignores.

    Raises:
        UsageError: a batch smaller than the world, a tail that leaves nothing, or padding without a weight.
    """

    def __init__(
        self,
        source: Source,
        global_batch: int,
        *,
        rank: int = 0,
        size: int = 1,
        shuffle: bool | int = True,
        seed: int = 0,
        tail: str = "keep",
        prefetch: int = 0,
        weight: str | None = None,
        padding: Mapping[str, float] | None = None,
    ) -> None:
        if global_batch < 1:
            raise UsageError(f"the batch size must be positive, not {global_batch}")
        if global_batch < size:
            raise UsageError(
                f"the global batch of {global_batch} is smaller than the {size} workers; each needs at least one sample"
            )
        if tail not in TAILS:
            raise UsageError(f"unknown tail {tail!r}{nearest(tail, TAILS)}; it is one of {', '.join(TAILS)}")
        if tail == "pad" and weight is None and not padding:
            raise UsageError(
                "tail='pad' needs weight=NAME, the input of sample weights, or padding={label: value that the loss ignores};"
                " else the padding would count"
            )
        if source.samples is None and shuffle is True:
            raise UsageError("a stream cannot be shuffled as a whole; shuffle=1000 takes it through a buffer of 1000 samples")
        self.source, self.samples, self.global_batch, self.tail = source, source.samples, global_batch, tail
        self.rank, self.size, self.prefetch = rank, size, prefetch
        self._shuffle, self._seed = shuffle, seed
        self._weight, self._padding = weight, dict(padding or {})
        self._epoch, self._start = 0, 0
        self._chunked: tuple[int, list[Sequence[Any]]] | None = None  # (epoch, its global batches): cache of part()
        if self.samples is not None:
            self._check_count(self.samples)

    def _check_count(self, samples: int) -> None:
        if samples == 0:
            raise UsageError("the data has no samples: its arrays are empty along axis 0")
        if self.tail == "keep" and samples < self.size:
            raise UsageError(f"{samples} samples are fewer than the {self.size} workers")
        if samples == 0 or (self.tail == "drop" and samples < self.global_batch):
            raise UsageError(f"{samples} samples are fewer than a global batch of {self.global_batch}: tail='drop' leaves none")

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        if self.samples is None:
            raise TypeError("a stream has no length")
        whole, rest = divmod(self.samples, self.global_batch)
        joins = self.tail == "keep" and rest < self.size and whole > 0
        return whole + (1 if rest and self.tail != "drop" and not joins else 0)

    # Walking ----------------------------------------------------------------------------------------------------------

    def epoch(self, epoch: int, *, start: int = 0) -> Iterator[Batch]:
        """Iterate over the batches of one epoch in its order, from sample ``start`` on.

        Raises (while iterating):
            DataError: the source failed; names the batch and, if known, the sample.
        """
        batches = self._batches(epoch, start)
        return prefetched(batches, self.prefetch) if self.prefetch > 0 else batches

    def part(self, epoch: int, index: int, rank: int, size: int) -> Batch:
        """Random access: return the share of worker ``rank`` of ``size`` in global batch ``index`` of an epoch.

        Raises:
            UsageError: the source is a stream, which has no random access.
        """
        if self.samples is None:
            raise UsageError("a stream can only be walked in order; take arrays, files or a dataset with a length")
        if self._chunked is None or self._chunked[0] != epoch:
            self._chunked = (epoch, list(self._with_tail(self._chunks(epoch, 0))))
        chunks = self._chunked[1]
        piece = self._piece(chunks[index], rank, size, sum(len(chunk) for chunk in chunks[: index + 1]))
        feeds = next(iter(self.source.read(iter([piece.rows]))))
        return Batch(self._finish(feeds, piece), piece.offset, piece.real, epoch, piece.stop)

    def __iter__(self) -> Iterator[Batch]:
        return self.walk(iter)

    def walk(self, ahead: Callable[[Iterator[Batch]], Iterator[Batch]]) -> Iterator[Batch]:
        """Iterate through ``ahead``, which may fetch batches early; the position follows the batch in use."""
        self._skip_end()
        for batch in ahead(self.epoch(self._epoch, start=self._start)):
            self._start = batch.stop  # before the step: a checkpoint written after it counts this batch
            yield batch
        self._epoch, self._start = self._epoch + 1, 0

    @property
    def position(self) -> tuple[int, int]:
        """The position: the epoch, and the number of its samples handed out."""
        self._skip_end()
        return self._epoch, self._start

    def state_dict(self) -> dict[str, Any]:
        """The position: ``samples`` of ``epoch`` were handed out; independent of the number of workers."""
        epoch, samples = self.position
        return {
            "epoch": epoch,
            "samples": samples,
            "seed": self._seed,
            "shuffle": int(self._shuffle),
            "length": self.samples,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the position of another run, with any number of workers and any batch size.

        Raises:
            UsageError: a position inside an epoch of another order: the seed, shuffle or number of samples differ.
        """
        mine = self.state_dict()
        wrong = [k for k in ("seed", "shuffle", "length") if state.get(k, mine[k]) != mine[k]]
        if state["samples"] and wrong:
            key = wrong[0]
            raise UsageError(
                f"the position is {state['samples']} samples into an epoch with {key} {state[key]}, and this data has"
                f" {key} {mine[key]}"
            )
        self._epoch, self._start = int(state["epoch"]), int(state["samples"])

    def _skip_end(self) -> None:
        """Move the position to the next epoch if this one has no batch left."""
        if self.samples is not None and self._start:
            left = self.samples - self._start
            if left <= 0 or (self.tail == "drop" and left < self.global_batch):
                self._epoch, self._start = self._epoch + 1, 0

    # Inner workings ---------------------------------------------------------------------------------------------------

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        pieces = self._pieces(epoch, start)
        waiting: collections.deque[_Piece] = collections.deque()

        def rows() -> Iterator[Sequence[Any]]:
            for piece in pieces:
                waiting.append(piece)
                yield piece.rows

        read = iter(self.source.read(rows()))
        for number in itertools.count(start // self.global_batch):
            try:
                feeds = next(read, None)
            except (FeedError, UsageError):
                raise
            except Exception as error:
                raise _failed(error, number, epoch, waiting) from error
            if feeds is None:
                return
            piece = waiting.popleft()
            yield Batch(self._finish(feeds, piece), piece.offset, piece.real, epoch, piece.stop)

    def _finish(self, feeds: dict[str, Array], piece: _Piece) -> dict[str, Array]:
        if piece.keep < len(piece.rows):
            feeds = {name: array[: piece.keep] for name, array in feeds.items()}
        live = max(0, min(piece.keep, piece.real - piece.offset))
        if self._weight is not None:
            weight = np.zeros(piece.keep, np.float32)
            weight[:live] = 1 if self._weight not in feeds else feeds[self._weight][:live]
            feeds[self._weight] = weight
        for name, value in self._padding.items():
            if live < piece.keep:
                feeds[name] = np.array(feeds[name])
                feeds[name][live:] = value
        return feeds

    def _pieces(self, epoch: int, start: int) -> Iterator[_Piece]:
        """Yield this worker's part of every global batch from ``start`` on."""
        for chunk in self._with_tail(self._chunks(epoch, start)):
            start += len(chunk)
            yield self._piece(chunk, self.rank, self.size, start)

    def _piece(self, chunk: Sequence[Any], rank: int, size: int, stop: int) -> _Piece:
        """The part of worker ``rank`` of ``size`` in a global batch that ends ``stop`` samples into the epoch."""
        real = len(chunk)
        if self.tail == "pad" and real < self.global_batch:
            chunk = [chunk[k % real] for k in range(self.global_batch)]
        mine = share(len(chunk), rank, size)
        # An empty share needs shapes and dtypes too: read one sample and cut it off.
        keep = mine.stop - mine.start
        return _Piece(chunk[mine] if keep else chunk[:1], keep, mine.start, real, stop)

    def _with_tail(self, chunks: Iterator[Sequence[Any]]) -> Iterator[Sequence[Any]]:
        """Yield all full batches, then the last one as :attr:`tail` says."""
        held: Sequence[Any] | None = None
        try:
            for chunk in chunks:
                if len(chunk) < self.global_batch and self.tail == "drop":
                    break
                if len(chunk) < self.size and self.tail == "keep" and held is not None:
                    chunk, held = [*held, *chunk], None
                if held is not None:
                    yield held
                held = chunk
        except Exception:
            if held is not None:
                yield held  # batches read before the stream failed
            raise
        if held is not None:
            yield held

    def _chunks(self, epoch: int, start: int) -> Iterator[Sequence[Any]]:
        """Yield the global batches as indices, or as samples of a stream."""
        random = np.random.Generator(np.random.Philox(key=[self._seed, epoch]))
        if self.samples is not None:
            order = random.permutation(self.samples) if self._shuffle else np.arange(self.samples)
            for first in range(start, self.samples, self.global_batch):
                yield order[first : first + self.global_batch]  # type: ignore[misc]
            return
        assert isinstance(self.source, StreamSource)
        stream = self.source.open()
        if self._shuffle:
            stream = _buffered_shuffle(stream, int(self._shuffle), random)
        stream = itertools.islice(stream, start, None)
        while chunk := list(itertools.islice(stream, self.global_batch)):
            yield chunk


def _buffered_shuffle(stream: Iterator[Any], size: int, random: np.random.Generator) -> Iterator[Any]:
    """Shuffle through a buffer of ``size`` samples: each new sample replaces a random one, which is yielded."""
    buffer = list(itertools.islice(stream, size))
    for sample in stream:
        slot = int(random.integers(len(buffer)))
        yield buffer[slot]
        buffer[slot] = sample
    yield from (buffer[int(k)] for k in random.permutation(len(buffer)))


def _failed(error: Exception, number: int, epoch: int, waiting: Sequence[_Piece]) -> DataError:
    where = f"batch {number} of epoch {epoch}"
    if isinstance(error, DataError):
        return DataError(f"{where}, {error}", epoch=epoch, batch=number, sample=error.sample)
    text = " ".join(str(error).split())
    near = f" (samples up to {waiting[0].stop} of the epoch)" if waiting else ""
    return DataError(f"{where}{near}: {type(error).__name__}: {text}", epoch=epoch, batch=number)


class ArrayBatches(Shards):
    """:class:`Shards` over arrays that share their first axis; a last batch smaller than the world joins the one before.

    Args:
        arrays: one array per graph input, first axis = sample.
        batch_size: samples of a global batch.

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
        super().__init__(ArraySource(arrays), batch_size, rank=rank, size=size, shuffle=shuffle, seed=seed)


def shard(
    source: Any,
    *,
    global_batch: int | None = None,
    per_worker_batch: int | None = None,
    rank: int | None = None,
    size: int | None = None,
    shuffle: bool | int | None = None,
    seed: int = 0,
    tail: str | None = None,
    prefetch: int = 0,
    names: Sequence[str] | None = None,
    weight: str | None = None,
    padding: Mapping[str, float] | None = None,
) -> Shards:
    """Cut data into disjoint shards, one for each worker.

    Args:
        source: a mapping input → array (memory-mapped ones are read batch by batch); the path of an ``.npz`` file or of a
            folder of ``.npy`` files; a ``torch.utils.data.DataLoader`` or ``Dataset``; samples with ``len()`` and ``[index]``;
            an iterable of samples, or a function that makes one for each epoch. Every worker reads the whole stream and keeps
            its part of each batch, so the stream's order must be the same on all workers.
        global_batch: samples of one step over all workers.
        per_worker_batch: samples of one step on one worker; exactly one of the two is given.
        rank, size: this worker and the number of workers; default: the world of this process.
        shuffle: see :class:`~graphc.data.Shards`; default: shuffle, except streams and DataLoaders that do not shuffle.
        names: input names of the elements of tuple samples; mapping samples bring their own names.
        tail: see :class:`~graphc.data.Shards`; default: ``drop`` for a DataLoader with ``drop_last=True``, else ``keep``.
        seed, prefetch, weight, padding: see :class:`~graphc.data.Shards`.

    A DataLoader's dataset is read with its ``collate_fn``, workers, ``persistent_workers`` and ``pin_memory``. Its
    ``batch_size`` is ignored in favour of the batch given here.

    Raises:
        UsageError: both batch sizes or none, a source that cannot be sharded, or a DataLoader setting that cannot be honoured.
        FeedError: arrays of different length.
    """
    if (global_batch is None) == (per_worker_batch is None):
        own = getattr(source, "batch_size", None) if is_loader(source) else None
        hint = f" (the loader's batch_size is {own})" if own else ""
        raise UsageError(
            "say either global_batch=, the samples of one step over all workers, or per_worker_batch=, those of one worker"
            + hint
        )
    if rank is None or size is None:
        if rank is not size:
            raise UsageError("rank= and size= go together; leave both out to take those of the world")
        world = find_world()
        rank, size = world.rank, world.size
    total = global_batch if global_batch is not None else (per_worker_batch or 0) * size
    if tail is None:
        tail = "drop" if is_loader(source) and source.drop_last else "keep"
    found, default = source_of(source, names)
    return Shards(
        found, total, rank=rank, size=size, shuffle=default if shuffle is None else shuffle, seed=seed, tail=tail,
        prefetch=prefetch, weight=weight, padding=padding,
    )  # fmt: skip
