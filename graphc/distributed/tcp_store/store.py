"""The meeting point of ranks that nobody but their environment introduces: a small server in rank 0, reached by TCP.

Rank 0 listens at ``MASTER_ADDR:MASTER_PORT``; every rank, rank 0 too, holds one connection to it. All that it does is exchange:
every rank hands in a piece for each rank and receives those meant for it. A rank that does not come in time, leaves, loses its
connection or stops the work is named to all that wait for it.

Pieces are bytes, which the server does not look at. There is no authentication: as with MPI, NCCL and other launchers, the
network between the machines is trusted.

A message is a header of JSON and a body, ``<length of header><length of body><header><body>``, lengths little-endian.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from graphc.distributed.health.hang_report import join_ranks
from graphc.errors import UsageError, WorldError, counted

PROTOCOL = "graphc-store-1"
RETRY = 0.1  # seconds between attempts to reach rank 0
SLACK = 10.0  # seconds beyond the deadline in which the server's answer must come
FOREVER = 1e6  # seconds: what sockets and locks can wait at most
LINGER = 5.0  # seconds for which a server that ends waits for the others to leave
LOCAL = ("localhost", "127.0.0.1")
_LENGTHS = struct.Struct("<IQ")

Header = dict[str, Any]


def meeting_place(environment: Mapping[str, str] | None = None) -> tuple[str, int]:
    """Host and port of rank 0, from ``MASTER_ADDR`` and ``MASTER_PORT``.

    torchrun keeps a server of its own at that port; ours is at the next one then.

    Raises:
        UsageError: one of them is missing or no port.
    """
    found = os.environ if environment is None else environment
    try:
        host, text = found["MASTER_ADDR"], found["MASTER_PORT"]
    except KeyError as error:
        raise UsageError(f"the environment does not set {error.args[0]}: where rank 0 listens for the others") from None
    if not text.isdecimal() or not 0 < int(text) < 65535:
        raise UsageError(f"MASTER_PORT={text!r} is no port that rank 0 can listen at")
    return host, int(text) + (found.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true")


@dataclass(slots=True)
class _Round:
    """One exchange: what each rank came to, and the pieces it brought."""

    names: dict[int, str] = field(default_factory=dict)
    pieces: dict[int, list[memoryview]] = field(default_factory=dict)
    served: int = 0


class StoreServer:
    """Lets ``size`` ranks exchange pieces; listens from the moment it is made, to other machines unless its own name is local.

    Raises:
        WorldError: the port is taken.
    """

    def __init__(self, size: int, place: tuple[str, int]) -> None:
        self.size = size
        host, port = place
        local, both = host in LOCAL, socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both and not local else socket.AF_INET
        try:
            self._listener = socket.create_server(
                ("127.0.0.1" if local else "", port), family=family, backlog=max(64, size), dualstack_ipv6=both and not local
            )
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            raise WorldError(f"rank 0 cannot listen at port {port} ({reason}); set another MASTER_PORT") from None
        self._changed = threading.Condition()
        self._rounds: dict[str, _Round] = {}
        self._here: set[int] = set()
        self._gone: dict[int, str] = {}
        self._failure: str | None = None
        threading.Thread(target=self._accept, name="graphc-store", daemon=True).start()

    def fail(self, reason: str) -> None:
        """Make every exchange fail with ``reason``."""
        with self._changed:
            self._failure = self._failure or reason
            self._changed.notify_all()

    def close(self) -> None:
        """Wait a little for the others to leave, and stop listening."""
        with self._changed:
            self._changed.wait_for(lambda: not self._here, LINGER)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), name="graphc-store-rank", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        rank = None
        with connection, contextlib.suppress(OSError, ValueError, KeyError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            header, _ = _receive(connection)
            problem = self._admit(header)
            _send(connection, {"protocol": PROTOCOL, "error": problem})
            if not problem:
                rank = int(header["rank"]) if not header["subgroup"] else None
                own = int(header["rank"])
                while True:
                    header, body = _receive(connection)
                    _send(connection, *self._answer(own, header, body, leaves=rank is not None))
        if rank is not None:
            self._drop(rank)

    def _admit(self, header: Header) -> str:
        if header.get("protocol") != PROTOCOL:
            return f"the store speaks {PROTOCOL}"
        rank, size = int(header["rank"]), int(header["size"])
        with self._changed:
            if size != self.size:
                return f"rank {rank} belongs to a world of {counted(size, 'worker')}, rank 0 to one of {self.size}"
            if header["subgroup"]:
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

    def _answer(self, rank: int, header: Header, body: bytearray, *, leaves: bool) -> tuple[Header, list[memoryview]]:
        if header["call"] == "exchange":
            return self._exchange(rank, header, _cut(body, header["lengths"]))
        if header["call"] == "abort":
            self.fail(f"rank {rank} stopped: {header['reason']}")
        if leaves:
            with self._changed:
                self._gone[rank] = "ended its program"
                self._changed.notify_all()
        return {}, []

    def _exchange(self, rank: int, header: Header, pieces: list[memoryview]) -> tuple[Header, list[memoryview]]:
        key, name, limit = header["key"], header["name"], time.monotonic() + header["deadline"]
        ranks: list[int] = header["ranks"]
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
                    return {"error": f"{join_ranks(missing)} did not come to {name} within {header['deadline']:g} s"}, []
            meeting.served += 1
            if meeting.served == len(ranks):
                del self._rounds[key]
            place = ranks.index(rank)
            found = [meeting.pieces[other][place if len(meeting.pieces[other]) > 1 else 0] for other in ranks]
        return {"lengths": [len(piece) for piece in found]}, found

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


class Store:
    """The connection of one rank.

    Attributes:
        server: on rank 0.

    Args:
        rank, size: of this worker.
        place: host and port of rank 0; see :func:`meeting_place`.
        deadline: seconds in which rank 0 must be reached.
        subgroup: whether it is a further connection of this rank, for the exchanges of a subgroup.

    Raises:
        WorldError: nobody listens there, something else does, or rank 0 knows another world.
    """

    def __init__(self, rank: int, size: int, place: tuple[str, int], deadline: float, *, subgroup: bool = False) -> None:
        self.rank, self.size = rank, size
        self._where = f"{place[0]}:{place[1]}"
        self._busy = threading.Lock()
        self.server = StoreServer(size, place) if rank == 0 and not subgroup else None
        self._socket = self._connect(place, deadline)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        try:
            self._socket.settimeout(SLACK)
            _send(self._socket, {"protocol": PROTOCOL, "rank": rank, "size": size, "subgroup": subgroup})
            answer, _ = _receive(self._socket)
        except (OSError, ValueError):
            answer = {}
        if answer.get("protocol") != PROTOCOL:
            raise WorldError(f"what listens at {self._where} is not rank 0 of this training; set another MASTER_PORT")
        if answer["error"]:
            raise WorldError(answer["error"])

    def _connect(self, place: tuple[str, int], deadline: float) -> socket.socket:
        limit = time.monotonic() + min(deadline, FOREVER)
        while True:
            try:
                return socket.create_connection(place, timeout=max(RETRY, limit - time.monotonic()))
            except OSError as error:
                if time.monotonic() >= limit:
                    raise WorldError(
                        f"rank {self.rank} could not reach rank 0 at {self._where} within {deadline:g} s "
                        f"({error.strerror or error}); is rank 0 running, and are MASTER_ADDR and MASTER_PORT right?"
                    ) from None
                time.sleep(RETRY)

    def exchange(
        self, key: str, name: str, pieces: Sequence[bytes | memoryview], deadline: float, ranks: Sequence[int] | None = None
    ) -> list[memoryview]:
        """Give every rank its piece of ``pieces``, or the only one; returns what the ranks had for this one, in rank order.

        What it returns is the caller's own memory.

        Args:
            key: of this exchange, the same on all ranks and used once.
            name: what it is, in words, which must be the same on all ranks.
            deadline: seconds in which all must have come.
            ranks: those that take part, in the order of the pieces; None: all.

        Raises:
            WorldError: a rank is gone, came to something else, stopped the work, or did not come.
        """
        deadline = min(deadline, FOREVER)
        header = {"call": "exchange", "key": key, "name": name, "deadline": deadline}
        header |= {"lengths": [len(piece) for piece in pieces], "ranks": list(range(self.size) if ranks is None else ranks)}
        answer, body = self._ask(header, pieces, deadline + SLACK)
        if answer.get("error"):
            raise WorldError(answer["error"])
        return _cut(body, answer["lengths"])

    def abort(self, reason: str) -> None:
        """Make every exchange of the others fail with ``reason``."""
        self._tell({"call": "abort", "reason": reason})

    def close(self) -> None:
        """Leave in good order."""
        self._tell({"call": "leave"})
        self._socket.close()
        if self.server is not None:
            self.server.close()

    def _tell(self, header: Header) -> None:
        """Ask for nothing; where another thread is in an exchange, the lost connection must say enough."""
        if self._busy.acquire(timeout=1.0):
            self._busy.release()
            with contextlib.suppress(WorldError):
                self._ask(header, (), SLACK)

    def _ask(self, header: Header, pieces: Sequence[bytes | memoryview], seconds: float) -> tuple[Header, bytearray]:
        try:
            with self._busy:
                self._socket.settimeout(seconds)
                _send(self._socket, header, pieces)
                return _receive(self._socket)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise WorldError(f"rank {self.rank} lost rank 0 at {self._where} ({reason}): it was killed or crashed") from None


def _send(connection: socket.socket, header: Header, pieces: Sequence[bytes | memoryview] = ()) -> None:
    text = json.dumps(header).encode()
    connection.sendall(_LENGTHS.pack(len(text), sum(map(len, pieces))) + text)
    for piece in pieces:
        connection.sendall(piece)


def _receive(connection: socket.socket) -> tuple[Header, bytearray]:
    """Raises OSError when the other side is gone, ValueError when it speaks of something else."""
    head, body = _LENGTHS.unpack(_read(connection, _LENGTHS.size))
    if head > 1 << 20:
        raise ValueError("no header")
    header: Header = json.loads(_read(connection, head))
    return header, _read(connection, body)


def _read(connection: socket.socket, length: int) -> bytearray:
    data = bytearray(length)
    view, place = memoryview(data), 0
    while place < length:
        count = connection.recv_into(view[place:])
        if not count:
            raise ConnectionResetError("the connection was closed")
        place += count
    return data


def _cut(body: bytearray, lengths: Sequence[int]) -> list[memoryview]:
    view, pieces, place = memoryview(body), [], 0
    for length in lengths:
        pieces.append(view[place : place + length])
        place += length
    return pieces
