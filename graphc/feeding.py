"""Feeds against what a graph wants: names, shapes, types and labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.device import Array, Memory
from graphc.errors import FeedError, nearest
from graphc.ir.facts import dims


def feed_shape(feed: Any) -> tuple[int, ...]:
    """The shape of a feed, wherever it lies."""
    found = getattr(feed, "shape", None)
    return tuple(np.shape(feed) if found is None else found)


def key_of_shapes(feeds: Mapping[str, Array]) -> tuple[Any, ...]:
    """What feeds for one plan have in common."""
    return tuple((name, feed_shape(array)) for name, array in sorted(feeds.items()))


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
        if dims(value) and not feed_shape(feeds[name]):
            raise FeedError(f"feed {name!r} is a single number, the model wants an array of {len(dims(value) or ())} axes")
    return {name: feed_shape(feeds[name]) for name in wanted}


def check_arrays(
    feeds: Mapping[str, Array],
    inputs: Mapping[str, Array],
    labels: Mapping[str, tuple[int, int, int | None]],
    memory: Memory,
) -> dict[str, Array]:
    """The feeds as arrays of the types that ``inputs`` have, in the host's memory or, where they lie there, in ``memory``.

    Args:
        labels: name → range of the labels, and the one that is ignored. Those on a device are not looked at.

    Raises:
        FeedError: a wrong type, a label out of range, or an array on a device that cannot be taken as it lies there.
    """
    arrays: dict[str, Array] = {}
    for name, buffer in inputs.items():
        array = _array(name, feeds[name], memory)
        if array.dtype != buffer.dtype:
            raise FeedError(f"feed {name!r} is {array.dtype}, the model wants {buffer.dtype}; convert it with .astype")
        arrays[name] = array
    for name, (low, high, ignore) in labels.items():
        found = arrays.get(name)
        if found is None or found.size == 0 or not isinstance(found, np.ndarray):
            continue
        if found.min() < low or found.max() >= high:
            wrong = (found < low) | (found >= high)
            if ignore is not None:
                wrong &= found != ignore
            if wrong.any():
                where = tuple(int(i) for i in np.argwhere(wrong)[0])
                raise FeedError(f"label {int(found[where])} at {name}{list(where)} is outside {low} … {high - 1}")
    return arrays


def _array(name: str, feed: Any, memory: Memory) -> Array:
    """A feed as an array of ``memory`` where it lies there, else of the host."""
    try:
        found = memory.adopt(feed)
    except (ValueError, RuntimeError, BufferError) as error:
        raise FeedError(f"feed {name!r} on a device cannot be taken: {error}") from error
    if found is None:
        try:
            return np.asarray(feed)
        except TypeError as error:
            where = "the host" if memory.on_host else "this worker's device or the host"
            raise FeedError(f"feed {name!r} does not lie in the memory of {where} ({error}); copy it there first") from error
    if not found.flags.c_contiguous:
        raise FeedError(f"feed {name!r} does not lie in one piece on the device; make it contiguous first")
    return found
