"""The connection of one rank to the TCP store, by which ranks meet that nobody but their environment introduces.

Rank 0 listens at ``MASTER_ADDR:MASTER_PORT``; every rank, rank 0 too, holds one connection to it.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Sequence

from graphc.distributed.tcp_store.channel import BROKEN, Channel, Header, Hello, prove_to_store
from graphc.distributed.tcp_store.job_secret import JOB_SECRET, Place, is_loopback
from graphc.distributed.tcp_store.server import FOREVER, StoreServer, cut
from graphc.errors import PeerError, WorldError

RETRY = 0.1  # seconds between attempts to reach rank 0
SLACK = 10.0  # seconds beyond the deadline in which the server's answer must come
LONGEST_REASON = 1 << 14  # characters


class Store:
    """The connection of one rank.

    Attributes:
        server: on rank 0.

    Args:
        rank, size: of this worker.
        place: host and port of rank 0; see :func:`~graphc.distributed.tcp_store.job_secret.meeting_place`.
        secret: what all ranks know; see :func:`~graphc.distributed.tcp_store.job_secret.job_secret`.
        deadline: seconds in which rank 0 must be reached.
        listens: where rank 0 listens, if not at ``place``.
        subgroup: whether it is a further connection of this rank, for the exchanges of a subgroup.

    Raises:
        WorldError: nobody listens there, something else does, or rank 0 knows another world.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        place: Place,
        secret: bytes,
        deadline: float,
        *,
        listens: Place | None = None,
        subgroup: bool = False,
    ) -> None:
        self.rank, self.size = rank, size
        self.place, self.secret = place, secret
        self._subgroup = subgroup
        self._where = f"{place[0]}:{place[1]}"
        self._busy = threading.Lock()
        self.server = StoreServer(size, listens or place, secret) if rank == 0 and not subgroup else None
        try:
            self._channel = self._join(deadline)
        except WorldError:
            if self.server is not None:
                self.server.close()
            raise

    def _join(self, deadline: float) -> Channel:
        """Connect, prove the secret and be admitted. Where nobody answers, or closes without a word, try again."""
        limit = time.monotonic() + min(deadline, FOREVER)
        while True:
            try:
                connection = socket.create_connection(self.place, timeout=max(RETRY, limit - time.monotonic()))
                try:
                    return self._introduce(connection, min(limit, time.monotonic() + SLACK))
                except BaseException:
                    connection.close()
                    raise
            except (OSError, UnicodeError) as error:
                if time.monotonic() >= limit:
                    raise PeerError(
                        f"rank {self.rank} could not reach rank 0 at {self._where} within {deadline:g} s "
                        f"({getattr(error, 'strerror', None) or error}); is rank 0 running, and are MASTER_ADDR and "
                        "MASTER_PORT right?"
                    ) from None
                time.sleep(RETRY)
            except BROKEN:
                raise WorldError(
                    f"what listens at {self._where} is not rank 0 of this training; set another MASTER_PORT, or "
                    f"{JOB_SECRET} to the same value for all workers"
                ) from None

    def _introduce(self, connection: socket.socket, limit: float) -> Channel:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        claim = Hello(self.rank, self.size, self._subgroup, sealed=not is_loopback(connection.getpeername()[0]))
        channel = prove_to_store(connection, self.secret, claim, limit)
        connection.settimeout(SLACK)
        answer, _ = channel.receive()
        if answer.get("error"):
            raise WorldError(str(answer["error"]))
        return channel

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
            raise PeerError(str(answer["error"]))
        try:
            return cut(body, answer["lengths"])
        except (KeyError, ValueError) as error:
            raise self._lost(error) from None

    def abort(self, reason: str) -> None:
        """Make every exchange of the others fail with ``reason``."""
        self._tell({"call": "abort", "reason": reason[:LONGEST_REASON]})

    def close(self) -> None:
        """Leave in good order."""
        self._tell({"call": "leave"})
        self._channel.connection.close()
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
                self._channel.connection.settimeout(seconds)
                self._channel.send(header, pieces)
                return self._channel.receive()
        except BROKEN as error:
            raise self._lost(error) from None

    def _lost(self, error: BaseException) -> PeerError:
        reason = getattr(error, "strerror", None) or error
        return PeerError(f"rank {self.rank} lost rank 0 at {self._where} ({reason}): it was killed or crashed")
