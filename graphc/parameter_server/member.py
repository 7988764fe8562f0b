"""Base of parameter servers and their workers: cells, waiting, failing, ``Push``."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.backend import Backend
from graphc.device import Array, Run
from graphc.distributed.communicator import Communicator
from graphc.distributed.rma_windows import Windows
from graphc.errors import NonFiniteError, WorldError
from graphc.parameter_server.layout import ENDED, EXPORTS, FAILED, FAILING, PER_WORKER, VERSION, ServerLayout
from graphc.parameter_server.split import exchanging, is_push
from graphc.plan.partition import Plan, make_plan

LONGEST_NAP = 1e-3  # seconds between two looks at a cell


class Member:
    """Base class of servers and workers: cells, waiting, failing.

    Attributes:
        digest: hexadecimal hash of the final state, once it exists.
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
            WorldError: a server is lost, or no step was finished within two deadlines (the first may have been busy);
                ``whom()`` names the ranks waited for.
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
        """Publish this error as the end of the run; the first error counts."""
        if self._windows.add(0, FAILING, 1) == 0:
            self._write_text(FAILED, str(error), error.step, error.tensor)

    def failure(self) -> NonFiniteError | None:
        """Return another rank's error, if there is one."""
        found = self._read_text(FAILED)
        return NonFiniteError(found[0], step=found[1], tensor=found[2]) if found else None

    def exported(self, count: int) -> None:
        """On server 0: announce that file number ``count`` is written, for which the other ranks wait."""
        if self._comm.rank == 0:
            self.tell(0, EXPORTS, count)
        else:
            self.wait(lambda: self.cell(0, EXPORTS) >= count, lambda: "server 0 (rank 0), which writes the file,")

    def publish_end(self, digest: str, means: Mapping[str, float]) -> None:
        """On server 0: publish the hash of the final state and the last epoch's means."""
        self._write_text(ENDED, digest, [means[name] for name in self.layout.outputs] if means else [])

    def _read_end(self) -> dict[str, float]:
        """Return the last epoch's means (empty if there was no step), and store the hash."""
        self.digest, means = self._read_text(ENDED)
        return dict(zip(self.layout.outputs, means, strict=True)) if means else {}

    def _write_text(self, cell: int, *entries: Any) -> None:
        """Write ``entries`` to server 0 and the length of their text to ``cell``; once per run."""
        text = json.dumps(entries).encode()[: self.layout.text_bytes]
        self._windows.put(0, self.layout.text, np.frombuffer(text, np.uint8))
        self.tell(0, cell, len(text))

    def _read_text(self, cell: int) -> list[Any]:
        """Read the entries written with ``cell``; empty if there are none."""
        data = np.zeros(self.cell(0, cell), np.uint8)
        self._windows.get(0, self.layout.text, data)
        found: list[Any] = json.loads(data.tobytes()) if data.size else []
        return found


def with_push(backend: Backend, push: Callable[[ir.Node, Sequence[Array], Sequence[Array]], Run]) -> Backend:
    """A copy of ``backend`` that binds ``Push`` by ``push``, one side of the exchange."""
    own = exchanging(backend)

    def bind_kernel(node: ir.Node, inputs: Sequence[Array | None], outputs: Sequence[Array], aliases: Mapping[int, int]) -> Run:
        if is_push(node):
            return push(node, [a for a in inputs if a is not None], outputs)
        return backend.bind_kernel(node, inputs, outputs, aliases)

    own.bind_kernel = bind_kernel  # type: ignore[method-assign]
    return own


def plan_part(part: ir.Model, shapes: Mapping[str, Sequence[int]], backend: Backend) -> Plan:
    """Plan a worker's or a server's part; its pushes are kept."""
    return make_plan(part, shapes, backend, world_size=2)
