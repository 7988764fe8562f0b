"""Ranks that meet at a TCP address: real processes, started as torchrun or a shell loop starts them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from graphc.distributed.communicator import Communicator
from graphc.distributed.host_queue import NullCommunicator
from graphc.distributed.host_staged import StagedCommunicator
from graphc.distributed.tcp_store.client import Store
from graphc.distributed.tcp_store.job_secret import meeting_place
from graphc.distributed.world import find_world
from graphc.errors import UsageError, WorldError
from graphc.launch.spawn import free_port
from tests.backends.strict import StrictMemory
from tests.runtime.collective_cases import everything, queue_and_gather, tree_of_blocks
from tests.runtime.mpi_run import ROOT
from tests.runtime.on_device import OnDevice
from tests.runtime.tcp_cases import OPEN, SECRET, both, pair
from tests.runtime.tcp_run import finish, map_tcp, run_tcp, start_tcp

pytestmark = pytest.mark.full


def collectives(comm: Communicator) -> Any:
    memory = StrictMemory()
    device = everything(OnDevice(StagedCommunicator(comm, memory), memory))  # type: ignore[arg-type]
    return everything(comm), device, tree_of_blocks(comm), find_world().transport, queue_and_gather(comm)


def test_every_collective() -> None:
    results = map_tcp(2, collectives)
    for host, device, tree, transport, queue in results:
        assert transport == "tcp"
        assert device == host
        assert tree == tree_of_blocks(NullCommunicator())
        for case, (error, digest) in host.items():
            assert error <= 1, case
            assert digest == results[0][0][case][1], f"{case}: ranks differ in bits"
        assert queue["means"] == [(k + 0.5, k + 0.5) for k in range(6)]
        assert queue["middle"] == [1.0] * 3
        assert queue["received"] == [1] * 3
        assert queue["agree"].endswith("collectives: entry 1 is 'AllReduce b0' on rank 0 and 'AllReduce b1' on rank 1")
        assert queue["ranks"] == [0, 1]


def test_a_rank_that_never_starts_is_named() -> None:
    (done,) = finish(start_tcp(2, OPEN, env={"GRAPHC_DEADLINE": "1"}, ranks=[0]))
    assert done.code == 1
    assert "rank 1 did not come to allgather_object within 1 s" in done.err


def test_a_missing_rank_0_is_named() -> None:
    (done,) = finish(start_tcp(2, OPEN, env={"GRAPHC_DEADLINE": "1"}, ranks=[1]))
    assert done.code == 1
    assert "rank 1 could not reach rank 0 at 127.0.0.1:" in done.err
    assert "is rank 0 running, and are MASTER_ADDR and MASTER_PORT right?" in done.err


def test_a_killed_rank_is_named_and_nobody_hangs() -> None:
    work = "comm.barrier()\nif comm.rank == 1: os.kill(os.getpid(), 9)\ncomm.allreduce(np.ones(3), 'sum', 'w')"
    first, second, third = run_tcp(3, OPEN + work)
    assert second.code == -signal.SIGKILL
    for done in (first, third):
        assert done.code == 1
        assert "rank 1" in done.err, done.text
        assert "killed or crashed" in done.err


def test_a_rank_that_stops_the_work_tells_why() -> None:
    work = "if comm.rank == 1: comm.abort('the disk is full'); sys.exit(7)\ncomm.allreduce(np.ones(3), 'sum', 'w')"
    first, second = run_tcp(2, OPEN + work)
    assert (first.code, second.code) == (1, 7)
    assert "the disk is full" in first.err


def test_an_uncaught_exception_sets_the_others_free() -> None:
    work = "if comm.rank == 1: raise ValueError('bad sample')\ncomm.allreduce(np.ones(3), 'sum', 'w')"
    first, second = run_tcp(2, OPEN + work)
    assert (first.code, second.code) == (1, 1)
    assert "bad sample" in second.err
    assert "rank 1" in first.err


def test_ranks_that_call_different_collectives() -> None:
    for done in run_tcp(2, OPEN + "comm.allreduce(np.ones(3 + comm.rank), tag='w')"):
        assert done.code == 1
        assert "the ranks disagree: rank 0 is in" in done.err
        assert "float64[3]" in done.err or "24 bytes" in done.err


def test_torchrun_starts_the_workers(tmp_path: Path) -> None:
    """torchrun keeps a server of its own at MASTER_PORT."""
    script = tmp_path / "script.py"
    script.write_text(OPEN + "x = np.full(4, comm.rank + 1.0); comm.allreduce(x); sys.stdout.write(f'sum {x[0]}\\n')")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}", str(script)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 3.0") == 2


# The store itself -----------------------------------------------------------------------------------------------------


def test_pieces_for_each_rank_and_one_for_all() -> None:
    a, b = pair()
    assert both(
        lambda: a.exchange("1", "x", [b"aa", b"ab"], 5.0), lambda: b.exchange("1", "x", [b"", b"b" * 3_000_000], 5.0)
    ) == [[b"aa", b""], [b"ab", b"b" * 3_000_000]]
    assert both(lambda: a.exchange("2", "y", [b"1"], 5.0), lambda: b.exchange("2", "y", [b"2"], 5.0)) == [[b"1", b"2"]] * 2
    assert both(b.close, a.close) == [None, None]


def test_who_does_not_come_is_named_and_the_others_can_go_on() -> None:
    a, b = pair()
    with pytest.raises(WorldError, match=r"^rank 1 did not come to barrier within 0.2 s$"):
        a.exchange("1", "barrier", [b""], 0.2)
    b.close()
    with pytest.raises(WorldError, match="rank 1 ended its program while rank 0 waits for it in barrier"):
        a.exchange("2", "barrier", [b""], 1e6)
    a.close()


def test_two_ranks_of_one_number_and_worlds_of_two_sizes() -> None:
    a, b = pair()
    place = ("127.0.0.1", int(a._where.rpartition(":")[2]))
    with pytest.raises(WorldError, match="there is another rank 1 already"):
        Store(1, 2, place, SECRET, 1.0)
    with pytest.raises(WorldError, match=r"rank 2 belongs to a world of 3 worker.*, rank 0 to one of 2"):
        Store(2, 3, place, SECRET, 1.0)
    with pytest.raises(
        WorldError, match=r"rank 0 cannot listen at port \d+ \(Address already in use\); set another MASTER_PORT"
    ):
        Store(0, 2, place, SECRET, 1.0)
    both(b.close, a.close)


def test_a_stranger_at_the_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        place = stranger.getsockname()

        def answer() -> None:
            connection, _ = stranger.accept()
            connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
            connection.close()

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(WorldError, match="is not rank 0 of this training; set another MASTER_PORT"):
            Store(1, 2, place, SECRET, 1.0)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"MASTER_ADDR": "node7", "MASTER_PORT": "29500"}, ("node7", 29500)),
        ({"MASTER_ADDR": "node7", "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True"}, ("node7", 29501)),
        ({"MASTER_ADDR": "node7"}, "does not set MASTER_PORT"),
        ({"MASTER_ADDR": "", "MASTER_PORT": "29500"}, "MASTER_ADDR is empty"),
        ({"MASTER_ADDR": "node7", "MASTER_PORT": "70000"}, "MASTER_PORT='70000' is no port"),
        ({"MASTER_ADDR": "node7", "MASTER_PORT": "http"}, "MASTER_PORT='http' is no port"),
    ],
)
def test_where_rank_0_listens(environment: dict[str, str], expected: Any) -> None:
    if isinstance(expected, tuple):
        assert meeting_place(environment) == expected
    else:
        with pytest.raises(UsageError, match=expected):
            meeting_place(environment)
