"""Pipeline schedules: which stage computes which micro-batch, and in which order on every rank.

A schedule is a table with one row a rank. An action is written as stage, kind and micro-batch: ``1F0`` is the forward pass of
micro-batch 0 on stage 1, ``B`` the backward pass, ``W`` the weight gradients where they are apart, ``U`` the updates.

    gpipe, 2 stages, 2 micro-batches      rank 0   0F0 0F1 0B0 0B1 0U
                                          rank 1   1F0 1F1 1B0 1B1 1U

Stage s lies on rank s mod ranks. The micro-batches of a stage come in ascending order in every schedule, so sums of gradients
are those of one worker that accumulates.

Sources: GPipe (Huang et al. 2019), 1F1B (PipeDream-Flush, Narayanan et al. 2021), interleaved 1F1B (Megatron-LM, Narayanan et
al. 2021), zero-bubble ZB-H1 (Qi et al. 2023).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from graphc.errors import UsageError, counted, nearest

Kind: TypeAlias = Literal["F", "B", "W", "U"]

NAMES = ("gpipe", "1f1b", "interleaved", "zero-bubble")


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One entry of a schedule; updates run once a step and rank, so their ``stage`` is the rank and ``micro`` is 0."""

    kind: Kind
    stage: int
    micro: int = 0

    def __str__(self) -> str:
        return f"{self.stage}U" if self.kind == "U" else f"{self.stage}{self.kind}{self.micro}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Parse ``1F0``.

        Raises:
            UsageError: another text.
        """
        found = re.fullmatch(r"(\d+)([FBW])(\d+)|(\d+)U", text)
        if found is None:
            raise UsageError(f"{text!r} is no action of a schedule; write stage, F, B or W, and micro-batch: 1F0")
        if found[4] is not None:
            return cls("U", int(found[4]))
        kinds: Mapping[str, Kind] = {"F": "F", "B": "B", "W": "W"}
        return cls(kinds[found[2]], int(found[1]), int(found[3]))


Table: TypeAlias = Sequence[Sequence[Action]]
"""The actions of every rank, in order."""


@dataclass(frozen=True, slots=True)
class PipeSchedule:
    """A schedule by name: ``"1f1b"``, ``"interleaved:stages=4"``.

    Attributes:
        name: one of :data:`NAMES`.
        stages: number of stages; 0: one a rank, two a rank where they are interleaved.
    """

    name: str = "1f1b"
    stages: int = 0

    @classmethod
    def parse(cls, text: str) -> PipeSchedule:
        """Parse the text form.

        Raises:
            UsageError: an unknown schedule or option, or a number of stages that is none.
        """
        name, _, rest = text.partition(":")
        if name not in NAMES:
            raise UsageError(f"unknown schedule {name!r}{nearest(name, NAMES)}; known are {', '.join(NAMES)}")
        if not rest:
            return cls(name)
        key, _, value = rest.partition("=")
        if name != "interleaved" or key != "stages" or not value.isdecimal() or int(value) < 1:
            raise UsageError(f"schedule {text!r} cannot be read; only interleaved has an option: interleaved:stages=4")
        return cls(name, int(value))

    def __str__(self) -> str:
        return f"{self.name}:stages={self.stages}" if self.stages else self.name

    @property
    def splits_weights(self) -> bool:
        """Whether weight gradients are tasks of their own."""
        return self.name == "zero-bubble"

    def stages_on(self, ranks: int) -> int:
        """The number of stages on ``ranks`` ranks.

        Raises:
            UsageError: stages that do not divide among the ranks.
        """
        if self.name != "interleaved":
            return ranks
        stages = self.stages or 2 * ranks
        if stages % ranks or stages == 0:
            raise UsageError(
                f"schedule {self}: {counted(stages, 'stage')} cannot be dealt to {counted(ranks, 'rank')} evenly;"
                f" take a multiple of {ranks}"
            )
        return stages

    def table(self, ranks: int, micro_batches: int) -> Table:
        """The actions of each of ``ranks`` ranks for one step.

        Raises:
            UsageError: a number of micro-batches that the schedule cannot take.
        """
        stages = self.stages_on(ranks)
        rows = {
            "gpipe": _gpipe,
            "1f1b": _one_forward_one_backward,
            "interleaved": _interleaved,
            "zero-bubble": _zero_bubble,
        }[self.name](ranks, stages, micro_batches)
        return [[*row, Action("U", rank)] for rank, row in enumerate(rows)]


def _gpipe(ranks: int, _stages: int, count: int) -> list[list[Action]]:
    micro = range(count)
    return [[*(Action("F", rank, k) for k in micro), *(Action("B", rank, k) for k in micro)] for rank in range(ranks)]


def _one_forward_one_backward(ranks: int, _stages: int, count: int) -> list[list[Action]]:
    rows = []
    for rank in range(ranks):
        ahead = min(ranks - rank - 1, count)
        row = [Action("F", rank, k) for k in range(ahead)]
        for k in range(count):
            row += [Action("F", rank, k + ahead)] if k + ahead < count else []
            row.append(Action("B", rank, k))
        rows.append(row)
    return rows


def _interleaved(ranks: int, stages: int, count: int) -> list[list[Action]]:
    """Rounds of ``ranks`` micro-batches pass through all stages of a rank in turn."""
    if count % ranks:
        raise UsageError(
            f"schedule interleaved: {counted(count, 'micro-batch', 'micro-batches')} cannot go in rounds of {ranks}, the ranks"
            f" of the pipe axis; take --accumulate {max(1, count // ranks) * ranks} or another multiple of {ranks}"
        )
    chunks, total = stages // ranks, count * (stages // ranks)

    def at(number: int, rank: int, *, backward: bool) -> Action:
        chunk = number % stages // ranks
        stage = (chunks - 1 - chunk if backward else chunk) * ranks + rank
        return Action("B" if backward else "F", stage, number // stages * ranks + number % ranks)

    rows = []
    for rank in range(ranks):
        ahead = min(total, 2 * (ranks - rank - 1) + (chunks - 1) * ranks)
        row = [at(k, rank, backward=False) for k in range(ahead)]
        for k in range(total):
            row += [at(k + ahead, rank, backward=False)] if k + ahead < total else []
            row.append(at(k, rank, backward=True))
        rows.append(row)
    return rows


def _zero_bubble(ranks: int, _stages: int, count: int) -> list[list[Action]]:
    """ZB-H1: rank r puts the weight gradients off by r micro-batches, so that they fill the time in which it would wait.

    No rank has more than ``ranks`` micro-batches in flight, which 1F1B has on rank 0.
    """
    rows = []
    for rank in range(ranks):
        ahead = min(ranks - rank, count)
        row = [Action("F", rank, k) for k in range(ahead)]
        for k in range(count):
            row.append(Action("B", rank, k))
            row += [Action("W", rank, k - rank)] if k >= rank else []
            row += [Action("F", rank, k + ahead)] if k + ahead < count else []
        rows.append([*row, *(Action("W", rank, k) for k in range(max(0, count - rank), count))])
    return rows
