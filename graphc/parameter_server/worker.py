"""A worker of parameter servers; :mod:`graphc.parameter_server.server` describes the protocol."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from graphc.backend import Backend
from graphc.device import Array, HostSync, Run
from graphc.distributed.communicator import Communicator
from graphc.distributed.rma_windows import Windows
from graphc.errors import WorldError
from graphc.ir.facts import is_float
from graphc.parameter_server.layout import APPLIED, DONE, ENDED, FAILED, LIVE, PUSHES, TICKETS, VERSION, ServerLayout
from graphc.parameter_server.member import Member, with_push
from graphc.runtime.executor import NonFiniteStepError


class ParameterWorker(Member):
    """One worker: pulls parameters and pushes gradients.

    Attributes:
        arrays: the last pulled state by name: views of one fixed buffer.
        count: finished steps of this worker.
    """

    def __init__(self, layout: ServerLayout, windows: Windows, comm: Communicator, backend: Backend, *, check: bool) -> None:
        super().__init__(layout, windows, comm)
        self.index = comm.rank - layout.servers
        self.count, self.version = 0, 0
        self._check = check
        self.backend = with_push(backend, self._bind_push)
        self._regions = [np.zeros(region.nbytes, np.uint8) for region in layout.published]
        self.arrays: dict[str, Array] = {}
        for region, memory in zip(layout.published, self._regions, strict=True):
            self.arrays |= {name: field.view(memory) for name, field in region.fields.items()}

    @property
    def live(self) -> list[int]:
        """Indices of the workers in the next step of a synchronous run."""
        found: list[int] = np.flatnonzero(self.arrays["::live"]).tolist()
        return found

    @property
    def results(self) -> dict[str, float]:
        """The graph's outputs of the last pulled step."""
        return dict(zip(self.layout.outputs, self.arrays["::outputs"].tolist(), strict=True))

    def claim(self) -> int:
        """Draw the next number, counted from 0, that no other worker gets."""
        return self._windows.add(0, TICKETS, 1)

    def pull(self) -> None:
        """Pull the parameters once they contain this worker's last push and no live worker is too far behind.

        Raises:
            NonFiniteError: on another rank.
            WorldError: no progress within the deadline, or a server is lost.
        """
        self.wait(self._may_go_on, self._behind)
        self._fetch(self.cell(0, VERSION))  # read after the cells above, which are written after it

    def _may_go_on(self) -> bool:
        head = self.look()
        if head[FAILED]:
            raise self.failure() or WorldError("the run has failed")
        if head[self.layout.table(APPLIED)][self.index] < self.count:
            return False
        bound = self.layout.options.staleness
        return not bound or self.count - self._slowest(head) <= bound

    def _slowest(self, head: Array) -> int:
        """Finished steps of the slowest live worker."""
        applied, live = head[self.layout.table(APPLIED)], head[self.layout.table(LIVE)] != 0
        return int(applied[live].min()) if live.any() else self.count

    def _behind(self) -> str:
        head = self._head
        if head[self.layout.table(APPLIED)][self.index] < self.count and self.layout.options.staleness != 0:
            return "the servers"
        applied, live = head[self.layout.table(APPLIED)], head[self.layout.table(LIVE)]
        slow = [w for w in range(self.layout.workers) if live[w] and applied[w] < self.count and w != self.index]
        return " or ".join(f"worker {w} (rank {w + self.layout.servers})" for w in slow) or "the servers"

    def _fetch(self, version: int) -> None:
        """Read a complete version, at least ``version``, of every server's parameters."""
        for server, memory in enumerate(self._regions):
            found = self.cell(server, VERSION)
            while True:
                if found < version:
                    self.wait(lambda s=server: self.cell(s, VERSION) >= version, lambda s=server: f"server {s} (rank {s})")  # type: ignore[misc]
                    found = self.cell(server, VERSION)
                self._windows.get(server, self.layout.half(server, found), memory)
                after = self.cell(server, VERSION)
                if after == found:  # else the server may have overwritten this half: retry
                    break
                found = after
            if server == 0:
                self.version = found

    def begin(self, samples: int) -> None:
        """Record the number of samples of the next step."""
        count = np.array([samples], np.int64).view(np.uint8)
        for server in range(self.layout.servers):
            offset = self.layout.mailbox[server].fields["::samples"].offset
            self._windows.put(server, self.layout.box(server, self.index) + offset, count)

    def commit(self) -> None:
        """Commit the push: everything is in the mailboxes."""
        self.count += 1
        self.tell(0, self.layout.table(PUSHES).start + self.index, self.count)

    def finish(self) -> dict[str, float]:
        """Stop training, wait for all workers, fetch the final parameters and return the last epoch's means."""
        self.tell(0, self.layout.table(DONE).start + self.index, 1)
        self.wait(self._has_ended, lambda: "the other workers")
        self._fetch(self.cell(0, VERSION))
        means = self._read_end()
        self.tell(0, self.layout.table(DONE).start + self.index, 2)
        return means

    def _has_ended(self) -> bool:
        head = self.look()
        if head[FAILED]:
            raise self.failure() or WorldError("the run has failed")
        return bool(head[ENDED])

    def _bind_push(self, node: ir.Node, inputs: Sequence[Array], outputs: Sequence[Array]) -> Run:
        """Check the operands and write each into the mailboxes of its servers."""
        memory = self.backend.memory
        held = inputs if memory.on_host else [memory.pinned(a.nbytes).view(a.dtype).reshape(a.shape) for a in inputs]
        puts: list[tuple[int, int, Array]] = []
        for server in range(self.layout.servers):
            fields = self.layout.mailbox[server].fields
            for k, array in enumerate(held):
                if (node.name, k) in fields:
                    offset = self.layout.box(server, self.index) + fields[node.name, k].offset
                    puts.append((server, offset, array.reshape(-1).view(np.uint8)))
        watched = [a.reshape(-1) for a, v in zip(held, node.inputs, strict=True) if v is not None and is_float(v)]
        if not self._check:
            watched = []
        put = self._windows.put

        def fail() -> None:
            raise NonFiniteStepError

        def check_mirrors() -> None:
            if not all(np.isfinite(array).all() for array in watched):
                fail()

        check = self.backend.bind_check(watched, fail) if memory.on_host else check_mirrors

        def push() -> None:
            if held is not inputs:
                for mirror, array in zip(held, inputs, strict=True):
                    memory.copy(mirror, array)
                memory.synchronize()
            check()
            for server, offset, data in puts:
                put(server, offset, data)

        return HostSync(push)
