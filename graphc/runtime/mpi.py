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
import os
import sys
import threading
import traceback
from typing import Any

import numpy as np

from graphc.errors import GraphcError, MissingExtraError, WorldError
from graphc.runtime.communicator import Array, QueuedCommunicator
from graphc.runtime.watch import KEEP_GOING, Watch, watch_peers
from graphc.runtime.world import World

SLICE = 2 << 20  # bytes


def open_mpi(world: World) -> QueuedCommunicator:
    """Join the ranks MPI started.

    Raises:
        MissingExtraError: mpi4py or an MPI library is not installed.
        WorldError: MPI knows another world than ``world``.
    """
    try:
        from mpi4py import MPI
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
    communicator = MpiCommunicator(MPI, world)
    communicator.watch = watch_peers(communicator, world)
    communicator.watch.end_all = communicator.end_all
    atexit.register(communicator.leave)
    return communicator


class MpiCommunicator(QueuedCommunicator):
    """One rank of MPI_COMM_WORLD, on a duplicate of it, so that a script's own MPI traffic cannot mix with ours."""

    def __init__(self, mpi: Any, world: World) -> None:
        super().__init__(world.rank, world.size)
        self.watch: Watch | None = None
        self._mpi = mpi
        self._comm = mpi.COMM_WORLD.Dup()
        self._operations = {"sum": mpi.SUM, "mean": mpi.SUM, "min": mpi.MIN, "max": mpi.MAX, "prod": mpi.PROD}

    def abort(self, reason: str) -> None:
        error = sys.exception()
        code = error.exit_code if isinstance(error, GraphcError) else 1
        if error is not None and not isinstance(error, GraphcError):
            traceback.print_exception(error)  # nobody after us can: this call does not return
        if self.watch is not None:
            self.watch.fail(reason, code)
            if not self.watch.launched:
                print(f"graphc: rank {self.rank} stopped: {reason}", file=sys.stderr, flush=True)
        self.end_all(code)

    def end_all(self, code: int) -> None:
        """End every rank, on other machines too, with exit code ``code``."""
        sys.stdout.flush()
        sys.stderr.flush()
        # MPI_Abort asks the runtime to end everyone; should that hang, this process still goes, and its watch tells the rest.
        fallback = threading.Timer(5.0, os._exit, (code,))
        fallback.daemon = True
        fallback.start()
        self._mpi.COMM_WORLD.Abort(code)

    def leave(self) -> None:
        """End in good order; called when the interpreter ends."""
        self.close()
        if self.watch is not None:
            self.watch.goodbye()
        if KEEP_GOING in os.environ:  # MPI_Finalize waits for everyone, those that died included
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    def spare(self, name: str) -> None:
        if self.watch is not None:
            self.watch.spare(name)

    def gone(self) -> frozenset[int]:
        return self.watch.lost if self.watch is not None else frozenset()

    def _reduce(self, array: Array, op: str, what: str) -> None:
        operation = self._operations[op]
        step = max(1, SLICE // array.itemsize)
        try:
            for start in range(0, array.size, step):
                part = array[start : start + step]
                self._comm.Allreduce(self._mpi.IN_PLACE, part, operation)
                if op == "mean":
                    np.divide(part, self.size, out=part)
        except self._mpi.Exception as error:
            raise WorldError(f"{what} failed on rank {self.rank}: {error}") from error

    def _broadcast(self, array: Array, root: int, what: str) -> None:
        data = array.view(np.uint8)
        try:
            for start in range(0, data.size, SLICE):
                self._comm.Bcast(data[start : start + SLICE], root)
        except self._mpi.Exception as error:
            raise WorldError(f"{what} from rank {root} failed on rank {self.rank}: {error}") from error

    def _gather(self, item: Any) -> list[Any]:
        return list(self._comm.allgather(item))

    def _barrier(self) -> None:
        self._comm.Barrier()
