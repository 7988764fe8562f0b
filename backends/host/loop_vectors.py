"""Chooses how LLVM makes vectors of an innermost loop, by the number of its passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir as ll

from graphc.backends.host.kinds import I1, I32
from graphc.backends.host.processor import processor

FEW = 16
"""Vectors of a loop below which it is written out: the masks of part of a vector are then known."""


@dataclass(frozen=True, slots=True)
class Vectors:
    """How an innermost loop becomes vectors.

    Attributes:
        lanes, count: of a vector, and vectors of a pass.
        masks: whether the last vector is a part of one.
        few: whether the passes are so few that they are written out.
    """

    lanes: int
    count: int
    masks: bool = False
    few: bool = False


def vectors_of(size: int) -> Vectors:
    """How an innermost loop of ``size`` passes becomes vectors.

    One that fills no vectors ends with part of a vector where the processor has masks, since a number that is left takes as
    long as a vector: log-softmax of rows of 77 takes half the time, and of rows of 5 as well. With AVX2 it would take up to
    twice as long. Loops of few vectors are written out: a log-softmax of rows of 100 with its gradient takes 0.25 ms instead of
    0.34.
    """
    widest = processor().lanes
    lanes = widest if size >= widest else 8
    whole, left = divmod(size, lanes)
    few = 0 < whole < FEW
    if widest == 16 and left > 1 and 2 < size < 32 * lanes:
        return Vectors(lanes, {1: 2, 3: 4}.get(whole, 1) if whole < FEW else 4, True, few)
    return Vectors(lanes if whole else 1, next(n for n in (4, 2, 1) if whole >= 16 or max(1, whole) % n == 0), few=few)


def pieces_of(size: int) -> list[tuple[int, Vectors]]:
    """The loops, one after the other, in which ``size`` numbers are added up: passes and vectors of each.

    No loop leaves anything to LLVM, which would add up what fills no vectors in an order that depends on whether it knows the
    size.
    """
    found = vectors_of(size)
    if found.masks or found.lanes == 1:
        return [(size, found)]
    whole = size // (found.lanes * found.count) * found.lanes * found.count
    left, pieces = size - whole, [(whole, found)]
    if processor().lanes == 16:
        return [*pieces, (left, Vectors(16, 1, masks=True))]
    full = left // found.lanes * found.lanes
    return [*pieces, (full, Vectors(found.lanes, 1)), (left - full, Vectors(1, 1))]


def into_vectors(again: Any, vectors: Vectors, sums: bool) -> None:
    """Say how an innermost loop is made vectors.

    Args:
        again: the branch back to the loop's head.
        sums: whether it adds numbers up. That has a fixed order: left to itself LLVM would choose by all that the loop holds.
    """
    settings = []
    if sums or vectors.masks:
        settings += [
            ("vectorize.width", ll.Constant(I32, vectors.lanes)),
            ("interleave.count", ll.Constant(I32, vectors.count)),
        ]
    if vectors.masks:
        settings.append(("vectorize.predicate.enable", ll.Constant(I1, 1)))
    if not settings:
        return
    module = again.module
    if vectors.few:
        settings.append(("vectorize.followup_vectorized", module.add_metadata(["llvm.loop.unroll.full"])))
    loop = module.add_metadata([f"loop {len(module.metadata)}"])
    loop.operands = (loop, *(module.add_metadata([f"llvm.loop.{name}", value]) for name, value in settings))
    again.set_metadata("llvm.loop", loop)
