"""What parameter servers and their workers have in common: cells, waiting, failing, and their side of a ``Push``."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from graphc.backend import Backend
from graphc.device import Array, Run
from graphc.distributed.communicator import Communicator
from graphc.distributed.rma_windows import Windows
from graphc.errors import NonFiniteError, WorldError
from graphc.parameter_server.layout import EXPORTS, FAILED, FAILING, HASH, PER_WORKER, TEXT, VERSION, ServerLayout
from graphc.parameter_server.split import Exchanging
from graphc.plan.partition import Plan, make_plan

LONGEST_NAP = 1e-3  # seconds between two looks at a cell


class Member:
    """What servers and workers have in common: cells, waiting, failing.

    Attributes:
        digest: the hash of the final state, in hexadecimal, once there is one.
    """

    digest = ""

    def __init__(self, layout: ServerLayout, windows: Windows, comm: Communicator) -> None:
        self.layout = layout
        self._windows = windows
        self._comm = comm
        self._head = np.zeros(PER_WORKER + 4 * layout.workers, np.int64)

    def look(self) -> Array:
        """The cells of server 0, up to its log."""
        self._windows.read(0, 0, self._head)
        return self._head

    def cell(self, rank: int, index: int) -> int:
        found = np.zeros(1, np.int64)
        self._windows.read(rank, index, found)
        return int(found[0])

    def tell(self, rank: int, index: int, *values: int) -> None:
        self._windows.publish(rank, index, np.array(values, np.int64))

    def wait(self, ready: Callable[[], bool], whom: Callable[[], str]) -> None:
        """Sleep until ``ready()``.

        Raises:
            WorldError: a server is gone, or no step was finished for a deadline (of two, the first may have been busy);
                the words are those of ``whom()``.
        """
        nap, limit, version = 2e-5, time.monotonic() + self._comm.deadline, -1
        while not ready():
            lost = [rank for rank in self._comm.gone() if rank < self.layout.servers]
            if lost and not ready():
                raise WorldError(f"server {lost[0]} (rank {lost[0]}) is gone; the workers cannot go on without it")
            if time.monotonic() > limit:
                seen, version = version, self.cell(0, VERSION)
                if seen == version:
                    raise WorldError(f"nothing has come from {whom()} within {self._comm.deadline:g} s")
                limit = time.monotonic() + self._comm.deadline
            time.sleep(nap)
            nap = min(nap * 1.5, LONGEST_NAP)

    def fail(self, error: NonFiniteError) -> None:
        """Tell all others that the run ends with this error; the first one counts."""
        if self._windows.add(0, FAILING, 1) == 0:
            text = json.dumps([str(error), error.step, error.tensor]).encode()[:TEXT]
            self._windows.put(0, self.layout.text, np.frombuffer(text, np.uint8))
            self.tell(0, FAILED, len(text))

    def failure(self) -> NonFiniteError | None:
        """The error of another rank, if there is one."""
        length = self.cell(0, FAILED)
        if not length:
            return None
        data = np.zeros(length, np.uint8)
        self._windows.get(0, self.layout.text, data)
        message, step, tensor = json.loads(data.tobytes())
        return NonFiniteError(message, step=step, tensor=tensor)

    def exported(self, count: int) -> None:
        """Server 0 has written file number ``count``, which the others wait for."""
        if self._comm.rank == 0:
            self.tell(0, EXPORTS, count)
        else:
            self.wait(lambda: self.cell(0, EXPORTS) >= count, lambda: "server 0 (rank 0), which writes the file,")

    def read_digest(self) -> None:
        found = np.zeros(4, np.int64)
        self._windows.read(0, HASH, found)
        self.digest = found.tobytes().hex()


class Exchange(Exchanging):
    """A backend whose kernel for ``Push`` is one side of the exchange; everything else it leaves to ``backend``."""

    def __init__(self, backend: Backend, push: Callable[[ir.Node, Sequence[Array], Sequence[Array]], Run]) -> None:
        super().__init__(backend)
        self.name = backend.name
        self.memory = backend.memory
        self._backend = backend
        self._push = push

    def bind_kernel(
        self, node: ir.Node, inputs: Sequence[Array | None], outputs: Sequence[Array], aliases: Mapping[int, int]
    ) -> Run:
        if _is_push(node):
            return self._push(node, [a for a in inputs if a is not None], outputs)
        return self._backend.bind_kernel(node, inputs, outputs, aliases)

    def bind_segment(
        self,
        model: onnx.ModelProto,
        inputs: Mapping[str, Array],
        outputs: Mapping[str, Array],
        *,
        reusable_buffers: Sequence[Array] = (),
    ) -> Run:
        return self._backend.bind_segment(model, inputs, outputs, reusable_buffers=reusable_buffers)

    def run_whole(self, model: onnx.ModelProto, feeds: Mapping[str, Any]) -> dict[str, Any]:
        return self._backend.run_whole(model, feeds)

    def inplace(self, node: ir.Node) -> Mapping[int, int]:
        return self._backend.inplace(node)

    def settle(self) -> None:
        self._backend.settle()

    def record(self, runs: Sequence[Run]) -> Run:
        return self._backend.record(runs)

    def all_finite(self, array: Array) -> bool:
        return self._backend.all_finite(array)

    def close(self) -> None:
        self._backend.close()


def _is_push(node: ir.Node) -> bool:
    return node.op_type == "Push" and node.domain == "graphc"


def plan_part(part: ir.Model, shapes: Mapping[str, Sequence[int]], backend: Backend) -> Plan:
    """The plan of a worker's or a server's part: its pushes stay."""
    return make_plan(part, shapes, backend, world_size=2)
