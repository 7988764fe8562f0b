"""Watches the other workers of this machine and ends this process when one of them dies or blocks a collective.

A worker killed in mid-step leaves the others blocked inside an AllReduce, where no Python runs. A daemon thread therefore polls
the process descriptors of the peers. It names the rank and ends this process when

* a peer ends without having left in good order;
* a peer has left in good order and this rank waits for it in a collective;
* a peer is in a different collective;
* a collective has not ended by its deadline: the flight recorders of the peers say who has not reached it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import shutil
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from graphc.distributed.health import hang_report
from graphc.distributed.health.flight_recorder import Entry, FlightRecorder, dump, last_of
from graphc.distributed.health.status_board import RankState, StatusBoard
from graphc.errors import PeerError, describe_error

if TYPE_CHECKING:
    from graphc.distributed.communicator import Handle
    from graphc.distributed.host_queue import QueuedCommunicator
    from graphc.distributed.world import World

RUN_DIRECTORY = "GRAPHC_RUN_DIR"
"""Environment variable set by the launcher: folder that holds the status board."""

LAUNCHER = "GRAPHC_LAUNCHER_PID"
"""Environment variable set by the launcher: its process id."""

KEEP_GOING = "GRAPHC_KEEP_GOING"
"""Environment variable set by the launcher when mpiexec lets the others continue after the death of a process."""

BOARD_FILE = "board"
POLL = 0.25  # seconds between checks of the collectives, and of processes without a descriptor
GRACE = 0.5  # seconds between the message and the end
RECENT = 64  # collectives that a peer may be ahead or behind for the ranks to be compared
LEAVE_GRACE = 3.0  # seconds a collective may take after a peer has left in good order


class ProcessWatch:
    """A daemon thread that calls back once for each watched process that ends.

    Attributes:
        tick: called on the thread after each poll.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[int | None, Callable[[], None]]] = {}
        self._lock = threading.Lock()
        self.tick: Callable[[], None] = lambda: None
        threading.Thread(target=self._run, name="graphc-watch", daemon=True).start()

    def add(self, pid: int, ended: Callable[[], None]) -> None:
        """Call ``ended()`` on the thread once process ``pid`` has ended."""
        try:
            descriptor = os.pidfd_open(pid)
        except (OSError, AttributeError):  # already gone, or a kernel or sandbox without process descriptors
            descriptor = None
        with self._lock:
            self._entries[pid] = (descriptor, ended)

    def _run(self) -> None:
        while True:
            with self._lock:
                entries = dict(self._entries)
            poll = select.poll()
            by_descriptor = {d: pid for pid, (d, _) in entries.items() if d is not None}
            for descriptor in by_descriptor:
                poll.register(descriptor, select.POLLIN)
            pids = [by_descriptor[d] for d, _ in poll.poll(POLL * 1000)]
            pids += [pid for pid, (d, _) in entries.items() if d is None and not is_alive(pid)]
            for pid in pids:
                with self._lock:
                    own, ended = self._entries.pop(pid)
                if own is not None:
                    os.close(own)
                ended()
            self.tick()


def is_alive(pid: int) -> bool:
    """Whether a process of this machine exists and is not a zombie."""
    return process_state(pid) not in "ZX"


def is_stopped(pid: int) -> bool:
    """Whether a process of this machine is stopped, by SIGSTOP or a debugger."""
    return process_state(pid) in "Tt"


def process_state(pid: int) -> str:
    """The kernel's letter for the state of a process; ``X`` if it does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


class WatchedCommunicator(Protocol):
    """A communicator whose collectives have a deadline.

    Attributes:
        recorder: where it records them, under ``number``.
        current: the collective under way.
        ranks: those that take part, by their numbers in the world.
        group: what they have in common; empty for the world.
    """

    recorder: FlightRecorder
    number: int
    current: Handle | None
    deadline: float
    ranks: Sequence[int]
    group: str


class Watchdog:
    """Writes this rank's status to the board and watches its peers.

    Attributes:
        end_all: ends all ranks, on other machines too where the transport can, with an exit code.
        notify: tells other machines why, before this process ends.
        lost: spare ranks that died.
    """

    def __init__(self, board: StatusBoard, rank: int, *, launched: bool) -> None:
        self.board = board
        self.rank = rank
        self.launched = launched
        self.world_size = board.size
        self.end_all: Callable[[int], None] = os._exit
        self.notify: Callable[[str], None] = lambda message: None
        self.recorder = board.recorder(rank)
        self.communicators: weakref.WeakSet[WatchedCommunicator] = weakref.WeakSet()
        self.lost: frozenset[int] = frozenset()
        self._peers: list[int] = []
        self._local = list(range(board.size)) if launched else [rank]
        self._joining: tuple[Handle, float] | None = None
        self._waited: dict[int, tuple[float, float]] = {}  # by communicator: start of the collective, seconds that count
        self._checked = time.monotonic()
        board.write(rank, RankState.RUNNING)
        self.processes = ProcessWatch()
        self.processes.tick = self._check
        if launched:
            self.processes.add(int(os.environ[LAUNCHER]), _launcher_gone)

    def watch(self, ranks: list[int]) -> None:
        """Watch these ranks of this machine, which have written their process ids to the board."""
        self._local = ranks
        for rank in ranks:
            if rank != self.rank and rank not in self._peers:
                self._peers.append(rank)
                self.processes.add(self.board.read(rank).pid, lambda rank=rank: self._ended(rank))  # type: ignore[misc]

    def add(self, communicator: WatchedCommunicator, number: int | None = None) -> None:
        """Apply the deadline of ``communicator`` to its collectives; every rank adds its own at the same point.

        Args:
            number: of a subgroup.
        """
        communicator.recorder = self.recorder
        communicator.number = next(_numbers) if number is None else number
        self.communicators.add(communicator)

    def leave(self) -> None:
        """Record that this worker leaves in good order."""
        self.board.write(self.rank, RankState.LEFT)

    def fail(self, text: str, code: int = 1) -> None:
        """Record why this worker is about to end: its own failure, or that of another, if a PeerError is being handled."""
        state = RankState.STOPPED if isinstance(sys.exception(), PeerError) else RankState.FAILED
        self.board.write(self.rank, state, text=text, code=code)

    def introduce(self, name: str, *, spare: bool) -> None:
        """Set this rank's name in messages, and whether the others can continue without it."""
        self.board.write(self.rank, RankState.SPARE if spare else RankState.RUNNING, text=name)

    def _ended(self, rank: int) -> None:
        status = self.board.read(rank)
        if status.state is RankState.LEFT:
            return
        if status.state is RankState.SPARE:
            self.lost |= {rank}
            return
        known = status.text and status.state is not RankState.RUNNING
        reason = f"failed: {status.text}" if known else "ended without a word; it was killed or crashed"
        self._end(f"{status.label(rank)} is gone: {reason}")

    @contextlib.contextmanager
    def joining(self, handle: Handle, deadline: float) -> Iterator[None]:
        """Watch the call in which all processes of the world meet for the first time, within ``deadline`` seconds."""
        handle.since = time.monotonic()
        place = self.recorder.begin(0, 1, -1, handle, handle.since)
        self._joining = handle, deadline
        yield
        self._joining = None
        self.recorder.end(place, time.monotonic())

    def _in_progress(self) -> Iterator[tuple[int, Handle, float, Sequence[int], str]]:
        """Number of each communicator with a collective under way, the collective, its deadline, and who takes part."""
        if self._joining is not None:
            yield 0, *self._joining, range(self.world_size), ""
        for communicator in list(self.communicators):
            current = communicator.current
            if current is not None:
                yield communicator.number, current, communicator.deadline, communicator.ranks, communicator.group

    def _check(self) -> None:
        """Check the collectives under way. Time in which this process itself was stopped does not count."""
        now = time.monotonic()
        passed, self._checked = min(now - self._checked, 4 * POLL), now
        for number, handle, deadline, ranks, group in self._in_progress():
            before, seconds = self._waited.get(number, (0.0, 0.0))
            seconds = seconds + passed if before == handle.since else min(now - handle.since, passed)
            self._waited[number] = (handle.since, seconds)
            self._check_left(handle, ranks, now)
            if seconds > deadline:
                self._check_deadline(number, deadline, ranks, group)
        self._check_same()

    def _check_left(self, current: Handle, ranks: Sequence[int], now: float) -> None:
        for rank in self._peers:
            if rank not in ranks:
                continue
            status = self.board.read(rank)
            if status.state is RankState.LEFT and now - max(status.time, current.since) > LEAVE_GRACE:
                self._end(f"rank {rank} ended its program while rank {self.rank} waits for it in {current.what!r}")

    def _check_deadline(self, number: int, deadline: float, ranks: Sequence[int], group: str) -> None:
        logs = self.logs()
        wanted = last_of(logs[self.rank], number)
        if wanted is not None and wanted.end is None:
            pids = {rank: self.board.read(rank).pid for rank in self._local}
            self._end(hang_report.explain_timeout(wanted, deadline, logs, pids, self._states(), time.monotonic(), ranks, group))

    def _check_same(self) -> None:
        """Compare collectives with the peers: different ones of equal size do not fail by themselves."""
        for rank in self._peers:
            if not self._differs(rank):
                continue
            time.sleep(0.001)  # the other process may be in the middle of writing an entry
            if self._differs(rank):
                self._end(hang_report.disagreement({rank: self.board.recorder(rank).entries() for rank in (self.rank, rank)}))

    def _differs(self, rank: int) -> bool:
        """Whether the newest collective that this rank and ``rank`` have both reached differs, or an earlier one did."""
        recorder = self.board.recorder(rank)
        for entry in self.recorder.newest(RECENT):
            other = recorder.find(entry.number)
            if other is not None and entry.place == other.place:
                return entry.differs_from(other) or entry.diverged_from(other)
        return False

    def logs(self) -> dict[int, list[Entry]]:
        """The flight logs of all ranks of this machine."""
        return {rank: self.board.recorder(rank).entries() for rank in self._local}

    def _states(self) -> dict[int, str]:
        """Why ranks of this machine do not run."""
        states = {}
        for rank in self._local:
            status = self.board.read(rank)
            if status.pid and is_stopped(status.pid):
                states[rank] = "is stopped (SIGSTOP)"
            elif status.state is RankState.ABSENT:
                states[rank] = "has not begun the program" if status.pid else "has not been started"
        return states

    def report(self, message: str) -> None:
        """Write the flight logs of this machine's ranks and print ``message``, unless the launcher does it for all ranks."""
        if not self.launched:
            logs = dump(self.logs(), self.world_size, message, self.board.stamp)
            print(f"graphc: {'; '.join(filter(None, (message, logs)))}", file=sys.stderr, flush=True)

    def _end(self, message: str) -> None:
        self.board.write(self.rank, RankState.STOPPED, text=message, code=1)
        self.notify(message)
        self.report(message)
        time.sleep(GRACE)
        os._exit(1)


def _launcher_gone() -> None:
    """End this process and remove the folder of the run, which a killed launcher leaves behind."""
    shutil.rmtree(os.environ[RUN_DIRECTORY], ignore_errors=True)
    os._exit(1)


_watchdog: Watchdog | None = None
_numbers = itertools.count(1)


def join_launcher(world: World) -> Watchdog | None:
    """The watchdog of this process on the launcher's status board; None if ``graphc launch`` did not start the process."""
    global _watchdog
    directory = os.environ.get(RUN_DIRECTORY)
    if _watchdog is None and directory is not None:
        _watchdog = Watchdog(StatusBoard(Path(directory) / BOARD_FILE, world.size), world.rank, launched=True)
    return _watchdog


def watch_peers(communicator: QueuedCommunicator, world: World) -> Watchdog:
    """Start watching all ranks of this machine; every rank calls it at the same point."""
    global _watchdog
    own = join_launcher(world)
    if own is None:
        own = _watchdog = _open_own_board(communicator, world)
    own.add(communicator)
    hosts = communicator.allgather_object(host_name())
    own.watch([rank for rank, host in enumerate(hosts) if host == hosts[world.rank]])
    return own


def _open_own_board(communicator: QueuedCommunicator, world: World) -> Watchdog:
    """Without a launcher: the lowest rank of each machine makes the board, in memory, so that no file is left behind."""
    descriptor = os.memfd_create("graphc-board")
    offers = communicator.allgather_object((host_name(), f"/proc/{os.getpid()}/fd/{descriptor}"))
    leader = next(rank for rank, (host, _) in enumerate(offers) if host == offers[world.rank][0])
    path = Path(offers[leader][1])
    if leader == world.rank:
        StatusBoard.create(path, world.size).close()
    communicator.barrier()
    watchdog = Watchdog(StatusBoard(path, world.size), world.rank, launched=False)
    communicator.barrier()
    os.close(descriptor)
    _report_uncaught(watchdog)
    return watchdog


def _report_uncaught(watchdog: Watchdog) -> None:
    """End all ranks on an uncaught exception, after which this one would wait in MPI_Finalize for the others forever."""
    previous = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text, code = describe_error(error)
        watchdog.fail(text, code)
        previous(kind, error, trace)
        watchdog.report(f"rank {watchdog.rank} failed: {text}")
        sys.stdout.flush()
        watchdog.end_all(1)

    sys.excepthook = report


def host_name() -> str:
    """A name of this machine and container; host names alone are not unique among containers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{os.uname().nodename}/{boot}/{os.readlink('/proc/self/ns/pid')}"
