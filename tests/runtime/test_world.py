"""The mesh, and finding the world from the environment."""

from __future__ import annotations

import os

import pytest

from graphc.distributed.cores import Place, cores_of, share_of_cores
from graphc.distributed.host_queue import NullCommunicator
from graphc.distributed.threads import run_threads
from graphc.distributed.world import World, available_cores, device_index, find_world, threads_for
from graphc.errors import UsageError
from graphc.mesh import Mesh


@pytest.mark.parametrize(
    ("environment", "world"),
    [
        ({}, World()),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, World(3, 8, 1, 2, "mpi")),
        ({"RANK": "1", "WORLD_SIZE": "2"}, World(1, 2, 1, 2, "mpi")),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node0"}, World(1, 2, 1, 2, "tcp")),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "GRAPHC_TRANSPORT": "mpi"}, World(1, 2, 1, 2, "mpi")),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "GRAPHC_TRANSPORT": "nccl"}, World(1, 2, 1, 2, "tcp")),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "PMIX_RANK": "1"}, World(1, 2, 1, 2, "mpi")),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "node0", "GRAPHC_TRANSPORT": "tcp"}, World()),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "GRAPHC_TRANSPORT": "tcp"}, World(1, 2, 1, 2, "tcp")),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, World(5, 8, 1, 4, "mpi")),
        ({"RANK": "0", "WORLD_SIZE": "1"}, World()),
        (
            {
                "OMPI_COMM_WORLD_RANK": "2",
                "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_LOCAL_RANK": "0",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            },
            World(2, 4, 0, 2, "mpi"),
        ),
        ({"RANK": "1", "WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "9"}, World(1, 2, 1, 2, "mpi")),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, World(1, 2, 1, 2, "mpi")),
        (
            {
                "SLURM_PROCID": "4",
                "SLURM_STEP_NUM_TASKS": "5",
                "SLURM_LOCALID": "0",
                "SLURM_NODEID": "2",
                "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
            },
            World(4, 5, 0, 1, "mpi"),
        ),
        # The shell of a batch script sees how many tasks the job may start, but is one process.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, World()),
    ],
)
def test_finds_the_world(environment: dict[str, str], world: World) -> None:
    assert find_world(environment=environment) == world


def test_what_the_caller_says_comes_first() -> None:
    assert find_world(World(1, 3, 1, 3, "mpi"), {"RANK": "0", "WORLD_SIZE": "2"}).size == 3


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "1"}, "sets RANK but not WORLD_SIZE"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 does not fit a world of 2"),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "GRAPHC_TRANSPORT": "ncl"},
            "unknown transport 'ncl' in GRAPHC_TRANSPORT; did you mean 'nccl'",
        ),
    ],
)
def test_bad_environment(environment: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        find_world(environment=environment)


def test_workers_share_the_cores() -> None:
    cores = available_cores()
    assert 1 <= cores <= len(os.sched_getaffinity(0))
    assert threads_for(World()) == cores
    assert threads_for(World(0, 2 * cores, 0, 2 * cores, "mpi")) == 1


FOUR, TWO = (0, 1, 2, 3), (4, 5)


@pytest.mark.parametrize(
    ("places", "shares"),
    [
        ([("a", FOUR)], [FOUR]),
        ([("a", FOUR)] * 2, [(0, 1), (2, 3)]),
        ([("a", FOUR)] * 3, [(0,), (1,), (2,)]),  # as many for each: none waits for a slower one
        ([("a", TWO)] * 3, [(4,), (5,), (4,)]),
        ([("a", FOUR), ("a", TWO)], [FOUR, TWO]),  # bound to sockets, one worker each
        ([("a", FOUR), ("a", TWO), ("a", FOUR), ("a", TWO)], [(0, 1), (4,), (2, 3), (5,)]),
        ([("a", FOUR), ("b", FOUR)], [FOUR, FOUR]),
        ([("a", (0,)), ("a", (1,))], [(0,), (1,)]),
    ],
)
def test_workers_of_a_machine_share_the_cores_that_they_may_use(places: list[Place], shares: list[tuple[int, ...]]) -> None:
    assert [share_of_cores(places, rank) for rank in range(len(places))] == shares


@pytest.mark.parametrize(
    ("quota", "alone", "two"),
    [(None, FOUR, [(0, 1), (2, 3)]), (3, (0, 1, 2), [(0,), (2,)]), (2, (0, 1), [(0,), (2,)]), (1, (0,), [(0,), (2,)])],
)
def test_workers_of_a_container_share_its_quota(
    monkeypatch: pytest.MonkeyPatch, quota: int | None, alone: tuple[int, ...], two: list[tuple[int, ...]]
) -> None:
    monkeypatch.setattr("graphc.distributed.cores.usable_cores", lambda: FOUR)
    monkeypatch.setattr("graphc.distributed.cores.cpu_quota", lambda: quota)
    assert cores_of(NullCommunicator()) == alone
    assert run_threads(2, cores_of) == two


def test_workers_take_their_devices_in_turn() -> None:
    assert [device_index(4, World(8 + k, 16, k, 4, "mpi")) for k in range(4)] == [0, 1, 2, 3]
    assert [device_index(1, World(k, 2, k, 2, "mpi")) for k in range(2)] == [0, 0]


def test_mesh_text() -> None:
    assert str(Mesh(data=2)) == "data=2"
    assert Mesh.parse("data=2") == Mesh(data=2)
    assert Mesh.parse(" data = 4 , tensor=1").size == 4
    assert str(Mesh()) == "data=1"
    assert Mesh.parse(str(Mesh(data=3))) == Mesh(data=3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("date=2", "unknown mesh axis 'date'; did you mean 'data'"),
        ("data=two", "cannot read the mesh axis 'data=two'"),
        ("data=0", "at least 1"),
        ("data=1,data=2", "given twice"),
        ("", "empty"),
    ],
)
def test_bad_mesh(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Mesh.parse(text)


def test_mesh_and_world_disagree() -> None:
    Mesh(data=2).check(2)
    with pytest.raises(UsageError, match=r"needs 4 workers.*the world has 2.*launch -n 4"):
        Mesh(data=4).check(2)
    with pytest.raises(UsageError, match="change the mesh to data=3,pipe=2"):
        Mesh(data=2, pipe=2).check(6)
    with pytest.raises(UsageError, match="one with tensor=1, 3, which divide the workers"):
        Mesh(data=2, pipe=2, tensor=2).check(6)
