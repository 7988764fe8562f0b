"""PyTorch's DataLoader as a source: its dataset, its way of making batches and its worker processes, our order and shares."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from graphc.data.sources import Source, StreamSource, feeds_of
from graphc.device import Array
from graphc.errors import UsageError


def loader_source(loader: Any, names: Sequence[str] | None) -> tuple[Source, bool]:
    """The source of a ``torch.utils.data.DataLoader``, and whether the loader shuffles.

    Raises:
        UsageError: a loader with a sampler of its own, whose order would be lost.
    """
    from torch.utils import data

    if isinstance(loader.dataset, data.IterableDataset):
        if loader.num_workers:
            raise UsageError(
                "a DataLoader over an IterableDataset has num_workers copies of its stream; make it with num_workers=0 and"
                " read ahead with prefetch="
            )
        return StreamSource(loader.dataset, names, join=loader.collate_fn), False
    sampler = getattr(loader, "sampler", None)
    shuffles = isinstance(sampler, data.RandomSampler)
    if type(sampler) not in (data.RandomSampler, data.SequentialSampler) or getattr(sampler, "replacement", False):
        raise UsageError(
            f"the DataLoader has the sampler {type(sampler).__name__}, but graphc orders shards itself: leave the sampler out,"
            " or put its choice into the dataset (torch.utils.data.Subset)"
        )
    return LoaderSource(loader, names), shuffles


class LoaderSource:
    """The dataset of a DataLoader, read with the loader's ``collate_fn`` and worker processes."""

    def __init__(self, loader: Any, names: Sequence[str] | None) -> None:
        self.samples: int | None = len(loader.dataset)
        self._loader, self._names = loader, names

    def read(self, rows: Iterable[Sequence[Any]]) -> Iterator[dict[str, Array]]:
        from torch.utils.data import DataLoader

        like = self._loader
        loader = DataLoader(
            like.dataset,
            batch_sampler=([int(k) for k in indices] for indices in rows),
            collate_fn=like.collate_fn,
            num_workers=like.num_workers,
            timeout=like.timeout,
            worker_init_fn=like.worker_init_fn,
            multiprocessing_context=like.multiprocessing_context,
            generator=like.generator,
            prefetch_factor=like.prefetch_factor,
        )
        for batch in loader:
            yield feeds_of(batch, self._names)
