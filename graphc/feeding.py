"""Feeds against what a graph wants: names, shapes, types and labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.device import Array
from graphc.errors import FeedError, nearest
from graphc.ir.facts import dims


def key_of_shapes(feeds: Mapping[str, Array]) -> tuple[Any, ...]:
    """What feeds for one plan have in common."""
    return tuple((name, np.shape(array)) for name, array in sorted(feeds.items()))


def check_names(feeds: Mapping[str, Array], graph: ir.Graph) -> dict[str, tuple[int, ...]]:
    """The shapes of ``feeds`` by the names of the graph's inputs.

    Raises:
        FeedError: a name too many, or one that is missing, or a number in place of an array.
    """
    wanted = {v.name or "": v for v in graph.inputs}
    for name in feeds:
        if name not in wanted:
            raise FeedError(f"there is no input {name!r}{nearest(name, wanted)}; the inputs are {', '.join(wanted)}")
    for name, value in wanted.items():
        if name not in feeds:
            raise FeedError(f"the feed {name!r} is missing; the inputs are {', '.join(wanted)}")
        if dims(value) and np.ndim(feeds[name]) == 0:
            raise FeedError(f"feed {name!r} is a single number, the model wants an array of {len(dims(value) or ())} axes")
    return {name: tuple(np.shape(feeds[name])) for name in wanted}


def check_arrays(
    feeds: Mapping[str, Array], inputs: Mapping[str, Array], labels: Mapping[str, tuple[int, int, int | None]]
) -> dict[str, Array]:
    """The feeds as arrays of the types that ``inputs`` have.

    Args:
        labels: name → range of the labels, and the one that is ignored.

    Raises:
        FeedError: a wrong type, or a label out of range.
    """
    arrays: dict[str, Array] = {}
    for name, buffer in inputs.items():
        array = np.asarray(feeds[name])
        if array.dtype != buffer.dtype:
            raise FeedError(f"feed {name!r} is {array.dtype}, the model wants {buffer.dtype}; convert it with .astype")
        arrays[name] = array
    for name, (low, high, ignore) in labels.items():
        found = arrays.get(name)
        if found is None or found.size == 0:
            continue
        if found.min() < low or found.max() >= high:
            wrong = (found < low) | (found >= high)
            if ignore is not None:
                wrong &= found != ignore
            if wrong.any():
                where = tuple(int(i) for i in np.argwhere(wrong)[0])
                raise FeedError(f"label {int(found[where])} at {name}{list(where)} is outside {low} … {high - 1}")
    return arrays
