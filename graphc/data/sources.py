"""Data sources: arrays, files, indexable and iterable samples, PyTorch's Dataset and DataLoader."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from graphc.data.files import mapped_file, open_arrays
from graphc.device import Array
from graphc.errors import DataError, FeedError, UsageError, counted


class Source(Protocol):
    """Source of samples: ``samples`` is their number, or None for a :class:`StreamSource`."""

    samples: int | None

    def read(self, rows: Iterable[Sequence[Any]]) -> Iterator[dict[str, Array]]:
        """Read arrays by input for each entry of ``rows``: indices, or the samples of a stream. No entry is empty."""


class ArraySource:
    """Arrays by graph input that share their first axis: in memory, or mapped from files and read batch by batch.

    Raises:
        FeedError: arrays of different length, or without a first axis.
        DataError (while reading): a file under an array has become shorter.
    """

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        lengths = {name: len(a) if np.ndim(a) else -1 for name, a in arrays.items()}
        if len(set(lengths.values())) != 1 or -1 in lengths.values():
            raise FeedError(f"arrays must have one entry per sample along axis 0; their lengths are {lengths}")
        self.samples: int | None = next(iter(lengths.values()))
        self._arrays = dict(arrays)
        self._files = [file for array in self._arrays.values() if (file := mapped_file(array)) is not None]

    def read(self, rows: Iterable[Sequence[Any]]) -> Iterator[dict[str, Array]]:
        for indices in rows:
            for file in self._files:
                file.check()
            # np.asarray turns the rows of a memory-mapped array into an ordinary array.
            yield {name: np.asarray(array[indices]) for name, array in self._arrays.items()}


def source_of(source: Any, names: Sequence[str] | None) -> tuple[Source, bool]:
    """Return the source, and whether it is shuffled by default."""
    if isinstance(source, str | Path):
        return ArraySource(open_arrays(source)), True
    if isinstance(source, Mapping):
        return ArraySource(source), True
    if is_loader(source):
        return loader_source(source, names)
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        return SampleSource(source, names), True
    if callable(source) or isinstance(source, Iterable):
        return StreamSource(source, names), False
    raise UsageError(
        f"cannot shard a {type(source).__name__}: give arrays by input, a path, samples, or an iterable of samples"
    )


def is_loader(source: Any) -> bool:
    """Whether ``source`` is a ``torch.utils.data.DataLoader``."""
    torch = sys.modules.get("torch.utils.data")  # torch is imported if the user made a DataLoader
    return torch is not None and isinstance(source, torch.DataLoader)


class SampleSource:
    """Samples with ``len()`` and ``[index]``, such as a list or a ``torch.utils.data.Dataset``."""

    def __init__(self, samples: Any, names: Sequence[str] | None = None) -> None:
        self.samples: int | None = len(samples)
        self._samples, self._names = samples, names

    def read(self, rows: Iterable[Sequence[Any]]) -> Iterator[dict[str, Array]]:
        for indices in rows:
            yield collate([self._sample(int(k)) for k in indices], self._names)

    def _sample(self, index: int) -> Any:
        try:
            return self._samples[index]
        except Exception as error:
            raise DataError(f"sample {index}: {type(error).__name__}: {error}", sample=index) from error


class StreamSource:
    """An iterable of samples, or a function that makes one for each epoch."""

    samples: int | None = None

    def __init__(
        self,
        stream: Iterable[Any] | Callable[[], Iterable[Any]],
        names: Sequence[str] | None = None,
        join: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self._stream, self._names = stream, names
        self._join = join
        self._opened = False

    def open(self) -> Iterator[Any]:
        """Iterate over the samples from the beginning.

        Raises (while iterating):
            UsageError: an iterator that is already used up.
            DataError: the stream failed; names the sample's index in the stream.
        """
        stream: Any = self._stream() if callable(self._stream) else self._stream
        iterator = iter(stream)
        if iterator is stream and not callable(self._stream):
            if self._opened:
                raise UsageError("an iterator can be walked only once; give a function that makes one for each epoch")
            self._opened = True
        return self._numbered(iterator)

    def _numbered(self, iterator: Iterator[Any]) -> Iterator[Any]:
        number = 0
        while True:
            try:
                sample = next(iterator)
            except StopIteration:
                return
            except Exception as error:
                raise DataError(f"sample {number}: {type(error).__name__}: {error}", sample=number) from error
            yield sample
            number += 1

    def read(self, rows: Iterable[Sequence[Any]]) -> Iterator[dict[str, Array]]:
        for samples in rows:
            yield collate(samples, self._names) if self._join is None else feeds_of(self._join(list(samples)), self._names)


def collate(samples: Sequence[Any], names: Sequence[str] | None) -> dict[str, Array]:
    """Stack samples (mappings, or tuples in the order of ``names``) into one array per input.

    Raises:
        FeedError: samples without names, or with different inputs or shapes.
    """
    parts = [feeds_of(sample, names) for sample in samples]
    first = parts[0]
    for part in parts:
        if part.keys() != first.keys():
            raise FeedError(f"samples must have the same inputs; one has {', '.join(first)}, another {', '.join(part)}")
    return {name: np.stack([part[name] for part in parts]) for name in first}


def feeds_of(item: Any, names: Sequence[str] | None) -> dict[str, Array]:
    """Convert a mapping, or a tuple in the order of ``names``, to arrays by input.

    Raises:
        FeedError: a tuple without names, or of another length.
    """
    if isinstance(item, Mapping):
        return {str(name): _array(value) for name, value in item.items()}
    values = item if isinstance(item, tuple | list) else (item,)
    if names is None or len(names) != len(values):
        raise FeedError(
            f"a sample has {counted(len(values), 'element')} and names= gives {len(names or ())}: one input name for each"
        )
    return {name: _array(value) for name, value in zip(names, values, strict=True)}


def _array(value: Any) -> Array:
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    return np.asarray(value)


_KEPT = (
    "collate_fn", "num_workers", "timeout", "worker_init_fn", "multiprocessing_context", "generator", "prefetch_factor",
    "pin_memory", "pin_memory_device", "persistent_workers",
)  # fmt: skip
"""Collect the settings of a DataLoader with which its shards are read."""


def loader_source(loader: Any, names: Sequence[str] | None) -> tuple[Source, bool]:
    """Return the source of a ``torch.utils.data.DataLoader``, and whether the loader shuffles.

    Raises:
        UsageError: a setting that cannot be honoured: a custom sampler or batch sampler, or ``in_order=False``.
    """
    from torch.utils import data

    if loader.batch_size is None:
        what = "batch_size=None" if loader.batch_sampler is None else f"the batch sampler {type(loader.batch_sampler).__name__}"
        raise UsageError(f"the DataLoader has {what}, but graphc makes the batches itself: give it batch_size= instead")
    if not getattr(loader, "in_order", True):
        raise UsageError("the DataLoader has in_order=False, but every worker must get the same order: leave in_order out")
    if isinstance(loader.dataset, data.IterableDataset):
        if loader.num_workers:
            raise UsageError(
                "a DataLoader over an IterableDataset has num_workers copies of its stream; make it with num_workers=0 and"
                " read ahead with prefetch="
            )
        if loader.pin_memory:
            raise UsageError("a DataLoader over an IterableDataset is read without pin_memory: leave it out, graphc pins feeds")
        return StreamSource(loader.dataset, names, join=loader.collate_fn), False
    sampler = getattr(loader, "sampler", None)
    shuffles = isinstance(sampler, data.RandomSampler)
    if type(sampler) not in (data.RandomSampler, data.SequentialSampler) or getattr(sampler, "replacement", False):
        raise UsageError(
            f"the DataLoader has the sampler {type(sampler).__name__}, but graphc orders shards itself: leave the sampler out,"
            " or put its choice into the dataset (torch.utils.data.Subset)"
        )
    return LoaderSource(loader, names), shuffles


class _Batches:
    """Batch sampler of a loader; its rows are set before each iteration."""

    rows: Iterable[Sequence[Any]] = ()

    def __iter__(self) -> Iterator[list[int]]:
        return ([int(k) for k in indices] for indices in self.rows)


class LoaderSource:
    """The dataset of a DataLoader, read with the loader's ``collate_fn``, worker processes and pinned memory."""

    def __init__(self, loader: Any, names: Sequence[str] | None) -> None:
        self.samples: int | None = len(loader.dataset)
        self._names, self._dataset = names, loader.dataset
        self._settings = {name: value for name in _KEPT if (value := getattr(loader, name, None))}
        self._idle: list[tuple[Any, _Batches]] = []  # idle loaders, kept for their persistent workers

    def read(self, rows: Iterable[Sequence[Any]]) -> Iterator[dict[str, Array]]:
        from torch.utils.data import DataLoader

        if self._idle:
            loader, batches = self._idle.pop()
        else:
            batches = _Batches()
            loader = DataLoader(self._dataset, batch_sampler=batches, **self._settings)
        batches.rows = rows
        try:
            for batch in loader:
                yield feeds_of(batch, self._names)
        finally:
            self._idle.append((loader, batches))
