"""NCCL through nccl4py, NVIDIA's own Python binding.

``nccl.bindings`` is its layer below ``nccl.core``: it takes addresses and releases the interpreter lock.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from graphc.device import Run, in_order
from graphc.distributed.nccl.calls import NcclCall


class NcclLibrary:
    """nccl4py and the ``libnccl`` that it loads.

    Raises:
        ImportError: nccl4py is not installed.
        RuntimeError: it finds no ``libnccl``.
    """

    def __init__(self) -> None:
        from nccl.bindings import nccl

        nccl.get_version()  # loads the library
        self.nccl = nccl

    def unique_id(self) -> bytes:
        """The id of a new world: one rank makes it and sends it to the others."""
        return bytes(self.nccl.get_unique_id())

    def init_rank(self, size: int, unique_id: bytes, rank: int) -> NcclComm:
        """Enter a world with the current GPU; returns when all ranks have."""
        return NcclComm(self.nccl, self.nccl.comm_init_rank(size, self.nccl.UniqueId.from_buffer(unique_id), rank))


class NcclComm:
    """One rank's ``ncclComm_t``."""

    def __init__(self, nccl: Any, comm: Any) -> None:
        self._nccl, self._comm = nccl, comm

    def bind(self, calls: Sequence[NcclCall], address: int, stream: int, copy: int = 0) -> Run:
        """What queues ``calls`` on the array at ``address`` on ``stream`` (a ``cudaStream_t``), as one group.

        Args:
            copy: address of the array that ``copied`` calls read.
        """
        runs = [self._bind(call, copy if call.copied else address, address, stream) for call in calls]
        return runs[0] if len(runs) == 1 else in_order([self._nccl.group_start, *runs, self._nccl.group_end] if runs else [])

    def _bind(self, call: NcclCall, source: int, target: int, stream: int) -> Run:
        options = [value for value in (call.operation, call.root) if value >= 0]
        places = {"send": (source + call.send,), "recv": (target + call.receive,)}.get(
            call.function, (source + call.send, target + call.receive)
        )
        arguments = (*places, call.count, call.datatype, *options, self._comm, stream)
        return functools.partial(getattr(self._nccl, call.function), *arguments)

    def error(self) -> str:
        """NCCL's asynchronous error, in its words; empty while there is none."""
        found = int(self._nccl.comm_get_async_error(self._comm))
        if found in (0, int(self._nccl.Result.InProgress)):
            return ""
        detail = self._nccl.get_last_error(self._comm)
        return f"{self._nccl.get_error_string(found)}{f': {detail}' if detail else ''}"

    def abort(self) -> None:
        """End kernels that wait for other ranks; their arrays are undefined and this object cannot be used again."""
        self._nccl.comm_abort(self._comm)

    def close(self) -> None:
        """Release it, once nothing is under way."""
        self._nccl.comm_destroy(self._comm)


def load_nccl() -> NcclLibrary | None:
    """The library, or None where nccl4py or libnccl is missing."""
    try:
        return NcclLibrary()
    except (ImportError, RuntimeError):
        return None
