"""Memory layout of the parameter servers' windows (:mod:`graphc.parameter_server.server`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.device import ALIGNMENT, Array
from graphc.distributed.rma_windows import CELL
from graphc.errors import UsageError, WorldError, counted
from graphc.ir.facts import inputs_of, state_updates
from graphc.ir.ops.parameter_server import ServerOptions, server_options
from graphc.parameter_server.split import pulled, pushes, server_part, static_spec

# Cells of a window. Servers other than server 0 use only VERSION and COLLECTED.
# FAILED and ENDED hold the length of a text with the details.
VERSION, LOG, TICKETS, ENDED, EXPORTS, FAILING, FAILED, COLLECTED = 0, 1, 2, 3, 4, 5, 6, 7
PER_WORKER = 8  # the first cell of the tables
PUSH, COLLECT, STOP = 1, 2, 3  # entries of the log
TEXT = 4096  # bytes for a failure's message, or for the final hash and means
TEXT_PER_OUTPUT = 32  # more bytes for the mean of each output
PUSHES, APPLIED, DONE, LIVE = 0, 1, 2, 3  # tables with one cell per worker


@dataclass(frozen=True, slots=True)
class Field:
    """Place of a tensor in a region of a window: byte ``offset``, shape and dtype."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def view(self, region: Array) -> Array:
        """Return the tensor as a view of ``region`` (uint8)."""
        count = int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize
        found: Array = region[self.offset : self.offset + count].view(self.dtype).reshape(self.shape)
        return found


class ServerRegion:
    """Place tensors one after the other, each starting on its own cache line."""

    def __init__(self) -> None:
        self.fields: dict[Any, Field] = {}
        self.nbytes = 0

    def add(self, key: Any, shape: Iterable[int], dtype: Any) -> None:
        field = Field(self.nbytes, tuple(shape), np.dtype(dtype))
        self.fields[key] = field
        count = int(np.prod(field.shape, dtype=np.int64)) * field.dtype.itemsize
        self.nbytes += -(-max(count, 1) // ALIGNMENT) * ALIGNMENT

    def add_value(self, key: Any, value: ir.Value) -> None:
        self.add(key, *static_spec(value))


class ServerLayout:
    """Roles of the ranks and layout of the windows; equal on all ranks."""

    def __init__(self, model: ir.Model, size: int) -> None:
        self.options = _options(model.graph)
        self.servers = self.options.servers
        self.workers = size - self.servers
        self.parts = [server_part(model, k) for k in range(self.servers)]
        self.published = [self._published(model.graph, k) for k in range(self.servers)]
        self.mailbox = [self._mailbox(k) for k in range(self.servers)]
        self.state = [self._state(k) for k in range(self.servers)]
        self.outputs = [v.name or "" for v in model.graph.outputs]
        self.entry = 2 + self.workers  # cells of a log entry: kind, learning rate, senders
        self.ring = 2 * self.workers + 4
        self.log = PER_WORKER + 4 * self.workers
        self.text = (self.log + self.ring * self.entry) * CELL
        self.text_bytes = TEXT + TEXT_PER_OUTPUT * len(self.outputs)
        self.halves = -(-(self.text + self.text_bytes) // ALIGNMENT) * ALIGNMENT

    def _published(self, graph: ir.Graph, server: int) -> ServerRegion:
        region = ServerRegion()
        for value in pulled(graph, server):
            region.add_value(value.name, value)
        if server == 0:
            region.add("::live", (self.workers,), np.int64)
            region.add("::outputs", (len(graph.outputs),), np.float64)
        return region

    def _mailbox(self, server: int) -> ServerRegion:
        region = ServerRegion()
        region.add("::samples", (1,), np.int64)
        for node in pushes(self.parts[server].graph, server):
            for k, value in enumerate(inputs_of(node)):
                region.add_value((node.name, k), value)
        return region

    def _state(self, server: int) -> ServerRegion:
        region = ServerRegion()
        for _, value, _ in state_updates(self.parts[server].graph):
            region.add_value(value.name, value)
        return region

    def half(self, server: int, version: int) -> int:
        """Byte offset of the parameters of ``version``."""
        return self.halves + (version % 2) * self.published[server].nbytes

    def box(self, server: int, worker: int) -> int:
        """Byte offset of a worker's mailbox."""
        return self.halves + 2 * self.published[server].nbytes + worker * self.mailbox[server].nbytes

    def collected(self, server: int) -> int:
        """Byte offset of the copy of the state that server 0 requests."""
        return self.box(server, self.workers)

    def nbytes(self, rank: int) -> int:
        """Size of the window of ``rank``."""
        if rank >= self.servers:
            return 0
        return self.collected(rank) + (self.state[rank].nbytes if rank else 0)

    def table(self, name: int) -> slice:
        """Return the slice of all workers' cells: ``pushed`` (0), ``applied`` (1), ``done`` (2) or ``live`` (3)."""
        start = PER_WORKER + name * self.workers
        return slice(start, start + self.workers)


def _options(graph: ir.Graph) -> ServerOptions:
    options = server_options(graph)
    if options is None:
        raise UsageError("the graph has no parameter servers")
    return options


def check_world(graph: ir.Graph, size: int, workers: int | None) -> None:
    """Refuse a world whose size is not the graph's servers plus ``workers``.

    Raises:
        UsageError: no rank is left for a worker.
        WorldError: the number of ranks is not servers plus the mesh's workers.
    """
    servers = _options(graph).servers
    if size <= servers:
        raise UsageError(
            f"servers={servers} takes {servers} of {counted(size, 'process', 'processes')} and leaves no "
            f"worker; start at least {servers + 1}: 'graphc launch -n {servers + 1} --keep-going …'"
        )
    if workers is not None and size != servers + workers:
        raise WorldError(
            f"the mesh data={workers} and {counted(servers, 'parameter server')} want {servers + workers} "
            f"processes, the world has {size}; start with 'graphc launch -n {servers + workers} --keep-going …'"
        )
