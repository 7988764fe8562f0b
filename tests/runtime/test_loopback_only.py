"""A run on one machine listens on the loopback only, MPI's runtime included."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from graphc.launch import loopback_bind
from graphc.launch.loopback_bind import _MACHINES, confine, library
from tests.runtime.listening import addresses, family
from tests.runtime.mpi_run import ROOT

WAIT = """
import os, sys, time
from graphc.distributed.choose import open_communicator
comm = open_communicator()
comm.barrier()
print(f"{comm.transport} {os.environ.get('LD_PRELOAD')}\\n", end="", flush=True)  # one write: threads share the stream
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
comm.barrier()
"""

BIND = """
import socket
with socket.socket() as any4, socket.socket() as other, socket.socket() as again:
    any4.bind(("", 0))
    print(any4.getsockname()[0])
    other.bind(("127.0.0.2", 0))
    print(other.getsockname()[0])
    any4.listen()
    try:
        again.bind(("", any4.getsockname()[1]))
    except OSError as error:
        print(error.errno)
if socket.has_ipv6:
    with socket.socket(socket.AF_INET6) as any6:
        any6.bind(("::", 0))
        print(any6.getsockname()[0])
"""

here = pytest.mark.skipif(platform.machine() not in _MACHINES, reason="no code for this processor")


@here
@pytest.mark.mpi
@pytest.mark.parametrize("transport", ["mpi", "tcp", pytest.param("threads", marks=pytest.mark.large)])
def test_no_process_of_a_run_listens_beyond_the_loopback(transport: str, tmp_path: Path) -> None:
    script, end = tmp_path / "wait.py", tmp_path / "end"
    script.write_text(WAIT)
    command = [sys.executable, "-m", "graphc", "launch", "-n", "2", "--transport", transport, str(script), str(end)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as run:
        assert run.stdout is not None
        said = [run.stdout.readline().split() for _ in range(2)]
        found = addresses(family(run.pid))
        end.touch()
    assert run.returncode == 0
    assert said == [[transport, "None"]] * 2
    assert found <= {"127.0.0.1", "::1"}
    assert found or transport == "threads"  # else nothing was looked at


@here
def test_any_address_becomes_the_loopback(tmp_path: Path) -> None:
    environment = dict(os.environ)
    environment.pop("LD_PRELOAD", None)
    command = confine([sys.executable, "-c", "import os; print(os.environ.get('LD_PRELOAD'))"], environment, tmp_path)
    done = subprocess.run([sys.executable, "-c", BIND], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() in (["127.0.0.1", "127.0.0.2", "98"], ["127.0.0.1", "127.0.0.2", "98", "::1"])
    assert done.stderr == ""
    assert subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout == "None\n"


@here
def test_workers_keep_a_preloaded_library_of_the_user(tmp_path: Path) -> None:
    environment = {"LD_PRELOAD": "/lib/tcmalloc.so"}
    assert confine(["python"], environment, tmp_path) == ["env", "LD_PRELOAD=/lib/tcmalloc.so", "python"]
    assert environment["LD_PRELOAD"] == f"{tmp_path}/{loopback_bind.FILE}:/lib/tcmalloc.so"


def test_where_it_cannot_be_confined_a_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    environment: dict[str, str] = {}
    assert confine(["python"], environment, tmp_path) == ["python"]
    assert environment == {}
    assert capsys.readouterr().err.startswith("graphc: the runtime of MPI listens on all interfaces")


@here
def test_a_folder_from_which_nothing_can_be_preloaded_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "a b" / "run"
    folder.mkdir(parents=True)
    assert confine(["python"], {}, folder) == ["python"]
    assert f"{folder.parent}; name a folder without spaces and colons in TMPDIR" in capsys.readouterr().err


@pytest.mark.parametrize("name", _MACHINES)
def test_the_instruction_finds_the_place_that_the_loader_fills(name: str) -> None:
    machine = _MACHINES[name]
    file = library(machine)
    text = int.from_bytes(file[0x120 + 24 + 8 : 0x120 + 24 + 16], "little")
    slot = int.from_bytes(file[0x198 : 0x198 + 8], "little")
    at = text + machine.call
    if name == "x86_64":
        assert at + 6 + int.from_bytes(file[at + 2 : at + 6], "little") == slot
    else:
        word = int.from_bytes(file[at : at + 4], "little")
        assert word & 0xFF00001F == 0x58000009  # ldr x9, a place that lies this many words ahead
        assert at + (word >> 5 & 0x7FFFF) * 4 == slot
