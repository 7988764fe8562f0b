"""Chooses how device arrays travel between ranks: over NCCL, or through host memory.

| arrays                  | ``transport``             | how                                                            |
|-------------------------|---------------------------|----------------------------------------------------------------|
| in host memory          | any but ``nccl``          | over what connects the workers: MPI, TCP or threads            |
| on GPUs, one a worker   | ``auto``, ``nccl``        | NCCL; ``auto`` goes through host memory where NCCL is missing  |
| on GPUs, some of them   | ``auto``                  | through pinned host memory: NCCL refuses two ranks on one GPU, |
| shared, or threads      |                           | and wants a process for each                                   |
| on GPUs                 | ``mpi``, ``tcp``,         | through pinned host memory                                     |
|                         | ``threads``               |                                                                |
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from graphc.device import Memory
from graphc.distributed.communicator import Communicator
from graphc.distributed.health.hang_report import join_ranks
from graphc.distributed.health.watchdog import host_name
from graphc.distributed.host_staged import StagedCommunicator
from graphc.distributed.nccl.bindings import load_nccl
from graphc.distributed.nccl.communicator import GpuMemory, NcclCommunicator, on_gpu
from graphc.distributed.world import Wanted, wanted_transport
from graphc.errors import MissingExtraError, UsageError, WorldError, counted


class StagedWarning(UserWarning):
    """Collectives of GPUs pass through host memory: slower, same results."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What one worker can use.

    Attributes:
        device: a name of its GPU, unique among all machines; None: its arrays are not on a GPU.
        nccl: whether it can load NCCL.
        wanted: the transport it was told to use.
    """

    device: str | None
    nccl: bool
    wanted: Wanted = "auto"


def for_memory(comm: Communicator, memory: Memory, *, transport: str | None = None) -> Communicator:
    """A communicator for arrays of ``memory``: ``comm``, or a wrapper around it; every rank calls it at the same point.

    Args:
        transport: one of :data:`~graphc.distributed.world.TRANSPORTS`; None: what GRAPHC_TRANSPORT says, or ``auto``.

    Raises:
        UsageError: the transport does not fit these arrays or workers.
        WorldError: the workers were given different transports.
        MissingExtraError: the transport is NCCL and a worker lacks it.
    """
    wanted = wanted_transport(transport)
    if memory.on_host and wanted == "nccl":
        raise UsageError("the transport 'nccl' moves arrays of GPUs, and this backend keeps its arrays in host memory")
    if comm.size == 1 or isinstance(comm, StagedCommunicator):  # the caller has chosen
        return comm
    library = load_nccl() if on_gpu(memory) and wanted in ("auto", "nccl") else None
    device = device_name(memory) if on_gpu(memory) else None
    offers = [Offer(*offer) for offer in comm.allgather_object((device, library is not None, wanted))]
    if memory.on_host:  # another worker's arrays may lie on a device all the same
        _check_host(comm.transport, wanted)
        return comm
    choice, remark = choose(comm.transport, offers)
    if remark and comm.rank == 0:
        warnings.warn(remark, StagedWarning, stacklevel=2)
    if choice == "nccl" and on_gpu(memory) and library is not None:
        return NcclCommunicator(comm, memory, library)
    return StagedCommunicator(comm, memory)


def choose(host: str, offers: Sequence[Offer]) -> tuple[Literal["nccl", "staged"], str]:
    """How device arrays travel, and a remark for the user, which may be empty.

    Args:
        host: the transport of the host's arrays.
        offers: by rank.
    """
    first = offers[0].wanted
    other = next((rank for rank, offer in enumerate(offers) if offer.wanted != first), None)
    if other is not None:
        raise WorldError(f"the transport is {first!r} on rank 0 and {offers[other].wanted!r} on rank {other}")
    _check_host(host, first)
    problem = _nccl_problem(host, offers)
    if not problem and first in ("auto", "nccl"):
        missing = [rank for rank, offer in enumerate(offers) if not offer.nccl]
        if not missing:
            return "nccl", ""
        text = f"{join_ranks(missing)} cannot load NCCL; run: pip install 'graphc[gpu]'"
        if first == "nccl":
            raise MissingExtraError(text)
        return "staged", f"gradients pass through host memory: {text}"
    if first == "nccl":
        raise UsageError(f"NCCL cannot connect these workers: {problem}")
    return "staged", f"gradients pass through host memory: {problem}" if first == "auto" and problem else ""


def _check_host(host: str, wanted: Wanted) -> None:
    if wanted not in ("auto", "nccl", host):
        raise UsageError(
            f"the transport is {wanted!r}, but these workers talk by {host}; leave it out, or start them with {wanted!r}"
        )


def _nccl_problem(host: str, offers: Sequence[Offer]) -> str:
    """Why NCCL cannot connect the workers; empty where it can."""
    if host == "threads":
        return "they are threads of one process, and it wants a process for each GPU"
    users: dict[str | None, list[int]] = {}
    for rank, offer in enumerate(offers):
        users.setdefault(offer.device, []).append(rank)
    if None in users:
        return f"the arrays of {join_ranks(users[None])} are not on an NVIDIA GPU"
    shared = next((ranks for ranks in users.values() if len(ranks) > 1), None)
    if shared is None:
        return ""
    return (
        f"{join_ranks(shared)} share a GPU, and it takes one rank a GPU; start at most {counted(len(users), 'worker')} on"
        f" {counted(len(users), 'GPU')}, or let every worker see its own (CUDA_VISIBLE_DEVICES, LOCAL_RANK)"
    )


def device_name(memory: GpuMemory) -> str:
    """A name of the GPU that is unique among all machines."""
    properties = memory.cupy.cuda.runtime.getDeviceProperties(int(memory.device.id))
    identity = properties.get("uuid")
    return identity.hex() if isinstance(identity, bytes) and identity else f"{host_name()}/{memory.device.pci_bus_id}"
