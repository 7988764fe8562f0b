"""Parameter servers: an engine over one-sided windows (:mod:`graphc.runtime.windows`).

Ranks 0 … S-1 are servers, the W ranks behind them workers. Each server has a window; nobody else needs one.

    cells         version · log · tickets · ended · … · per worker: pushed, applied, done, live
    log           ring of what is to be applied next, written by server 0, followed by the others
    published     the parameters, twice: version v in half v mod 2, so that a reader finds a whole one
    mailboxes     one per worker: what it pushes

A worker writes its gradients into its mailbox on every server and then, as the only sign of it, the number of its push into
one cell of server 0. Server 0 orders the pushes it finds in its log, and every server applies them in that order, each with
the learning rate noted beside it. So a push is applied exactly once, on all servers or (its worker died in the middle) on
none, and all servers hold the same sequence of updates.

A worker pulls only what contains its own last push; that, and the staleness, are all it waits for. With staleness k it starts
its step c when every live worker has finished step c - k (stale synchronous parallel; Ho et al. 2013). With staleness 0
server 0 gathers the pushes of all live workers into one step, reduced in the order of ranks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from graphc.backend import Array, Backend, Run
from graphc.errors import NonFiniteError, UsageError, WorldError
from graphc.ir.facts import is_float, state_updates, static_dims
from graphc.ir.names import LEARNING_RATE
from graphc.plan import Plan, make_plan
from graphc.roles import ServerOptions, nbytes, pulled, pushes, server_options, server_part
from graphc.runtime.communicator import Communicator
from graphc.runtime.executor import Executor, NonFiniteStepError
from graphc.runtime.state import State
from graphc.runtime.windows import CELL, Windows
from graphc.steps import ALIGNMENT

# Cells of a window. Only VERSION and COLLECTED are used on servers other than the first.
VERSION, LOG, TICKETS, ENDED, EXPORTS, FAILING, FAILED, COLLECTED, HASH = 0, 1, 2, 3, 4, 5, 6, 7, 8
PER_WORKER = 12  # the first cell of the tables; HASH takes four
PUSH, COLLECT, STOP = 1, 2, 3  # entries of the log
TEXT = 4096  # bytes for the words of a failure
LONGEST_NAP = 1e-3  # seconds between two looks at a cell

_UFUNCS = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}


@dataclass(frozen=True, slots=True)
class Field:
    """Where a tensor lies in a region of a window: byte ``offset``, shape and dtype."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def view(self, region: Array) -> Array:
        """The tensor in ``region`` (uint8)."""
        count = int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize
        found: Array = region[self.offset : self.offset + count].view(self.dtype).reshape(self.shape)
        return found


class Region:
    """Tensors one behind the other, each on a cache line of its own."""

    def __init__(self) -> None:
        self.fields: dict[Any, Field] = {}
        self.nbytes = 0

    def add(self, key: Any, shape: Iterable[int], dtype: Any) -> None:
        field = Field(self.nbytes, tuple(shape), np.dtype(dtype))
        self.fields[key] = field
        count = int(np.prod(field.shape, dtype=np.int64)) * field.dtype.itemsize
        self.nbytes += -(-max(count, 1) // ALIGNMENT) * ALIGNMENT

    def add_value(self, key: Any, value: ir.Value) -> None:
        assert value.dtype is not None
        nbytes(value)  # refuses a value without a static shape
        self.add(key, static_dims(value) or (), value.dtype.numpy())


class Layout:
    """Who is what, and where everything lies in the windows; equal on all ranks."""

    def __init__(self, model: ir.Model, size: int) -> None:
        options = server_options(model.graph)
        assert options is not None
        self.options: ServerOptions = options
        self.servers = options.servers
        self.workers = size - options.servers
        self.parts = [server_part(model, k) for k in range(self.servers)]
        self.published = [self._published(model.graph, k) for k in range(self.servers)]
        self.mailbox = [self._mailbox(k) for k in range(self.servers)]
        self.state = [self._state(k) for k in range(self.servers)]
        self.outputs = [v.name or "" for v in model.graph.outputs]
        self.entry = 2 + self.workers  # cells of a log entry: kind, learning rate, who
        self.ring = 2 * self.workers + 4
        self.log = PER_WORKER + 4 * self.workers
        self.text = (self.log + self.ring * self.entry) * CELL
        self.halves = -(-(self.text + TEXT) // ALIGNMENT) * ALIGNMENT

    def _published(self, graph: ir.Graph, server: int) -> Region:
        region = Region()
        for value in pulled(graph, server):
            region.add_value(value.name, value)
        if server == 0:
            region.add("::live", (self.workers,), np.int64)
            region.add("::outputs", (len(graph.outputs),), np.float64)
        return region

    def _mailbox(self, server: int) -> Region:
        region = Region()
        region.add("::samples", (1,), np.int64)
        for node in pushes(self.parts[server].graph, server):
            for k, value in enumerate(node.inputs):
                assert value is not None
                region.add_value((node.name, k), value)
        return region

    def _state(self, server: int) -> Region:
        region = Region()
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
        """Byte offset of the copy of all state that server 0 asks for."""
        return self.box(server, self.workers)

    def nbytes(self, rank: int) -> int:
        """Size of the window of ``rank``."""
        if rank >= self.servers:
            return 0
        return self.collected(rank) + (self.state[rank].nbytes if rank else 0)

    def table(self, name: int) -> slice:
        """Where the cells ``pushed`` (0), ``applied`` (1), ``done`` (2) or ``live`` (3) of all workers are."""
        start = PER_WORKER + name * self.workers
        return slice(start, start + self.workers)


PUSHES, APPLIED, DONE, LIVE = 0, 1, 2, 3


class Member:
    """What servers and workers have in common: cells, waiting, failing.

    Attributes:
        digest: the hash of the final state, in hexadecimal, once there is one.
    """

    digest = ""

    def __init__(self, layout: Layout, windows: Windows, comm: Communicator) -> None:
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


class Exchange:
    """A backend whose kernel for ``Push`` is one side of the exchange; everything else it leaves to ``backend``."""

    def __init__(self, backend: Backend, push: Callable[[ir.Node, Sequence[Array], Sequence[Array]], Run]) -> None:
        self.name = backend.name
        self._backend = backend
        self._push = push

    def prefers_native(self, node: ir.Node) -> bool:
        return _is_push(node) or self._backend.prefers_native(node)

    def bind_kernel(
        self, node: ir.Node, inputs: Sequence[Array | None], outputs: Sequence[Array], aliases: Mapping[int, int]
    ) -> Run:
        if _is_push(node):
            return self._push(node, [a for a in inputs if a is not None], outputs)
        return self._backend.bind_kernel(node, inputs, outputs, aliases)

    def computes_halves(self, node: ir.Node) -> bool:
        return self._backend.computes_halves(node)

    def bind_segment(self, model: onnx.ModelProto, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> Run:
        return self._backend.bind_segment(model, inputs, outputs)

    def run_whole(self, model: onnx.ModelProto, feeds: Mapping[str, Any]) -> dict[str, Any]:
        return self._backend.run_whole(model, feeds)

    def inplace(self, node: ir.Node) -> Mapping[int, int]:
        return self._backend.inplace(node)

    def all_finite(self, array: Array) -> bool:
        return self._backend.all_finite(array)

    def close(self) -> None:
        self._backend.close()


def _is_push(node: ir.Node) -> bool:
    return node.op_type == "Push" and node.domain == "graphc"


def plan_part(part: ir.Model, shapes: Mapping[str, Sequence[int]], backend: Backend) -> Plan:
    """The plan of a worker's or a server's part: its pushes stay."""
    return make_plan(part, shapes, native=backend.prefers_native, world_size=2, halves=backend.computes_halves)


class Server(Member):
    """One server: applies what the workers push, in the order of the log.

    Args:
        state: the whole state to start from; of server 0 it is brought up to date by :meth:`collect`.
        steps: steps that lie behind this state.
    """

    def __init__(
        self,
        layout: Layout,
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
        self.state.load({name: state.arrays[name] for name in self.state.arrays})
        shapes = {v.name or "": static_dims(v) or () for v in part.graph.inputs}
        engine = Exchange(backend, self._bind_push)
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
        """Finished steps, those before this run included."""
        return self.first + self.version

    @property
    def results(self) -> dict[str, float]:
        """The graph's outputs over what was applied last; only on server 0."""
        return {name: float(array) for name, array in self._executor.outputs.items()}

    def next(self) -> bool:
        """Apply the next step; False when all live workers have finished.

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
        """On server 0: bring ``state`` up to date with all servers."""
        for name in self.state.updated:
            np.copyto(state.arrays[name], self.state.arrays[name])
        if self.layout.servers == 1:
            return
        self._append(COLLECT, [])
        wanted = self.cell(0, LOG)
        for server in range(1, self.layout.servers):
            self.wait(lambda s=server: self.cell(s, COLLECTED) >= wanted, lambda s=server: f"server {s} (rank {s})")  # type: ignore[misc]
            region = self.layout.state[server]
            copy = np.zeros(region.nbytes, np.uint8)
            self._windows.get(server, self.layout.collected(server), copy)
            for name, field in region.fields.items():
                np.copyto(state.arrays[name], field.view(copy))

    def stop(self) -> None:
        """On server 0: let the other servers end."""
        self._append(STOP, [])

    def end(self, digest: str | None) -> None:
        """Return when every live worker has the final state; server 0 gives its hash, which :attr:`digest` then holds."""
        if self.index == 0 and digest is not None:
            self.tell(0, HASH, *np.frombuffer(bytes.fromhex(digest), np.int64).tolist())
            self.tell(0, ENDED, 1)
        self.wait(self._all_have_left, lambda: "a worker that has finished")
        self.read_digest()

    def _all_have_left(self) -> bool:
        gone = self._comm.gone()
        head = self.look()
        return bool(head[ENDED]) and all(
            state == 2 or self._rank(w) in gone for w, state in enumerate(head[self.layout.table(DONE)])
        )

    # The order of pushes ----------------------------------------------------------------------------------------------

    def _decide(self) -> tuple[int, list[int]]:
        """On server 0: what comes next, noted in the log for the others."""
        found: list[int] = []

        def ready() -> bool:
            gone = self._comm.gone()  # read first: what a dead worker has pushed before its end counts
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
        """Whose pushes make the next step."""
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
        pushed = self.look()[self.layout.table(PUSHES)]
        return [w for w in range(self.layout.workers) if self._live[w] and pushed[w] <= self._applied[w]]

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
        """Make the state visible: first the bytes, then the version, then who may go on."""
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
    """Sums of a low type are built in float32 and rounded once."""
    total = arrays[0].astype(np.float32)
    for array in arrays[1:]:
        ufunc(total, array.astype(np.float32), out=total)
    if reduce == "mean":
        total /= len(arrays)
    out[...] = total.astype(out.dtype)


class Worker(Member):
    """One worker: pulls, and pushes what its executor computes.

    Attributes:
        arrays: the state as pulled last, by name: views into memory that stays.
        count: finished steps of this worker.
    """

    def __init__(self, layout: Layout, windows: Windows, comm: Communicator, backend: Backend, *, check: bool) -> None:
        super().__init__(layout, windows, comm)
        self.index = comm.rank - layout.servers
        self.count, self.version = 0, 0
        self._check = check
        self.backend = Exchange(backend, self._bind_push)
        self._regions = [np.zeros(region.nbytes, np.uint8) for region in layout.published]
        self.arrays: dict[str, Array] = {}
        for region, memory in zip(layout.published, self._regions, strict=True):
            self.arrays |= {name: field.view(memory) for name, field in region.fields.items()}

    @property
    def live(self) -> list[int]:
        """The workers that take part in the next step of a synchronous run."""
        found: list[int] = np.flatnonzero(self.arrays["::live"]).tolist()
        return found

    @property
    def results(self) -> dict[str, float]:
        """The graph's outputs over the step that was pulled last."""
        return dict(zip(self.layout.outputs, self.arrays["::outputs"].tolist(), strict=True))

    def claim(self) -> int:
        """A number that no other worker gets, counted from 0."""
        return self._windows.add(0, TICKETS, 1)

    def pull(self) -> None:
        """Fetch the parameters, once they contain this worker's last push and no live worker is too far behind.

        Raises:
            NonFiniteError: of another rank.
            WorldError: no progress within the deadline, or a server is gone.
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
        """Finished steps of the live worker that has least of them."""
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
        """Read a whole version of every server's parameters, at least ``version``."""
        for server, memory in enumerate(self._regions):
            found = self.cell(server, VERSION)
            while True:
                if found < version:
                    self.wait(lambda s=server: self.cell(s, VERSION) >= version, lambda s=server: f"server {s} (rank {s})")  # type: ignore[misc]
                    found = self.cell(server, VERSION)
                self._windows.get(server, self.layout.half(server, found), memory)
                after = self.cell(server, VERSION)
                if after == found:  # the other half was written meanwhile, if any
                    break
                found = after
            if server == 0:
                self.version = found

    def begin(self, samples: int) -> None:
        """Note how many samples the step to come has."""
        count = np.array([samples], np.int64).view(np.uint8)
        for server in range(self.layout.servers):
            offset = self.layout.mailbox[server].fields["::samples"].offset
            self._windows.put(server, self.layout.box(server, self.index) + offset, count)

    def commit(self) -> None:
        """Everything is in the mailboxes: let it count."""
        self.count += 1
        self.tell(0, self.layout.table(PUSHES).start + self.index, self.count)

    def finish(self) -> None:
        """Take part no longer; returns with the final parameters when no worker does."""
        self.tell(0, self.layout.table(DONE).start + self.index, 1)
        self.wait(self._has_ended, lambda: "the other workers")
        self._fetch(self.cell(0, VERSION))
        self.read_digest()
        self.tell(0, self.layout.table(DONE).start + self.index, 2)

    def _has_ended(self) -> bool:
        head = self.look()
        if head[FAILED]:
            raise self.failure() or WorldError("the run has failed")
        return bool(head[ENDED])

    def _bind_push(self, node: ir.Node, inputs: Sequence[Array], outputs: Sequence[Array]) -> Run:
        """Test the operands, and put each into the mailboxes of those servers that get it."""
        puts: list[tuple[int, int, Array]] = []
        for server in range(self.layout.servers):
            fields = self.layout.mailbox[server].fields
            for k, array in enumerate(inputs):
                if (node.name, k) in fields:
                    offset = self.layout.box(server, self.index) + fields[node.name, k].offset
                    puts.append((server, offset, array.reshape(-1).view(np.uint8)))
        watched = [a.reshape(-1) for a, v in zip(inputs, node.inputs, strict=True) if v is not None and is_float(v)]
        if not self._check:
            watched = []
        finite, put = self.backend.all_finite, self._windows.put

        def push() -> None:
            for array in watched:
                if not finite(array):
                    raise NonFiniteStepError
            for server, offset, data in puts:
                put(server, offset, data)

        return push


def check_world(options: ServerOptions, size: int, workers: int | None) -> None:
    """Refuse a world that is no ``servers + workers`` ranks.

    Raises:
        UsageError: no rank is left for a worker.
        WorldError: another number of ranks than servers and the mesh's workers.
    """
    if size <= options.servers:
        raise UsageError(
            f"servers={options.servers} takes {options.servers} of {size} process(es) and leaves no worker; start at least "
            f"{options.servers + 1}: 'graphc launch -n {options.servers + 1} --keep-going …'"
        )
    if workers is not None and size != options.servers + workers:
        raise WorldError(
            f"the mesh data={workers} and {options.servers} parameter server(s) want {options.servers + workers} processes, "
            f"the world has {size}; start with 'graphc launch -n {options.servers + workers} --keep-going …'"
        )
