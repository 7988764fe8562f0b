"""Collectives between real MPI processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from graphc.distributed.choose import open_communicator
from graphc.distributed.host_queue import NullCommunicator
from graphc.distributed.world import World
from graphc.errors import MissingExtraError
from tests.runtime.collective_cases import everything, queue_and_gather, tree_of_blocks
from tests.runtime.mpi_run import map_ranks, run_mpi

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.large), pytest.param(3, marks=pytest.mark.full)])
def test_every_collective(ranks: int) -> None:
    results = map_ranks(ranks, everything)
    for case, (error, digest) in results[0].items():
        assert error <= 1, case
        assert all(other[case][1] == digest for other in results[1:]), f"{case}: ranks differ in bits"


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.large), 4])
def test_a_tree_has_the_same_bits_on_any_number_of_workers(ranks: int) -> None:
    alone = tree_of_blocks(NullCommunicator())
    assert map_ranks(ranks, tree_of_blocks) == [alone] * ranks


def test_queue_gather_broadcast_agree() -> None:
    for rank, found in enumerate(map_ranks(2, queue_and_gather)):
        assert found["means"] == [(k + 0.5, k + 0.5) for k in range(6)]
        assert found["middle"] == [1.0] * 3
        assert found["received"] == [1] * 3
        assert found["agree"].endswith("collectives: entry 1 is 'AllReduce b0' on rank 0 and 'AllReduce b1' on rank 1")
        assert found["ranks"] == [0, 1]
        assert found["world"] == World(rank, 2, rank, 2, "mpi")
        assert found["threads"] >= 1


@pytest.mark.large  # four, and twelve in test_start.py, are as many on small machines
def test_more_workers_than_cores() -> None:
    done = run_mpi(5, "from graphc.distributed.choose import open_communicator as o; print(len(o().allgather_object(1)))")
    assert done.code == 0, done.text
    assert done.out.split() == ["5"] * 5


def test_a_world_mpi_knows_nothing_of() -> None:
    program = (
        "from graphc.distributed.world import World\nfrom graphc.distributed.choose import open_communicator\n"
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
