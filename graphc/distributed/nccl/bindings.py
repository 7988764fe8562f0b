"""NCCL through whichever of its Python bindings is installed: nccl4py, which is NVIDIA's own, else CuPy's.

Both release the interpreter lock. Numbers of operations and datatypes are those of ``nccl.h``, the same for both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from graphc.device import Run, in_order
from graphc.distributed.nccl.calls import NcclCall


class Link(Protocol):
    """This rank's end of the connection between the GPUs."""

    def bind(self, calls: Sequence[NcclCall], address: int, stream: int) -> Run:
        """What queues ``calls``, on the array at ``address``, on ``stream`` (a ``cudaStream_t``)."""

    def error(self) -> str:
        """What went wrong behind the back of the callers, in NCCL's words; empty while nothing has."""

    def abort(self) -> None:
        """Set free kernels that wait for other ranks, with nothing of use in their arrays; the link cannot be used again."""

    def close(self) -> None:
        """Release it, once nothing is under way."""


class NcclLibrary(Protocol):
    """A binding."""

    name: str

    def identity(self) -> bytes:
        """A new name for a world, which one rank makes and all others get from it."""

    def join(self, size: int, identity: bytes, rank: int) -> Link:
        """Enter a world with the GPU that is the current one; returns when all ranks have."""


class Nccl4py:
    """``nccl.bindings``, the layer below ``nccl.core`` that takes addresses.

    Raises:
        ImportError: it is not installed.
    """

    name = "nccl4py"

    def __init__(self) -> None:
        from nccl.bindings import nccl

        nccl.get_version()  # loads the library
        self._nccl = nccl

    def identity(self) -> bytes:
        return bytes(self._nccl.get_unique_id())

    def join(self, size: int, identity: bytes, rank: int) -> Link:
        nccl = self._nccl
        return _Nccl4pyLink(nccl, nccl.comm_init_rank(size, nccl.UniqueId.from_buffer(identity), rank))


class _Nccl4pyLink:
    def __init__(self, nccl: Any, comm: Any) -> None:
        self._nccl, self._comm = nccl, comm

    def bind(self, calls: Sequence[NcclCall], address: int, stream: int) -> Run:
        nccl, comm = self._nccl, self._comm
        functions = {name: getattr(nccl, name) for name in FUNCTIONS}
        return _grouped(nccl.group_start, nccl.group_end, [_bound(functions, c, address, (comm, stream)) for c in calls])

    def error(self) -> str:
        found = int(self._nccl.comm_get_async_error(self._comm))
        if found in (0, int(self._nccl.Result.InProgress)):
            return ""
        detail = self._nccl.get_last_error(self._comm)
        return f"{self._nccl.get_error_string(found)}{f': {detail}' if detail else ''}"

    def abort(self) -> None:
        self._nccl.comm_abort(self._comm)

    def close(self) -> None:
        self._nccl.comm_destroy(self._comm)


class CupyNccl:
    """``cupy.cuda.nccl``, which CuPy's maintainers intend to retire.

    Raises:
        ImportError: CuPy, or NCCL under it, is not installed.
    """

    name = "cupy.cuda.nccl"

    def __init__(self) -> None:
        from cupy.cuda import nccl

        if not nccl.available:
            raise ImportError("CuPy finds no NCCL")
        self._nccl = nccl

    def identity(self) -> bytes:
        return bytes(self._nccl.get_unique_id())

    def join(self, size: int, identity: bytes, rank: int) -> Link:
        return _CupyLink(self._nccl, self._nccl.NcclCommunicator(size, identity, rank))


class _CupyLink:
    def __init__(self, nccl: Any, comm: Any) -> None:
        self._nccl, self._comm = nccl, comm

    def bind(self, calls: Sequence[NcclCall], address: int, stream: int) -> Run:
        nccl = self._nccl
        functions = {name: getattr(self._comm, FUNCTIONS[name]) for name in FUNCTIONS}
        return _grouped(nccl.groupStart, nccl.groupEnd, [_bound(functions, call, address, (stream,)) for call in calls])

    def error(self) -> str:
        try:
            self._comm.check_async_error()
        except self._nccl.NcclError as error:
            return str(error)
        return ""

    def abort(self) -> None:
        self._comm.abort()

    def close(self) -> None:
        self._comm.destroy()


FUNCTIONS = {
    "all_reduce": "allReduce",
    "reduce_scatter": "reduceScatter",
    "all_gather": "allGather",
    "broadcast": "broadcast",
    "reduce": "reduce",
}
"""Names of nccl4py → of CuPy; the order of arguments is the same."""


def _bound(functions: dict[str, Callable[..., Any]], call: NcclCall, address: int, end: tuple[Any, ...]) -> Run:
    options = [value for value in (call.operation, call.root) if value >= 0]
    arguments = (address + call.send, address + call.receive, call.count, call.datatype, *options, *end)
    return functools.partial(functions[call.function], *arguments)


def _grouped(start: Run, end: Run, runs: list[Run]) -> Run:
    return runs[0] if len(runs) == 1 else in_order([start, *runs, end] if runs else [])


def find_library() -> NcclLibrary | None:
    """The binding that is installed, or None."""
    for make in (Nccl4py, CupyNccl):
        try:
            return make()
        except (ImportError, RuntimeError):  # the package, or the library that it loads
            continue
    return None
