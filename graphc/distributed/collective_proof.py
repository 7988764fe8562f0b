"""Proves before the first step that the collectives of all ranks fit together, so that no step can wait forever.

For every group, all its ranks run the same collectives in the same order. On every channel what is sent is what is received,
in the same order. And when the ranks' steps are played, each waiting for what it needs, all come to their end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from itertools import zip_longest
from typing import TypeAlias

from graphc.distributed.communicator import Communicator
from graphc.distributed.consistency import agree
from graphc.distributed.health.hang_report import join_ranks
from graphc.errors import WorldError
from graphc.mesh import Mesh
from graphc.plan.group_places import CollectiveEvent

Events: TypeAlias = Sequence[CollectiveEvent]
Lane: TypeAlias = tuple[str, int, int]
"""A queue: group, and the places of sender and receiver of a channel."""


def prove_collectives(communicator: Communicator, mesh: Mesh, events: Events) -> list[Lane]:
    """Check the events of all ranks; every rank calls it.

    Returns:
        The channels of all ranks: group, source and target; see :meth:`graphc.distributed.groups.Groups.open_channels`.

    Raises:
        WorldError: on every rank, naming the first difference, or who waits for whom.
    """
    if mesh.data == mesh.size:  # one group, in which no rank sends to another alone
        agree(communicator, [event.text for event in events if event.begins], "collective")
        return []
    gathered = communicator.allgather_object([astuple(event) for event in events])
    everyone = [[CollectiveEvent(*fields) for fields in one] for one in gathered]
    check_events(mesh, everyone)
    return sorted({event.lane for events in everyone for event in events if event.source >= 0})


def check_events(mesh: Mesh, everyone: Sequence[Events]) -> None:
    """Raise WorldError unless the events of all ranks, by rank, fit together."""
    begun: list[dict[Lane, list[CollectiveEvent]]] = [{} for _ in everyone]
    for events, lanes in zip(everyone, begun, strict=True):
        for event in events:
            if event.begins:
                lanes.setdefault(event.lane, []).append(event)
    for lane in sorted({lane for lanes in begun for lane in lanes}):
        group, source, target = lane
        for members in mesh.groups(group):
            if source < 0:
                _check_group(group, members, [begun[rank].get(lane, []) for rank in members])
            else:
                sender, receiver = members[source], members[target]
                _check_channel(sender, receiver, begun[sender].get(lane, []), begun[receiver].get(lane, []))
    _play(mesh, everyone)


def _check_group(group: str, members: Sequence[int], lists: Sequence[Events]) -> None:
    """All members begin the same collectives in the same order."""
    first = lists[0]
    for rank, mine in zip(members[1:], lists[1:], strict=True):
        for index, pair in enumerate(zip_longest(first, mine)):
            one, other = (repr(event.text) if event is not None else "nothing" for event in pair)
            if one != other:
                where = f"the collectives of group {group!r}: entry {index} is {one} on rank {members[0]}"
                raise WorldError(f"the ranks disagree on {where} and {other} on rank {rank}")


def _check_channel(sender: int, receiver: int, sent: Events, received: Events) -> None:
    """What one end sends is what the other receives."""
    for one, other in zip_longest(sent, received):
        if one is not None and other is not None and (one.tag, one.text) == (other.tag, other.text):
            continue
        if one is not None and all(one.tag != event.tag for event in received):
            raise WorldError(f"rank {sender} sends {one.tag!r} ({one.text}) to rank {receiver}, which never receives it")
        if other is not None and all(other.tag != event.tag for event in sent):
            raise WorldError(f"rank {receiver} receives {other.tag!r} ({other.text}) from rank {sender}, which never sends it")
        gives, takes = (f"{event.tag!r} ({event.text})" if event is not None else "nothing" for event in (one, other))
        raise WorldError(f"rank {sender} sends {gives} to rank {receiver}, which expects {takes} then")


def _play(mesh: Mesh, everyone: Sequence[Events]) -> None:
    """Run all ranks' events; a collective ends when all its ranks have begun it, and those before it in its queue."""
    begun: dict[tuple[Lane, int], dict[str, int]] = {}  # by queue and rank: tag → place in the queue
    position = [0] * len(everyone)

    def ranks_of(event: CollectiveEvent, rank: int) -> tuple[int, ...]:
        members = mesh.members(event.group, rank)
        return members if event.source < 0 else (members[event.source], members[event.target])

    def ended(event: CollectiveEvent, rank: int) -> bool:
        place = begun[event.lane, rank][event.tag]
        return all(len(begun.get((event.lane, other), ())) > place for other in ranks_of(event, rank))

    moved = True
    while moved:
        moved = False
        for rank, events in enumerate(everyone):
            while position[rank] < len(events):
                event = events[position[rank]]
                if event.begins:
                    queue = begun.setdefault((event.lane, rank), {})
                    queue[event.tag] = len(queue)
                elif not ended(event, rank):
                    break
                position[rank] += 1
                moved = True
    texts = []
    for rank, events in enumerate(everyone):
        if position[rank] < len(events):
            event = events[position[rank]]
            texts.append(
                f"rank {rank} waits in {event.tag!r} for {join_ranks([r for r in ranks_of(event, rank) if r != rank])}"
            )
    if texts:
        raise WorldError(f"the ranks would wait for each other forever: {'; '.join(texts[:4])}")
