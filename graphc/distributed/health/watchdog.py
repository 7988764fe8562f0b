"""Learning at once that another worker of this machine is gone.

A worker killed in mid-step leaves the others blocked inside an AllReduce, where no Python runs. A daemon thread therefore
waits on the process descriptors of the peers. When a peer ends without having left in good order, it says which rank is gone
and ends this process; so it does when a peer left in good order while this rank waits for it in a collective, when a peer
is in another collective, and when a collective has not ended by its deadline: then it reads the flight recorders of the
peers and says who has not come.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import shutil
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Protocol

from graphc.distributed.communicator import Handle, find_deadline
from graphc.distributed.health import hang_report
from graphc.distributed.health.flight_recorder import Entry, Ring, dump, last_of
from graphc.distributed.health.status_board import Board, WorkerStatus
from graphc.distributed.host_queue import QueuedCommunicator
from graphc.distributed.world import World
from graphc.errors import GraphcError

RUN_DIRECTORY = "GRAPHC_RUN_DIR"
"""Environment variable set by the launcher: directory that holds the notice board."""

LAUNCHER = "GRAPHC_LAUNCHER_PID"
"""Environment variable set by the launcher: its process id."""

KEEP_GOING = "GRAPHC_KEEP_GOING"
"""Environment variable set by the launcher when the death of a process does not make mpiexec end the others."""

BOARD_FILE = "board"
POLL = 0.25  # seconds between looks at what has no process descriptor
GRACE = 0.5  # seconds between the message and the end
RECENT = 64  # so many collectives a peer may be ahead or behind when what the ranks do is compared
PATIENCE = 3.0  # seconds a collective may hang after a peer left in good order


class ProcessWatch:
    """A daemon thread that calls back once for every watched process that ends."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[int | None, Callable[[], None]]] = {}
        self._lock = threading.Lock()
        self.idle: Callable[[], None] = lambda: None
        threading.Thread(target=self._run, name="graphc-watch", daemon=True).start()

    def add(self, pid: int, gone: Callable[[], None]) -> None:
        """Call ``gone()`` on the watching thread once process ``pid`` has ended."""
        try:
            descriptor = os.pidfd_open(pid)
        except (OSError, AttributeError):  # already gone, or a kernel or sandbox without process descriptors
            descriptor = None
        with self._lock:
            self._entries[pid] = (descriptor, gone)

    def _run(self) -> None:
        while True:
            with self._lock:
                entries = dict(self._entries)
            poll = select.poll()
            by_descriptor = {d: pid for pid, (d, _) in entries.items() if d is not None}
            for descriptor in by_descriptor:
                poll.register(descriptor, select.POLLIN)
            ended = [by_descriptor[d] for d, _ in poll.poll(POLL * 1000)]
            ended += [pid for pid, (d, _) in entries.items() if d is None and not is_alive(pid)]
            for pid in ended:
                with self._lock:
                    own, gone = self._entries.pop(pid)
                if own is not None:
                    os.close(own)
                gone()
            self.idle()


def is_alive(pid: int) -> bool:
    """Whether a process of this machine is there and no zombie."""
    return process_state(pid) not in "ZX"


def is_stopped(pid: int) -> bool:
    """Whether a process of this machine is stopped, by SIGSTOP or a debugger."""
    return process_state(pid) in "Tt"


def process_state(pid: int) -> str:
    """The kernel's letter for the state of a process; ``X`` where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


class WatchedCommunicator(Protocol):
    """A communicator whose collectives have a deadline.

    Attributes:
        ring: where it notes them, as number ``number``.
        current: the one under way.
    """

    ring: Ring
    number: int
    current: Handle | None
    deadline: float


class Watch:
    """This process's side of the board: its own notice, and the watch over its peers."""

    def __init__(self, board: Board, rank: int, *, launched: bool) -> None:
        self.board = board
        self.rank = rank
        self.launched = launched
        self.world_size = board.size
        self.end_all: Callable[[int], None] = os._exit  # a transport knows how to end the ranks of other machines too
        self.tell: Callable[[str], None] = lambda message: None  # and how to say why, before this process ends
        self.ring = board.ring(rank)
        self.communicators: weakref.WeakSet[WatchedCommunicator] = weakref.WeakSet()
        self.lost: frozenset[int] = frozenset()
        self._peers: list[int] = []
        self._local = list(range(board.size)) if launched else [rank]
        self._joining: Handle | None = None
        self._waited: dict[int, tuple[float, float]] = {}  # by communicator: since when, and how long of that counts
        self._looked = time.monotonic()
        board.write(rank, WorkerStatus.RUNNING)
        self.processes = ProcessWatch()
        self.processes.idle = self._look
        if launched:
            self.processes.add(int(os.environ[LAUNCHER]), _launcher_gone)

    def follow(self, ranks: list[int]) -> None:
        """Watch these ranks of this machine; each has written its process id on the board."""
        self._local = ranks
        for rank in ranks:
            if rank != self.rank and rank not in self._peers:
                self._peers.append(rank)
                self.processes.add(self.board.read(rank).pid, lambda rank=rank: self._gone(rank))  # type: ignore[misc]

    def add(self, communicator: WatchedCommunicator) -> None:
        """Look after the collectives of ``communicator``; every rank adds its own at the same point."""
        communicator.ring = self.ring
        communicator.number = next(_numbers)
        self.communicators.add(communicator)

    def goodbye(self) -> None:
        """Say that this worker leaves in good order."""
        self.board.write(self.rank, WorkerStatus.LEFT)

    def fail(self, text: str, code: int = 1) -> None:
        """Say why this worker ends, before it does."""
        self.board.write(self.rank, WorkerStatus.FAILED, text=text, code=code)

    def introduce(self, name: str, *, spare: bool) -> None:
        """Say what messages call this rank, and whether the others can go on without it."""
        self.board.write(self.rank, WorkerStatus.SPARE if spare else WorkerStatus.RUNNING, text=name)

    def _gone(self, rank: int) -> None:
        notice = self.board.read(rank)
        if notice.state is WorkerStatus.LEFT:
            return
        if notice.state is WorkerStatus.SPARE:
            self.lost |= {rank}
            return
        told = notice.text and notice.state is not WorkerStatus.RUNNING
        reason = f"failed: {notice.text}" if told else "ended without a word; it was killed or crashed"
        self._end(f"{notice.called(rank)} is gone: {reason}")

    @contextlib.contextmanager
    def joining(self) -> Iterator[None]:
        """Around the call in which all processes of the world meet for the first time."""
        handle = Handle(lambda: None, "join")
        handle.since = time.monotonic()
        place = self.ring.begin(0, 1, -1, "join", "", "", 0, handle.since)
        self._joining = handle
        yield
        self._joining = None
        self.ring.end(place, time.monotonic())

    def _in_progress(self) -> Iterator[tuple[int, Handle, float]]:
        """Number of the communicator, collective under way, and its deadline."""
        if self._joining is not None:
            yield 0, self._joining, find_deadline()
        for communicator in self.communicators:
            if communicator.current is not None:
                yield communicator.number, communicator.current, communicator.deadline

    def _look(self) -> None:
        """Look after the collectives under way. Time in which this process itself was stopped does not count."""
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, 4 * POLL), now
        for number, handle, deadline in self._in_progress():
            before, seconds = self._waited.get(number, (0.0, 0.0))
            seconds = seconds + passed if before == handle.since else min(now - handle.since, passed)
            self._waited[number] = (handle.since, seconds)
            self._look_for_desertion(handle, now)
            if seconds > deadline:
                self._look_for_the_late(number, deadline)
        self._look_for_differences()

    def _look_for_desertion(self, current: Handle, now: float) -> None:
        for rank in self._peers:
            notice = self.board.read(rank)
            if notice.state is WorkerStatus.LEFT and now - max(notice.time, current.since) > PATIENCE:
                self._end(f"rank {rank} ended its program while rank {self.rank} waits for it in {current.what!r}")

    def _look_for_the_late(self, number: int, deadline: float) -> None:
        logs = self.logs()
        wanted = last_of(logs[self.rank], number)
        if wanted is not None and wanted.end is None:
            pids = {rank: self.board.read(rank).pid for rank in self._local}
            self._end(hang_report.late(wanted, deadline, logs, pids, self._states(), time.monotonic(), self.world_size))

    def _look_for_differences(self) -> None:
        """Collectives of one size pass even where the ranks mean different ones."""
        for rank in self._peers:
            if not self._differs(rank):
                continue
            time.sleep(0.001)  # what another process is just writing can be half there, but not for long
            if self._differs(rank):
                self._end(hang_report.disagreement({rank: self.board.ring(rank).entries() for rank in (self.rank, rank)}))

    def _differs(self, rank: int) -> bool:
        """Whether the newest collective that ``rank`` has come to as well is another one there, or one before it was."""
        ring = self.board.ring(rank)
        for entry in self.ring.newest(RECENT):
            other = ring.find(entry.number)
            if other is not None and entry.place == other.place:
                return entry.contradicts(other) or entry.has_parted(other)
        return False

    def logs(self) -> dict[int, list[Entry]]:
        """The flight logs of all ranks of this machine."""
        return {rank: self.board.ring(rank).entries() for rank in self._local}

    def _states(self) -> dict[int, str]:
        """Words on the ranks of this machine that do not run."""
        words = {}
        for rank in self._local:
            notice = self.board.read(rank)
            if notice.state is WorkerStatus.ABSENT:
                words[rank] = "has not started"
            elif is_stopped(notice.pid):
                words[rank] = "is stopped (SIGSTOP)"
        return words

    def dump(self, reason: str) -> str:
        """Write the flight logs of this machine's ranks to files; returns words about where they are."""
        return dump(self.logs(), self.world_size, self.board.stamp, reason)

    def _end(self, message: str) -> None:
        self.board.write(self.rank, WorkerStatus.STOPPED, text=message, code=1)
        self.tell(message)
        if not self.launched:  # the launcher reads the board and says it once
            print(f"graphc: {'; '.join(filter(None, (message, self.dump(message))))}", file=sys.stderr, flush=True)
        time.sleep(GRACE)
        os._exit(1)


def _launcher_gone() -> None:
    """A killed launcher cannot clean up after itself."""
    shutil.rmtree(os.environ[RUN_DIRECTORY], ignore_errors=True)
    os._exit(1)


_watch: Watch | None = None
_numbers = itertools.count(1)


def join_launcher() -> Watch | None:
    """Take this process's place on the launcher's board; None when no launcher of ours started it."""
    global _watch
    directory = os.environ.get(RUN_DIRECTORY)
    if _watch is None and directory is not None:
        from graphc.distributed.world import find_world

        world = find_world()
        _watch = Watch(Board(Path(directory) / BOARD_FILE, world.size), world.rank, launched=True)
    return _watch


def watch_peers(communicator: QueuedCommunicator, world: World) -> Watch:
    """Start watching all ranks on this machine; every rank calls it at the same point."""
    global _watch
    mine = join_launcher()
    if mine is None:
        mine = _watch = _open_own_board(communicator, world)
    mine.add(communicator)
    hosts = communicator.allgather_object(host_name())
    mine.follow([rank for rank, host in enumerate(hosts) if host == hosts[world.rank]])
    return mine


def _open_own_board(communicator: QueuedCommunicator, world: World) -> Watch:
    """Without our launcher the lowest rank of each machine makes the board, and unlinks it once all have mapped it."""
    path = Path(tempfile.gettempdir()) / f"graphc-board-{os.getpid()}-{time.monotonic_ns()}"
    offers = communicator.allgather_object((host_name(), str(path)))
    leader = next(rank for rank, (host, _) in enumerate(offers) if host == offers[world.rank][0])
    if leader == world.rank:
        Board.create(path, world.size).close()
    communicator.barrier()
    board = Board(Path(offers[leader][1]), world.size)
    watch = Watch(board, world.rank, launched=False)
    communicator.barrier()
    if leader == world.rank:
        path.unlink()
    _report_uncaught(watch)
    return watch


def _report_uncaught(watch: Watch) -> None:
    """Without our launcher, an uncaught exception would leave this rank in MPI_Finalize, waiting for the others forever."""
    previous = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text = str(error) if isinstance(error, GraphcError) else f"{kind.__name__}: {error}"
        watch.fail(text, getattr(error, "exit_code", 1))
        previous(kind, error, trace)
        where = watch.dump(f"rank {watch.rank} failed: {text}")
        print(f"graphc: {'; '.join(filter(None, (f'rank {watch.rank} failed: {text}', where)))}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        watch.end_all(1)

    sys.excepthook = report


def host_name() -> str:
    """A name of this running system; host names are not unique among containers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{os.uname().nodename}/{boot}/{os.readlink('/proc/self/ns/pid')}"
