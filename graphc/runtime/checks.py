"""What the arguments of a collective, and its deadline, may be; the same for every transport."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphc.distributed.communicator import DTYPES, KINDS, REDUCTIONS, Kind, Options
from graphc.distributed.reductions import Array, Parts, even_parts
from graphc.errors import UsageError, nearest

DEADLINE = "GRAPHC_DEADLINE"
"""Environment variable: seconds after which a collective that has not ended ends the work."""


def check_array(array: Array, op: str, lengths: Sequence[int] | None = None) -> None:
    """Raise UsageError unless a communicator can reduce ``array`` by ``op``."""
    check_reduction(array.dtype, array.size, op, lengths)
    check_layout(array)


def check_reduction(dtype: np.dtype[Any], elements: int, op: str, lengths: Sequence[int] | None = None) -> None:
    """Raise UsageError unless a communicator can reduce an array of ``elements`` elements by ``op``."""
    if op not in REDUCTIONS:
        raise UsageError(f"unknown reduction {op!r}{nearest(op, REDUCTIONS)}; the reductions are {', '.join(REDUCTIONS)}")
    if dtype not in DTYPES:
        raise UsageError(f"a collective takes float32, float64, bfloat16, float16 or int64, not {dtype}")
    if op in ("mean", "adasum") and dtype == np.int64:
        raise UsageError(f"the {op} of {dtype} is no {dtype}; reduce by sum")
    if lengths is not None and sum(lengths) != elements:
        raise UsageError(f"tensors of {sum(lengths)} elements in all cannot make up an array of {elements}")


@dataclass(frozen=True, slots=True)
class Asked:
    """A collective whose arguments fit, with what was left out; see :class:`~graphc.distributed.communicator.Options`."""

    op: str
    kind: Kind
    parts: Parts
    root: int
    lengths: Sequence[int] | None
    overlap: bool

    @property
    def reduction(self) -> str:
        """The reduction; empty where nothing is reduced."""
        return self.op if self.kind in ("allreduce", "reduce_scatter") else ""


def check_collective(array: Array, size: int, op: str, options: Options) -> Asked:
    """Raise UsageError unless the arguments of :meth:`Communicator.prepare` fit; returns all of them."""
    kind, parts, root = options.get("kind", "allreduce"), options.get("parts"), options.get("root", 0)
    if kind not in KINDS:
        raise UsageError(f"unknown collective {kind!r}{nearest(kind, KINDS)}; the collectives are {', '.join(KINDS)}")
    division = even_parts(array.size, size) if parts is None else parts
    asked = Asked(op, kind, division, root, options.get("lengths"), options.get("overlap", True))
    if asked.reduction:
        check_reduction(array.dtype, array.size, op, asked.lengths)
    if kind == "broadcast":
        check_root(root, size)
    if kind in ("reduce_scatter", "all_gather"):
        check_parts(division, array.size, size)
    return asked


def check_parts(parts: Parts, elements: int, size: int) -> None:
    """Raise UsageError unless ``parts`` has a ``(start, stop)`` for each rank, in order, disjoint and inside the array."""
    end = 0
    for start, stop in parts:
        if not end <= start <= stop <= elements:
            raise UsageError(f"the parts {list(parts)} are not in order, disjoint and within {elements} elements")
        end = stop
    if len(parts) != size:
        raise UsageError(f"{len(parts)} parts for {size} ranks")


def check_root(root: int, size: int) -> None:
    """Raise UsageError unless ``root`` is a rank."""
    if not 0 <= root < size:
        raise UsageError(f"broadcast from rank {root}: the ranks are 0 … {size - 1}")


def check_layout(array: Array) -> None:
    """Raise UsageError unless ``array`` is one-dimensional, contiguous and writable."""
    if array.ndim != 1 or not array.flags.c_contiguous or not array.flags.writeable:
        raise UsageError(
            f"a collective takes a writable, contiguous one-dimensional array, not one of shape {array.shape} "
            f"and strides {array.strides}"
        )


def find_deadline(environment: Mapping[str, str] | None = None) -> float:
    """Seconds a collective may take: ``GRAPHC_DEADLINE``, or 300.

    Raises:
        UsageError: it is no positive number.
    """
    text = (os.environ if environment is None else environment).get(DEADLINE, "300")
    try:
        return check_deadline(float(text))
    except ValueError:
        raise UsageError(f"{DEADLINE} is {text!r}, not a positive number of seconds") from None


def check_deadline(seconds: float) -> float:
    """``seconds``, or UsageError unless they are a positive number."""
    if not seconds > 0:
        raise UsageError(f"the deadline of collectives must be a positive number of seconds, not {seconds:g}")
    return seconds


def check_device_layout(array: Array) -> None:
    """Raise UsageError unless an array of a device is one-dimensional and contiguous."""
    if array.ndim != 1 or not array.flags.c_contiguous:
        raise UsageError(f"a collective takes a contiguous one-dimensional array, not one of shape {array.shape}")
