"""Predicts the step of synchronous data parallelism from the step of one worker.

    backward     ████████████████████
    AllReduce           ▓b0▓▓ ▓b1▓▓▓ ▓b2▓▓▓▓
                                    └──────┘ exposed: what ends behind the backward pass

Gradients become ready evenly over the backward pass. A bucket's AllReduce starts when it is full and the one before has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

BACKWARD = 2 / 3
"""Share of the backward pass in a step: it computes two products for each one of the forward pass."""

BUCKET = 25e6
"""Bytes of a bucket."""


@dataclass(frozen=True, slots=True)
class Overlapped:
    """Communication beside the backward pass, in seconds.

    Attributes:
        busy: all collectives.
        exposed: what ends after the backward pass.
    """

    busy: float
    exposed: float


def overlapped(backward: float, gradient: float, reduce: Callable[[float], float], bucket: float = BUCKET) -> Overlapped:
    """Reduce ``gradient`` bytes in buckets while a backward pass of ``backward`` seconds runs.

    Args:
        reduce: bytes of a bucket → seconds of its collective.
    """
    count = max(1, round(gradient / bucket))
    each = reduce(gradient / count)
    end = 0.0
    for k in range(count):
        end = max(end, backward * (k + 1) / count) + each
    return Overlapped(count * each, max(0.0, end - backward))


def server_exposed(step: float, pull: float, push: float, *, copies_at_end: bool) -> float:
    """Seconds that a step with synchronous parameter servers takes longer than ``step``.

    Args:
        pull, push: seconds to fetch all parameters and to send all gradients.
        copies_at_end: parameters are fetched in one go after the update, rather than each before its layer.
    """
    late = max(0.0, push - step * BACKWARD)
    return late + (pull if copies_at_end else max(0.0, pull - step * (1 - BACKWARD)))


def zero_bytes(parameters: int, ranks: int, stage: int, *, low: int = 2, optimizer: int = 12) -> int:
    """Bytes of parameters, gradients and optimizer state on one rank under ZeRO, without padding.

    Args:
        parameters: their number Ψ, a multiple of ``ranks``.
        stage: 0 everything on all ranks, 1 divides optimizer state, 2 gradients as well, 3 parameters as well.
        low: bytes of a parameter, and of a gradient, in the computation.
        optimizer: K, bytes of masters and optimizer state for each parameter: 12 for Adam beside 16-bit parameters.

    Source: S. Rajbhandari et al., "ZeRO", SC 2020: (2 + 2 + K)Ψ, and each term divided by ``ranks`` from its stage on.
    """
    terms = ((low, 3), (low, 2), (optimizer, 1))
    return sum(nbytes * parameters // (ranks if stage >= least else 1) for nbytes, least in terms)
