"""The collectives that move data, groups of a mesh and channels, on any transport, against what a rank works out alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from graphc.distributed.communicator import Communicator
from graphc.distributed.groups import Groups
from graphc.errors import UsageError
from graphc.mesh import Mesh

SIZES = (0, 24, 300_024)  # of an array; the last is several slices
Wrap = Callable[[Communicator], Any]


def row(rank: int, size: int, dtype: str = "float32") -> Any:
    return _drawn(rank, size, dtype).copy()


@functools.cache
def _drawn(rank: int, size: int, dtype: str) -> Any:
    return np.random.default_rng(rank).normal(scale=3, size=size).astype(dtype)


def movements(comm: Any, ranks: Any = None, dtypes: tuple[str, ...] = ("float32", "float16", "int64", "uint8")) -> list[str]:
    """Reduce, AllToAll and Barrier; returns what went wrong.

    Args:
        ranks: the seeds of the ranks' arrays; their numbers in the world.
    """
    seeds = range(comm.size) if ranks is None else ranks
    wrong = []
    for size in SIZES:
        for dtype in dtypes:
            rows, each = [row(seed, size, dtype) for seed in seeds], size // comm.size
            array = rows[comm.rank].copy()
            comm.wait(comm.start(array, tag="a", kind="all_to_all"))
            expected = np.concatenate([r[comm.rank * each : (comm.rank + 1) * each] for r in rows])
            if not np.array_equal(array, expected):
                wrong.append(f"all_to_all {dtype} {size}")
            array = rows[comm.rank].copy()
            comm.wait(comm.start(array, tag="p", kind="barrier", overlap=False))
            if not np.array_equal(array, rows[comm.rank]):
                wrong.append(f"barrier {dtype} {size}")
            if dtype == "uint8" or not size:
                continue
            root = comm.size - 1
            comm.wait(comm.start(array, "sum", "r", kind="reduce", root=root))
            expected = np.sum([r.astype("float64") for r in rows], axis=0)
            if comm.rank == root and not np.allclose(array, expected, rtol=2e-3 if dtype == "float16" else 1e-5, atol=1e-2):
                wrong.append(f"reduce {dtype} {size}")
    return wrong


def in_groups(comm: Communicator, mesh: Mesh, wrap: Wrap = lambda group: group) -> list[str]:
    """All groups of ``mesh``, whose collectives are under way together; returns what went wrong."""
    groups, wrong = Groups(comm, mesh), []
    names = ("data", "pipe", "tensor", "data+tensor", "data+pipe+tensor")
    groups.open(names)
    assert groups.of("data+pipe+tensor") is comm
    started = []
    for name in names:
        group, members = wrap(groups.of(name)), mesh.members(name, comm.rank)
        assert (group.size, group.rank) == (len(members), mesh.coordinate(name, comm.rank))
        array = row(comm.rank, 10_000, "float64")
        started.append((name, members, array, group, group.start(array, "sum", f"{name}/x")))
    for name, members, array, group, handle in reversed(started):
        group.wait(handle)
        if not np.allclose(array, sum(row(member, 10_000, "float64") for member in members)):
            wrong.append(f"sum over {name}")
        wrong += [f"{text} over {name}" for text in movements(group, members, ("float32", "int64"))]
    return wrong


def in_a_ring(comm: Communicator, wrap: Wrap = lambda group: group) -> list[float]:
    """Every rank sends to the next and receives from the one before; what is received starts first, and ends last."""
    size = comm.size
    groups = Groups(comm, Mesh(pipe=size))
    groups.open_channels([("pipe", k, (k + 1) % size) for k in range(size)])
    after = wrap(groups.channel("pipe", comm.rank, (comm.rank + 1) % size))
    before = wrap(groups.channel("pipe", (comm.rank - 1) % size, comm.rank))
    received = [np.zeros(70_000, np.float32) for _ in range(3)]
    arriving = [before.start(array, tag=f"x{k}", kind="recv") for k, array in enumerate(received)]
    for k in range(3):
        array = np.full(70_000, comm.rank + 10 * k, np.float32)
        after.wait(after.start(array, tag=f"x{k}", kind="send", overlap=k == 1))
    for handle in reversed(arriving):
        before.wait(handle)
    assert all((array == array[0]).all() for array in received)
    return [float(array[0]) for array in received]


def around(comm: Communicator) -> list[float]:
    """What :func:`in_a_ring` has to return."""
    return [(comm.rank - 1) % comm.size + 10.0 * k for k in range(3)]


def everything_in_groups(comm: Communicator) -> tuple[list[str], bool]:
    """All cases for a world of 2 or 4 ranks."""
    mesh = Mesh(tensor=2) if comm.size == 2 else Mesh(data=2, tensor=2)
    wrong = [*movements(comm), *in_groups(comm, mesh)]
    same = in_a_ring(comm) == in_a_ring(comm) == around(comm)
    places = [entry.place for entry in comm.recorder.entries()]
    if len(places) > len(set(places)):  # the watchdog of a rank in the second ring would compare it with another's first
        wrong.append("channels that are opened again count from 1")
    return wrong, same


def misuse(comm: Communicator) -> list[str]:
    """The errors of wrong arguments, which no other rank has to see."""
    groups, texts = Groups(comm, Mesh(data=comm.size)), []
    array = np.ones(2 * comm.size + 1, np.float32)
    for call in (
        lambda: groups.of("tensor"),
        lambda: groups.open(["dada"]),
        lambda: groups.channel("data", 0, 1),
        lambda: comm.prepare(array, kind="all_to_all"),
        lambda: comm.prepare(array, kind="reduce", root=comm.size),
        lambda: comm.prepare(array, kind="send" if comm.rank == 1 else "recv"),
        lambda: Groups(comm, Mesh(data=comm.size + 1)),
    ):
        try:
            call()
        except UsageError as error:
            texts.append(str(error))
    return texts
