"""Parameter servers: an engine over one-sided windows (:mod:`graphc.distributed.rma_windows`).

Ranks 0 … S-1 are servers, the W ranks after them workers. Only servers have windows.

    cells         version · log · tickets · ended · … · per worker: pushed, applied, done, live
    log           ring of updates to apply next; server 0 writes it, the other servers read it
    published     the parameters, twice: version v in half v mod 2, so that readers find a complete one
    mailboxes     one per worker, for its pushes

A worker writes its gradients into its mailbox on every server, then commits the push by writing its number into one cell of
server 0. Server 0 orders the pushes in its log, and every server applies them in that order, each with the learning rate of its
log entry. So every push is applied exactly once on all servers, or on none if its worker died halfway, and all servers apply
the same sequence of updates.

A worker waits only for parameters that contain its own last push, and for the staleness bound. With staleness k it starts step
c when every live worker has finished step c - k (stale synchronous parallel; Ho et al. 2013). With staleness 0 server 0 gathers
the pushes of all live workers into one step and reduces them in rank order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.backend import Backend
from graphc.device import Array, Run
from graphc.distributed.communicator import Communicator
from graphc.distributed.rma_windows import Windows
from graphc.errors import NonFiniteError, WorldError
from graphc.ir.facts import static_dims
from graphc.ir.names import LEARNING_RATE, SKIPPED
from graphc.parameter_server.layout import (
    APPLIED,
    COLLECT,
    COLLECTED,
    DONE,
    ENDED,
    FAILED,
    LIVE,
    LOG,
    PUSH,
    PUSHES,
    STOP,
    VERSION,
    ServerLayout,
)
from graphc.parameter_server.member import Member, plan_part, with_push
from graphc.runtime.executor import Executor, NonFiniteStepError
from graphc.runtime.state import State

_UFUNCS = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}


class Server(Member):
    """One server: applies the workers' pushes in the order of the log.

    Args:
        state: the whole initial state; on server 0 :meth:`collect` updates it.
        steps: steps already contained in this state.
    """

    def __init__(
        self,
        layout: ServerLayout,
        windows: Windows,
        comm: Communicator,
        state: State,
        backend: Backend,
        *,
        steps: int = 0,
        check: bool = True,
    ) -> None:
        super().__init__(layout, windows, comm)
        self.index = comm.rank
        self.first, self.version, self.samples = steps, 0, 0
        self.lost: dict[int, int] = {}
        part = layout.parts[self.index]
        self.state = State(part)
        self.state.load({name: state.fetch(name) for name in self.state.arrays})
        shapes = {v.name or "": static_dims(v) or () for v in part.graph.inputs}
        engine = with_push(backend, self._bind_push)
        self._senders: list[int] = []
        self._executor = Executor(plan_part(part, shapes, engine), self.state, engine, check=check)
        self._followed = 0
        self._failed = False
        self._live = np.ones(layout.workers, np.int64)
        self._applied = np.zeros(layout.workers, np.int64)
        self._entry = np.zeros(layout.entry, np.int64)
        if self.index == 0:
            self.tell(0, layout.table(LIVE).start, *self._live.tolist())
        self._publish()

    @property
    def steps(self) -> int:
        """Finished steps, including those before this run."""
        return self.first + self.version

    @property
    def results(self) -> dict[str, float]:
        """The graph's outputs of the last applied step; only on server 0."""
        return {name: float(array) for name, array in self._executor.outputs.items()}

    @property
    def skipped_steps(self) -> int:
        """Steps skipped because of a NaN or an infinity."""
        return int(self.state.scalars.read(SKIPPED)) if SKIPPED in self.state.scalars else 0

    def next(self) -> bool:
        """Apply the next step; return False when all live workers have finished.

        Raises:
            NonFiniteError: here or on another rank.
            WorldError: no progress within the deadline, or no worker is left.
        """
        while True:
            kind, senders = self._decide() if self.index == 0 else self._follow()
            if kind == PUSH:
                if not self._failed:
                    self._apply(senders)
                if not self._failed:
                    return True
            elif kind == COLLECT:
                self._export()
            else:
                error = self.failure()
                if error is not None:
                    raise error
                return False

    def collect(self, state: State) -> None:
        """On server 0: collect the current ``state`` from all servers."""
        state.load({name: self.state.arrays[name] for name in self.state.updated})
        if self.layout.servers == 1:
            return
        self._append(COLLECT, [])
        wanted = self.cell(0, LOG)
        for server in range(1, self.layout.servers):
            self.wait(lambda s=server: self.cell(s, COLLECTED) >= wanted, lambda s=server: f"server {s} (rank {s})")  # type: ignore[misc]
            region = self.layout.state[server]
            copy = np.zeros(region.nbytes, np.uint8)
            self._windows.get(server, self.layout.collected(server), copy)
            state.load({name: field.view(copy) for name, field in region.fields.items()})

    def stop(self) -> None:
        """On server 0: let the other servers end."""
        self._append(STOP, [])

    def end(self) -> dict[str, float]:
        """Wait until every live worker has the final state; return the last epoch's means."""
        self.wait(self._all_have_left, lambda: "a worker that has finished")
        return self._read_end()

    def _all_have_left(self) -> bool:
        gone = self._comm.gone()
        head = self.look()
        return bool(head[ENDED]) and all(
            state == 2 or self._rank(w) in gone for w, state in enumerate(head[self.layout.table(DONE)])
        )

    # The order of pushes ----------------------------------------------------------------------------------------------

    def _decide(self) -> tuple[int, list[int]]:
        """On server 0: choose the next log entry and publish it to the other servers."""
        found: list[int] = []

        def ready() -> bool:
            gone = self._comm.gone()  # read first: pushes that a worker made before it died count
            head = self.look()
            if head[FAILED]:
                return True
            pushed, done = head[self.layout.table(PUSHES)], head[self.layout.table(DONE)]
            present = np.flatnonzero(pushed > self._applied).tolist()
            self._note_lost(gone, done)
            found[:] = self._choose(present)
            return bool(found) or not (self._live.any() or present)

        self.wait(ready, lambda: " or ".join(f"worker {w} (rank {self._rank(w)})" for w in self._missing()))
        if found:
            self._append(PUSH, found)
            return PUSH, found
        if len(self.lost) == self.layout.workers:
            raise WorldError("all workers are gone")
        return STOP, []

    def _choose(self, present: list[int]) -> list[int]:
        """Choose the workers whose pushes make the next step."""
        if self.layout.options.staleness == 0:
            complete = all(w in present for w in range(self.layout.workers) if self._live[w])
            return present if complete else []
        return sorted(present, key=lambda w: (self._applied[w], w))[:1]

    def _note_lost(self, gone: frozenset[int], done: Array) -> None:
        before = self._live.copy()
        for worker in range(self.layout.workers):
            if done[worker]:
                self._live[worker] = 0
            elif self._rank(worker) in gone and self._live[worker]:
                self._live[worker] = 0
                self.lost[worker] = self.steps
        if (self._live != before).any():
            self.tell(0, self.layout.table(LIVE).start, *self._live.tolist())

    def _missing(self) -> list[int]:
        """Name the workers whose push is due; with a staleness bound faster workers wait for the slowest."""
        pushed = self.look()[self.layout.table(PUSHES)]
        found = [w for w in range(self.layout.workers) if self._live[w] and pushed[w] <= self._applied[w]]
        if self.layout.options.staleness:
            found = [w for w in found if self._applied[w] == self._applied[found].min()]
        return found

    def _rank(self, worker: int) -> int:
        return self.layout.servers + worker

    def _append(self, kind: int, senders: list[int]) -> None:
        entry = np.zeros(self.layout.entry, np.int64)
        entry[0] = kind
        entry[1:2].view(np.float64)[0] = self._learning_rate()
        entry[2:][senders] = 1
        number = self.cell(0, LOG)
        self._windows.publish(0, self.layout.log + number % self.layout.ring * self.layout.entry, entry)
        self.tell(0, LOG, number + 1)

    def _follow(self) -> tuple[int, list[int]]:
        """On the other servers: wait for the next entry of the log."""
        number = self._followed
        self.wait(lambda: self.cell(0, LOG) > number, lambda: "server 0 (rank 0)")
        self._windows.read(0, self.layout.log + number % self.layout.ring * self.layout.entry, self._entry)
        self._followed += 1
        rate = self.state.arrays.get(LEARNING_RATE)
        if rate is not None:
            rate[...] = self._entry[1:2].view(np.float64)[0]
        return int(self._entry[0]), np.flatnonzero(self._entry[2:]).tolist()

    def _learning_rate(self) -> float:
        rate = self.state.arrays.get(LEARNING_RATE)
        return float(rate) if rate is not None else 0.0

    # Applying ---------------------------------------------------------------------------------------------------------

    def _box(self, worker: int) -> Array:
        start = self.layout.box(self.index, worker)
        found: Array = self._windows.memory[start : start + self.layout.mailbox[self.index].nbytes]
        return found

    def _apply(self, senders: list[int]) -> None:
        self._senders[:] = senders
        samples = self.layout.mailbox[self.index].fields["::samples"]
        self.samples = sum(int(samples.view(self._box(w))[0]) for w in senders)
        try:
            for run in self._executor.runs:
                run()
        except NonFiniteStepError:
            self._failed = True
            names = ", ".join(str(w) for w in senders)
            text = f"a NaN or infinity appeared in step {self.steps}, in the sum of what worker {names} pushed"
            self.fail(NonFiniteError(f"{text}; the state is that of the last good step", step=self.steps, tensor=None))
            return
        self.version += 1
        self._applied[senders] += 1
        self._publish()

    def _bind_push(self, node: ir.Node, inputs: Sequence[Array], outputs: Sequence[Array]) -> Run:
        """Reduce the mailboxes of the senders into the operands of the updates."""
        reduce = node.attributes["reduce"].as_string() if "reduce" in node.attributes else "sum"
        fields = [self.layout.mailbox[self.index].fields[node.name, k] for k in range(len(outputs))]
        boxes = [[field.view(self._box(w)) for w in range(self.layout.workers)] for field in fields]
        ufunc, senders = _UFUNCS[reduce], self._senders

        def receive() -> None:
            for out, arrived in zip(outputs, boxes, strict=True):
                if len(senders) > 1 and out.dtype.itemsize == 2:
                    _reduce_wide(ufunc, reduce, [arrived[w] for w in senders], out)
                    continue
                np.copyto(out, arrived[senders[0]])
                for w in senders[1:]:
                    ufunc(out, arrived[w], out=out)
                if reduce == "mean" and len(senders) > 1:
                    np.divide(out, len(senders), out=out)

        return receive

    def _publish(self) -> None:
        """Publish the state: first the bytes, then the version, then the workers' applied counts."""
        region = self.layout.published[self.index]
        start = self.layout.half(self.index, self.version)
        memory = self._windows.memory[start : start + region.nbytes]
        for name, field in region.fields.items():
            if name in self.state.arrays:
                np.copyto(field.view(memory), self.state.arrays[name])
        if self.index == 0:
            np.copyto(region.fields["::live"].view(memory), self._live)
            if self.version:
                region.fields["::outputs"].view(memory)[:] = [self.results[name] for name in self.layout.outputs]
        self.tell(self.index, VERSION, self.version)
        if self.index == 0:
            self.tell(0, self.layout.table(APPLIED).start, *self._applied.tolist())

    def _export(self) -> None:
        region, start = self.layout.state[self.index], self.layout.collected(self.index)
        memory = self._windows.memory[start : start + region.nbytes]
        for name, field in region.fields.items():
            np.copyto(field.view(memory), self.state.arrays[name])
        self.tell(self.index, COLLECTED, self._followed)


def _reduce_wide(ufunc: Any, reduce: str, arrays: Sequence[Array], out: Array) -> None:
    """Low-precision sums are accumulated in float32 and rounded once."""
    total = arrays[0].astype(np.float32)
    for array in arrays[1:]:
        ufunc(total, array.astype(np.float32), out=total)
    if reduce == "mean":
        total /= len(arrays)
    out[...] = total.astype(out.dtype)
