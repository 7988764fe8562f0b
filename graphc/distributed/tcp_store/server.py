"""The server of the TCP store, in rank 0: lets the ranks of a run exchange pieces, and nobody else.

All that it does is exchange: every rank hands in a piece for each rank and receives those meant for it. A rank that does not
come in time, leaves, loses its connection or stops the work is named to all that wait for it. Pieces are bytes, which the
server does not look at.

A connection that does not prove the job secret in time is closed with a line on stderr. It holds up nobody else.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from graphc.distributed.health.hang_report import join_ranks
from graphc.distributed.tcp_store.channel import BROKEN, Channel, Header, Hello, prove_to_rank
from graphc.distributed.tcp_store.job_secret import JOB_SECRET, LISTEN_ADDRESS, Place
from graphc.errors import WorldError, counted

FOREVER = 1e6  # seconds: what sockets and locks can wait at most
LINGER = 5.0  # seconds for which a server that ends waits for the others to leave
PROOF_TIME = 5.0  # seconds in which a connection must prove the secret
MOST_UNPROVEN = 64  # connections without a proof at one time, or two for each rank; a further one replaces the oldest
BACKLOG = 1024  # connections that the kernel holds until they are accepted
MOST_NOTES = 5  # lines about strangers
PAUSE = 0.05  # seconds between attempts to accept when descriptors or threads have run out
_ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def cut(body: bytearray, lengths: Sequence[int]) -> list[memoryview]:
    """Divide a body into pieces.

    Raises:
        ValueError: the lengths are not those of pieces that fill it.
    """
    if not isinstance(lengths, list) or not all(type(length) is int and length >= 0 for length in lengths):
        raise ValueError("lengths of pieces are whole numbers")
    if sum(lengths) != len(body):
        raise ValueError("the pieces do not fill the message")
    view, pieces, place = memoryview(body), [], 0
    for length in lengths:
        pieces.append(view[place : place + length])
        place += length
    return pieces


@dataclass(slots=True)
class _Round:
    """One exchange: what each rank came to, and the pieces it brought."""

    names: dict[int, str] = field(default_factory=dict)
    pieces: dict[int, list[memoryview]] = field(default_factory=dict)
    served: int = 0


class StoreServer:
    """Lets ``size`` ranks exchange pieces; listens at the addresses of ``place``, and at no others, from the moment it is made.

    Raises:
        WorldError: the port is taken, or the address is not one of this machine.
    """

    def __init__(self, size: int, place: Place, secret: bytes) -> None:
        self.size = size
        self._secret = secret
        self._listeners = _listen(place)
        self._changed = threading.Condition()
        self._rounds: dict[str, _Round] = {}
        self._unproven: dict[int, socket.socket] = {}
        self._notes = 0
        self._here: set[int] = set()
        self._gone: dict[int, str] = {}
        self._failure: str | None = None
        for listener in self._listeners:
            threading.Thread(target=self._accept, args=(listener,), name="graphc-store", daemon=True).start()

    def fail(self, reason: str) -> None:
        """Make every exchange fail with ``reason``."""
        with self._changed:
            self._failure = self._failure or reason
            self._changed.notify_all()

    def close(self) -> None:
        """Wait a little for the others to leave, and stop listening."""
        with self._changed:
            self._changed.wait_for(lambda: not self._here, LINGER)
            waiting = list(self._unproven.values())
        for connection in (*self._listeners, *waiting):
            _wake(connection)
        for listener in self._listeners:
            listener.close()

    # Who may connect ----------------------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if listener.fileno() < 0 or error.errno in (errno.EBADF, errno.EINVAL):  # closed
                    return
                time.sleep(PAUSE)  # a connection that is gone already, or no more descriptors
                continue
            with self._changed:
                self._unproven[id(connection)] = connection
                if len(self._unproven) > max(MOST_UNPROVEN, 2 * self.size):
                    _wake(self._unproven.pop(next(iter(self._unproven))))
            try:
                threading.Thread(target=self._serve, args=(connection,), name="graphc-store-rank", daemon=True).start()
            except RuntimeError:  # no more threads
                self._proven(connection)
                connection.close()
                time.sleep(PAUSE)

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            found = self._introduced(connection)
            if found is None:
                return
            hello, channel = found
            with contextlib.suppress(*BROKEN, KeyError, TypeError):
                while True:
                    channel.send(*self._answer(hello, *channel.receive()))
        if not hello.subgroup:
            self._drop(hello.rank)

    def _introduced(self, connection: socket.socket) -> tuple[Hello, Channel] | None:
        """The rank at the other end, once it has proved to be one and been admitted."""
        where = _peer(connection)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            hello, channel = prove_to_rank(connection, self._secret, time.monotonic() + PROOF_TIME)
            connection.settimeout(None)
        except BROKEN as error:
            self._note(f"a connection from {where} was closed: it did not prove {JOB_SECRET} ({_reason(error)})")
            return None
        finally:
            self._proven(connection)
        problem = self._admit(hello)
        if problem:
            self._note(f"a worker at {where} was refused: {problem}")
        try:
            channel.send({"error": problem})
        except OSError:
            if not problem and not hello.subgroup:
                self._drop(hello.rank)
            return None
        return None if problem else (hello, channel)

    def _proven(self, connection: socket.socket) -> None:
        with self._changed:
            self._unproven.pop(id(connection), None)

    def _note(self, text: str) -> None:
        with self._changed:
            self._notes += 1
            count = self._notes
        if count <= MOST_NOTES:
            more = "; further ones are not reported" if count == MOST_NOTES else ""
            with contextlib.suppress(OSError, ValueError, AttributeError):  # there is no stderr, or nobody reads it
                sys.stderr.write(f"graphc: {text}{more}\n")  # one call, so that lines of several threads do not mix
                sys.stderr.flush()

    def _admit(self, hello: Hello) -> str:
        """Why a rank may not take part; empty if it may."""
        rank, size = hello.rank, hello.size
        with self._changed:
            if size != self.size:
                problem = f"rank {rank} belongs to a world of {counted(size, 'worker')}, rank 0 to one of {self.size}"
                if len(self._here) + len(self._gone) < self.size:  # it is one of those that rank 0 waits for
                    self.fail(problem)
                return problem
            if not 0 <= rank < size:
                return f"there is no rank {rank} in a world of {counted(size, 'worker')}"
            if hello.subgroup:
                return "" if rank in self._here else f"rank {rank} has left already"
            if rank in self._here or rank in self._gone:
                return f"there is another rank {rank} already"
            self._here.add(rank)
        return ""

    def _drop(self, rank: int) -> None:
        with self._changed:
            self._here.discard(rank)
            self._gone.setdefault(rank, "lost its connection; it was killed or crashed, or its machine is gone")
            self._changed.notify_all()

    # What they exchange -------------------------------------------------------------------------------------------------

    def _answer(self, hello: Hello, header: Header, body: bytearray) -> tuple[Header, list[memoryview]]:
        """The answer to a message; raises ValueError, KeyError or TypeError where it is none of ours."""
        if header["call"] == "exchange":
            return self._exchange(hello.rank, header, cut(body, header["lengths"]))
        if header["call"] == "abort":
            self.fail(f"rank {hello.rank} stopped: {_text(header['reason'])}")
        if not hello.subgroup:
            with self._changed:
                self._gone[hello.rank] = "ended its program"
                self._changed.notify_all()
        return {}, []

    def _exchange(self, rank: int, header: Header, pieces: list[memoryview]) -> tuple[Header, list[memoryview]]:
        key, name, deadline = _text(header["key"]), _text(header["name"]), _seconds(header["deadline"])
        ranks = self._members(header["ranks"], rank)
        if len(pieces) not in (1, len(ranks)):
            raise ValueError("a rank brings one piece for each, or one for all")
        limit = time.monotonic() + deadline
        with self._changed:
            meeting = self._rounds.setdefault(key, _Round())
            meeting.names[rank], meeting.pieces[rank] = name, pieces
            self._changed.notify_all()
            while True:
                problem = self._problem(meeting, ranks, rank, name)
                if problem:
                    return {"error": problem}, []
                missing = [other for other in ranks if other not in meeting.pieces]
                if not missing:
                    break
                if not self._changed.wait(max(0.0, limit - time.monotonic())) and time.monotonic() >= limit:
                    return {"error": f"{join_ranks(missing)} did not come to {name} within {deadline:g} s"}, []
            meeting.served += 1
            if meeting.served == len(ranks):
                del self._rounds[key]
            place = ranks.index(rank)
            found = [meeting.pieces[other][place if len(meeting.pieces[other]) > 1 else 0] for other in ranks]
        return {"lengths": [len(piece) for piece in found]}, found

    def _members(self, value: Any, rank: int) -> list[int]:
        """The ranks of an exchange, of which ``rank`` is one."""
        if not isinstance(value, list) or not all(type(other) is int and 0 <= other < self.size for other in value):
            raise ValueError("not a list of ranks")
        if rank not in value or len(set(value)) < len(value):
            raise ValueError("a rank takes part in its exchanges once")
        return value

    def _problem(self, meeting: _Round, ranks: Sequence[int], rank: int, name: str) -> str:
        if self._failure is not None:
            return self._failure
        other = next((other for other, its in sorted(meeting.names.items()) if its != name), None)
        if other is not None:
            (first, one), (second, two) = sorted(((rank, name), (other, meeting.names[other])))
            return f"the ranks disagree: rank {first} is in {one} and rank {second} in {two}"
        for gone, reason in self._gone.items():  # the first is the cause of the others
            if gone in ranks and gone not in meeting.pieces:
                return f"rank {gone} {reason} while rank {rank} waits for it in {name}"
        return ""


def _listen(place: Place) -> list[socket.socket]:
    """One socket for each address of the host."""
    host, port = place
    sockets: list[socket.socket] = []
    failed: OSError | None = None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for family, address in dict.fromkeys((family, address) for family, *_, address in found):
            try:
                sockets.append(socket.create_server(address, family=family, backlog=BACKLOG))
            except OSError as error:
                failed = error
                if error.errno not in _ABSENT:
                    raise
    except (OSError, UnicodeError) as error:
        for listener in sockets:
            listener.close()
        sockets, failed = [], error if isinstance(error, OSError) else OSError(str(error))
    if sockets:
        return sockets
    if failed is not None and failed.errno == errno.EADDRINUSE:
        raise WorldError(f"rank 0 cannot listen at port {port} ({os.strerror(failed.errno)}); set another MASTER_PORT")
    raise WorldError(
        f"rank 0 cannot listen at {host}:{port} ({_reason(failed)}); set MASTER_ADDR to the address of its machine, or "
        f"{LISTEN_ADDRESS} to one that rank 0 has, if the others reach it at another"
    )


def _wake(connection: socket.socket) -> None:
    """End whatever waits for this socket; its own thread closes it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _peer(connection: socket.socket) -> str:
    try:
        host, port, *_ = connection.getpeername()
    except OSError:
        return "somewhere"
    return f"{host}:{port}"


def _reason(error: BaseException | None) -> str:
    if isinstance(error, socket.gaierror):
        return str(error.args[-1])
    number = getattr(error, "errno", None)
    return os.strerror(number) if number else str(error)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("not a text")
    return value


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("not a number of seconds")
    return min(float(value), FOREVER)
