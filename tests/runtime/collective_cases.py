"""Every collective on every dtype, on any transport, against numpy; run by the tests of threads and of MPI."""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import ml_dtypes
import numpy as np

from graphc.distributed.choose import open_communicator
from graphc.distributed.communicator import Communicator
from graphc.distributed.consistency import agree
from graphc.distributed.reductions import tree_pairs
from graphc.distributed.world import find_world, threads_for
from graphc.errors import WorldError

SIZES = (1, 10, 4099, 700_003)  # the last is several slices and a rest
FLOATS = ("float32", "float64", "bfloat16", "float16")
OPS = ("sum", "mean", "min", "max", "prod", "tree")
LENGTHS = (5, 0, 1000, 3094)
TOLERANCE = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 1e-6, "float64": 1e-14, "int64": 0.0}
"""Half a unit in the last place of the low precisions (rounded once); for the others, a few rounding errors of a sum."""

NUMPY: dict[str, Any] = {"sum": np.sum, "tree": np.sum, "mean": np.mean, "min": np.min, "max": np.max, "prod": np.prod}


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name)) if name == "bfloat16" else np.dtype(name)


def share(rank: int, size: int, dtype: str) -> Any:
    return _drawn(rank, size, dtype).copy()


@functools.cache
def _drawn(rank: int, size: int, dtype: str) -> Any:
    return np.random.default_rng(rank).normal(scale=3, size=size).astype(dtype_of(dtype))


def everything(comm: Communicator) -> dict[tuple[str, ...], tuple[float, str]]:
    """For each case the error in units of its tolerance, and a digest of what all ranks must hold alike."""
    found: dict[tuple[str, ...], tuple[float, str]] = {}
    for size in SIZES:
        for dtype in (*FLOATS, "int64") if size < 10_000 else ("float32", "bfloat16"):
            for op in OPS if size < 10_000 else ("sum", "tree"):
                if (op, dtype) != ("mean", "int64"):
                    found["allreduce", op, dtype, str(size)] = _allreduce(comm, op, dtype, size)
            for name, parts in _divisions(size, comm.size).items():
                found["scatter", name, dtype, str(size)] = _scatter_and_gather(comm, dtype, size, parts)
    for dtype in FLOATS:
        found["adasum", "", dtype, ""] = _adasum(comm, dtype)
    received = share(comm.rank, 700_003, "bfloat16")
    comm.wait(comm.start(received, tag="b", kind="broadcast", root=comm.size - 1))
    wrong = float(np.count_nonzero(received != share(comm.size - 1, 700_003, "bfloat16")))
    found["broadcast", "", "", ""] = (wrong, _digest(received))
    return found


def _allreduce(comm: Communicator, op: str, dtype: str, size: int) -> tuple[float, str]:
    array = share(comm.rank, size, dtype)
    comm.allreduce(array, op, f"{op} {size}")
    return _error(array, _expected(comm, op, dtype, size), dtype, comm.size), _digest(array)


def _divisions(size: int, ranks: int) -> dict[str, list[tuple[int, int]] | None]:
    """Equal parts, everything on rank 0, and parts of which one is empty."""
    half = size // 2
    uneven = [(0, 0), (0, half)] + [(half + (size - half) * k // (ranks - 2), 0) for k in range(ranks - 2)]
    ends = [start for start, _ in uneven[3:]] + [size]
    uneven[2:] = [(start, stop) for (start, _), stop in zip(uneven[2:], ends, strict=False)]
    return {"even": None, "root": [(0, size)] + [(size, size)] * (ranks - 1), "uneven": uneven}


def _scatter_and_gather(comm: Communicator, dtype: str, size: int, parts: list[tuple[int, int]] | None) -> tuple[float, str]:
    array = share(comm.rank, size, dtype)
    comm.wait(comm.start(array, "sum", "w", kind="reduce_scatter", parts=parts))
    length = -(-size // comm.size)
    start, stop = parts[comm.rank] if parts else (min(comm.rank * length, size), min((comm.rank + 1) * length, size))
    mine = array[start:stop].copy()
    array.fill(7)
    array[start:stop] = mine
    comm.wait(comm.start(array, tag="w", kind="all_gather", parts=parts))
    if parts and parts[-1][1] < size:  # what belongs to nobody is untouched
        assert (array[parts[-1][1] :] == 7).all()
        array[parts[-1][1] :] = _expected(comm, "sum", dtype, size)[parts[-1][1] :]
    return _error(array, _expected(comm, "sum", dtype, size), dtype, comm.size), _digest(array)


def _expected(comm: Communicator, op: str, dtype: str, size: int) -> Any:
    return _reduced(comm.size, op, dtype, size)


@functools.cache
def _reduced(ranks: int, op: str, dtype: str, size: int) -> Any:
    """By numpy, once for all ranks that are threads and for all cases."""
    wide = "int64" if dtype == "int64" else "float64"
    found = NUMPY[op](np.stack([_drawn(rank, size, dtype).astype(wide) for rank in range(ranks)]), axis=0)
    found.flags.writeable = False
    return found


def _adasum(comm: Communicator, dtype: str) -> tuple[float, str]:
    array = share(comm.rank, sum(LENGTHS), dtype)
    array[:5] = 0 if comm.rank == 0 else array[:5]
    comm.allreduce(array, "adasum", "a", lengths=LENGTHS)
    rows = [share(rank, sum(LENGTHS), dtype).astype(np.float64) for rank in range(comm.size)]
    rows[0][:5] = 0
    error = 0.0
    for begin, length in zip(np.cumsum((0, *LENGTHS[:-1])), LENGTHS, strict=True):
        expected = adasum([row[begin : begin + length] for row in rows])
        error = max(error, _error(array[begin : begin + length], expected, dtype, comm.size))
    return error, _digest(array)


def adasum(rows: list[Any]) -> Any:
    """The definition of Maleki et al., over the tree whose left half is the largest power of two."""
    if len(rows) == 1:
        return rows[0]
    half = 1 << (len(rows) - 1).bit_length() - 1
    a, b = adasum(rows[:half]), adasum(rows[half:])
    if not a.any() or not b.any():
        return a + b
    return (1 - a @ b / (2 * (a @ a))) * a + (1 - a @ b / (2 * (b @ b))) * b


def _error(array: Any, expected: Any, dtype: str, ranks: int) -> float:
    if array.size == 0:
        return 0.0
    difference = np.abs(array.astype(expected.dtype) - expected)
    if dtype == "int64":
        return float(difference.max())
    scale = np.abs(expected) * TOLERANCE[dtype] + 3 * ranks * {"float64": 1e-15}.get(dtype, 1e-6)
    return float((difference / scale).max())


def _digest(array: Any) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()


def queue_and_gather(comm: Communicator) -> dict[str, Any]:
    arrays = [np.full(300_000, comm.rank + k, np.float32) for k in range(6)]
    handles = [comm.start(array, "mean", f"b{k}") for k, array in enumerate(arrays)]
    middle = np.full(3, float(comm.rank))
    comm.allreduce(middle)  # a blocking call behind a full queue keeps its place
    for handle in reversed(handles):
        comm.wait(handle)
    received = np.full(3, comm.rank, np.uint8)
    comm.broadcast(received, root=1)
    comm.barrier()
    try:
        agree(comm, ["AllReduce w", f"AllReduce b{comm.rank}"], "collectives")
    except WorldError as error:
        text = str(error)
    second = open_communicator()
    ranks = second.allgather_object(comm.rank)
    second.close()
    return {
        "means": [(float(a.min()), float(a.max())) for a in arrays],
        "middle": middle.tolist(),
        "received": received.tolist(),
        "agree": text,
        "ranks": ranks,
        "world": find_world(),
        "threads": threads_for(find_world()),
    }


def tree_of_blocks(comm: Communicator) -> str:
    """Sum eight micro-shards, this rank's share of them here and the rest over the ranks."""
    rows = [np.random.default_rng(k).normal(size=10_007).astype(np.float32) for k in range(8)]
    each = 8 // comm.size
    mine = rows[comm.rank * each : (comm.rank + 1) * each]
    for into, other in tree_pairs(each):
        mine[into] += mine[other]
    comm.allreduce(mine[0], "tree")
    return hashlib.sha256(mine[0].tobytes()).hexdigest()
