"""Shards: every sample once an epoch, the same order for every number of workers, positions that move between worlds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphc
from graphc.data import TAILS, Batch, Shards, shard
from graphc.data import files as data_files
from graphc.errors import DataError, FeedError, UsageError

WORLDS = st.integers(1, 5)
QUICK = settings(max_examples=60, deadline=None)


def make(samples: int, batch: int, rank: int, size: int, **options: Any) -> Shards:
    """Shards over samples that are their own index; padding has the index -1."""
    if options.get("tail") == "pad":
        options["padding"] = {"i": -1}
    return shard({"i": np.arange(samples)}, global_batch=batch, rank=rank, size=size, **options)


def ids(batches: Any) -> list[list[int]]:
    return [b.feeds["i"].tolist() for b in batches]


def whole(per_rank: list[list[list[int]]]) -> list[list[int]]:
    """The global batches that the ranks' shares make up, without padding."""
    assert len({len(batches) for batches in per_rank}) == 1
    return [[i for part in parts for i in part if i >= 0] for parts in zip(*per_rank, strict=True)]


def flat(batches: list[list[int]]) -> list[int]:
    return list(itertools.chain(*batches))


@st.composite
def cases(draw: Any) -> tuple[int, int, int]:
    size = draw(WORLDS)
    batch = draw(st.integers(size, 16))
    return draw(st.integers(max(5, batch), 70)), batch, size


@QUICK
@given(cases(), st.sampled_from(TAILS), st.integers(0, 3))
def test_every_sample_once_and_in_the_order_of_one_worker(case: tuple[int, int, int], tail: str, epoch: int) -> None:
    samples, batch, size = case
    shards = [make(samples, batch, rank, size, tail=tail, seed=7) for rank in range(size)]
    found = whole([ids(s.epoch(epoch)) for s in shards])
    one = whole([ids(make(samples, batch, 0, 1, tail=tail, seed=7).epoch(epoch))])
    order = flat(found)
    assert order == flat(one)
    assert len(found) == len(shards[0])
    if tail == "drop":
        assert len(set(order)) == len(order) == samples // batch * batch
    else:
        assert sorted(order) == list(range(samples))
    if tail != "keep":  # where a tail smaller than the world joins the batch before it
        assert found == one


@QUICK
@given(cases(), WORLDS, st.sampled_from(["keep", "pad", "weight-zero"]), st.integers(0, 8), st.booleans())
def test_a_position_moves_to_another_world(case: tuple[int, int, int], other: int, tail: str, steps: int, stream: bool) -> None:
    """Some batches on one world, the rest on another: together the epoch of one worker, and then the next epoch."""
    samples, batch, size = case

    def open_(rank: int, size: int, batch: int) -> Shards:
        if not stream:
            return make(samples, batch, rank, size, tail=tail)
        padding = {"i": -1} if tail == "pad" else None
        source = [{"i": k} for k in range(samples)]
        return shard(lambda: iter(source), global_batch=batch, rank=rank, size=size, tail=tail, shuffle=9, padding=padding)

    first = [open_(rank, size, batch) for rank in range(size)]
    begun, states = [], []
    for shards in first:
        walk = iter(shards)
        begun.append([b.feeds["i"].tolist() for b in itertools.islice(walk, steps)])
        states.append(shards.state_dict())
    assert all(state == states[0] for state in states)
    second = [open_(rank, other, max(batch, other)) for rank in range(other)]
    for shards in second:
        shards.load_state_dict(states[0])
    done = flat(whole(begun))
    rest, after = (flat(whole([ids(s) for s in second])) for _ in range(2))
    one = open_(0, 1, batch)
    orders = [[i for i in flat(ids(one)) if i >= 0] for _ in range(2)]
    ended = states[0]["epoch"]
    assert done + ([] if ended else rest) == orders[0]
    assert (rest if ended else after) == orders[1]


def test_each_epoch_has_its_own_order_and_each_seed_too() -> None:
    shards = make(50, 10, 0, 1, seed=1)
    first, second = (flat(ids(shards)) for _ in range(2))
    assert first != second
    assert sorted(second) == list(range(50))
    assert flat(ids(make(50, 10, 0, 1, seed=2))) != first
    assert flat(ids(make(50, 10, 0, 1, seed=1))) == first
    assert flat(ids(make(50, 10, 0, 1, shuffle=False))) == list(range(50))


def test_global_and_per_worker_batch() -> None:
    two = shard({"i": np.arange(24)}, per_worker_batch=4, rank=1, size=2)
    assert {len(b.feeds["i"]) for b in two} == {4}
    assert {b.global_size for b in two} == {8}
    for wrong in ({}, {"global_batch": 4, "per_worker_batch": 2}):
        with pytest.raises(UsageError, match=r"either global_batch=.*per_worker_batch="):
            shard({"i": np.arange(24)}, **wrong)  # type: ignore[arg-type]


def test_padding_weighs_nothing() -> None:
    """Equal shapes on all ranks in all steps, and a weight that is zero for padding only."""
    arrays = {"i": np.arange(10), "w": np.full(10, 0.5, np.float32)}
    total = 0.0
    for rank in range(3):
        for batch in shard(arrays, global_batch=6, rank=rank, size=3, tail="pad", weight="w"):
            assert batch.feeds["i"].shape == batch.feeds["w"].shape == (2,)
            total += float(batch.feeds["w"].sum())
    assert total == 5.0
    with pytest.raises(UsageError, match="tail='pad' needs weight=NAME"):
        shard(arrays, global_batch=6, tail="pad")


def test_an_empty_share_has_the_shape_of_a_full_one() -> None:
    arrays = {"x": np.zeros((5, 3, 2), np.float32)}
    *_, last = shard(arrays, global_batch=4, rank=1, size=2, tail="weight-zero")
    assert last.feeds["x"].shape == (0, 3, 2)
    assert last.feeds["x"].dtype == np.float32
    assert last.global_size == 1


def test_positions_that_do_not_fit_are_refused() -> None:
    state = make(20, 4, 0, 1).state_dict() | {"samples": 8}
    with pytest.raises(UsageError, match="8 samples into an epoch with seed 0, and this data has seed 5"):
        make(20, 4, 0, 1, seed=5).load_state_dict(state)
    with pytest.raises(UsageError, match="length 20"):
        make(21, 4, 0, 1).load_state_dict(state)
    moved = make(21, 4, 0, 1, seed=5)
    moved.load_state_dict(state | {"samples": 0, "epoch": 3})  # between epochs new data and a new order are fine
    assert moved.position == (3, 0)


# Streams and errors ---------------------------------------------------------------------------------------------------


def test_a_stream_is_split_and_walked_again() -> None:
    def stream() -> Iterator[tuple[int, float]]:
        yield from ((k, k / 2) for k in range(11))

    parts = [shard(stream, global_batch=4, rank=r, size=2, names=("i", "x")) for r in range(2)]
    for _ in range(2):
        seen = [list(part) for part in parts]
        assert whole([[b.feeds["i"].tolist() for b in s] for s in seen]) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
        assert all((b.feeds["x"] * 2 == b.feeds["i"]).all() for s in seen for b in s)
    once = shard(stream(), global_batch=4, names=("i", "x"))
    assert len(list(once)) == 3
    with pytest.raises(UsageError, match="walked only once"):
        list(once)
    with pytest.raises(UsageError, match="buffer"):
        shard(stream, global_batch=4, shuffle=True)
    with pytest.raises(FeedError, match="2 elements and names= gives 0"):
        list(shard(stream, global_batch=4))


class Broken:
    """Samples of which number 13 cannot be read."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, k: int) -> dict[str, int]:
        if k == 13:
            raise OSError("disk on fire")
        return {"i": k}


def broken_stream() -> Iterator[dict[str, int]]:
    for k in range(20):
        yield Broken()[k]


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("source", [Broken(), broken_stream], ids=["samples", "stream"])
def test_an_error_of_the_loader_is_raised_in_its_place(source: Any, prefetch: int) -> None:
    walk = iter(shard(source, global_batch=4, shuffle=False, prefetch=prefetch))
    assert flat(ids(itertools.islice(walk, 3))) == list(range(12))
    with pytest.raises(DataError, match="batch 3 of epoch 0, sample 13: OSError: disk on fire") as caught:
        next(walk)
    assert (caught.value.batch, caught.value.sample) == (3, 13)
    assert "disk on fire" in repr(caught.value.__cause__) or "disk on fire" in repr(caught.value.__cause__.__cause__)


# Files ----------------------------------------------------------------------------------------------------------------


def test_files_are_mapped_and_read_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = np.random.default_rng(0).standard_normal((40, 300)), np.arange(40)
    (tmp_path / "folder").mkdir()
    np.save(tmp_path / "folder" / "x.npy", x)
    np.save(tmp_path / "folder" / "y.npy", y)
    np.savez(tmp_path / "plain.npz", x=x, y=y)
    np.savez(tmp_path / "columns.npz", x=np.asfortranarray(x), y=y)
    np.savez_compressed(tmp_path / "small.npz", x=x, y=y)
    monkeypatch.setattr(data_files, "MAPPED_FROM", 4096)
    for name, mapped in (("folder", True), ("plain.npz", True), ("columns.npz", True), ("small.npz", False)):
        arrays = graphc.data.open_arrays(tmp_path / name)
        assert isinstance(arrays["x"], np.memmap) == mapped, name
        assert not isinstance(arrays["y"], np.memmap) or name == "folder"
        for batch in shard(tmp_path / name, global_batch=7):
            assert not isinstance(batch.feeds["x"], np.memmap)
            np.testing.assert_array_equal(batch.feeds["x"], x[batch.feeds["y"]])


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "cut").mkdir()
    np.save(tmp_path / "cut" / "x.npy", np.zeros(1000))
    whole_file = (tmp_path / "cut" / "x.npy").read_bytes()
    (tmp_path / "cut" / "x.npy").write_bytes(whole_file[:500])
    np.savez(tmp_path / "objects.npz", x=np.array([{}, []], dtype=object))
    for name, message in (
        ("empty", "has no .npy file"),
        ("cut", "'x' of .* is damaged"),
        ("objects.npz", "holds Python objects"),
        ("object.npz", "no such file.*did you mean 'objects.npz'"),
    ):
        with pytest.raises(FeedError, match=message):
            graphc.data.open_arrays(tmp_path / name)


# Reading ahead --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 3])
def test_reading_ahead_changes_nothing_but_the_thread(depth: int) -> None:
    assert ids(make(50, 8, 1, 2, prefetch=depth)) == ids(make(50, 8, 1, 2))


def test_reading_ahead_is_bounded_and_ends() -> None:
    import threading
    import time

    taken = []

    def endless() -> Iterator[dict[str, int]]:
        k = 0
        while True:
            taken.append(k)
            yield {"i": k}
            k += 1

    walk: Iterator[Batch] = iter(shard(endless, global_batch=2, prefetch=3, tail="weight-zero"))
    next(walk)
    time.sleep(0.2)
    assert len(taken) <= 2 * (1 + 3 + 2)  # handed out, read ahead, and the batch held back to see whether it is the last
    walk.close()  # type: ignore[attr-defined]
    assert not any(t.name == "graphc-prefetch" for t in threading.enumerate())


@pytest.mark.full
def test_a_process_ends_while_its_loader_reads(tmp_path: Path) -> None:
    import subprocess
    import sys

    program = """
import time, graphc
def slow():
    k = 0
    while True:
        yield {"i": k}
        k += 1
        time.sleep(0.0 if k < 4 else 1000)
for batch in graphc.data.shard(slow, global_batch=2, prefetch=4):
    print("got", batch.feeds["i"].tolist(), flush=True)
    break
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "got [0, 1]\n", "")
