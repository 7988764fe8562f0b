"""Computes what decides the shapes of a step before the step, so that a plan can know them (:mod:`graphc.plan.found_sizes`).

Each set of sizes needs a plan of its own. Where sizes differ from step to step, a backend that can run such shapes unplanned
does so, more slowly; where they come back, as those of one graph do, they are planned.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.backend import Backend
from graphc.device import Array, Memory
from graphc.errors import GraphcError
from graphc.plan.found_sizes import FoundSizes
from graphc.training.feeds import check_arrays, key_of_shapes

MOST = 8
"""Plans of found sizes, where other sizes can run without."""

_REMEMBERED = 4096
"""Sizes seen once that are remembered."""


class SizeFinder:
    """Finds the sizes of a graph's steps.

    Args:
        parts: the graph.
        backend: computes its first part, in the host's memory.
        memory: where feeds may lie.

    Attributes:
        always: plan all sizes that are found.
    """

    def __init__(self, parts: FoundSizes, backend: Backend, memory: Memory, *, always: bool) -> None:
        self._parts, self._memory, self.always = parts, memory, always
        self._run = backend.bind_whole(parts.first)
        inputs = (value.type.tensor_type.elem_type for value in parts.first.graph.input)
        self._inputs = {n: np.empty(0, ir.DataType(t).numpy()) for n, t in zip(parts.feeds, inputs, strict=True)}
        self._planned: set[tuple[Any, ...]] = set()
        self._seen: set[tuple[Any, ...]] = set()

    def bound(self, found: Mapping[str, Array]) -> tuple[ir.Model, dict[str, Array]]:
        """What is planned for what was found, and which of it is fed to that."""
        return self._parts.bound(found), {n: array for n, array in found.items() if n not in self._parts.constants}

    def find(self, feeds: Mapping[str, Array]) -> dict[str, Array] | None:
        """What the first part computes of ``feeds``; None: the step runs without, whose errors say more about a bad feed.

        Raises:
            FeedError: a feed of a wrong type.
            GraphcError: the part failed, and no step runs without it.
        """
        if not feeds.keys() >= self._inputs.keys():
            return None
        given = check_arrays(feeds, self._inputs, {}, self._memory)
        try:
            found = self._run({name: self._memory.fetch(array) for name, array in given.items()})
        except GraphcError:
            if self.always:
                raise
            return None
        return found if self._is_planned(self.key(feeds, found)) else None

    def key(self, feeds: Mapping[str, Array], found: Mapping[str, Array]) -> tuple[Any, ...]:
        """Key of the plan: all shapes, and the values of what decides others."""
        values = [(name, array.tobytes()) for name, array in sorted(found.items()) if name in self._parts.constants]
        return (*key_of_shapes({**feeds, **found}), *values)

    def _is_planned(self, key: tuple[Any, ...]) -> bool:
        """Whether steps of these sizes have a plan, or get one: the first sizes do, and those that come again."""
        if self.always or key in self._planned:
            return True
        if len(self._planned) < MOST and (not self._planned or key in self._seen):
            self._planned.add(key)
            return True
        if len(self._seen) >= _REMEMBERED:
            self._seen.clear()
        self._seen.add(key)
        return False
