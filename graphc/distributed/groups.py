"""The communicators of a mesh's groups, made once from that of the world.

    groups = Groups(comm, Mesh(data=2, tensor=2))
    groups.open(["tensor"])                       # every rank, at the same point
    groups.of("tensor").allreduce(array)          # between ranks 0 and 1, and between ranks 2 and 3
    groups.open_channels([("pipe", 0, 1)])        # from the first to the second rank of each pipe group
    groups.channel("pipe", 0, 1)

Communicators of different groups, and channels, run beside each other; within each, the order is that of the starts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from graphc.distributed.communicator import Communicator
from graphc.errors import UsageError, WorldError
from graphc.mesh import Mesh


class Groups:
    """The groups that this rank belongs to.

    Args:
        world: the communicator of all ranks.
        mesh: its axes.
    """

    def __init__(self, world: Communicator, mesh: Mesh) -> None:
        mesh.check(world.size)
        self.world, self.mesh = world, mesh
        self._open: dict[str, Communicator] = {}
        self._channels: dict[tuple[str, int, int], Communicator] = {}

    def open(self, names: Iterable[str]) -> None:
        """Make the communicators of the groups ``names``; every rank of the world calls it with the same ones.

        Raises:
            UsageError: an unknown axis.
        """
        for name in sorted({self.mesh.canonical(name) for name in names}):
            members = self.mesh.members(name, self.world.rank)
            if name not in self._open and len(members) == self.world.size:
                self._open[name] = self.world
            elif name not in self._open:
                self._open[name] = self.world.subgroup(members, name, self._number(name, members[0], 0))

    def of(self, name: str) -> Communicator:
        """The communicator of group ``name``, which is open."""
        found = self._open.get(self.mesh.canonical(name))
        if found is None:
            raise UsageError(f"the group {name!r} is not open; this run has {', '.join(sorted(self._open)) or 'none'}")
        return found

    def open_channels(self, ends: Iterable[tuple[str, int, int]]) -> None:
        """Make channels; every rank of the world calls it with the same ones.

        Args:
            ends: group, and the places in it of the rank that sends and the one that receives.
        """
        for name, source, target in sorted(set(ends)):
            members = self.mesh.members(name, self.world.rank)
            pair = members[source], members[target]
            if self.world.rank in pair and (name, source, target) not in self._channels:
                shown = f"{name} from rank {pair[0]} to rank {pair[1]}"
                self._channels[name, source, target] = self.world.subgroup(
                    pair, shown, self._number(name, pair[0], 1 + pair[1])
                )

    def channel(self, name: str, source: int, target: int) -> Communicator:
        """The channel on which place ``source`` of group ``name`` sends to place ``target``; this rank is one of them."""
        found = self._channels.get((name, source, target))
        if found is None:
            raise UsageError(f"the channel from {source} to {target} of group {name!r} is not open")
        return found

    def _number(self, name: str, first: int, second: int) -> int:
        """A number for a group, or for a channel, that no other has."""
        axes = list(self.mesh.axes)
        which = sum(1 << axes.index(axis) for axis in name.split("+"))
        size = self.world.size
        return (which * size + first) * (size + 1) + second + 1


def workers_of_a_machine(comm: Communicator) -> int:
    """The number of workers on each machine; every rank calls it at the same point.

    Raises:
        WorldError: machines with different numbers of workers, or whose ranks are not consecutive.
    """
    machines = comm.allgather_object(comm.machine())
    counts = [len(list(ranks)) for _, ranks in itertools.groupby(machines)]
    if len(set(counts)) > 1 or len(counts) > len(set(machines)):
        raise WorldError(
            f"the workers lie on the machines {', '.join(machines)}, by rank: a node is a machine, and needs consecutive ranks"
            " and as many as the others; start them so, or say how many workers a node has (per_node=N, shard_size=N)"
        )
    return counts[0]
