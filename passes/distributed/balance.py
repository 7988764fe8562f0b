"""Cuts a row of nodes into stages of nearly equal cost, by dynamic programming."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def cut_positions(
    costs: Sequence[float],
    crossing: Sequence[float],
    anchors: Sequence[int],
    stages: int,
    memory: Sequence[float] | None = None,
    limits: Sequence[float] | None = None,
) -> list[int] | None:
    """Where the stages begin, so that the most expensive stage costs least.

    Args:
        costs: of every node, in order.
        crossing: cost of a boundary in front of node k, added to the stages on both its sides; one longer than ``costs``.
        anchors: 1 for nodes of which every stage needs at least one.
        memory: of every node, where it is limited.
        limits: the most memory of each stage.

    Returns:
        The first node of stages 1, 2, …; None if no cut fits.
    """
    count = len(costs)
    total = np.concatenate([[0.0], np.cumsum(costs)])
    anchored = np.concatenate([[0], np.cumsum(anchors)])
    held = np.concatenate([[0.0], np.cumsum(memory)]) if memory is not None else np.zeros(count + 1)
    edge: npt.NDArray[np.float64] = np.asarray(crossing, np.float64)
    best = np.full((stages + 1, count + 1), np.inf)
    first = np.zeros((stages + 1, count + 1), np.int64)
    best[0, 0] = 0.0
    for stage in range(1, stages + 1):
        limit = limits[stage - 1] if limits is not None else np.inf
        for end in range(stage, count + 1):
            if stage == stages and end < count:
                continue
            here = total[end] - total[:end] + edge[:end] + edge[end]
            here = np.where((anchored[end] > anchored[:end]) & (held[end] - held[:end] <= limit), here, np.inf)
            worst = np.maximum(best[stage - 1, :end], here)
            k = int(np.argmin(worst))
            best[stage, end], first[stage, end] = worst[k], k
    if not np.isfinite(best[stages, count]):
        return None
    cuts, end = [], count
    for stage in range(stages, 1, -1):
        end = int(first[stage, end])
        cuts.append(end)
    return cuts[::-1]
