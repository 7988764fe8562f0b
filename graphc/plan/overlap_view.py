"""Prints the plans of all ranks as a grid of rank × step, with the collectives in flight below.

ranks 0-1  ccckk>ck>cc<<?uu
  a             ══════
  b                ════
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import ascii_lowercase

import numpy as np
import onnx_ir as ir

from graphc.errors import counted
from graphc.ir.facts import static_dims
from graphc.ir.ops.accumulation import is_accumulation
from graphc.ir.ops.collectives import collective_of
from graphc.plan.partition import Plan
from graphc.plan.specialise import VIEWS
from graphc.plan.steps import PlanStep

SYMBOLS: Mapping[str, str] = {"segment": "c", "kernel": "k", "update": "u", "check": "?", "start": ">", "wait": "<"}
"""Kind of a step → its letter; other kinds are ``·``, and ``-`` is an update of state that other ranks own."""

COMPUTING = ("segment", "kernel", "update")
WIDTH = 100
"""Steps in a row of the grid; a longer plan continues in the next block."""


@dataclass(frozen=True, slots=True)
class CollectiveSpan:
    """A collective between its start and its wait: step numbers, bytes, and the steps that compute meanwhile."""

    tag: str
    start: int
    wait: int
    nbytes: int
    computing: tuple[int, ...]


def flights(plan: Plan) -> list[CollectiveSpan]:
    """The collectives of a plan in the order of their start."""
    steps = plan.steps
    spans = in_flight([(step.kind, step.tag) for step in steps], [_computes(step) for step in steps])
    return [CollectiveSpan(tag, start, wait, _nbytes(steps[start]), work) for tag, start, wait, work in spans]


def in_flight(events: Sequence[tuple[str, str]], computes: Sequence[bool]) -> list[tuple[str, int, int, tuple[int, ...]]]:
    """Tag, start, wait and what computes meanwhile of each collective, in the order of their start.

    Args:
        events: kind and tag of each step; collectives are ``start`` and ``wait``.
        computes: whether each step computes.
    """
    begun: dict[str, int] = {}
    found = []
    for k, (kind, tag) in enumerate(events):
        if kind == "start":
            begun[tag] = k
        elif kind == "wait" and tag in begun:
            start = begun.pop(tag)
            found.append((tag, start, k, tuple(i for i in range(start + 1, k) if computes[i])))
    return sorted(found, key=lambda span: span[1])


def overlapping(graph: ir.Graph) -> int:
    """How many collectives of a scheduled graph are in flight while nodes compute, as its plan will show it."""
    events, computes = [], []
    for node in graph:
        kind = "" if collective_of(node) is None else "start" if node.op_type.endswith("Start") else "wait"
        events.append((kind, node.attributes.get_string("tag", "")))
        idle = is_accumulation(node) or (not node.domain and (node.op_type in VIEWS or node.op_type == "Constant"))
        computes.append(not kind and not idle)
    return sum(bool(work) for *_, work in in_flight(events, computes))


def _nbytes(step: PlanStep) -> int:
    """Bytes of the operands of a collective, or of the part of them that this rank owns and the collective takes."""
    if step.transfer is not None and step.transfer.within:
        return step.transfer.nbytes
    return sum(
        int(np.prod(static_dims(v) or (), dtype=np.int64) * v.dtype.itemsize) for v in step.inputs if v.dtype is not None
    )


def grid(plans: Sequence[Plan]) -> str:
    """Render the grid: one row per rank (equal ranks share one), its collectives below, and a list of them.

    Args:
        plans: of rank 0, 1, ….
    """
    rows: dict[str, list[int]] = {}
    for rank, plan in enumerate(plans):
        rows.setdefault(_row(plan), []).append(rank)
    lines = [f"{counted(len(plans), 'worker')}, a row each; a column is a step"]
    lines.append(
        "  " + "   ".join(f"{symbol} {kind}" for kind, symbol in SYMBOLS.items()) + "   - not this rank's   ═ in flight"
    )
    for row, ranks in rows.items():
        lines += ["", *_block(row, ranks, plans[ranks[0]])]
    return "\n".join(lines)


def _row(plan: Plan) -> str:
    return "".join("-" if _owns_nothing(step) else SYMBOLS.get(step.kind, "·") for step in plan.steps)


def _owns_nothing(step: PlanStep) -> bool:
    return step.group is not None and step.group.elements > 0 and step.group.owned[0] == step.group.owned[1]


def _computes(step: PlanStep) -> bool:
    return step.kind in COMPUTING and not _owns_nothing(step)


def _block(row: str, ranks: Sequence[int], plan: Plan) -> list[str]:
    """The lines of ranks with one plan."""
    found = flights(plan)
    title = f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + _ranges(ranks)
    names = [_letters(k) for k in range(len(found))]
    margin = max(len(title), 8, *(len(n) + 2 for n in names)) + 2
    lines = []
    for first in range(0, len(row), WIDTH):
        part = row[first : first + WIDTH]
        lines.append(" " * margin + "".join(f"{k:<10}" for k in range(first, first + len(part), 10)).rstrip())
        lines.append(f"{title:<{margin}}{part}")
        for name, flight in zip(names, found, strict=True):
            bar = "".join("═" if flight.start <= k < flight.wait else " " for k in range(first, first + len(part))).rstrip()
            if bar:
                lines.append(f"  {name:<{margin - 2}}{bar}")
    width = max((len(f.tag) for f in found), default=0)
    for name, flight in zip(names, found, strict=True):
        meanwhile = ", ".join(plan.steps[k].name for k in flight.computing[:3])
        more = f" and {len(flight.computing) - 3} more" if len(flight.computing) > 3 else ""
        steps = "1 computing step" if len(flight.computing) == 1 else f"{len(flight.computing)} computing steps"
        beside = f"beside {steps}: {meanwhile}{more}" if flight.computing else "beside nothing"
        lines.append(
            f"  {name}  {flight.tag:<{width}}  {flight.nbytes:>11,} bytes  steps {flight.start}-{flight.wait}  {beside}"
        )
    busy = {k for flight in found for k in flight.computing}
    computing = sum(map(_computes, plan.steps))
    lines.append(f"  {len(busy)} of {computing} computing steps run while a collective is in flight")
    return lines


def _letters(k: int) -> str:
    """a … z, aa, ab, …"""
    return (_letters(k // 26 - 1) if k >= 26 else "") + ascii_lowercase[k % 26]


def _ranges(ranks: Sequence[int]) -> str:
    """``0-2,5``."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][-1] == rank - 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)
