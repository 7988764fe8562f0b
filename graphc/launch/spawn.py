"""Starts the ranks of one machine that meet by TCP: ``python -m graphc.launch.spawn N SCRIPT ARGS…``.

It stands where ``mpiexec`` stands for MPI: each rank is a process of :mod:`graphc.launch.entry` in a process group of its own,
with ``RANK`` and its like in the environment. When one ends badly the others are ended, and a line as of mpiexec says which.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from graphc.distributed.tcp_store.job_secret import JOB_SECRET, LISTEN_ADDRESS, LOOPBACK, new_secret
from graphc.errors import WorldError

TICK = 0.05  # seconds between looks at the ranks
PATIENCE = 1.0  # seconds in which the others notice a failure themselves, and say more about it

PORTS = range(20000, 32768)
"""Ports below those that Linux and macOS give to outgoing connections.

An outgoing connection could take a port of its range between this process's look and the moment when rank 0 listens.
"""

TRIES = 50
"""Ports that are tried before the system chooses one."""


def free_port() -> int:
    """A port of the loopback that nobody listens at."""
    for port in (*random.SystemRandom().sample(PORTS, TRIES), 0):
        with contextlib.suppress(OSError), socket.create_server((LOOPBACK, port)) as listener:
            return int(listener.getsockname()[1])
    raise WorldError("no port of the loopback is free")


def main(size: int, argv: Sequence[str]) -> int:
    """Run all ranks; returns 0 if they succeed, else the exit code of the first that did not."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    place = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free_port()), LISTEN_ADDRESS: LOOPBACK, JOB_SECRET: new_secret()}
    place |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    command = [sys.executable, "-P", "-m", "graphc.launch.entry", *argv]
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(size):
            numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(subprocess.Popen(command, env=os.environ | place | numbers, start_new_session=True))
        return _wait(ranks)
    finally:
        _end(ranks)


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    failed, since = 0, 0.0
    told: set[int] = set()
    while True:
        running = [process for process in ranks if process.poll() is None]
        for rank, process in enumerate(ranks):
            if process.returncode and rank not in told:
                told.add(rank)
                failed, since = failed or process.returncode, since or time.monotonic()
                code = process.returncode
                how = f"exited on signal {-code}" if code < 0 else f"exiting with exit code {code}"
                print(f"process rank {rank} with PID {process.pid} on node localhost {how}", flush=True)
        if not running or (failed and time.monotonic() - since > PATIENCE):
            return abs(failed)
        time.sleep(TICK)


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the ranks that still run: by SIGTERM, and by SIGKILL those that take no notice."""
    running = [process for process in ranks if process.poll() is None]
    for process in running:
        process.terminate()
    limit = time.monotonic() + PATIENCE
    while any(process.poll() is None for process in running) and time.monotonic() < limit:
        time.sleep(TICK)
    for process in running:
        process.kill()
        process.wait()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
