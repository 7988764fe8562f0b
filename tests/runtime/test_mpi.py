"""Collectives between real MPI processes."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphc.errors import MissingExtraError, WorldError
from graphc.runtime.communicator import Communicator, agree, open_communicator
from graphc.runtime.world import World, find_world, threads_for
from tests.runtime.mpi_run import map_ranks, run_mpi

pytestmark = pytest.mark.mpi

SIZES = (1, 10, 4099, 700_003)  # the last is several slices and a rest
OPS = ("sum", "mean", "min", "max", "prod")


def share(rank: int, size: int, dtype: str) -> Any:
    return np.random.default_rng(rank).normal(scale=3, size=size).astype(dtype)


def reduce_everything(comm: Communicator) -> dict[tuple[str, str, int], tuple[float, str]]:
    """Largest error against numpy, and a digest of the result, for every case."""
    numpy: dict[str, Any] = {"sum": np.sum, "mean": np.mean, "min": np.min, "max": np.max, "prod": np.prod}
    found = {}
    for size in SIZES:
        for dtype in ("float32", "float64", "int64"):
            for op in OPS if size < 10_000 else ("sum", "mean"):
                if op == "mean" and dtype == "int64":
                    continue
                array = share(comm.rank, size, dtype)
                comm.allreduce(array, op, f"{op} {size}")
                expected = numpy[op](np.stack([share(rank, size, dtype) for rank in range(comm.size)]), axis=0)
                error = float(np.max(np.abs(array - expected) / (1.0 + np.abs(expected))))
                found[op, dtype, size] = (error, hashlib.sha256(array.tobytes()).hexdigest())
    return found


def queue_and_gather(comm: Communicator) -> dict[str, Any]:
    arrays = [np.full(300_000, comm.rank + k, np.float32) for k in range(6)]
    handles = [comm.start(array, "mean", f"b{k}") for k, array in enumerate(arrays)]
    middle = np.full(3, float(comm.rank))
    comm.allreduce(middle)  # a blocking call behind a full queue keeps its place
    for handle in reversed(handles):
        comm.wait(handle)
    received = np.full(3, comm.rank, np.uint8)
    comm.broadcast(received, root=1)
    comm.barrier()
    try:
        agree(comm, ["AllReduce w", f"AllReduce b{comm.rank}"], "collectives")
    except WorldError as error:
        text = str(error)
    second = open_communicator()
    ranks = second.allgather_object(comm.rank)
    second.close()
    return {
        "means": [(float(a.min()), float(a.max())) for a in arrays],
        "middle": middle.tolist(),
        "received": received.tolist(),
        "agree": text,
        "ranks": ranks,
        "world": find_world(),
        "threads": threads_for(find_world()),
    }


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.full)])
def test_allreduce(ranks: int) -> None:
    results = map_ranks(ranks, reduce_everything)
    for case, (error, bits) in results[0].items():
        assert error < 1e-5, case
        assert all(other[case][1] == bits for other in results[1:]), f"{case}: ranks differ in bits"


def test_queue_gather_broadcast_agree() -> None:
    for rank, found in enumerate(map_ranks(2, queue_and_gather)):
        assert found["means"] == [(k + 0.5, k + 0.5) for k in range(6)]
        assert found["middle"] == [1.0] * 3
        assert found["received"] == [1] * 3
        assert found["agree"].endswith("collectives: entry 1 is 'AllReduce b0' on rank 0 and 'AllReduce b1' on rank 1")
        assert found["ranks"] == [0, 1]
        assert found["world"] == World(rank, 2, rank, 2, "mpi")
        assert found["threads"] >= 1


def test_more_workers_than_cores() -> None:
    done = run_mpi(5, "from graphc.runtime.communicator import open_communicator as o; print(len(o().allgather_object(1)))")
    assert done.code == 0, done.text
    assert done.out.split() == ["5"] * 5


def test_a_world_mpi_knows_nothing_of() -> None:
    program = (
        "from graphc.runtime.world import World\nfrom graphc.runtime.communicator import open_communicator\n"
        "open_communicator(World(0, 3, 0, 3, 'mpi'))"
    )
    done = run_mpi(2, program)
    assert done.code == 1
    assert "this worker should be rank 0 of 3, but MPI started rank" in done.err
    assert "Traceback" not in done.err


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'graphc\[mpi\]'"):
        open_communicator(World(0, 2, 0, 2, "mpi"))


def test_script_of_a_user(tmp_path: Path) -> None:
    """A script's folder is importable, its arguments and name arrive, and each rank's lines come whole."""
    (tmp_path / "helper.py").write_text("WORD = 'x' * 3000")
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, helper, os\nassert __name__ == '__main__'\n"
        "for k in range(50): print(os.environ['OMPI_COMM_WORLD_RANK'], sys.argv[1:], helper.WORD)\n"
        "print('late', file=sys.stderr)"
    )
    done = run_mpi(2, script, "--lr", "0.1")
    assert done.code == 0, done.text
    lines = done.out.splitlines()
    assert len(lines) == 100
    assert set(lines) == {f"{rank} ['--lr', '0.1'] {'x' * 3000}" for rank in range(2)}
    assert done.err.split() == ["late", "late"]
