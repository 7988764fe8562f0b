"""PyTorch's Dataset and DataLoader as sources."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from graphc.data import shard
from graphc.errors import DataError, UsageError

pytestmark = pytest.mark.full

X = torch.arange(22 * 3, dtype=torch.float32).reshape(22, 3)
Y = torch.arange(22)


class Rows(Dataset[Any]):
    """Samples as mappings; number 9 fails on demand."""

    def __init__(self, broken: bool = False) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return 22

    def __getitem__(self, k: int) -> dict[str, torch.Tensor]:
        if self.broken and k == 9:
            raise ValueError("no such picture")
        return {"x": X[k], "y": Y[k]}


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from zip(X, Y, strict=True)


def negated(samples: list[Any]) -> dict[str, torch.Tensor]:
    return {"x": -torch.stack([s["x"] for s in samples]), "y": torch.stack([s["y"] for s in samples])}


def collected(source: Any, size: int = 2, **options: Any) -> dict[str, Any]:
    """All samples of an epoch in the order of the global batches."""
    parts = [list(shard(source, global_batch=5, rank=rank, size=size, **options)) for rank in range(size)]
    batches = [b for step in zip(*parts, strict=True) for b in step]
    for batch in batches:
        assert all(isinstance(a, np.ndarray) for a in batch.feeds.values())
    return {name: np.concatenate([b.feeds[name] for b in batches]) for name in batches[0].feeds}


@pytest.mark.parametrize(
    "source",
    [
        DataLoader(TensorDataset(X, Y), batch_size=4),
        DataLoader(Rows(), batch_size=4),
        DataLoader(Rows(), batch_size=4, num_workers=1),
        TensorDataset(X, Y),
        Rows(),
        DataLoader(Endless(), batch_size=4),
        Endless(),
    ],
    ids=["loader", "loader of mappings", "worker process", "dataset", "mappings", "iterable loader", "iterable"],
)
def test_the_samples_in_their_order(source: Any) -> None:
    found = collected(source, names=("x", "y"), shuffle=False)
    np.testing.assert_array_equal(found["x"], X.numpy())
    np.testing.assert_array_equal(found["y"], Y.numpy())
    assert found["x"].dtype == np.float32


def test_a_loader_that_shuffles_is_shuffled_alike_on_all_workers() -> None:
    one, two = (collected(DataLoader(Rows(), shuffle=True), size=size, seed=4)["y"] for size in (1, 2))
    np.testing.assert_array_equal(one, two)
    assert sorted(one) == list(range(22))
    assert list(one) != list(range(22))
    assert list(collected(DataLoader(Rows()))["y"]) == list(range(22))


def test_the_loaders_way_of_making_batches_is_kept() -> None:
    found = collected(DataLoader(Rows(), collate_fn=negated), size=3)
    np.testing.assert_array_equal(found["x"], -X.numpy())


def test_the_loaders_settings_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []

    def note(dataset: Any, **options: Any) -> list[Any]:  # in place of a loader, which would start worker processes
        made.append(options)
        return []

    settings = {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 3, "timeout": 60, "pin_memory": True}
    loader: DataLoader[Any] = DataLoader(Rows(), batch_size=4, multiprocessing_context="spawn", **settings)  # type: ignore[arg-type]
    shards = shard(loader, global_batch=5, rank=0, size=1)
    monkeypatch.setattr(torch.utils.data, "DataLoader", note)
    assert list(shards) == []
    (options,) = made
    assert {name: options[name] for name in settings} == settings
    assert options["multiprocessing_context"] is loader.multiprocessing_context


def numbered(samples: list[Any]) -> dict[str, torch.Tensor]:
    """The labels, and the process that read them."""
    return {"y": torch.stack([s["y"] for s in samples]), "pid": torch.full((len(samples),), os.getpid())}


@pytest.mark.full
def test_persistent_workers_live_on_over_epochs() -> None:
    loader: DataLoader[Any] = DataLoader(Rows(), num_workers=1, persistent_workers=True, collate_fn=numbered)
    shards = shard(loader, global_batch=5, rank=0, size=1)
    epochs = [list(shards), list(shards)]
    assert len({int(batch.feeds["pid"][0]) for epoch in epochs for batch in epoch} - {os.getpid()}) == 1
    for epoch in epochs:
        assert np.concatenate([batch.feeds["y"] for batch in epoch]).tolist() == list(range(22))


def test_two_walks_at_once_do_not_disturb_each_other() -> None:
    shards = shard(DataLoader(Rows()), global_batch=5, rank=0, size=1)
    pairs = zip(shards.epoch(0), shards.epoch(0), strict=True)
    assert [int(a.feeds["y"][0]) for pair in pairs for a in pair] == [0, 0, 5, 5, 10, 10, 15, 15, 20, 20]


def test_drop_last_is_the_default_of_tail() -> None:
    loader: DataLoader[Any] = DataLoader(Rows(), batch_size=4, drop_last=True)
    assert len(shard(loader, global_batch=5, rank=0, size=1)) == 4
    assert len(shard(loader, global_batch=5, rank=0, size=1, tail="keep")) == 5
    assert len(shard(DataLoader(Rows(), batch_size=4), global_batch=5, rank=0, size=1)) == 5


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_failing_dataset_is_named(prefetch: int) -> None:
    with pytest.raises(DataError, match=r"batch 1 of epoch 0.*sample 9: ValueError: no such picture"):
        list(shard(Rows(broken=True), global_batch=5, shuffle=False, prefetch=prefetch))
    with pytest.raises(DataError, match=r"batch 1 of epoch 0 \(samples up to 10 of the epoch\): ValueError: no such picture"):
        list(shard(DataLoader(Rows(broken=True)), global_batch=5, prefetch=prefetch))


def test_loaders_that_cannot_be_cut() -> None:
    class Mine(SequentialSampler):
        pass

    for sampler in (SubsetRandomSampler([1, 2]), Mine(Rows())):
        with pytest.raises(UsageError, match=rf"sampler {type(sampler).__name__}.*Subset"):
            shard(DataLoader(Rows(), sampler=sampler), global_batch=4)
    with pytest.raises(UsageError, match="num_workers=0"):
        shard(DataLoader(Endless(), num_workers=2), global_batch=4)
    with pytest.raises(UsageError, match="batch_size=None"):
        shard(DataLoader(Rows(), batch_size=None), global_batch=4)
    with pytest.raises(UsageError, match="the batch sampler BatchSampler"):
        shard(DataLoader(Rows(), batch_sampler=BatchSampler(range(22), 4, False)), global_batch=4)
    with pytest.raises(UsageError, match="in_order=False"):
        shard(DataLoader(Rows(), in_order=False), global_batch=4)
    with pytest.raises(UsageError, match="without pin_memory"):
        shard(DataLoader(Endless(), pin_memory=True), global_batch=4)
    with pytest.raises(UsageError, match="the loader's batch_size is 7"):
        shard(DataLoader(Rows(), batch_size=7))
