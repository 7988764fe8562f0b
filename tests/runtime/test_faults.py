"""Faults inside a training on real MPI processes, at random moments: the right error, nothing half-written.

``make test`` runs a few moments, ``make faults`` all of them. Faults from outside (killed, stopped, crashed processes) are the
kind ``fault`` of ``make fuzz``, in ``tests/fuzz/fault.py``.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import subprocess
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from graphc.distributed.health.flight_recorder import load
from graphc.distributed.health.watchdog import is_alive
from tests.cli.models import write_mlp
from tests.runtime.fault_run import WORKER, check_the_files
from tests.runtime.mpi_run import HANG, Done, finish, start_mpi

DEADLINE = 4.0
MOMENTS = 20
pytestmark = pytest.mark.mpi


def moments(kind: str, quick: int, large: Collection[int] = ()) -> list[object]:
    """Seeds of the moments; those beyond the first ``quick`` ones only in ``make faults``."""
    marks = [[pytest.mark.large] if seed in large else [] if seed < quick else [pytest.mark.faults] for seed in range(MOMENTS)]
    return [pytest.param(seed, id=f"{kind}-{seed}", marks=mark) for seed, mark in enumerate(marks)]


@dataclass
class Run:
    """A training under way, and what it has said about itself."""

    folder: Path
    size: int
    rank: int
    process: subprocess.Popen[str]
    pids: dict[int, int] = field(default_factory=dict)
    training: threading.Event = field(default_factory=threading.Event)

    def end(self) -> Done:
        """Wait for the end."""
        return finish(self.process, HANG)


def start(kind: str, seed: int, tmp_path: Path, folder: Path | None = None, moment: int = 0) -> Run:
    """Start a training of two or three ranks, with a fault in a random one."""
    choice = random.Random(f"{kind} {seed}")
    size = choice.choice((2, 2, 3))
    rank = choice.randrange(size)
    folder = folder or tmp_path
    write_mlp(folder)
    job = {"folder": str(folder), "kind": kind, "rank": rank, "moment": moment}
    process = start_mpi(size, WORKER, json.dumps(job), deadline=DEADLINE)
    run = Run(folder, size, rank, process)
    out, process.stdout = process.stdout, None
    assert out is not None

    def read() -> None:
        for line in out:
            word, number, *rest = line.split()
            if word == "pid":
                run.pids[int(number)] = int(rest[0])
            elif word == "training":
                run.training.set()

    threading.Thread(target=read, daemon=True).start()
    return run


def check_the_end(run: Run, done: Done, message: str) -> None:
    """The right error, from one place; no process left, and every file whole."""
    assert done.code == 1, done.text
    assert re.search(f"^graphc: {message}", done.err, re.MULTILINE), done.text
    assert done.err.count("graphc: ") == 1, done.text
    limit = time.monotonic() + 60
    while any(map(is_alive, run.pids.values())) and time.monotonic() < limit:
        time.sleep(0.02)
    assert not any(map(is_alive, run.pids.values())), done.text
    check_the_files(run.folder)
    found = re.search(r"flight logs: (\S+) \(", done.err)
    if found is not None:
        assert {flight.rank for flight in load(Path(found[1]))} <= set(range(run.size))


@pytest.mark.parametrize("seed", moments("loader", 1, large=[0]))
def test_an_exception_in_the_data_loader(seed: int, tmp_path: Path) -> None:
    run = start("loader", seed, tmp_path, moment=random.Random(seed).randrange(1000))
    done = run.end()
    check_the_end(run, done, rf"rank {run.rank} failed: .*batch \d+ of epoch 0.*ValueError: sample \d+ is damaged")


@pytest.mark.parametrize("seed", moments("mismatch", 1, large=[0]))
def test_a_pass_that_changes_a_collective_on_one_rank(seed: int, tmp_path: Path) -> None:
    run = start("mismatch", seed, tmp_path, moment=seed)
    done = run.end()
    # Rank 0 is compared with the first that differs from it, which is rank 1 where rank 0 itself is the faulty one.
    # On a busy machine a rank can be too late to report the same error.
    message = (
        rf"ranks? \d(, \d)* failed: the ranks disagree on collective: entry \d+ is 'AllReduce\([^']*' on rank 0 "
        rf"and 'AllReduce\([^']*' on rank {run.rank or 1}(; the other workers were stopped.*)?$"
    )
    check_the_end(run, done, message)
    assert not (run.folder / "checkpoint").exists()


@pytest.mark.parametrize("seed", moments("disk", 1))
def test_a_full_disk(seed: int, tmp_path: Path) -> None:
    """The disk is filled up at a random moment, to leave a random number of bytes: a checkpoint or model breaks off there."""
    with small_disk(tmp_path) as folder:
        run = start("disk", seed, tmp_path, folder)
        choice = random.Random(seed)
        assert run.training.wait(HANG), run.end().text
        time.sleep(choice.uniform(0.0, 0.5))
        fill(folder / "filler", leave=choice.randrange(3000))
        done = run.end()
        (folder / "filler").unlink()
        message = rf"rank 0 failed: cannot write (the checkpoint '{folder}/checkpoint'|{folder}/trained.onnx): No space left"
        check_the_end(run, done, message)


@contextlib.contextmanager
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("only root can mount a small file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(file: Path, leave: int) -> None:
    """Write until nothing fits, then give ``leave`` bytes (whole pages) back."""
    with open(file, "wb", buffering=0) as stream, contextlib.suppress(OSError):
        while True:
            stream.write(bytes(4096))
    os.truncate(file, max(0, file.stat().st_size - leave))
