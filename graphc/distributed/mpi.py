"""Collectives over MPI (mpi4py), in place on host buffers.

Choices, measured on a 2-core machine (32 MiB level-3 cache), 2 ranks, Open MPI 5.0.11, mpi4py 4.1:

* Buffers go in slices of 2 MiB. Open MPI's own ring over one large message leaves the cache; milliseconds for 64 MiB by
  slice size: 64 MiB (plain MPI) 27, 16 MiB 10.6, 4 MiB 7.0, **2 MiB 7.2**, 1 MiB 7.3, 256 KiB 10.9. For 16 MiB: 2 MiB 1.6,
  plain 2.2-6.6.
* A blocking call with nothing queued runs on the caller's thread: 40 bytes take 3.6 µs and 4 KiB 7 µs (plain MPI, yielding:
  1.3 and 4.2); through the communication thread 19 and 24 µs. 1 MiB: 113, plain 111, through the thread 132 µs.
* Open MPI polls while it waits. The launcher sets ``mpi_yield_when_idle``, which costs 1-2 µs on tiny messages and nothing
  from 64 KiB on. Ten steps of 15 ms of computation, each followed by an AllReduce of 4 MiB, one compute thread a rank, so
  that the communication threads have no core of their own: one after the other 162-166 ms, overlapped 171-217 ms without
  yielding and **153-160 ms** with it. Non-blocking calls tested between short sleeps took 160-165 ms, an Ibarrier tested
  between short sleeps in front of a blocking call 157-271 ms.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from graphc.distributed.communicator import CollectiveRequest, Handle
from graphc.distributed.health.watchdog import KEEP_GOING, join_launcher, watch_peers
from graphc.distributed.host_queue import ProcessCommunicator
from graphc.distributed.reductions import LOW, Array, Parts, adasum_rows, combine, cuts_of, widen
from graphc.distributed.rma_windows import MpiWindows, Windows
from graphc.distributed.world import World
from graphc.errors import GraphcError, MissingExtraError, WorldError, describe_error

SLICE = 2 << 20  # bytes
TAGS = 1 << 15  # the least number of tags that MPI has
WHOLE = 4 << 20  # bytes up to which one message is as fast as two


def open_mpi(world: World, deadline: float) -> MpiCommunicator:
    """Join the ranks MPI started, which must all have come within ``deadline`` seconds.

    Raises:
        MissingExtraError: mpi4py or an MPI library is not installed.
        WorldError: MPI knows another world than ``world``.
    """
    watchdog = join_launcher(world)
    try:
        MPI = _load_mpi()
        with watchdog.joining(Handle(lambda: None, "join"), deadline) if watchdog is not None else _time_limit(world, deadline):
            _initialise(MPI)
    except (ImportError, RuntimeError) as error:
        raise MissingExtraError(
            f"workers in several processes need mpi4py and an MPI library ({error}); run: pip install 'graphc[mpi]'"
        ) from error
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise WorldError("this MPI library allows calls from one thread only; MPI_THREAD_SERIALIZED is needed")
    everyone = MPI.COMM_WORLD
    if (everyone.Get_rank(), everyone.Get_size()) != (world.rank, world.size):
        raise WorldError(
            f"this worker should be rank {world.rank} of {world.size}, but MPI started rank {everyone.Get_rank()} of "
            f"{everyone.Get_size()}; start the workers with 'graphc launch -n {world.size}' or mpiexec"
        )
    with _time_limit(world, deadline):
        communicator = MpiCommunicator(MPI, everyone.Dup())
        communicator.deadline = deadline
        communicator.watchdog = watch_peers(communicator, world)
    communicator.watchdog.end_all = communicator.end_all
    atexit.register(communicator.leave)
    return communicator


def _load_mpi() -> Any:
    """Import mpi4py without its call of MPI_Init, in which no watchdog could run until all ranks have come."""
    import mpi4py

    if "mpi4py.MPI" not in sys.modules and mpi4py.rc.initialize is True:
        mpi4py.rc.initialize = False
        if mpi4py.rc.finalize is None:
            mpi4py.rc.finalize = True
    from mpi4py import MPI

    return MPI


def _initialise(mpi: Any) -> None:
    """Initialise MPI as mpi4py does, but with the interpreter free for other threads."""
    import mpi4py

    if mpi.Is_initialized():  # by the program itself
        return
    level, library = getattr(mpi, f"THREAD_{mpi4py.rc.thread_level.upper()}"), ctypes.CDLL(mpi.__file__)
    if not hasattr(library, "MPI_Init_thread"):
        mpi.Init_thread(level)
    elif library.MPI_Init_thread(None, None, level, ctypes.byref(ctypes.c_int())):
        raise RuntimeError("MPI_Init_thread failed")
    if mpi4py.rc.errors == "exception":
        for communicator in (mpi.COMM_SELF, mpi.COMM_WORLD):
            communicator.Set_errhandler(mpi.ERRORS_RETURN)


@contextlib.contextmanager
def _time_limit(world: World, deadline: float, group: str = "") -> Iterator[None]:
    """End the process unless all workers, or those of ``group``, join in time; no watchdog can say yet which is missing."""

    def end() -> None:
        wanted = f"its group {group}" if group else f"all {world.size} workers"
        print(
            f"graphc: rank {world.rank} waited {deadline:g} s for {wanted} to join: one of them died,"
            " is stopped, or never came",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    timer = threading.Timer(min(deadline, threading.TIMEOUT_MAX), end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class MpiCommunicator(ProcessCommunicator):
    """One rank of an MPI communicator that nobody else uses, so that a script's own MPI traffic cannot mix with ours."""

    transport = "mpi"

    def __init__(self, mpi: Any, comm: Any) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size())
        self._mpi = mpi
        self._comm = comm
        self._operations = {"sum": mpi.SUM, "mean": mpi.SUM, "min": mpi.MIN, "max": mpi.MAX, "prod": mpi.PROD}
        self._units = {1: mpi.BYTE, 2: mpi.INT16_T, 4: mpi.INT32_T, 8: mpi.INT64_T}  # for data that is only moved
        self._memory: dict[str, Array] = {}

    def abort(self, reason: str) -> None:
        error = sys.exception()
        code = describe_error(error)[1] if error is not None else 1
        if error is not None and not isinstance(error, GraphcError | SystemExit):
            traceback.print_exception(error)  # this call does not return
        if self.watchdog is not None:
            self.watchdog.fail(reason, code)
            self.watchdog.report(f"rank {self.ranks[self.rank]} stopped: {reason}")
        self.end_all(code)

    def end_all(self, code: int) -> None:
        """End every rank, on other machines too, with exit code ``code``."""
        sys.stdout.flush()
        sys.stderr.flush()
        # MPI_Abort asks the runtime to end all ranks; if it hangs, this process ends anyway and the watchdogs end the rest.
        fallback = threading.Timer(5.0, os._exit, (code,))
        fallback.daemon = True
        fallback.start()
        self._mpi.COMM_WORLD.Abort(code)

    def leave(self) -> None:
        super().leave()
        if KEEP_GOING in os.environ:  # MPI_Finalize waits for all ranks, also those that died
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    def machine(self) -> str:
        """The first of the ranks that share memory with this one."""
        together = self._comm.Split_type(self._mpi.COMM_TYPE_SHARED)
        first = np.array([self.rank], np.int64)
        together.Allreduce(self._mpi.IN_PLACE, first, self._mpi.MIN)
        together.Free()
        return f"that of rank {self.ranks[int(first[0])]}"

    def open_windows(self, nbytes: int) -> Windows:
        return MpiWindows(self._mpi, self._comm, nbytes)

    def _action(self, request: CollectiveRequest) -> Callable[[], None]:
        array, operation = request.array, self._operation(request)
        if request.kind != "allreduce" or operation is None or request.op == "mean" or array.nbytes > WHOLE:
            return super()._action(request)
        # A single slice: nothing of ours stands between the caller and MPI.
        allreduce, in_place, failure = self._comm.Allreduce, self._mpi.IN_PLACE, self._mpi.Exception

        def run() -> None:
            try:
                allreduce(in_place, array, operation)
            except failure as error:
                raise self._failed(request, error) from error

        return run

    def _operation(self, request: CollectiveRequest) -> Any:
        """MPI's operation for a reduction; None where MPI has none, or would accumulate in low precision."""
        return None if request.array.dtype in LOW else self._operations.get(request.op)

    def _allreduce(self, request: CollectiveRequest) -> None:
        array, operation = request.array, self._operation(request)
        if operation is None:
            super()._allreduce(request)
            return
        step = (WHOLE if array.nbytes <= WHOLE else SLICE) // array.itemsize
        with self._failures(request):
            for start in range(0, array.size, step):
                part = array[start : start + step]
                self._comm.Allreduce(self._mpi.IN_PLACE, part, operation)
                if request.op == "mean":
                    np.divide(part, self.size, out=part)

    def _reduce_scatter(self, request: CollectiveRequest) -> None:
        """Every rank collects its part of all arrays, slice by slice, and reduces it: half the bytes of an AllReduce."""
        array, parts = request.array, request.parts
        begin, end = parts[self.rank]
        if request.op == "adasum":
            count = end - begin
            memory = self._scratch("rows", self.size * count * array.itemsize).view(array.dtype)
            with self._failures(request):
                self._exchange(array, parts, memory)
            rows = [memory[rank * count : (rank + 1) * count] for rank in range(self.size)]
            lengths = request.lengths or [array.size]
            self._adasum(rows, array[begin:end], cuts_of(lengths, parts[self.rank]), len(lengths))
            return
        longest = max(stop - start for start, stop in parts)
        step = max(1, SLICE // array.itemsize // self.size)
        memory = self._scratch("rows", self.size * min(step, longest) * array.itemsize).view(array.dtype)
        wide = self._scratch("wide", memory.size * 4).view(np.float32) if array.dtype in LOW else None
        for offset in range(0, longest, step):
            slices = [(min(start + offset, stop), min(start + offset + step, stop)) for start, stop in parts]
            with self._failures(request):
                self._exchange(array, slices, memory)
            begin, end = slices[self.rank]
            rows = [memory[k * (end - begin) : (k + 1) * (end - begin)] for k in range(self.size)]
            combine(rows, request.op, array[begin:end], wide)

    def _exchange(self, array: Array, parts: Parts, memory: Array) -> None:
        """Receive this rank's part of every rank's array into ``memory``, in rank order."""
        mine = parts[self.rank][1] - parts[self.rank][0]
        unit = self._units[array.itemsize]
        counts, places = [stop - start for start, stop in parts], [start for start, _ in parts]
        source: list[Any] = [array.view(np.uint8), counts, places, unit]
        target: list[Any] = [memory.view(np.uint8), [mine] * self.size, [rank * mine for rank in range(self.size)], unit]
        self._comm.Alltoallv(source, target)

    def _adasum(self, rows: list[Array], out: Array, cuts: list[tuple[int, int, int]], tensors: int) -> None:
        if out.dtype in LOW:
            memory = self._scratch("wide", len(rows) * out.size * 4).view(np.float32)
            for rank, row in enumerate(rows):
                rows[rank] = memory[rank * out.size : (rank + 1) * out.size]
                widen(row, rows[rank])
        adasum_rows(rows, cuts, tensors, lambda sums: self._comm.Allreduce(self._mpi.IN_PLACE, sums, self._mpi.SUM))
        out[...] = rows[0]

    def _all_gather(self, request: CollectiveRequest) -> None:
        array, parts = request.array, request.parts
        owners = [rank for rank, (start, stop) in enumerate(parts) if start < stop]
        if len(owners) == 1:
            self._broadcast(replace(request, array=array[slice(*parts[owners[0]])], root=owners[0]))
            return
        unit, data = self._units[array.itemsize], array.view(np.uint8)
        step = max(1, SLICE // array.itemsize)
        with self._failures(request):
            for offset in range(0, max(stop - start for start, stop in parts), step):
                places = [min(start + offset, stop) for start, stop in parts]
                counts = [min(place + step, stop) - place for place, (_, stop) in zip(places, parts, strict=True)]
                self._comm.Allgatherv(self._mpi.IN_PLACE, [data, counts, places, unit])

    def _broadcast(self, request: CollectiveRequest) -> None:
        data = request.array.view(np.uint8)
        with self._failures(request):
            for start in range(0, data.size, SLICE):
                self._comm.Bcast(data[start : start + SLICE], request.root)

    def _all_to_all(self, request: CollectiveRequest) -> None:
        data = request.array.view(np.uint8)
        with self._failures(request):
            self._comm.Alltoall(self._mpi.IN_PLACE, data)

    def _subgroup(self, members: Sequence[int], index: int) -> MpiCommunicator:
        if self._mpi.Query_thread() < self._mpi.THREAD_MULTIPLE:
            raise WorldError("this MPI library lets one thread at a time call it; groups of workers need MPI_THREAD_MULTIPLE")
        names = ", ".join(str(self.ranks[member]) for member in members)
        with _time_limit(World(self.ranks[self.rank], self.root.size, 0, 1, "mpi"), self.deadline, f"of ranks {names}"):
            group = self._comm.Get_group().Incl(list(members))
            return MpiCommunicator(self._mpi, self._comm.Create_group(group, index % TAGS))

    def _scratch(self, name: str, size: int) -> Array:
        """``size`` bytes of memory that is kept for the next collective."""
        memory = self._memory.get(name)
        if memory is None or memory.size < size:
            memory = self._memory[name] = np.empty(size, np.uint8)
        return memory[:size]

    @contextlib.contextmanager
    def _failures(self, request: CollectiveRequest) -> Iterator[None]:
        try:
            yield
        except self._mpi.Exception as error:
            raise self._failed(request, error) from error

    def _failed(self, request: CollectiveRequest, error: BaseException) -> WorldError:
        return WorldError(f"{request.what} failed on rank {self.ranks[self.rank]}: {error}")

    def _gather(self, data: bytes) -> list[memoryview]:
        """Plain bytes: mpi4py's own calls for objects would pickle them."""
        counts = np.zeros(self.size, np.int64)
        self._comm.Allgather(np.array([len(data)], np.int64), counts)
        stops = np.cumsum(counts)
        rows = np.empty(int(stops[-1]), np.uint8)
        byte = self._mpi.BYTE
        self._comm.Allgatherv([np.frombuffer(data, np.uint8), byte], [rows, counts.tolist(), (stops - counts).tolist(), byte])
        return [rows[start:stop].data for start, stop in zip(stops - counts, stops, strict=True)]

    def _barrier(self) -> None:
        self._comm.Barrier()
