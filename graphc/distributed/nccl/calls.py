"""Plans the NCCL calls of a collective, once, when it is prepared.

    allreduce         AllReduce in place
    broadcast         Broadcast in place
    reduce            Reduce in place
    all_to_all        a group of Sends and Receives, from a copy of the array
    send, recv        Send, Recv
    reduce_scatter    ReduceScatter in place where the parts are equal and in order, else a group of Reduces, one to each owner
    all_gather        AllGather in place where they are, else a group of Broadcasts, one from each owner

Data that is only moved travels as ``uint8``, so any dtype works.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from graphc.distributed.communicator import REDUCING, Kind
from graphc.distributed.reductions import Parts

OPERATIONS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "mean": 4}
"""Reduction → its ``ncclRedOp_t``; other reductions go through host memory."""

DATATYPES = {"uint8": 1, "int64": 4, "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9}
"""Dtype → its ``ncclDataType_t``."""

Function = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "send", "recv"]


@dataclass(frozen=True, slots=True)
class NcclCall:
    """One call of NCCL.

    Attributes:
        send, receive: offsets into the array in bytes.
        count: elements; for ``reduce_scatter`` and ``all_gather`` those of one rank.
        datatype, operation: see :data:`DATATYPES` and :data:`OPERATIONS`; operation -1: none.
        root: a rank, for ``send`` and ``recv`` the other one; -1: none.
        copied: whether it reads a copy of the array, so that what arrives does not overwrite what is to be sent.
    """

    function: Function
    send: int
    receive: int
    count: int
    datatype: int
    operation: int = -1
    root: int = -1
    copied: bool = False


def supports(kind: Kind, op: str) -> bool:
    """Whether NCCL has this collective."""
    return kind in ("all_gather", "broadcast", "all_to_all", "send", "recv") or (kind in REDUCING and op in OPERATIONS)


def plan_calls(
    kind: Kind, op: str, dtype: np.dtype[Any], elements: int, parts: Parts, root: int, rank: int
) -> tuple[NcclCall, ...]:
    """The calls of ``rank``, which form one group; only the offsets of their own parts differ between ranks.

    Args:
        elements: length of the array.
        parts: ``(start, stop)`` of each rank, in elements.
        root: the source of a broadcast, the target of a reduce.
    """
    if kind in REDUCING:
        size, datatype, operation = dtype.itemsize, DATATYPES[dtype.name], OPERATIONS[op]
    else:
        size, datatype, operation = 1, DATATYPES["uint8"], -1
        parts = [(start * dtype.itemsize, stop * dtype.itemsize) for start, stop in parts]
        elements *= dtype.itemsize
    if kind == "allreduce":
        return (NcclCall("all_reduce", 0, 0, elements, datatype, operation),) if elements else ()
    if kind == "broadcast":
        return (NcclCall("broadcast", 0, 0, elements, datatype, root=root),) if elements else ()
    if kind in ("send", "recv"):
        return (NcclCall(kind, 0, 0, elements, datatype, root=1 - rank),) if elements else ()
    if kind == "all_to_all":
        each = elements // len(parts)
        pieces = [(other, other * each) for other in range(len(parts))] if each else []
        return tuple(
            call
            for other, place in pieces
            for call in (
                NcclCall("send", place, place, each, datatype, root=other, copied=True),
                NcclCall("recv", place, place, each, datatype, root=other),
            )
        )
    length = parts[0][1] - parts[0][0]
    if length and all(part == (k * length, (k + 1) * length) for k, part in enumerate(parts)):
        mine = rank * length * size
        if kind == "reduce_scatter":
            return (NcclCall("reduce_scatter", 0, mine, length, datatype, operation),)
        return (NcclCall("all_gather", mine, 0, length, datatype),)
    function: Function = "broadcast" if kind == "all_gather" else "reduce"
    return tuple(
        NcclCall(function, start * size, start * size, stop - start, datatype, operation, owner)
        for owner, (start, stop) in enumerate(parts)
        if start < stop
    )
