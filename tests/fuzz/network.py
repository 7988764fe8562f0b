"""Rogue peers of a meeting by TCP: strangers, insiders that know the secret, relays in between, and impostors of rank 0.

The ranks are threads of the child. They must exchange the right bytes, or end with a GraphcError within the deadline; strangers
may not even make them do that. No traceback, and no memory for what a rogue only announces.
"""

from __future__ import annotations

import contextlib
import io
import random
import resource
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Any

from graphc.distributed.tcp_store import client as store_client
from graphc.distributed.tcp_store import server as store_server
from graphc.distributed.tcp_store.channel import PROTOCOL, TAG, Hello, prove_to_rank, prove_to_store
from graphc.distributed.tcp_store.client import Store
from graphc.errors import GraphcError, WorldError
from graphc.launch.spawn import free_port

SECRET = b"the secret of this run"
SHORT = 0.1  # seconds: deadline where a rogue may keep ranks waiting
LONG = 8.0  # seconds: deadline where nothing may; it is not waited for
MEGABYTES = 200  # that an attempt may take
LOOPBACK = "127.0.0.1"

_GIVING, _GIVEN = threading.Lock(), set[int]()

Rogue = Callable[[socket.socket, random.Random], None]
Place = tuple[str, int]


def network(number: int, keep: Collection[int] | None = None) -> tuple[str, Callable[[], object]]:
    """A meeting of two or three ranks, with the rogues of attempt ``number``."""
    kind = kind_of(number)
    return kind, lambda: meet(kind, [number])


def kind_of(number: int) -> str:
    (kind,) = random.Random(number).choices(list(KINDS), (5, 3, 1, 1))
    return kind


def meet(kind: str, numbers: Sequence[int]) -> None:
    """Run attempts of one kind at once; whatever a thread raised, or was printed beside lines of graphc, is a fault."""
    store_server.LINGER = store_server.PROOF_TIME = SHORT
    store_client.SLACK = LONG if kind == "strangers" else SHORT
    store_client.RETRY = 0.005
    store_client.is_loopback = lambda host: False  # as between two machines: tags cover everything
    raised: list[str] = []
    refused: list[GraphcError] = []
    threading.excepthook = lambda info: raised.append(f"{info.exc_type.__name__}: {info.exc_value} in {info.thread}")

    def work(number: int) -> None:
        try:
            KINDS[kind](random.Random(f"{number}"))
        except GraphcError as error:
            refused.append(error)

    before, sys.stderr = sys.stderr, io.StringIO()
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    attempts = [threading.Thread(target=work, args=(number,), name=f"attempt {number}") for number in numbers]
    for attempt in attempts:
        attempt.start()
    for attempt in attempts:
        attempt.join()
    said, sys.stderr = sys.stderr.getvalue(), before  # type: ignore[attr-defined]
    wrong = [line for line in said.splitlines() if not line.startswith("graphc: ")]
    taken = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used) >> 10
    assert not raised, raised
    assert not wrong, said
    assert taken < MEGABYTES, f"{taken} MB"
    if refused:
        raise refused[0]


# The ranks ------------------------------------------------------------------------------------------------------------


class Meeting:
    """Real ranks, each in a thread.

    Args:
        place: of rank 0.
        reached: where a rank reaches it, if not there.
    """

    def __init__(self, size: int, place: Place, deadline: float, reached: dict[int, Place] | None = None) -> None:
        self.size, self.place, self.deadline = size, place, deadline
        self.reached = reached or {}
        self.errors: list[GraphcError] = []
        self.wrong: list[str] = []
        self.threads: list[threading.Thread] = []

    def start(self, *ranks: int) -> None:
        for rank in ranks:
            self.threads.append(threading.Thread(target=self._rank, args=(rank,), name=f"rank {rank}", daemon=True))
            self.threads[-1].start()

    def _rank(self, rank: int) -> None:
        try:
            store = Store(rank, self.size, self.reached.get(rank, self.place), SECRET, self.deadline)
            try:
                for turn in range(3):
                    own = [b"%d for %d, %d" % (rank, other, turn) * 9 for other in range(self.size)]
                    found = store.exchange(f"{turn}", "an exchange", own, self.deadline)
                    right = [b"%d for %d, %d" % (other, rank, turn) * 9 for other in range(self.size)]
                    if found != right:
                        self.wrong.append(f"rank {rank} received {[bytes(piece) for piece in found]}")
            finally:
                store.close()
        except GraphcError as error:
            self.errors.append(error)

    def finish(self) -> None:
        """Wait for the ranks, as long as they may take; raises the first error of one."""
        limit = time.monotonic() + 5 * (self.deadline + SHORT) + 3
        for thread in self.threads:
            thread.join(max(0.0, limit - time.monotonic()))
        alive = [thread.name for thread in self.threads if thread.is_alive()]
        assert not alive, f"{alive} did not end"
        assert not self.wrong, self.wrong
        if self.errors:
            raise self.errors[0]


def _free() -> Place:
    with _GIVING:  # attempts run at once, and a port stays free until its rank 0 listens
        while (port := free_port()) in _GIVEN:
            pass
        _GIVEN.add(port)
    return LOOPBACK, port


def _connect(place: Place) -> socket.socket:
    """A connection as soon as somebody listens."""
    limit = time.monotonic() + LONG
    while True:
        try:
            return socket.create_connection(place, timeout=SHORT)
        except OSError:
            if time.monotonic() > limit:
                raise
            time.sleep(0.001)


# Strangers ------------------------------------------------------------------------------------------------------------


@cache
def _recorded() -> tuple[bytes, bytes]:
    """What a rank and a store once said to each other."""
    said: tuple[list[bytes], list[bytes]] = [], []
    ends = socket.socketpair()
    other = threading.Thread(target=prove_to_rank, args=(_Recorder(ends[1], said[1]), SECRET, time.monotonic() + LONG))
    other.start()
    prove_to_store(_Recorder(ends[0], said[0]), SECRET, Hello(1, 2), time.monotonic() + LONG)  # type: ignore[arg-type]
    other.join()
    for end in ends:
        end.close()
    return b"".join(said[0]), b"".join(said[1])


class _Recorder:
    def __init__(self, inner: socket.socket, said: list[bytes]) -> None:
        self._inner, self._said = inner, said

    def sendall(self, data: bytes) -> None:
        self._said.append(bytes(data))
        self._inner.sendall(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


_GREETINGS = (
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"SSH-2.0-OpenSSH_9.6\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x02id\x85R.",
    struct.pack("<IQ", 60, 1 << 62) + b'{"protocol": "graphc-store-1", "rank": -1, "size": 2}',
    b"\xff" * 12 + bytes(48),
    b"\0" * 4096,
)


def _hello(rng: random.Random) -> bytes:
    claim = (
        rng.choice((-1, 0, 1, 2, 7, 2**31 - 1)),
        rng.choice((-1, 0, 2, 3, 1 << 30)),
        rng.random() < 0.3,
        rng.random() < 0.5,
    )
    return PROTOCOL + struct.pack("<ii??", *claim) + rng.randbytes(32)


def _random_bytes(connection: socket.socket, rng: random.Random) -> None:
    connection.sendall(rng.randbytes(rng.choice((0, 1, 16, 58, 59, 400, 1 << 20))))


def _greeting(connection: socket.socket, rng: random.Random) -> None:
    connection.sendall(rng.choice(_GREETINGS))


def _truncated(connection: socket.socket, rng: random.Random) -> None:
    hello = _hello(rng)
    connection.sendall(hello[: rng.randrange(len(hello))])


def _no_proof(connection: socket.socket, rng: random.Random) -> None:
    connection.sendall(_hello(rng))
    proof = _answer(connection)
    connection.sendall(rng.choice((rng.randbytes(TAG), bytes(TAG), proof[-TAG:], proof[:5], proof)) + rng.randbytes(99))


def _other_secret(connection: socket.socket, rng: random.Random) -> None:
    with contextlib.suppress(ValueError):
        prove_to_store(connection, b"another secret", Hello(1, 2), time.monotonic() + SHORT)


def _replay(connection: socket.socket, rng: random.Random) -> None:
    rank, store = _recorded()
    connection.sendall(rng.choice((rank, store, rank[:59])))
    connection.sendall(rank[59:])


def _slow(connection: socket.socket, rng: random.Random) -> None:
    for byte in _hello(rng):
        connection.sendall(bytes([byte]))
        time.sleep(rng.random() * 0.02)


def _silent(connection: socket.socket, rng: random.Random) -> None:
    """Connects and says nothing."""


STRANGERS: tuple[Rogue, ...] = (_random_bytes, _greeting, _truncated, _no_proof, _other_secret, _replay, _slow, _silent)


def _answer(connection: socket.socket) -> bytes:
    connection.settimeout(SHORT)
    with contextlib.suppress(OSError):
        return connection.recv(4096)
    return b""


def _part(connection: socket.socket, rng: random.Random) -> None:
    """End a connection in order, half, by a reset, or leave it open."""
    how = rng.randrange(4)
    with contextlib.suppress(OSError):
        if how == 0:
            connection.shutdown(socket.SHUT_WR)
        elif how == 1:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if how < 3:
            connection.close()


def _set_loose(place: Place, rogue: Rogue, rng: random.Random, kept: list[socket.socket]) -> None:
    with contextlib.suppress(OSError):
        connection = _connect(place)
        kept.append(connection)
        rogue(connection, rng)
        _part(connection, rng)


def strangers(rng: random.Random) -> None:
    """Strangers before, while and after the ranks meet: the ranks succeed."""
    size, place = rng.choice((2, 3)), _free()
    meeting, kept = Meeting(size, place, LONG), list[socket.socket]()
    ranks, crowd = list(range(size)), [rng.choice(STRANGERS) for _ in range(rng.randint(1, 12))]
    events: list[Any] = [*ranks, *crowd]
    rng.shuffle(events)
    for event in events:
        if isinstance(event, int):
            meeting.start(event)
        else:
            seed = random.Random(rng.random())
            threading.Thread(target=_set_loose, args=(place, event, seed, kept), daemon=True).start()
        time.sleep(rng.choice((0, 0, 0.002)))
    try:
        meeting.finish()
    except GraphcError as error:
        raise AssertionError(f"strangers made a rank end: {error}") from error
    finally:
        for connection in kept:
            connection.close()


# Insiders -------------------------------------------------------------------------------------------------------------

_VALUES = (None, True, -1, 0, 1, 1 << 70, 0.5, float("nan"), float("inf"), "", "0", [], [0], [0, 1], [1, 1], [-1], {}, [[]])


def _frames(channel: Any, rng: random.Random) -> None:
    """Messages of somebody who has the secret and is no rank."""
    connection = channel.connection
    connection.settimeout(SHORT)
    for _ in range(rng.randint(1, 3)):
        kind = rng.randrange(5)
        if kind == 0:
            connection.sendall(rng.randbytes(rng.randint(1, 200)))
        elif kind == 1:
            connection.sendall(struct.pack("<IQ", rng.choice((0, 1 << 19, 2**32 - 1)), rng.choice((0, 1 << 35, 2**64 - 1))))
        elif kind == 2:
            lengths = struct.pack("<IQ", rng.choice((0, 60, 2**32 - 1)), rng.choice((0, 1 << 35, 1 << 50, 2**64 - 1)))
            connection.sendall(lengths + channel._tag(b"rank", channel._sent, lengths).digest() + rng.randbytes(60))
        else:
            header: Any = {
                "call": "exchange",
                "key": "0",
                "name": "an exchange",
                "deadline": 1,
                "lengths": [0],
                "ranks": [0, 1],
            }
            header["call"] = rng.choice(("exchange", "exchange", "abort", "leave", "nothing"))
            for name in rng.sample(sorted(header), rng.randint(1, 2)):
                header[name] = rng.choice(_VALUES)
            pieces = [b"x" * rng.choice((0, 1, 1000))]
            channel.send(rng.choice((header, header, header, [], 5)), pieces)


def insiders(rng: random.Random) -> None:
    """Peers with the secret, but of a wrong rank or world, or with messages that are none."""
    size, place = rng.choice((2, 3)), _free()
    meeting, kept = Meeting(size, place, SHORT), list[socket.socket]()

    def insider(connection: socket.socket, own: random.Random) -> None:
        claim = Hello(own.choice((-1, size, 7, 1, 1, 0)), own.choice((size, size, size, 0, -5, 1 << 30)), own.random() < 0.3)
        with contextlib.suppress(ValueError):
            channel = prove_to_store(connection, SECRET, claim, time.monotonic() + SHORT)
            _frames(channel, own)

    crowd = [rng.choice((insider, insider, *STRANGERS)) for _ in range(rng.randint(1, 3))]
    events: list[Any] = [*range(size), *crowd]
    rng.shuffle(events)
    for event in events:
        if isinstance(event, int):
            meeting.start(event)
        else:
            seed = random.Random(rng.random())
            threading.Thread(target=_set_loose, args=(place, event, seed, kept), daemon=True).start()
        time.sleep(rng.choice((0, 0.002)))
    try:
        meeting.finish()
    finally:
        for connection in kept:
            connection.close()


# In between -----------------------------------------------------------------------------------------------------------


def relay(rng: random.Random) -> None:
    """Somebody between rank 1 and rank 0, who changes what passes from some byte on."""
    place = _free()
    with socket.create_server((LOOPBACK, 0)) as listener:
        meeting = Meeting(2, place, SHORT, {1: listener.getsockname()})
        inward, at, change = rng.random() < 0.5, rng.randrange(1200), rng.randrange(6)
        seed = random.Random(rng.random())
        threading.Thread(target=_relay, args=(listener, place, inward, at, change, seed), daemon=True).start()
        meeting.start(0, 1)
        meeting.finish()


def _relay(listener: socket.socket, place: Place, inward: bool, at: int, change: int, rng: random.Random) -> None:
    with contextlib.suppress(OSError):
        while True:
            near, _ = listener.accept()
            far = _connect(place)
            for source, target, meddles in ((near, far, inward), (far, near, not inward)):
                arguments = (source, target, at if meddles else 1 << 60, change, rng)
                threading.Thread(target=_pass_on, args=arguments, daemon=True).start()


def _pass_on(source: socket.socket, target: socket.socket, at: int, change: int, rng: random.Random) -> None:
    passed = 0
    with contextlib.suppress(OSError):
        while data := bytearray(source.recv(4096)):
            place = at - passed
            if 0 <= place < len(data):
                if change == 0:
                    data[place] ^= 1 << rng.randrange(8)
                elif change == 1:
                    del data[place : place + rng.randint(1, 50)]
                elif change == 2:
                    data[place:place] = rng.randbytes(rng.randint(1, 50))
                elif change == 3:
                    data[place:place] = data
                elif change == 4:
                    del data[place:]
                    source.shutdown(socket.SHUT_RDWR)
                else:
                    time.sleep(SHORT)
            passed += len(data)
            target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def impostor(rng: random.Random) -> None:
    """Somebody else listens in the place of rank 0: rank 1 ends with an error."""
    kind = rng.randrange(7)

    def pretend(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            connection.settimeout(SHORT)
            if kind == 0:
                return
            if kind == 1:
                connection.sendall(rng.choice(_GREETINGS))
            heard = _answer(connection)
            if kind == 2:
                connection.sendall((heard * 2)[:64])
            elif kind == 3:
                connection.sendall(_recorded()[1])
            elif kind == 4:
                connection.sendall(rng.randbytes(rng.randint(1, 200)))
            elif kind == 5:
                connection.sendall(rng.randbytes(rng.randint(1, 63)))
            _answer(connection)

    def listen() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=pretend, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server((LOOPBACK, 0)) as listener:
        threading.Thread(target=listen, daemon=True).start()
        meeting = Meeting(2, listener.getsockname(), SHORT)
        meeting.start(1)
        try:
            meeting.finish()
        except WorldError:
            return
    raise AssertionError("rank 1 took somebody else for rank 0")


KINDS: dict[str, Callable[[random.Random], None]] = {
    "strangers": strangers,
    "insiders": insiders,
    "relay": relay,
    "impostor": impostor,
}
