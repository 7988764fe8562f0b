"""Groups of a mesh, channels, and the collectives that came with them, between threads and over every other transport."""

from __future__ import annotations

import time

import numpy as np
import pytest

from graphc.distributed.communicator import Communicator
from graphc.distributed.groups import Groups
from graphc.distributed.host_staged import StagedCommunicator
from graphc.distributed.nccl.communicator import NcclCommunicator
from graphc.distributed.threads import ThreadCommunicator, run_threads
from graphc.errors import UsageError, WorldError
from graphc.mesh import Mesh
from tests.backends.strict import StrictMemory
from tests.runtime.group_cases import around, everything_in_groups, in_a_ring, in_groups, misuse, movements
from tests.runtime.mpi_run import map_ranks
from tests.runtime.on_device import OnDevice
from tests.runtime.pretend_gpu import PretendMemory, PretendNccl
from tests.runtime.tcp_run import map_tcp


def test_groups_of_a_mesh() -> None:
    mesh = Mesh(data=2, pipe=2, tensor=2)
    assert mesh.groups("tensor") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert mesh.groups("pipe") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert mesh.groups("data+pipe") == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert [mesh.coordinate("data+pipe", rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    for wrong, text in (("dada", "did you mean 'data'"), ("data+data", "twice")):
        with pytest.raises(UsageError, match=text):
            mesh.members(wrong, 0)


@pytest.mark.full
def test_threads() -> None:
    for size in (2, 4):
        assert run_threads(size, everything_in_groups) == [([], True)] * size
    assert run_threads(8, lambda comm: in_groups(comm, Mesh(data=2, pipe=2, tensor=2))) == [[]] * 8


@pytest.mark.mpi
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.large)])
def test_mpi(size: int) -> None:
    assert map_ranks(size, everything_in_groups) == [([], True)] * size


@pytest.mark.full
def test_tcp() -> None:
    assert map_tcp(4, everything_in_groups) == [([], True)] * 4


@pytest.mark.full
def test_devices_through_host_memory() -> None:
    def work(comm: ThreadCommunicator) -> tuple[list[str], bool]:
        memory = StrictMemory()

        def device(group: Communicator) -> OnDevice:
            return OnDevice(group, memory)  # type: ignore[arg-type]

        staged = StagedCommunicator(comm, memory)
        return [*movements(device(staged)), *in_groups(staged, Mesh(data=2, tensor=2), device)], in_a_ring(
            staged, device
        ) == around(comm)

    assert run_threads(4, work) == [([], True)] * 4


@pytest.mark.full
def test_nccl() -> None:
    library = PretendNccl(4)

    def work(comm: ThreadCommunicator) -> tuple[list[str], bool]:
        memory = PretendMemory(comm.rank)
        world = NcclCommunicator(comm, memory, library)  # type: ignore[arg-type]

        def device(group: Communicator) -> OnDevice:
            return OnDevice(group, memory)  # type: ignore[arg-type]

        wrong = [*movements(device(world)), *in_groups(world, Mesh(data=2, tensor=2), device)]
        ring = in_a_ring(world, device) == around(comm)
        world.close()
        return wrong, ring

    assert run_threads(4, work) == [([], True)] * 4


def test_misuse() -> None:
    expected = (
        "the group 'tensor' is not open",
        "unknown mesh axis 'dada'; did you mean 'data'",
        "the channel from 0 to 1 of group 'data' is not open",
        "all_to_all gives 2 ranks equal parts, which 5 elements have not",
        "reduce to rank 2: the ranks are 0 … 1",
        "the first rank of a channel sends",
        "needs 3 workers, and the world has 2",
    )
    for texts in run_threads(2, misuse):
        assert len(texts) == len(expected)
        for text, part in zip(texts, expected, strict=True):
            assert part in text


@pytest.mark.full
def test_a_rank_that_stays_away_from_its_group_is_named_by_its_number_in_the_world() -> None:
    def work(comm: ThreadCommunicator) -> None:
        groups = Groups(comm, Mesh(data=2, tensor=2))
        groups.open(["tensor"])
        comm.step = 5
        if comm.rank == 3:
            time.sleep(0.6)
        groups.of("tensor").allreduce(np.ones(4, np.float32), tag="tensor/h")

    text = r"rank 3 did not come to allreduce\(sum\) 'tensor/h' of step 5 \(16 bytes\) within 0.2 s \(tensor: ranks 2, 3\)"
    with pytest.raises(WorldError, match=text):
        run_threads(4, work, deadline=0.2)


def test_a_rank_that_fails_sets_all_groups_free() -> None:
    def work(comm: ThreadCommunicator) -> None:
        groups = Groups(comm, Mesh(pipe=3))
        groups.open_channels([("pipe", 0, 1), ("pipe", 1, 2)])
        if comm.rank == 2:
            raise ValueError("bad stage")
        channel = groups.channel("pipe", comm.rank, comm.rank + 1)
        channel.wait(channel.start(np.ones(3), kind="send", tag="y"))

    with pytest.raises(ValueError, match="bad stage"):
        run_threads(3, work, deadline=60)
