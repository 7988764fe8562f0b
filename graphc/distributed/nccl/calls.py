"""What NCCL is asked to do for a collective: settled when it is prepared, before anything runs.

    allreduce         AllReduce in place
    broadcast         Broadcast in place
    reduce_scatter    ReduceScatter in place where the parts are equal and in order, else a Reduce to each owner, in one group
    all_gather        AllGather in place where they are, else a Broadcast from each owner, in one group

Bytes that are only moved travel as ``uint8``, so that any dtype can be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from graphc.distributed.communicator import Kind
from graphc.distributed.reductions import Parts

OPERATIONS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "mean": 4}
"""Numbers of ``ncclRedOp_t``; what is not here goes through host memory."""

DATATYPES = {"uint8": 1, "int64": 4, "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9}
"""Numbers of ``ncclDataType_t``."""

Function = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce"]


@dataclass(frozen=True, slots=True)
class NcclCall:
    """One call of NCCL.

    Attributes:
        send, receive: bytes from the beginning of the array.
        count: elements; of one rank's part for ``reduce_scatter`` and ``all_gather``.
        datatype, operation: numbers of NCCL; operation -1: none.
        root: a rank, or -1.
    """

    function: Function
    send: int
    receive: int
    count: int
    datatype: int
    operation: int = -1
    root: int = -1


def takes(kind: Kind, op: str) -> bool:
    """Whether NCCL can do it."""
    return kind in ("all_gather", "broadcast") or op in OPERATIONS


def plan_calls(
    kind: Kind, op: str, dtype: np.dtype[Any], elements: int, parts: Parts, root: int, rank: int
) -> tuple[NcclCall, ...]:
    """The calls of ``rank``; two or more belong in one group. The same on all ranks but for the places of their own parts.

    Args:
        elements: of the array.
        parts: ``(start, stop)`` in elements of each rank.
        root: of a broadcast.
    """
    if kind in ("allreduce", "reduce_scatter"):
        size, datatype, operation = dtype.itemsize, DATATYPES[dtype.name], OPERATIONS[op]
    else:
        size, datatype, operation = 1, DATATYPES["uint8"], -1
        parts = [(start * dtype.itemsize, stop * dtype.itemsize) for start, stop in parts]
        elements *= dtype.itemsize
    if kind == "allreduce":
        return (NcclCall("all_reduce", 0, 0, elements, datatype, operation),) if elements else ()
    if kind == "broadcast":
        return (NcclCall("broadcast", 0, 0, elements, datatype, root=root),) if elements else ()
    length = parts[0][1] - parts[0][0]
    if length and all(part == (k * length, (k + 1) * length) for k, part in enumerate(parts)):
        mine = rank * length * size
        if kind == "reduce_scatter":
            return (NcclCall("reduce_scatter", 0, mine, length, datatype, operation),)
        return (NcclCall("all_gather", mine, 0, length, datatype),)
    function: Function = "reduce" if kind == "reduce_scatter" else "broadcast"
    return tuple(
        NcclCall(function, start * size, start * size, stop - start, datatype, operation, owner)
        for owner, (start, stop) in enumerate(parts)
        if start < stop
    )
