"""Plays a schedule on a clock: times, idle shares, micro-batches in flight, and the table as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from graphc.errors import UsageError
from graphc.pipe.tables import Action, Table

Cost = Callable[[Action], float]
"""The time of an action."""


@dataclass(frozen=True, slots=True)
class Played:
    """The result of :func:`play`.

    Attributes:
        start, end: of every action, from 0 on.
    """

    table: Table
    start: Mapping[Action, float]
    end: Mapping[Action, float]

    @property
    def span(self) -> float:
        """The time of the step."""
        return max(self.end.values(), default=0.0)

    def idle(self) -> float:
        """The share of all ranks' time in which they wait: the pipeline bubble."""
        busy = sum(self.end[a] - self.start[a] for row in self.table for a in row)
        return 1 - busy / (self.span * len(self.table)) if self.span else 0.0


def needs(action: Action, stages: int) -> Iterator[Action]:
    """The actions on other ranks, or earlier on this one, whose results ``action`` reads."""
    stage, micro = action.stage, action.micro
    if action.kind == "F" and stage > 0:
        yield Action("F", stage - 1, micro)
    if action.kind == "B":
        yield Action("B", stage + 1, micro) if stage + 1 < stages else Action("F", stage, micro)
        yield Action("F", stage, micro)
    if action.kind == "W":
        yield Action("B", stage, micro)


def unit(action: Action) -> float:
    """One tick for F, B and W, none for updates."""
    return 0.0 if action.kind == "U" else 1.0


def free(action: Action) -> float:
    """Messages that take no time."""
    return 0.0


def play(table: Table, cost: Cost = unit, message: Cost = free) -> Played:
    """Run every rank's row in order, each action as soon as its operands exist.

    Args:
        message: time from the end of an action until its results are on another rank; the sender goes on meanwhile.

    Raises:
        UsageError: a table in which ranks wait for each other forever; the message shows where.
    """
    stages = 1 + max((a.stage for row in table for a in row), default=0)
    start: dict[Action, float] = {}
    end: dict[Action, float] = {}
    place, clock = [0] * len(table), [0.0] * len(table)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(table):
            while place[rank] < len(row):
                action = row[place[rank]]
                sources = list(needs(action, stages))
                if any(source not in end for source in sources):
                    break
                came = [end[a] + (message(a) if (a.stage - action.stage) % len(table) else 0.0) for a in sources]
                start[action] = max([clock[rank], *came])
                clock[rank] = end[action] = start[action] + cost(action)
                place[rank] += 1
                moved = True
    stuck = [row[k] for row, k in zip(table, place, strict=True) if k < len(row)]
    if stuck:
        raise UsageError(f"the schedule stands still at {', '.join(map(str, stuck))}, which wait for each other")
    return Played(table, start, end)


def in_flight(row: Sequence[Action], stage: int) -> int:
    """The most micro-batches of ``stage`` between their forward pass and the last action that reads its activations."""
    slots = assign_slots(row, stage)
    return 1 + max(slots.values(), default=-1)


def assign_slots(row: Sequence[Action], stage: int) -> dict[int, int]:
    """Micro-batch → slot of the activation stash of ``stage``; a slot is free again after the backward pass."""
    last = {a.micro: k for k, a in enumerate(row) if a.stage == stage and a.kind in "FBW"}
    free: list[int] = []
    found: dict[int, int] = {}
    used = 0
    for k, action in enumerate(row):
        if action.stage != stage or action.kind not in "FBW":
            continue
        if action.kind == "F":
            free.sort()
            found[action.micro] = free.pop(0) if free else used
            used += found[action.micro] == used
        if last[action.micro] == k:
            free.append(found[action.micro])
    return found


def grid(table: Table) -> str:
    """The table as text: a row a rank, a column a tick."""
    played = play(table)
    rows = []
    for rank, row in enumerate(table):
        cells = dict.fromkeys(range(int(played.span)), "")
        for action in row:
            if action.kind != "U":
                cells[int(played.start[action])] = str(action)
        rows.append((f"rank {rank}", list(cells.values())))
    width = max((len(cell) for _, cells in rows for cell in cells), default=1)
    head = max(len(name) for name, _ in rows)
    lines = []
    for name, entries in rows:
        shown = " ".join((cell or "·").ljust(width) for cell in entries)
        lines.append(f"{name:<{head}}  {shown}".rstrip())
    return "\n".join(lines)
