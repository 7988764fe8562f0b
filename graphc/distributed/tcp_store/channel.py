"""A connection to the TCP store: both sides prove the job secret first, and every message afterwards is authenticated.

The proof is of fixed length, so that nothing that a stranger says is read as a length or a message::

    rank  -> store   HELLO: protocol, rank, size of the world, two flags, 32 random bytes
    store -> rank    32 random bytes, HMAC(secret, "store", HELLO, random bytes)
    rank  -> store   HMAC(secret, "rank", HELLO, random bytes)

Both derive the key of this connection from the same bytes. A message is the lengths of its two parts with a tag, a header of
JSON, a body, and a tag of all of it. Tags count the messages of a direction: none can be repeated, left out or sent back.
On the loopback, tags leave out the bodies: only root could change them there, and the tag of an array of 16 MiB takes three
times as long as its AllReduce. Nothing is encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

PROTOCOL = b"graphc-store-2\0\0"
LONGEST_HEADER = 1 << 20  # bytes
ONE_CALL = 1 << 16  # bytes of a body up to which a message is sent by one call
TAG = hashlib.sha256().digest_size
NONCE = 32
_HELLO = struct.Struct(f"<{len(PROTOCOL)}sii??{NONCE}s")
_LENGTHS = struct.Struct("<IQ")
_COUNT = struct.Struct("<Q")

Header: TypeAlias = dict[str, Any]
BROKEN = (OSError, ValueError, OverflowError, MemoryError, RecursionError)
"""What :meth:`Channel.receive` raises when the other side is gone, or has sent what is no message of its own."""


class UnprovenError(ValueError):
    """The other side does not know the job secret, or speaks of something else."""


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of a rank; what it claims counts only after its proof.

    Attributes:
        rank, size: of the worker.
        subgroup: whether it is a further connection of a rank, for the exchanges of a subgroup.
        sealed: whether tags cover the bodies of messages.
    """

    rank: int
    size: int
    subgroup: bool = False
    sealed: bool = True


def prove_to_store(connection: socket.socket, secret: bytes, claim: Hello, limit: float) -> Channel:
    """The part of a rank; ``limit`` is the ``time.monotonic()`` by which it must end.

    Raises:
        OSError: nobody answered in time, or the connection was closed without a word.
        UnprovenError: what answers does not know the secret.
    """
    hello = _HELLO.pack(PROTOCOL, claim.rank, claim.size, claim.subgroup, claim.sealed, os.urandom(NONCE))
    _send_all(connection, hello, limit)
    answer = _read(connection, 1, limit)
    try:
        answer += _read(connection, NONCE + TAG - 1, limit)
    except OSError:
        raise UnprovenError("it says something else") from None
    nonce = answer[:NONCE]
    if not hmac.compare_digest(answer[NONCE:], _proof(secret, b"store", hello, nonce)):
        raise UnprovenError("it does not know the job secret")
    _send_all(connection, _proof(secret, b"rank", hello, nonce), limit)
    key = _proof(secret, b"key", hello, nonce)
    return Channel(connection, key, sends=b"rank", receives=b"store", sealed=claim.sealed)


def prove_to_rank(connection: socket.socket, secret: bytes, limit: float) -> tuple[Hello, Channel]:
    """The part of the store; errors are those of :func:`prove_to_store`."""
    hello = bytes(_read(connection, _HELLO.size, limit))
    protocol, rank, size, subgroup, sealed, _ = _HELLO.unpack(hello)
    if protocol != PROTOCOL:
        raise UnprovenError("it is no worker of graphc, or one of another version")
    nonce = os.urandom(NONCE)
    _send_all(connection, nonce + _proof(secret, b"store", hello, nonce), limit)
    if not hmac.compare_digest(_read(connection, TAG, limit), _proof(secret, b"rank", hello, nonce)):
        raise UnprovenError("it does not know the job secret")
    key = _proof(secret, b"key", hello, nonce)
    return Hello(rank, size, subgroup, sealed), Channel(connection, key, sends=b"store", receives=b"rank", sealed=sealed)


class Channel:
    """A proven connection.

    Args:
        key: of this connection alone.
        sends, receives: names of the two directions.
        sealed: see :class:`Hello`.
    """

    def __init__(self, connection: socket.socket, key: bytes, *, sends: bytes, receives: bytes, sealed: bool) -> None:
        self.connection = connection
        self.sealed = sealed
        self._key = key
        self._sends, self._receives = sends, receives
        self._sent = self._received = 0

    def send(self, header: Header, pieces: Sequence[bytes | memoryview] = ()) -> None:
        """Send a message; errors are those of the socket."""
        text = json.dumps(header).encode()
        lengths = _LENGTHS.pack(len(text), sum(map(len, pieces)))
        tag = self._tag(self._sends, self._sent, lengths)
        start = lengths + tag.digest() + text
        tag.update(text)
        if self.sealed:
            for piece in pieces:
                tag.update(piece)
        parts = [start, *pieces, tag.digest()]
        if sum(map(len, pieces)) <= ONE_CALL:
            parts = [b"".join(parts)]
        for part in parts:
            self.connection.sendall(part)
        self._sent += 1

    def receive(self) -> tuple[Header, bytearray]:
        """The next message; raises one of :data:`BROKEN`."""
        lengths = _read(self.connection, _LENGTHS.size)
        tag = self._tag(self._receives, self._received, lengths)
        self._check(tag)  # before memory is set aside for what follows
        head, body = _LENGTHS.unpack(lengths)
        if head > LONGEST_HEADER:
            raise ValueError("its header is too long")
        text, data = _read(self.connection, head), _read(self.connection, body)
        tag.update(text)
        if self.sealed:
            tag.update(data)
        self._check(tag)
        self._received += 1
        header = json.loads(text)
        if not isinstance(header, dict):
            raise ValueError("its header is no object")
        return header, data

    def _tag(self, direction: bytes, number: int, lengths: bytes | bytearray) -> hmac.HMAC:
        return hmac.new(self._key, direction + _COUNT.pack(number) + lengths, "sha256")

    def _check(self, tag: hmac.HMAC) -> None:
        if not hmac.compare_digest(_read(self.connection, TAG), tag.digest()):
            raise ValueError("a message was changed on its way")


def _proof(secret: bytes, word: bytes, hello: bytes, nonce: bytes | bytearray) -> bytes:
    return hmac.digest(secret, word + hello + nonce, "sha256")


def _send_all(connection: socket.socket, data: bytes, limit: float) -> None:
    connection.settimeout(_left(limit))
    connection.sendall(data)


def _read(connection: socket.socket, length: int, limit: float | None = None) -> bytearray:
    """Read exactly ``length`` bytes, however slowly they come, but until ``limit``."""
    data = bytearray(length)
    view, place = memoryview(data), 0
    while place < length:
        if limit is not None:
            connection.settimeout(_left(limit))
        count = connection.recv_into(view[place:])
        if not count:
            raise ConnectionResetError("the connection was closed")
        place += count
    return data


def _left(limit: float) -> float:
    left = limit - time.monotonic()
    if left <= 0:
        raise TimeoutError("it took too long")
    return left
