"""The TCP store lets in only those who prove the job secret, and strangers disturb nobody."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from graphc.distributed.tcp_store import client as store_client
from graphc.distributed.tcp_store import server as store_server
from graphc.distributed.tcp_store.channel import Channel, Hello, prove_to_store
from graphc.distributed.tcp_store.client import Store
from graphc.distributed.tcp_store.job_secret import job_secret, listening_place, meeting_place
from graphc.distributed.tcp_store.server import StoreServer
from graphc.errors import UsageError, WorldError
from graphc.launch.spawn import free_port
from tests.runtime.listening import addresses
from tests.runtime.tcp_cases import OPEN, SECRET, both, pair
from tests.runtime.tcp_run import finish, run_tcp, start_tcp

pytestmark = pytest.mark.full


def place_of(store: Store) -> tuple[str, int]:
    host, _, port = store._where.rpartition(":")
    return host, int(port)


def prove(place: tuple[str, int], rank: int, size: int, secret: bytes = SECRET) -> Channel:
    connection = socket.create_connection(place)
    return prove_to_store(connection, secret, Hello(rank, size), time.monotonic() + 5)


@contextlib.contextmanager
def meeting() -> Iterator[tuple[Store, Store]]:
    """Two ranks, which must be able to exchange after whatever happened, within the deadline."""
    a, b = pair()
    yield a, b
    start = time.monotonic()
    assert both(lambda: a.exchange("end", "x", [b"a"], 5.0), lambda: b.exchange("end", "x", [b"b"], 5.0)) == [[b"a", b"b"]] * 2
    assert time.monotonic() - start < 2
    both(b.close, a.close)


# Where it listens -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("host", "expected"), [("127.0.0.1", {"127.0.0.1"}), ("127.0.0.3", {"127.0.0.3"})])
def test_rank_0_listens_at_its_address_only(host: str, expected: set[str]) -> None:
    before = addresses([os.getpid()])
    server = StoreServer(2, (host, free_port()), SECRET)
    assert addresses([os.getpid()]) - before <= expected
    assert expected <= addresses([os.getpid()])
    server.close()


def test_localhost_is_the_loopback_of_both_families() -> None:
    server = StoreServer(2, ("localhost", free_port()), SECRET)
    assert addresses([os.getpid()]) <= {"127.0.0.1", "::1"}
    server.close()


def test_a_server_that_ends_gives_its_port_back() -> None:
    place = ("127.0.0.1", free_port())
    for _ in range(3):
        StoreServer(1, place, SECRET).close()


def test_an_address_of_another_machine_is_refused_with_what_to_set() -> None:
    with pytest.raises(WorldError, match=r"cannot listen at 192\.0\.2\.77:\d+ .*set MASTER_ADDR .* or GRAPHC_LISTEN_ADDR"):
        StoreServer(2, ("192.0.2.77", free_port()), SECRET)
    with pytest.raises(WorldError, match=r"rank 0 cannot listen at no\.such\.host\.invalid"):
        StoreServer(2, ("no.such.host.invalid", free_port()), SECRET)


def test_torchrun_on_one_machine_meets_on_the_loopback() -> None:
    common = {"MASTER_ADDR": "node7", "MASTER_PORT": "29500", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
    assert meeting_place({**common, "LOCAL_WORLD_SIZE": "2"}) == ("127.0.0.1", 29500)
    assert meeting_place({**common, "LOCAL_WORLD_SIZE": "1"}) == ("node7", 29500)
    assert listening_place(("node7", 29500), {"GRAPHC_LISTEN_ADDR": "10.0.0.1"}) == ("10.0.0.1", 29500)


# The secret -----------------------------------------------------------------------------------------------------------


def test_beyond_the_loopback_a_secret_is_required() -> None:
    with pytest.raises(UsageError, match=r"meet at 192\.0\.2\.7 .* GRAPHC_JOB_SECRET is not set; .*: export GRAPHC"):
        job_secret("192.0.2.7", environment={})
    with pytest.raises(UsageError, match=r"meet at 0\.0\.0\.0 "):
        job_secret("127.0.0.1", "0.0.0.0", environment={})
    with pytest.raises(UsageError, match="GRAPHC_JOB_SECRET is too short"):
        job_secret("127.0.0.1", environment={"GRAPHC_JOB_SECRET": "abc"})
    assert job_secret("192.0.2.7", environment={"GRAPHC_JOB_SECRET": "a" * 32}) == b"a" * 32
    assert job_secret("192.0.2.7", environment={"GRAPHC_JOB_SECRET": "\udcff" * 32}) == b"\xff" * 32  # bytes that are no text


def test_on_the_loopback_a_user_has_a_key_of_his_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHC_CACHE_DIR", str(tmp_path / "cache"))
    found = {job_secret("127.0.0.1", environment={}) for _ in range(2)}
    assert len(found) == 1
    (key,) = (tmp_path / "cache").iterdir()
    assert key.stat().st_mode & 0o777 == 0o600
    assert len(key.read_bytes()) == 64
    monkeypatch.setenv("GRAPHC_CACHE_DIR", str(tmp_path / "other"))
    assert job_secret("127.0.0.1", environment={}) not in found


def test_ranks_with_different_secrets_do_not_meet() -> None:
    common = {"GRAPHC_DEADLINE": "3", "MASTER_PORT": str(free_port())}
    processes = start_tcp(2, OPEN, env={**common, "GRAPHC_JOB_SECRET": "a" * 32}, ranks=[0])
    processes += start_tcp(2, OPEN, env={**common, "GRAPHC_JOB_SECRET": "b" * 32}, ranks=[1])
    first, second = finish(processes)
    assert "is not rank 0 of this training; set another MASTER_PORT, or GRAPHC_JOB_SECRET to the same value" in second.err
    assert "graphc: a connection from 127.0.0.1:" in first.err
    assert "was closed: it did not prove GRAPHC_JOB_SECRET" in first.err
    assert "rank 1 did not come" in first.err


def test_several_machines_without_a_secret_are_told_what_to_set() -> None:
    for done in run_tcp(2, OPEN, env={"MASTER_ADDR": "192.0.2.77"}):
        assert done.code == 1
        assert "GRAPHC_JOB_SECRET is not set; set it to the same value for all of them: export GRAPHC_JOB_SECRET=" in done.err


# Strangers ------------------------------------------------------------------------------------------------------------

GARBAGE = [
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x16\x03\x01" + b"\0" * 200,
    b"\xff" * 4096,
    b"graphc-store-2\0\0" + b"\0" * 40 + b"\xff" * 32,
    b"\x02\0\0\0\0\0\0\0\0\0\0\0[]",
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=repr)
def test_garbage_ends_that_connection_only(garbage: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    with meeting() as (a, _), socket.create_connection(place_of(a)) as stranger:
        stranger.settimeout(2)
        with contextlib.suppress(OSError):  # the server may have closed it before all is said
            stranger.sendall(garbage)
            stranger.shutdown(socket.SHUT_WR)
        assert len(_rest(stranger)) in (0, 64)
    said = capfd.readouterr().err
    assert said.startswith("graphc: a connection from 127.0.0.1:")
    assert said.count("\n") == 1
    assert "Traceback" not in said


def test_a_crowd_of_silent_strangers_holds_up_nobody() -> None:
    place, before = ("127.0.0.1", free_port()), threading.active_count()
    server = StoreServer(2, place, SECRET)
    with contextlib.ExitStack() as crowd:
        for _ in range(200):
            crowd.enter_context(socket.create_connection(place)).sendall(b"g")
        start = time.monotonic()
        b = Store(1, 2, place, SECRET, 5.0)
        assert time.monotonic() - start < 3
        assert threading.active_count() - before < 100
        b.close()
    server.close()


def test_a_slow_stranger_is_closed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_server, "PROOF_TIME", 0.3)
    with meeting() as (a, _), socket.create_connection(place_of(a)) as stranger:
        start = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - start < 5:
                stranger.sendall(b"g")
                time.sleep(0.05)
        assert time.monotonic() - start < 3


def test_a_message_of_another_connection_is_not_accepted() -> None:
    """What a rank once said proves nothing to a server that has chosen other random bytes."""
    with meeting() as (a, _):
        recorded: list[bytes] = []
        with socket.create_connection(place_of(a)) as stranger:
            plain = _Recorder(stranger, recorded)
            with pytest.raises(WorldError, match="there is another rank 1 already"):
                _admitted(prove_to_store(plain, SECRET, Hello(1, 2), time.monotonic() + 5))  # type: ignore[arg-type]
        with socket.create_connection(place_of(a)) as stranger:
            stranger.sendall(b"".join(recorded))
            stranger.settimeout(2)
            assert len(_rest(stranger)) == 64  # the server's own proof, and then the end


class _Recorder:
    def __init__(self, inner: socket.socket, said: list[bytes]) -> None:
        self._inner, self._said = inner, said

    def sendall(self, data: bytes) -> None:
        self._said.append(bytes(data))
        self._inner.sendall(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _rest(connection: socket.socket) -> bytes:
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(4096):
            found += data
    return found


def _admitted(channel: Channel) -> None:
    answer, _ = channel.receive()
    if answer["error"]:
        raise WorldError(answer["error"])


def test_processes_train_on_while_strangers_knock() -> None:
    port, end = free_port(), threading.Event()

    def knock() -> None:
        while not end.is_set():
            for garbage in GARBAGE:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as stranger:
                    stranger.sendall(garbage)
                    time.sleep(0.005)

    threading.Thread(target=knock, daemon=True).start()
    work = "for k in range(50):\n    x = np.full(9, comm.rank + 1.0); comm.allreduce(x, 'sum', 'w')\nprint(x[0])"
    first, second = run_tcp(2, OPEN + work, env={"MASTER_PORT": str(port)})
    end.set()
    assert (first.out, second.out) == ("3.0\n", "3.0\n")
    assert second.err == ""
    assert 1 <= first.err.count("\n") <= store_server.MOST_NOTES
    assert all(line.startswith("graphc: a connection from 127.0.0.1:") for line in first.err.splitlines())


# Peers that know the secret -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [-1, 2, 7, -(2**31)])
def test_a_rank_outside_the_world_is_refused(rank: int) -> None:
    with meeting() as (a, _), pytest.raises(WorldError, match=rf"there is no rank {rank} in a world of 2 workers"):
        _admitted(prove(place_of(a), rank, 2))


def test_a_rank_of_another_world_ends_the_wait_of_rank_0() -> None:
    place = ("127.0.0.1", free_port())
    a = Store(0, 2, place, SECRET, 5.0)
    with pytest.raises(WorldError, match="rank 1 belongs to a world of 3 workers, rank 0 to one of 2"):
        Store(1, 3, place, SECRET, 5.0)
    with pytest.raises(WorldError, match="rank 1 belongs to a world of 3 workers, rank 0 to one of 2"):
        a.exchange("1", "x", [b""], 5.0)
    a.close()


HEADERS: list[Any] = [
    {},
    {"call": "exchange"},
    {"call": "exchange", "key": [], "name": "x", "deadline": 1, "lengths": [0], "ranks": [0, 1]},
    {"call": "exchange", "key": "1", "name": "x", "deadline": float("nan"), "lengths": [0], "ranks": [0, 1]},
    {"call": "exchange", "key": "1", "name": "x", "deadline": "1", "lengths": [0], "ranks": [0, 1]},
    {"call": "exchange", "key": "1", "name": "x", "deadline": 1, "lengths": [1 << 60], "ranks": [0, 1]},
    {"call": "exchange", "key": "1", "name": "x", "deadline": 1, "lengths": [0, 0, 0], "ranks": [0, 1]},
    {"call": "exchange", "key": "1", "name": "x", "deadline": 1, "lengths": None, "ranks": [0, 1]},
    *(
        {"call": "exchange", "key": "1", "name": "x", "deadline": 1, "lengths": [0], "ranks": r}
        for r in ([0], [1, 1], [1, 7], 1)
    ),
    {"call": "abort", "reason": 1},
    [],
    5,
]


@pytest.mark.parametrize("header", HEADERS, ids=repr)
def test_a_message_that_is_none_loses_that_rank_only(header: Any, capfd: pytest.CaptureFixture[str]) -> None:
    place = ("127.0.0.1", free_port())
    a = Store(0, 2, place, SECRET, 5.0)
    channel = prove(place, 1, 2)
    _admitted(channel)
    channel.send(header)
    with pytest.raises(WorldError, match="rank 1 lost its connection"):
        a.exchange("1", "x", [b""], 5.0)
    a.close()
    assert capfd.readouterr().err == ""


def test_what_is_changed_on_the_way_ends_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relay between rank 1 and rank 0 passes on the proof and flips one bit of what follows, as between two machines."""
    monkeypatch.setattr(store_client, "is_loopback", lambda host: False)
    place = ("127.0.0.1", free_port())
    a = Store(0, 2, place, SECRET, 5.0)
    with socket.create_server(("127.0.0.1", 0)) as relay:
        threading.Thread(target=_relay, args=(relay, place), daemon=True).start()
        b = Store(1, 2, relay.getsockname(), SECRET, 5.0)
        found = both(lambda: a.exchange("1", "x", [b"a" * 99], 3.0), lambda: b.exchange("1", "x", [b"b" * 99], 3.0))
    assert "rank 1 lost its connection" in found[0]
    assert "rank 1 lost rank 0" in found[1]
    a.close()


def _relay(listener: socket.socket, place: tuple[str, int]) -> None:
    inside, _ = listener.accept()
    outside = socket.create_connection(place)

    def back() -> None:
        with contextlib.suppress(OSError):
            while data := outside.recv(4096):
                inside.sendall(data)
        inside.shutdown(socket.SHUT_RDWR)

    threading.Thread(target=back, daemon=True).start()
    with contextlib.suppress(OSError):
        while data := bytearray(inside.recv(4096)):
            if b"bbb" in data:
                data[data.index(b"bbb")] ^= 1
            outside.sendall(data)
