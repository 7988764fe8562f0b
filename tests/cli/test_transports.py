"""``--transport tcp``: the launcher's own processes, which meet on the loopback without MPI."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from graphc.cli import main
from tests.cli.models import cli, write_blobs, write_mlp

TRAIN = ["train", "mlp.onnx", "--data", "d.npz", "--loss", "softmax_cross_entropy", "--optimizer", "adam", "--batch-size", "16"]

FAULT = """
import os, signal, sys
from graphc.distributed.choose import open_communicator
comm = open_communicator()
comm.barrier()
if comm.rank == 1:
    {fault}
comm.barrier()
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_mlp(tmp_path)
    write_blobs(tmp_path)
    return tmp_path


@pytest.mark.full
def test_workers_over_tcp_train_as_threads_do(
    here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphc.launch.local.find_mpiexec", lambda: pytest.fail("MPI is not needed"))
    ends = []
    for transport in ("tcp", "threads"):
        assert main([*TRAIN, "-n", "2", "--transport", transport, "--json"]) == 0
        ends.append(json.loads(capfd.readouterr().out.splitlines()[-1]))
    assert ends[0]["world_size"] == 2
    assert ends[0]["state_sha256"] == ends[1]["state_sha256"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "code", "text"),
    [
        pytest.param("os.kill(os.getpid(), signal.SIGKILL)", 1, "is gone: killed by SIGKILL", marks=pytest.mark.large),
        ("sys.exit(5)", 5, "rank 1 failed: exit code 5; the other workers were stopped"),
    ],
)
def test_a_worker_over_tcp_that_ends_is_named(here: Path, fault: str, code: int, text: str) -> None:
    (here / "f.py").write_text(FAULT.format(fault=fault))
    done = cli("launch", "-n", 2, "--transport", "tcp", "f.py", timeout=60)
    assert done.returncode == code
    assert text in done.stderr.decode()


def test_servers_need_windows(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*TRAIN, "-n", "2", "--transport", "tcp", "--strategy", "parameter_server"]) == 2
    assert "--strategy parameter_server works over --transport mpi or threads, not over tcp" in capfd.readouterr().err
